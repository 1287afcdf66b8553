"""DFlash 2 in whole runs: ``drafter.version: 2``. Its parts have tests of their own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import test_dflash_engine
import tiny
import torch
from test_dflash_learning import learn
from test_dflash_train import rows, settings, state_of

import fxsafe
from fxsafe.dflash.batches import Features
from fxsafe.dflash.config import DFlash2
from fxsafe.dflash.engine import StepReport
from fxsafe.dflash.errors import CheckpointError, DFlashError, SettingsError
from fxsafe.dflash.export import export_drafter, load_drafter
from fxsafe.dflash.flops import drafter_flops
from fxsafe.dflash.journal import describe, read_metrics
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.masks import dense_masks
from fxsafe.dflash.model import Drafter, is_dflash2, parameter_count
from fxsafe.dflash.replica import Replica, ReplicaSettings
from fxsafe.dflash.speculate import decode, evaluate
from fxsafe.dflash.target import Target
from fxsafe.dflash.train import Trainer

CPU = torch.device("cpu")
PARTS = DFlash2(conv_group_size=8, selector_rank=6, selector_top_k=5)


def trainer(out: Path, say: Any = None, **changes: Any) -> Trainer:
    wish: dict[str, Any] = {f"drafter__{name}": value for name, value in dataclasses.asdict(PARTS).items()}
    wish = {"drafter__version": 2, **wish} | changes
    target = Target(tiny.target_model("qwen3"))
    return Trainer(settings(out, **wish), target=target, rows=rows(), say=say or (lambda line: None))


def plain(version: int | None = None, **changes: Any) -> dict[str, Any]:
    """Settings of a drafter that nothing of DFlash 2 is asked of."""
    parts = {f"drafter__{name}": value for name, value in dataclasses.asdict(DFlash2()).items()}
    return {"drafter__version": version, **parts, **changes}


def test_it_begins_as_the_plain_drafter_of_the_same_seed() -> None:
    first, second = Drafter(tiny.config()), Drafter(tiny.second())
    for model in (first, second):
        model.initialize(torch.Generator().manual_seed(5))
    ours, theirs = second.state_dict(), first.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert {name for name in ours if is_dflash2(name)} == ours.keys() - theirs.keys()
    head = tiny.head()
    ids, feats, blocks = tiny.inputs(tiny.config(), [3, 7, 11])
    masks = dense_masks(tiny.config(), blocks.anchors_BN, blocks.keep_BN, ids.shape[1])
    noise, at = head.embed(blocks.ids_BNK.flatten(1)), blocks.positions_BNK.flatten(1)
    assert torch.equal(first(feats, noise, at, masks), second(feats, noise, at, masks))


def test_gradients_reach_every_new_parameter() -> None:
    target = Target(tiny.target_model("qwen3"))
    config = tiny.second()
    replica = Replica(config, target.head, CPU, ReplicaSettings(compile=False), LossSettings())
    replica.load(tiny.drafter(config).state_dict())
    batch = next(test_dflash_engine.batches())
    replica.learn(Features(batch, target.features(batch.ids_BS, config.target_layer_ids), None))
    grads, _ = replica.take()
    names = [name for name, _ in replica.drafter.named_parameters()]
    assert all(grad.any() for grad in grads)
    convolutions = {name: grad for name, grad in zip(names, grads, strict=True) if "base_kernel" in name}
    assert len(convolutions) == 4
    assert all(grad.abs().amax(-1).min() > 0 for grad in convolutions.values()), "both sides, both taps"


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_the_result_does_not_depend_on_the_number_of_drafters(weighting: Any) -> None:
    runs = [
        test_dflash_engine.Run(drafters=m, loss=LossSettings(weighting=weighting, chunk_blocks=5), config=tiny.second())
        for m in (1, 3)
    ]
    first, many = (run.steps(4) for run in runs)
    for name, ours, theirs in zip(runs[0].master.names, runs[1].weights, runs[0].weights, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-3, msg=name)
    for mine, other in zip(many, first, strict=True):
        assert dataclasses.astuple(mine.tally)[:6] == pytest.approx(dataclasses.astuple(other.tally)[:6], rel=1e-3)
    assert first[-1].tally.metrics()["loss"] < first[0].tally.metrics()["loss"]
    moved = [
        name
        for name, weight in zip(runs[0].master.names, runs[0].weights, strict=True)
        if "successor" in name and weight.any()
    ]
    assert moved == ["candidate_selector.successor_codebook"]


def test_drafters_that_compile_in_their_threads_learn_the_same_and_compile_no_more() -> None:
    torch._dynamo.reset()
    how = ReplicaSettings(backend="aot_eager")
    eager = test_dflash_engine.Run(config=tiny.second())
    compiled = test_dflash_engine.Run(drafters=2, settings=how, config=tiny.second())
    eager.steps(3)
    with fxsafe.install(), compiled.engine:
        for _ in range(3):
            compiled.engine.step(1e-2)
        for ours, theirs in zip(compiled.weights, eager.weights, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)
        for _ in range(3):
            compiled.engine.step(1e-3)
        late = sum(compiled.engine.step(1e-3).graphs for _ in range(10))
    assert late == 0 or not tiny.KEEPS_ORDER


@pytest.mark.filterwarnings("ignore")  # transformers deprecates what the package calls
def test_a_drafter_that_knows_its_texts_gains_in_decoding_what_training_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, config, prompts, replica, master, reports = learn(dflash2=PARTS, is_causal=True)
    first, simulated = reports[0].tally.metrics(), reports[-1].tally.metrics()
    assert simulated["loss"] < first["loss"] / 4
    assert simulated["selector_loss"] < first["selector_loss"] / 4
    assert simulated["accuracy"] > 0.9
    assert simulated["candidate_recall"] > 0.95
    real = evaluate(target, replica.drafter, target.head, prompts, new_tokens=25)
    assert real.equal == len(prompts)
    assert real.acceptance_pooled == pytest.approx(simulated["accept_length"], rel=0.15)
    assert real.acceptance_pooled > 3

    # The package's own loop with our export; slots of a causal drafter do not see that it shortens the last blocks.
    dflash_model = pytest.importorskip("dflash.model", reason="pip install --no-deps dflash==0.1.0")
    monkeypatch.setattr(dflash_model, "_cuda_time", time.perf_counter)
    out = export_drafter(master.best(), config, tmp_path / "out")
    theirs = dflash_model.DFlash2DraftModel.from_pretrained(out, dtype=torch.float32).eval()
    replica.load({name: tensor.float() for name, tensor in load_drafter(out)[1].items()})
    again = evaluate(target, replica.drafter, target.head, prompts, new_tokens=25)
    lengths: list[int] = []
    for prompt in prompts:
        text = dflash_model.dflash_generate(theirs, target.model, torch.tensor([prompt]), 25, None, return_stats=True)
        assert text.output_ids[0, len(prompt) :].tolist() == list(decode(target, prompt, new_tokens=25).tokens)
        lengths += text.acceptance_lengths
    assert {n: lengths.count(n) for n in sorted(set(lengths))} == again.histogram


def test_a_run_leaves_the_numbers_of_both_terms_and_an_export(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run")
    assert any(line.startswith("DFlash 2") for line in run.plan.lines)
    outcome = run.run(quiet=True)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    names = {"selector_loss", "candidate_recall", "base_accept_length", "base_accuracy", "accept_length"}
    assert names <= metrics[0].keys()
    assert {f"val_{name}" for name in names} <= metrics[-1].keys()
    for word in ("selector loss", "recall", "without selector"):
        assert word in describe(metrics[0])
    config, exported = load_drafter(outcome.export or "")
    assert config == run.config
    assert config.dflash2 == PARTS
    state = state_of(tmp_path / "run")
    for name in ("candidate_selector.successor_codebook", "layers.0.attention_conv.base_kernel"):
        assert torch.equal(exported[name], state[f"average.{name}"].bfloat16())
    document = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert document["architectures"] == ["DFlash2DraftModel"]


def test_a_run_that_was_stopped_goes_on_with_the_numbers_of_one_that_was_not(tmp_path: Path) -> None:
    trainer(tmp_path / "whole").run(quiet=True)
    first = trainer(tmp_path / "parts")

    def stop(step: int, report: StepReport) -> None:
        if step == 4:
            first.stop()

    assert first.run(quiet=True, on_step=stop).step == 4
    assert trainer(tmp_path / "parts").run(quiet=True).finished
    ours, theirs = state_of(tmp_path / "parts"), state_of(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert "first.candidate_selector.predecessor_codebook" in ours


def test_a_run_is_not_resumed_as_the_other_kind(tmp_path: Path) -> None:
    trainer(tmp_path, run__max_steps=1).run(quiet=True)
    with pytest.raises(CheckpointError, match="of another drafter"):
        trainer(tmp_path, **plain()).run(quiet=True)


NO_STEP = {"optim__lr": 0.0, "optim__ema": 0.0, "run__max_steps": 1}


@pytest.mark.parametrize("version", [None, 2])
def test_a_warm_start_from_dflash2_begins_with_all_of_its_weights(tmp_path: Path, version: int | None) -> None:
    trainer(tmp_path / "first").run(quiet=True)
    said: list[str] = []
    released = str(tmp_path / "first" / "export")
    run = trainer(tmp_path / "run", said.append, **plain(version, drafter__warm_start=released, **NO_STEP))
    run.run(quiet=True)
    assert not said
    assert run.config.dflash2 == PARTS
    weights = state_of(tmp_path / "run")
    assert all(torch.equal(weights[f"weight.{n}"], t.float()) for n, t in load_drafter(released)[1].items())


def test_a_warm_start_from_a_plain_drafter_says_what_is_new(tmp_path: Path) -> None:
    trainer(tmp_path / "first", **plain()).run(quiet=True)
    said: list[str] = []
    released = str(tmp_path / "first" / "export")
    run = trainer(tmp_path / "run", said.append, drafter__warm_start=released, **NO_STEP)
    assert "the convolutions and the selector of DFlash 2 are new" in said[0]
    run.run(quiet=True)
    weights = {name.removeprefix("weight."): t for name, t in state_of(tmp_path / "run").items()}
    config, state = load_drafter(released)
    assert run.config == dataclasses.replace(config, dflash2=PARTS)
    assert all(torch.equal(weights[name], tensor.float()) for name, tensor in state.items())
    assert not weights["candidate_selector.successor_codebook"].any()
    assert weights["candidate_selector.predecessor_codebook"].any()
    assert weights["layers.1.mlp_conv.base_kernel"][:, 0].eq(1).all()


def test_a_dflash2_drafter_is_not_taken_for_a_plain_one(tmp_path: Path) -> None:
    shape = trainer(tmp_path / "first").config
    export_drafter(tiny.drafter(shape).state_dict(), shape, tmp_path / "released")
    with pytest.raises(SettingsError, match=r"drafter\.version is 1 and .*released is a DFlash 2 drafter"):
        trainer(tmp_path / "run", **plain(1, drafter__warm_start=str(tmp_path / "released")))


def test_a_dflash2_drafter_of_fewer_tokens_than_the_target_has_is_refused(tmp_path: Path) -> None:
    shape = dataclasses.replace(trainer(tmp_path / "first").config, vocab_size=63, mask_token_id=62)
    export_drafter(tiny.drafter(shape).state_dict(), shape, tmp_path / "released")
    with pytest.raises(CheckpointError, match="no drafter for this target"):
        trainer(tmp_path / "run", **plain(drafter__warm_start=str(tmp_path / "released")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafter__conv_group_size": 5}, "conv_group_size 5 does not divide the hidden size, 32"),
        ({"drafter__conv_kernel_size": 5}, "conv_kernel_size 5 is more than the block size, 4"),
        ({"drafter__selector_top_k": 65}, "selector_top_k 65 is more than the tokens there are, 64"),
        ({"drafter__selector_rank": 0}, r"drafter\.selector_rank is 0 and has to be at least 1"),
        ({"loss__selector_weight": -1.0}, r"loss\.selector_weight is -1\.0 and has to be at least 0"),
        ({"drafter__version": 3}, r"drafter\.version is 3 and has to be 1 or 2"),
        (plain(1, drafter__selector_rank=6), r"drafter\.selector_rank belongs to DFlash 2 .* say drafter\.version 2"),
        (plain(loss__selector_weight=2.0), r"loss\.selector_weight belongs to DFlash 2"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DFlashError, match=message):
        trainer(tmp_path / "run", **change)
    assert not (tmp_path / "run").exists()


def test_what_is_new_is_counted(tmp_path: Path) -> None:
    second, first = trainer(tmp_path / "a"), trainer(tmp_path / "b", **plain())
    new = sum(p.numel() for n, p in Drafter(second.config).named_parameters() if is_dflash2(n))
    assert second.plan.parameters - first.plan.parameters == new
    for name in ("replica_bytes", "master_bytes", "activation_bytes", "drafter_flops"):
        assert getattr(second.plan, name) > getattr(first.plan, name)
    qwen3_4b = tiny.config(
        hidden_size=2560, num_hidden_layers=5, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=9728, num_target_layers=36, target_layer_ids=(1, 9, 17, 25, 33), vocab_size=151936,
        block_size=16,
    )  # fmt: skip
    both = [qwen3_4b, dataclasses.replace(qwen3_4b, dflash2=DFlash2())]
    counts = [parameter_count(config) for config in both]
    per_layer = 2 * (2 * 2 * 2560 + 2 * 2 * (2560 // 16) * 2560)
    assert counts[1] - counts[0] == 5 * per_layer + 2 * 151936 * 256 + 2560 * 256
    plain_work, work = (drafter_flops(config, 2048, 512, 151936) for config in both)
    assert 1.01 < work / plain_work < 1.05


def test_a_plain_run_has_no_number_of_dflash2(tmp_path: Path) -> None:
    trainer(tmp_path, **plain(1)).run(quiet=True)
    told = set(itertools.chain.from_iterable(read_metrics(tmp_path / "metrics.jsonl")))
    assert not {name for name in told if "selector" in name or "base" in name or "recall" in name}
    assert not any(is_dflash2(name) for name in state_of(tmp_path))
