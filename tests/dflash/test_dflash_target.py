from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pytest
import tiny
import torch

from fxsafe.dflash.compiling import graph_count
from fxsafe.dflash.errors import SettingsError, TargetError
from fxsafe.dflash.target import Target, find_layers, load_target

FAMILIES = ("qwen3", "llama", "gemma", "gemma2", "mixtral", "gpt_neox", "gpt2")
IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_outputs_of_the_tapped_layers(family: str) -> None:
    model = tiny.target_model(family)
    with torch.no_grad():
        states = model(input_ids=IDS, output_hidden_states=True).hidden_states
    target = Target(model)
    for taps in ((0, 2), (2, 1), (1,)):
        feats = target.features(IDS, taps)
        assert torch.equal(feats, torch.cat([states[i + 1] for i in taps], dim=-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_beyond_the_last_tapped_one_do_not_run(family: str) -> None:
    target = Target(tiny.target_model(family))
    ran: list[int] = []
    for i, layer in enumerate(target.layers):
        layer.register_forward_pre_hook(lambda m, args, i=i: ran.append(i))
    target.features(IDS, (0, 1))
    assert ran == [0, 1]
    target.forward(IDS, (0, 1))
    assert ran == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_gives_the_targets_own_logits(family: str) -> None:
    model = tiny.target_model(family)
    target = Target(model)
    _, last = target.features_and_last(IDS, (0,))
    with torch.no_grad():
        torch.testing.assert_close(target.head.logits(last), model(input_ids=IDS).logits)


def test_scaled_embeddings_and_capped_logits_are_found() -> None:
    gemma = Target(tiny.target_model("gemma2")).head
    assert gemma.input_scale == 32**0.5
    assert gemma.softcap == 5.0
    seen: list[torch.Tensor] = []
    model = tiny.target_model("gemma2")
    model.model.layers[0].register_forward_pre_hook(
        lambda m, args, kw: seen.append(args[0] if args else kw["hidden_states"]), with_kwargs=True
    )
    model(input_ids=IDS)
    torch.testing.assert_close(seen[0], gemma.embed(IDS))
    assert Target(tiny.target_model("qwen3")).head.input_scale == 1.0


def test_position_embeddings_are_not_taken_for_a_scale() -> None:
    assert Target(tiny.target_model("gpt2")).head.input_scale == 1.0


def test_an_embedding_that_is_normalised_is_reported() -> None:
    with pytest.warns(UserWarning, match="more to its embeddings than to scale them"):
        assert Target(tiny.target_model("bloom")).head.input_scale == 1.0


def test_tied_tables_stay_one_tensor() -> None:
    head = Target(tiny.target_model("gemma")).head.to(torch.device("cpu"), torch.bfloat16)
    assert head.embedding_VH.data_ptr() == head.output_VH.data_ptr()


def test_a_target_with_projected_embeddings_is_refused_by_name() -> None:
    with pytest.raises(TargetError, match="OPTForCausalLM"):
        Target(tiny.target_model("opt"))


def test_logits_that_a_reader_cannot_repeat_are_refused_by_name() -> None:
    model = tiny.target_model("qwen3")
    model.lm_head.register_forward_hook(lambda m, args, out: out + 1)
    with pytest.raises(TargetError, match="Qwen3ForCausalLM: its logits"):
        Target(model)


def test_layers_are_found_by_their_number_where_the_path_is_unusual() -> None:
    model = tiny.target_model("qwen3")
    layers = model.model.layers
    del model.model.layers
    model.model.stack = layers
    assert find_layers(model) is layers
    model.model.twin = torch.nn.ModuleList([torch.nn.Identity() for _ in layers])
    with pytest.raises(TargetError, match="2 module lists"):
        find_layers(model)


def test_a_target_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="nowhere"):
        load_target(str(tmp_path / "nowhere"), dtype=torch.float32, device=torch.device("cpu"))


def test_a_target_is_loaded_from_a_directory(tmp_path: Path) -> None:
    model = tiny.target_model("llama")
    model.save_pretrained(tmp_path)
    target = load_target(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(target.features(IDS, (1,)), Target(model).features(IDS, (1,)))


def test_files_that_need_pickle_are_not_loaded(tmp_path: Path) -> None:
    model = tiny.target_model("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": print}))
    with pytest.raises(TargetError, match="no causal LM"):
        load_target(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))


def test_threads_share_a_target_without_mixing_what_they_capture() -> None:
    target = Target(tiny.target_model("qwen3"))
    inputs = [torch.randint(3, 60, (1, 5 + i), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = [target.features(ids, (0, 2)) for ids in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(30) if not torch.equal(target.features(inputs[i], (0, 2)), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_drafter_takes_its_shape_from_the_target() -> None:
    target = Target(tiny.target_model("gpt2"))
    shape = target.drafter_config(layers=2, block_size=4, mask_token_id=63, taps=(0, 1))
    assert (shape.hidden_size, shape.intermediate_size, shape.num_attention_heads) == (32, 128, 4)
    assert target.head.fits(shape)
    with pytest.raises(SettingsError, match="is the last one"):
        target.drafter_config(layers=2, block_size=4, mask_token_id=63, taps=(0, 3))


@pytest.mark.parametrize("family", ["qwen3", "gemma", "gpt2"])
def test_compiled_layers_give_the_same_features_and_decoding_does_without(family: str) -> None:
    torch._dynamo.reset()
    target = Target(tiny.target_model(family))
    feats, (also, last) = target.features(IDS, (2, 0)), target.features_and_last(IDS, (0, 1))
    logits, _ = target.forward(IDS, ())
    target.compile_layers("aot_eager")
    before = graph_count()
    torch.testing.assert_close(target.features(IDS, (2, 0)), feats)
    again = target.features_and_last(IDS, (0, 1))
    torch.testing.assert_close(again[0], also)
    torch.testing.assert_close(again[1], last)
    compiled = graph_count()
    assert compiled > before
    assert torch.equal(target.forward(IDS, ())[0], logits)
    target.forward(IDS[:, :5], (0,))
    assert graph_count() == compiled


def test_a_directory_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    model = tiny.target_model("qwen3")
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.2.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(TargetError, match=r"lacks 3 weights, the first being model\.layers\.2\.mlp\.down_proj"):
        load_target(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))


def test_a_tied_head_is_not_missed(tmp_path: Path) -> None:
    tiny.target_model("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path)
    assert load_target(str(tmp_path), dtype=torch.float32, device=torch.device("cpu")).rows == tiny.VOCAB


@pytest.mark.parametrize("damage", ["cut off", "of another size"])
def test_weights_that_cannot_be_loaded_are_named(tmp_path: Path, damage: str) -> None:
    model = tiny.target_model("qwen3")
    model.save_pretrained(tmp_path)
    if damage == "cut off":
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:20_000])
    else:
        tiny.target_model("qwen3", intermediate_size=64).config.save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="no causal LM can be loaded"):
        load_target(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
