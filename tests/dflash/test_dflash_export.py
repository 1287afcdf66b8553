from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from fxsafe.dflash import export
from fxsafe.dflash.config import DFlash2
from fxsafe.dflash.errors import CheckpointError
from fxsafe.dflash.export import export_drafter, load_drafter, tensor_shapes
from fxsafe.dflash.model import Drafter
from fxsafe.dflash.sessions import DraftSession


def test_an_export_has_the_layout_and_nothing_else(tmp_path: Path) -> None:
    shape = tiny.config(rope_theta=123456.0)
    out = export_drafter(tiny.drafter(shape).state_dict(), shape, tmp_path / "out")
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    tensors = load_file(out / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == tensor_shapes(shape)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    document = json.loads((out / "config.json").read_text())
    assert document["rope_theta"] == document["rope_parameters"]["rope_theta"] == 123456.0
    assert document["block_size"] == document["dflash_config"]["block_size"] == 4
    assert document["num_target_layers"] == 4


@pytest.mark.parametrize("shape", [tiny.config(), tiny.sliding(), tiny.sliding(causal=None)], ids=str)
@pytest.mark.filterwarnings("ignore")  # transformers deprecates what the package calls
def test_the_package_dflash_computes_the_same(shape: export.DrafterConfig, tmp_path: Path) -> None:
    dflash_model = pytest.importorskip("dflash.model", reason="pip install --no-deps dflash==0.1.0")
    model = tiny.drafter(shape).bfloat16().float()
    out = export_drafter(model.state_dict(), shape, tmp_path / "out")
    theirs = dflash_model.DFlashDraftModel.from_pretrained(out, dtype=torch.float32).eval()
    assert theirs.target_layer_ids == list(shape.target_layer_ids)
    assert (theirs.block_size, theirs.mask_token_id) == (shape.block_size, shape.mask_token_id)
    anchors = [1, 3, 11, 23]
    _, feats, blocks = tiny.inputs(shape, anchors)
    head = tiny.head()
    with torch.no_grad():
        ours = tiny.hidden_states(model, feats, blocks, head)
        for j, anchor in enumerate(anchors):
            reference = theirs(
                position_ids=torch.arange(anchor + 4).expand(2, -1),
                noise_embedding=head.embed(blocks.ids_BNK[:, j]),
                target_hidden=feats[:, :anchor],
            )
            torch.testing.assert_close(ours[:, j], reference, atol=2e-5, rtol=1e-5)


def test_a_warm_start_reads_a_drafter_of_several_files_and_a_prefix(tmp_path: Path) -> None:
    shape = tiny.config()
    state = tiny.drafter(shape).state_dict()
    names = sorted(state)
    parts = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, inside in parts.items():
        save_file({f"model.{name}": state[name] for name in inside}, tmp_path / file)
    index = {f"model.{name}": file for file, inside in parts.items() for name in inside}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text(json.dumps(shape.to_json()))
    again, read = load_drafter(tmp_path)
    warm = Drafter(again)
    export.load_into(warm, read)
    assert again == shape
    assert all(torch.equal(state[name], tensor) for name, tensor in warm.state_dict().items())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.pop("fc.weight"), "lacks 1 tensors, the first being fc.weight"),
        (lambda s: s.update(mask_hidden=torch.zeros(1)), "1 tensors too many, the first being mask_hidden"),
        (lambda s: s.update({"fc.weight": torch.zeros(2, 2)}), "fc.weight has the shape"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(damage, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    shape = tiny.config()
    state = dict(tiny.drafter(shape).state_dict())
    damage(state)
    with pytest.raises(CheckpointError, match=message):
        export_drafter(state, shape, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    shape = tiny.config()
    out = export_drafter(tiny.drafter(shape).state_dict(), shape, tmp_path / "out")
    file = out / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_drafter(out)
    (out / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no readable config\.json"):
        load_drafter(out)


def test_an_export_that_reads_back_differently_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = tiny.config()
    good = export_drafter(tiny.drafter(shape).state_dict(), shape, tmp_path / "out")
    before = (good / "model.safetensors").read_bytes()
    flipped = tiny.drafter(shape, seed=9)
    state = {name: t.bfloat16() for name, t in flipped.state_dict().items()}
    monkeypatch.setattr(export, "load_drafter", lambda path: (shape, state | {"fc.weight": state["fc.weight"] + 1}))
    with pytest.raises(CheckpointError, match="not what was written"):
        export_drafter(state, shape, good)
    assert (good / "model.safetensors").read_bytes() == before


def test_a_model_that_is_no_drafter_is_not_replaced(tmp_path: Path) -> None:
    tiny.target_model("qwen3").save_pretrained(tmp_path / "target")
    before = (tmp_path / "target" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="something else than a drafter"):
        export_drafter(tiny.drafter(tiny.config()).state_dict(), tiny.config(), tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match="something else than a drafter"):
        export_drafter(tiny.drafter(tiny.config()).state_dict(), tiny.config(), tmp_path / "target")
    assert (tmp_path / "target" / "model.safetensors").read_bytes() == before


def test_a_directory_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match="something else"):
        export_drafter(tiny.drafter(tiny.config()).state_dict(), tiny.config(), tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = tiny.config()
    state = tiny.drafter(shape).state_dict()
    monkeypatch.chdir(tmp_path)
    for name in (".", "", str(tmp_path)):
        with pytest.raises(CheckpointError, match="where this command runs"):
            export_drafter(state, shape, name)
    assert export_drafter(state, shape, "a/../b") == Path("a/../b")
    assert sorted(p.name for p in Path("b").iterdir()) == ["config.json", "model.safetensors"]


SECOND = {
    "full": tiny.second(),
    "sliding": tiny.second(layer_types=("full_attention", "sliding_attention"), sliding_window=6),
    "causal": tiny.second(is_causal=True),
    "three taps": tiny.config(dflash2=DFlash2(conv_kernel_size=3, conv_group_size=4, selector_rank=3)),
}


def weighty(shape: export.DrafterConfig) -> Drafter:
    """A drafter whose selector often has another opinion than the logits; in numbers that an export keeps."""
    model = tiny.drafter(shape)
    assert model.candidate_selector is not None
    with torch.no_grad():
        for name, parameter in model.candidate_selector.named_parameters():
            parameter.mul_(10 if "codebook" in name else 1)
    return model.bfloat16().float()


@pytest.mark.parametrize("shape", SECOND.values(), ids=SECOND)
@pytest.mark.filterwarnings("ignore")  # transformers deprecates what the package calls
def test_the_package_dflash_drafts_the_same_with_dflash2(shape: export.DrafterConfig, tmp_path: Path) -> None:
    dflash_model = pytest.importorskip("dflash.model", reason="pip install --no-deps dflash==0.1.0")
    model = weighty(shape)
    assert all(parameter.any() for parameter in model.parameters())
    out = export_drafter(model.state_dict(), shape, tmp_path / "out")
    theirs, report = dflash_model.DFlash2DraftModel.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), "no tensor is missing, left over, or of another shape"
    theirs.eval()
    anchors = [1, 3, 11, 20]
    ids, feats, blocks = tiny.inputs(shape, anchors)
    head = tiny.head()
    output = torch.nn.Linear(32, tiny.VOCAB, bias=False)
    assert model.candidate_selector is not None
    differs = 0
    with torch.no_grad():
        output.weight.copy_(head.output_VH)
        ours = tiny.hidden_states(model, feats, blocks, head)
        for j, anchor in enumerate(anchors):
            reference = theirs(
                position_ids=torch.arange(anchor + 4).expand(2, -1),
                noise_embedding=head.embed(blocks.ids_BNK[:, j]),
                target_hidden=feats[:, :anchor],
            )
            torch.testing.assert_close(ours[:, j], reference, atol=2e-5, rtol=1e-5)
            logits = head.logits(ours[:, j, 1:])
            torch.testing.assert_close(logits, theirs.compute_logits(reference[:, 1:], output), atol=2e-4, rtol=1e-4)
            paths, candidates, _ = theirs.propose(reference[:, 1:], ids[:, anchor], output, 0.0)
            top_k = model.candidate_selector.top_k
            assert torch.equal(logits.topk(top_k).indices.sort().values, candidates.sort().values)
            for b in range(2):
                session = DraftSession(model, head)
                path = session.propose(feats[b : b + 1, :anchor], int(ids[b, anchor]))
                assert path == paths[b].tolist()
                differs += path != logits[b].argmax(-1).tolist()
    assert differs, "the selector has a say"


def test_the_codebooks_have_the_names_that_readers_look_for(tmp_path: Path) -> None:
    shape = tiny.second()
    state = tiny.drafter(shape).state_dict()
    tensors = load_file(export_drafter(state, shape, tmp_path / "out") / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == tensor_shapes(shape)
    assert {name for name in tensors if "candidate_selector" in name} == {
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        "candidate_selector.hidden_projection.weight",
    }
    # As trainers write them that hold embeddings.
    renamed = {f"{name}.weight" if name.endswith("codebook") else name: tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "out" / "model.safetensors")
    again, read = load_drafter(tmp_path / "out")
    assert again == shape
    assert read.keys() == tensors.keys()
    export_drafter(state, shape, tmp_path / "out")  # an older export is replaced


def test_a_drafter_that_lacks_what_its_config_says_is_refused(tmp_path: Path) -> None:
    shape = tiny.second()
    state = dict(tiny.drafter(shape).state_dict())
    del state["layers.1.mlp_conv.base_kernel"]
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors, the first being layers\.1\.mlp_conv\.base_kernel"):
        export_drafter(state, shape, tmp_path / "out")
    with pytest.raises(CheckpointError, match="tensors too many, the first being candidate_selector"):
        export_drafter(tiny.drafter(shape).state_dict(), tiny.config(), tmp_path / "out")
