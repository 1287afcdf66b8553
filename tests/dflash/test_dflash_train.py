from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

import fxsafe
from fxsafe.dflash import checkpoint
from fxsafe.dflash.engine import StepReport, WorkerError
from fxsafe.dflash.errors import CheckpointError, DataError, DFlashError, NotFiniteError, SettingsError
from fxsafe.dflash.export import export_drafter, load_drafter
from fxsafe.dflash.journal import describe, plot, read_metrics
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.optim import Master, OptimSettings
from fxsafe.dflash.rows import Table
from fxsafe.dflash.settings import DataSettings, DrafterSettings, RunSettings, Settings, TargetSettings
from fxsafe.dflash.target import Target
from fxsafe.dflash.train import Trainer, counted


def rows(count: int = 30) -> Table:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(8, 30, (count,), generator=generator).tolist()
    return Table([{"input_ids": torch.randint(3, 60, (n,), generator=generator).tolist()} for n in lengths], "made")


def settings(out: Path, **changes: Any) -> Settings:
    base = Settings(
        target=TargetSettings(dtype="float32", devices=("cpu",)),
        drafter=DrafterSettings(
            layers=2, block_size=4, anchors=4, target_layer_ids=(0, 2), mask_token_id=63,
            devices=("cpu", "cpu"), dtype="float32", compile=False,
        ),
        data=DataSettings(validation_share=0.1, max_length=32, batch_size=2, micro_batches=4, bucket=16),
        loss=LossSettings(weighting="dpace"),
        optim=OptimSettings(lr=1e-2, ema=0.9),
        run=RunSettings(out=str(out), max_steps=9, log_every=2, eval_every=4, save_every=3, keep=2),
    )  # fmt: skip
    for path, value in changes.items():
        section, name = path.split("__")
        base = dataclasses.replace(base, **{section: dataclasses.replace(getattr(base, section), **{name: value})})
    return base


def trainer(out: Path, target: Any = None, **changes: Any) -> Trainer:
    target = target or Target(tiny.target_model("qwen3"))
    return Trainer(settings(out, **changes), target=target, rows=rows(), say=lambda line: None)


def state_of(out: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.latest(out / "checkpoints")
    assert found is not None
    return checkpoint.load_checkpoint(found)[0]


def test_the_log_has_the_counters_of_fxsafe_where_it_is_installed(tmp_path: Path) -> None:
    assert counted() == {}
    with fxsafe.install():
        trainer(tmp_path / "run").run(quiet=True)
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert {"fx_traces", "fx_waits", "fx_longest_wait_s"} <= set(row)
    assert f"waits {row['fx_waits']:.0f}" in describe(row)


def test_a_run_leaves_all_that_is_promised(tmp_path: Path) -> None:
    outcome = trainer(tmp_path / "run").run(quiet=True)
    assert outcome.finished
    assert outcome.step == 9
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoints", "curves.png", "export", "metrics.jsonl", "settings.json",
    ]  # fmt: skip
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "step-00000006", "step-00000009",
    ]  # fmt: skip
    assert outcome.validation is not None
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in metrics if "loss" in r] == [2, 4, 6, 8, 9]
    assert [r["step"] for r in metrics if "val_loss" in r] == [4, 8, 9]
    for name in ("lr", "grad_norm", "tokens_per_second", "drafter_wait", "target_wait", "graphs", "accuracy_1"):
        assert name in metrics[0]
    config, exported = load_drafter(outcome.export or "")
    assert config == trainer(tmp_path / "other").config
    state = state_of(tmp_path / "run")
    assert torch.equal(exported["fc.weight"], state["average.fc.weight"].bfloat16())
    assert not torch.equal(state["average.fc.weight"], state["weight.fc.weight"])


@pytest.mark.parametrize("stop_at", [4, 6])
def test_a_run_that_was_stopped_goes_on_with_the_numbers_of_one_that_was_not(tmp_path: Path, stop_at: int) -> None:
    whole = trainer(tmp_path / "whole")
    whole.run(quiet=True)
    first = trainer(tmp_path / "parts")

    def stop(step: int, report: StepReport) -> None:
        if step == stop_at:
            first.stop()

    outcome = first.run(quiet=True, on_step=stop)
    assert not outcome.finished
    assert outcome.step == stop_at
    assert outcome.export is None
    position = checkpoint.load_checkpoint(outcome.checkpoint)[1]["position"]
    assert position["offset"] not in (0, len(first.rows)), "in the middle of an epoch"
    assert trainer(tmp_path / "parts").run(quiet=True).finished
    ours, theirs = state_of(tmp_path / "parts"), state_of(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    last = [read_metrics(tmp_path / name / "metrics.jsonl")[-2:] for name in ("parts", "whole")]
    for mine, other in zip(*last, strict=True):
        for name in mine.keys() & {"loss", "accuracy", "accept_length", "val_loss", "val_accept_length", "lr"}:
            assert mine[name] == other[name]


@pytest.mark.parametrize("stop_at", [0, 3])
def test_a_run_that_is_stopped_before_its_first_line_ends_as_any_other(tmp_path: Path, stop_at: int) -> None:
    run = trainer(tmp_path / "run", run__log_every=100)
    if not stop_at:
        run.stop()
    outcome = run.run(quiet=True, on_step=lambda step, report: run.stop() if step == stop_at else None)
    assert (outcome.step, outcome.finished) == (stop_at, False)
    assert outcome.checkpoint.name == f"step-{stop_at:08d}"
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [stop_at][: bool(stop_at)]
    assert (tmp_path / "run" / "curves.png").exists() == bool(stop_at)


def test_a_run_on_a_stream_goes_on_in_the_middle_of_a_window(tmp_path: Path) -> None:
    import datasets

    made = rows()
    datasets.Dataset.from_list([dict(made[i]) for i in range(30)]).to_parquet(str(tmp_path / "rows.parquet"))

    def run(name: str) -> Trainer:
        wish = settings(
            tmp_path / name,
            data__validation_share=0.0,
            data__train=(str(tmp_path / "rows.parquet"),),
            data__window=7,
            data__streaming=True,
        )
        return Trainer(wish, target=Target(tiny.target_model("qwen3")), say=lambda line: None)

    whole, first = run("whole"), run("parts")
    assert "a stream" in whole.plan.lines[-1]
    whole.run(quiet=True)
    first.run(quiet=True, on_step=lambda step, report: first.stop() if step == 5 else None)
    assert run("parts").run(quiet=True).finished
    ours, theirs = state_of(tmp_path / "parts"), state_of(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    outcome = trainer(tmp_path).run(
        quiet=True, on_step=lambda step, report: os.kill(os.getpid(), number) if step == 2 else None
    )
    assert not outcome.finished
    assert outcome.checkpoint.name == "step-00000002"
    assert signal.getsignal(number) is before


def test_a_second_signal_interrupts_and_still_saves(tmp_path: Path) -> None:
    def twice(step: int, report: StepReport) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path).run(quiet=True, on_step=twice)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "checkpoints")] == ["step-00000001"]


def test_a_thread_that_fails_leaves_the_state_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny.target_model("qwen3"))
    run = trainer(tmp_path, target)
    features, calls = target.features, 0

    def fail(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 14:
            raise RuntimeError("cable")
        return features(*args)

    monkeypatch.setattr(target, "features", fail)
    with pytest.raises(WorkerError, match="target-0 failed with RuntimeError: cable"):
        run.run(quiet=True)
    (saved,) = checkpoint.list_checkpoints(tmp_path / "checkpoints")[-1:]
    step = checkpoint.load_checkpoint(saved)[1]["step"]
    monkeypatch.undo()
    assert trainer(tmp_path).run(quiet=True).finished
    trainer(tmp_path / "whole").run(quiet=True)
    ours, theirs = state_of(tmp_path), state_of(tmp_path / "whole")
    assert 0 <= step < 9
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = checkpoint.save_file, 0

    def full(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left .* the last good one is step-00000003"):
        trainer(tmp_path).run(quiet=True)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    checkpoint.load_checkpoint(tmp_path / "checkpoints" / "step-00000003")


def test_a_checkpoint_that_was_damaged_is_refused_with_an_older_one_named(tmp_path: Path) -> None:
    trainer(tmp_path).run(quiet=True)
    last = checkpoint.latest(tmp_path / "checkpoints")
    assert last is not None
    data = bytearray((last / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (last / "state.safetensors").write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"step-00000009 is damaged.*an older one is .*step-00000006.*if step-00000009 is moved"
    ):
        trainer(tmp_path).run(quiet=True)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": "another"}', '{"format": "fxsafe-dflash-checkpoint", "version": 99}']
)
def test_a_foreign_checkpoint_is_refused(tmp_path: Path, text: str) -> None:
    place = tmp_path / "checkpoints" / "step-00000001"
    place.mkdir(parents=True)
    (place / "state.json").write_text(text)
    with pytest.raises(CheckpointError):
        trainer(tmp_path).run(quiet=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run__seed": 1}, r"run\.seed 42, and now it is 1"),
        ({"data__batch_size": 1}, r"data\.batch_size"),
        ({"drafter__layers": 1}, "of another drafter"),
        ({"data__validation_share": 0.3}, r"share of 0\.1 of data\.train set apart, and now it is 0\.3"),
    ],
)
def test_a_run_is_not_resumed_with_settings_that_would_change_it(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    trainer(tmp_path, run__max_steps=1).run(quiet=True)
    with pytest.raises(CheckpointError, match=message):
        trainer(tmp_path, **change).run(quiet=True)


def test_a_target_that_is_compiled_teaches_the_same(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", drafter__backend="aot_eager", run__max_steps=3)
    plain.run(quiet=True)
    with fxsafe.install():
        run = trainer(
            tmp_path / "compiled",
            drafter__backend="aot_eager",
            drafter__compile=True,
            target__compile=True,
            run__max_steps=3,
            run__log_every=1,
        )
        run.run(quiet=True)
    assert read_metrics(tmp_path / "compiled" / "metrics.jsonl")[0]["graphs"] > 0
    ours, theirs = state_of(tmp_path / "compiled"), state_of(tmp_path / "plain")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=5e-5, rtol=1e-3)


def test_nothing_on_disk_is_a_pickle(tmp_path: Path) -> None:
    trainer(tmp_path).run(quiet=True)
    kinds = {p.suffix for p in tmp_path.rglob("*") if p.is_file()}
    assert kinds == {".json", ".jsonl", ".png", ".safetensors"}


def test_a_warm_start_begins_with_the_released_weights(tmp_path: Path) -> None:
    shape = Target(tiny.target_model("qwen3")).drafter_config(layers=2, block_size=4, mask_token_id=63, taps=(0, 2))
    state = tiny.drafter(shape).state_dict()
    export_drafter(state, shape, tmp_path / "released")
    run = trainer(
        tmp_path / "run",
        drafter__warm_start=str(tmp_path / "released"),
        optim__lr=0.0,
        optim__ema=0.0,
        run__max_steps=1,
    )
    run.run(quiet=True)
    weights = state_of(tmp_path / "run")
    assert all(torch.equal(weights[f"weight.{name}"], t.bfloat16().float()) for name, t in state.items())


def test_a_warm_start_from_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    shape = tiny.config(num_target_layers=9)
    export_drafter(tiny.drafter(shape).state_dict(), shape, tmp_path / "released")
    with pytest.raises(CheckpointError, match="no drafter for this target"):
        trainer(tmp_path / "run", drafter__warm_start=str(tmp_path / "released"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"drafter__target_layer_ids": (0, 4)}, SettingsError, "target layer 4 does not exist"),
        ({"drafter__target_layer_ids": (0, 3)}, SettingsError, "is the last one"),
        ({"drafter__mask_token_id": None}, SettingsError, "free for the mask token"),
        ({"drafter__mask_token_id": 64}, SettingsError, "no row of the embedding"),
        ({"drafter__devices": ("cuda:77",)}, SettingsError, "cuda:77 does not exist"),
        ({"drafter__target_layer_ids": ()}, SettingsError, "target_layer_ids is empty"),
        ({"drafter__attention": "flex"}, SettingsError, "no backward on a CPU"),
        ({"optim__lr": -1.0}, SettingsError, r"optim\.lr is -1\.0 and has to be at least 0"),
        ({"optim__betas": (0.9, 1.0)}, SettingsError, r"optim\.betas"),
        ({"optim__warmup": 3.0}, SettingsError, r"optim\.warmup is 3\.0 .* share of the steps"),
        ({"loss__alpha": 7.0}, SettingsError, r"loss\.alpha"),
        ({"run__epochs": 0.0}, SettingsError, r"run\.epochs"),
        ({"data__streaming": True}, SettingsError, "no rows of a stream can be set apart"),
        ({"drafter__devices": ("toaster",)}, SettingsError, "'toaster' is no device"),
        ({"data__max_length": 10**6}, SettingsError, "positions"),
        ({"data__validation": ("nowhere.jsonl",)}, DataError, r"nowhere\.jsonl cannot be read"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], error: type[DFlashError], message: str
) -> None:
    with pytest.raises(error, match=message):
        trainer(tmp_path / "run", **change)
    assert not (tmp_path / "run").exists()


def test_a_run_that_finds_too_little_memory_says_what_the_plan_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path)

    def update(*args: Any) -> tuple[float, bool]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")

    monkeypatch.setattr(Master, "update", update)
    with pytest.raises(WorkerError) as caught:
        run.run(quiet=True)
    assert run.plan.memory in str(caught.value)
    assert "Tried to allocate 8 GiB" in str(caught.value)
    assert "lower data.max_length" in str(caught.value)


def test_the_place_of_a_run_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(SettingsError, match=r"run\.out .*/run cannot be made"):
        trainer(tmp_path / "run").run(quiet=True)
    assert (tmp_path / "run").read_text() == "a file"


def test_events_for_tensorboard_hold_the_numbers_of_the_log(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer(tmp_path, run__tensorboard=True).run(quiet=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert [e.step for e in events.Scalars("loss")] == [row["step"] for row in rows]
    assert [e.value for e in events.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])


def test_a_loss_that_is_not_finite_stops_saves_and_names_the_rows(tmp_path: Path) -> None:
    target = Target(tiny.target_model("qwen3"))
    run = trainer(tmp_path, target)
    features, calls = target.features, 0

    def poison(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return features(*args) * (float("nan") if calls > 8 else 1.0)

    target.features = poison  # type: ignore[method-assign]
    with pytest.raises(NotFiniteError, match=r"made, row \d+"):
        run.run(quiet=True)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]
    assert all(t.isfinite().all() for t in state_of(tmp_path).values())


def test_rows_without_anything_to_learn_end_the_run_with_counts(tmp_path: Path) -> None:
    silent = Table([{"input_ids": [5] * 9, "loss_mask": [0] * 9}] * 20, "made")
    run = Trainer(
        settings(tmp_path, data__validation_share=0.0),
        target=Target(tiny.target_model("qwen3")),
        rows=silent,
        say=lambda line: None,
    )
    with pytest.raises(DataError, match="20 without two tokens of the assistant"):
        run.run(quiet=True)


def test_the_plan_counts_what_is_there(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    assert run.plan.parameters == sum(p.numel() for p in tiny.drafter(run.config).parameters())
    assert run.plan.steps == run.steps == 9
    assert any("63" in line for line in run.plan.lines)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("taps", "count"), [((0, 2), 0), ((0, 1, 2), 0), ((2, 0), 1), ((1, 1), 1), (None, 1)])
def test_the_plan_warns_of_taps_that_engines_do_not_collect(
    tmp_path: Path, taps: tuple[int, ...] | None, count: int
) -> None:
    # Four layers and two taps: the reference's rule names one layer twice.
    lines = trainer(tmp_path, drafter__target_layer_ids=taps).plan.lines
    assert sum("tapped layers repeat or do not ascend" in line for line in lines) == count


def test_the_plan_says_which_device_auto_is(tmp_path: Path) -> None:
    lines = trainer(tmp_path, target__devices=("auto",)).plan.lines
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert f"devices  targets auto ({device}); drafters cpu, cpu" in lines


def test_a_resumed_run_says_which_settings_are_others(tmp_path: Path) -> None:
    trainer(tmp_path / "run", run__max_steps=3).run(quiet=True)
    for changes, expected in (
        ({"run__max_steps": 3}, []),
        (
            {"run__max_steps": 4, "optim__lr": 2e-2},
            ["with other settings than before: optim.lr 0.02 (0.01), run.max_steps 4 (3)"],
        ),
    ):
        said: list[str] = []
        run = Trainer(
            settings(tmp_path / "run", **changes),
            target=Target(tiny.target_model("qwen3")), rows=rows(), say=said.append,
        )  # fmt: skip
        run.run(quiet=True)
        assert [line for line in said if "settings" in line] == expected


def test_sizes_that_a_warm_start_overrules_are_named(tmp_path: Path) -> None:
    shape = Target(tiny.target_model("qwen3")).drafter_config(layers=2, block_size=4, mask_token_id=63, taps=(0, 2))
    export_drafter(tiny.drafter(shape).state_dict(), shape, tmp_path / "released")
    said: list[str] = []
    Trainer(
        settings(tmp_path / "run", drafter__warm_start=str(tmp_path / "released"), drafter__layers=3),
        target=Target(tiny.target_model("qwen3")), rows=rows(), say=said.append,
    )  # fmt: skip
    assert said == [f"drafter.layers is not 3 but 2, as in {tmp_path / 'released'}"]


def test_validation_rows_without_anything_to_learn_are_told_with_the_setting(tmp_path: Path) -> None:
    table = Table([{"input_ids": [3]} for _ in range(20)], "made")
    run = Trainer(
        settings(tmp_path / "run"), target=Target(tiny.target_model("qwen3")), rows=table, say=lambda line: None
    )
    with pytest.raises(DataError, match=r"the rows that data\.validation_share sets apart: none of 2 rows"):
        run.run(quiet=True)


def test_the_plan_warns_of_what_engines_do_not_read_in_an_export(tmp_path: Path) -> None:
    warned = [
        [line for line in trainer(tmp_path, Target(tiny.target_model(family))).plan.lines if "warning" in line]
        for family in ("qwen3", "gemma")
    ]
    assert warned[0] == []
    assert "embeddings are scaled by 5.657" in warned[1][0]
    assert "SGLang 0.5.23 and vLLM 0.33.0 do not" in warned[1][0]
    target = Target(tiny.target_model("gemma"))
    second = trainer(tmp_path, target, drafter__version=2, drafter__conv_group_size=8, drafter__selector_top_k=5)
    assert any("vLLM 0.33.0 read that" in line for line in second.plan.lines)


def test_curves_are_drawn_from_what_was_written(tmp_path: Path) -> None:
    with pytest.raises(DFlashError, match="cannot be read"):
        plot(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0, "accuracy_1": 0.5}\n{"step": 2, "loss": 1.5}\n{"st'
    )
    assert plot(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_settings_are_kept_as_json(tmp_path: Path) -> None:
    trainer(tmp_path, run__max_steps=1).run(quiet=True)
    kept = json.loads((tmp_path / "settings.json").read_text())
    assert kept["drafter"]["block_size"] == 4
    assert load_file(tmp_path / "export" / "model.safetensors")


def test_the_numbers_go_to_weights_and_biases_and_a_resumed_run_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "run"
    for steps in (4, 6):
        trainer(out, run__wandb="drafters", run__max_steps=steps).run(quiet=True)
    name = (out / "wandb_id.txt").read_text().strip()
    files = sorted(out.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{name}.wandb"] * 2
    sent = b"".join(file.read_bytes() for file in files)
    assert b"drafters" in sent
    for row in read_metrics(out / "metrics.jsonl"):
        assert all(json.dumps(row[name]).encode() in sent for name in row.keys() & {"loss", "val_loss"})


def test_a_run_that_weights_and_biases_refuse_ends_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(DFlashError, match=r"run\.wandb: Weights & Biases does not take the run"):
        trainer(tmp_path / "run", run__wandb="no/such").run(quiet=True)


def test_a_terminal_shows_whole_lines_above_the_bar(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    values = {
        "loss": 2.5,
        "tokens_per_second": 12345.0,
        "mfu": 0.55,
        "drafter_wait": 0.25,
        "target_wait": 0.5,
        "graphs": 2,
    }
    program = f"""
import pathlib
from fxsafe.dflash.journal import Journal
journal = Journal(pathlib.Path({str(tmp_path)!r}), 10)
journal.record(5, {values!r})
journal.close()
"""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=theirs, env=os.environ | {"COLUMNS": "60", "TERM": "xterm"}
    ) as child:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert child.returncode == 0
    assert f"step 5/10  {describe(values)}" in shown.decode()
    assert "50%" in shown.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_during_a_save_lets_it_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    real, sent = checkpoint.save_file, 0

    def interrupted(*args: Any) -> None:
        nonlocal sent
        sent += 1
        os.kill(os.getpid(), number)
        real(*args)

    monkeypatch.setattr(checkpoint, "save_file", interrupted)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("its own action would have ended the process"))
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path, run__save_every=100).run(
                quiet=True, on_step=lambda step, report: os.kill(os.getpid(), number) if step == 2 else None
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert sent == 1
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_run_that_is_stopped_before_its_first_line_ends_well(tmp_path: Path) -> None:
    run = trainer(tmp_path, run__log_every=100)
    outcome = run.run(quiet=True, on_step=lambda step, report: run.stop())
    assert (outcome.step, outcome.finished) == (1, False)


def test_what_a_killed_save_left_goes_with_the_next_one(tmp_path: Path) -> None:
    rest = tmp_path / "checkpoints" / ".new-00000002"
    rest.mkdir(parents=True)
    (rest / "state.safetensors").write_bytes(b"half")
    trainer(tmp_path).run(quiet=True)
    assert not rest.exists()


def test_a_second_run_in_the_same_directory_is_refused_while_the_first_one_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    refused: list[str] = []

    def again(step: int, report: StepReport) -> None:
        if step == 1:
            with pytest.raises(SettingsError, match="belongs to a run that has not ended") as caught:
                trainer(tmp_path).run(quiet=True)
            refused.append(str(caught.value))

    assert trainer(tmp_path).run(quiet=True, on_step=again).finished
    assert len(refused) == 1
    assert trainer(tmp_path).run(quiet=True).finished, "it is free again"


def test_a_run_is_not_resumed_with_other_rows(tmp_path: Path) -> None:
    trainer(tmp_path, run__max_steps=1).run(quiet=True)
    resumed = Trainer(
        settings(tmp_path), target=Target(tiny.target_model("qwen3")), rows=rows(20), say=lambda line: None
    )
    with pytest.raises(CheckpointError, match=r"with 27 rows, and now there are 18"):
        resumed.run(quiet=True)


def test_padding_does_not_go_beyond_the_positions_of_the_target(tmp_path: Path) -> None:
    target = Target(tiny.target_model("gpt2"))
    assert trainer(tmp_path, target, data__max_length=128, data__bucket=300, run__max_steps=2).run(quiet=True).finished


def test_output_that_nobody_reads_is_not_taken_for_a_directory(tmp_path: Path) -> None:
    def closed(step: int, report: StepReport) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(CheckpointError, match=r"^what is printed cannot be written.*that of step-00000001"):
        trainer(tmp_path).run(quiet=True, on_step=closed)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_run_is_not_resumed_with_rows_that_were_changed_and_not_their_number(tmp_path: Path, kind: str) -> None:
    import datasets

    made = [dict(rows()[i]) for i in range(30)]
    file = tmp_path / f"rows.{kind}"

    def write(content: list[dict[str, Any]]) -> None:
        if kind == "jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in content))
        else:
            datasets.Dataset.from_list(content).to_parquet(str(file))

    def run(**changes: Any) -> Trainer:
        wish = settings(tmp_path / "run", data__train=(str(file),), **changes)
        return Trainer(wish, target=Target(tiny.target_model("qwen3")), say=lambda line: None)

    write(made)
    run(run__max_steps=1).run(quiet=True)
    times = file.stat()
    write([*made[:-1], made[-1] | {"input_ids": made[-1]["input_ids"][::-1]}])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(
        CheckpointError, match=rf"step-00000001 was trained on other rows: .*rows\.{kind} has been changed"
    ):
        run(run__max_steps=2).run(quiet=True)
    write(made)
    assert run(run__max_steps=2).run(quiet=True).finished


def test_a_run_is_not_resumed_with_a_table_that_was_changed(tmp_path: Path) -> None:
    trainer(tmp_path, run__max_steps=1).run(quiet=True)
    changed = [dict(rows()[i]) for i in range(30)]
    changed[17] = {"input_ids": [9] * 12}
    again = Trainer(
        settings(tmp_path),
        target=Target(tiny.target_model("qwen3")),
        rows=Table(changed, "made"),
        say=lambda line: None,
    )
    with pytest.raises(CheckpointError, match="trained on other rows: made has been changed"):
        again.run(quiet=True)


def _edit(state: dict[str, Any], name: str, value: Any) -> None:
    *parts, last = name.split(".")
    for part in parts:
        state = state[part]
    if value is None:
        del state[last]
    else:
        state[last] = value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("config", None, r"state\.json lacks config"),
        ("settings.data", None, r"state\.json lacks settings\.data"),
        ("position.offset", None, r"state\.json lacks position\.offset"),
        ("step", None, r"state\.json lacks step"),
        ("blake2b", None, r"state\.json lacks blake2b"),
        ("version", "1", r"state\.json: version is '1' and should be a whole number"),
        ("position", [3], r"state\.json lacks position\.epoch"),
        ("position.epoch", True, r"state\.json: position\.epoch is True and should be a whole number"),
        ("config", "qwen3", r"state\.json: config is 'qwen3' and should be an object"),
        ("data", [], r"state\.json: data is \[\] and should be an object"),
    ],
)
def test_a_state_that_lacks_something_is_refused_with_its_name_and_an_older_one(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    trainer(tmp_path, run__max_steps=6).run(quiet=True)
    last = checkpoint.latest(tmp_path / "checkpoints")
    assert last is not None
    state = json.loads((last / "state.json").read_text())
    _edit(state, name, value)
    (last / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=message + r".*an older one is .*step-00000003"):
        trainer(tmp_path).run(quiet=True)


def test_a_checkpoint_of_an_earlier_release_is_resumed(tmp_path: Path) -> None:
    trainer(tmp_path, run__max_steps=3).run(quiet=True)
    last = checkpoint.latest(tmp_path / "checkpoints")
    assert last is not None
    state = json.loads((last / "state.json").read_text())
    del state["data"], state["rows"]
    (last / "state.json").write_text(json.dumps(state))
    assert trainer(tmp_path).run(quiet=True).finished


def test_something_else_in_the_place_of_the_export_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "run" / "export").mkdir(parents=True)
    (tmp_path / "run" / "export" / "notes.txt").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"run/export exists and holds something else .*\(notes\.txt\); move it away"
    ):
        trainer(tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["export"]
