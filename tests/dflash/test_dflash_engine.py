from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import tiny
import torch

import fxsafe
from fxsafe.dflash.batches import Example, Features, MicroBatch, collate, seed_for
from fxsafe.dflash.channels import Channel, Closed
from fxsafe.dflash.compiling import RECOMPILE_LIMIT, promise_recompile_limit, recompile_limit_here
from fxsafe.dflash.config import DrafterConfig
from fxsafe.dflash.engine import Engine, StepReport, WorkerError
from fxsafe.dflash.errors import NotFiniteError
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.optim import Master, OptimSettings
from fxsafe.dflash.replica import Replica, ReplicaSettings
from fxsafe.dflash.target import Target

CPU = torch.device("cpu")
EAGER = ReplicaSettings(compile=False)
OPTIM = OptimSettings(lr=1e-2, schedule="constant", warmup=0.0)


def batches(seed: int = 0, bucket: int = 16, learn: bool = True, start: int = 0) -> Iterator[MicroBatch]:
    for index in itertools.count(start):
        rng = random.Random(seed_for(seed, index))
        examples = []
        for _ in range(2):
            length = rng.randint(10, 40)
            ids = [rng.randrange(3, 60) for _ in range(length)]
            examples.append(Example(ids, [learn and i > 3 for i in range(length)], f"line {index}"))
        yield collate(examples, index=index, seed=seed, anchors=6, bucket=bucket, position={"index": index})


class Run:
    """A target, drafters and the weights they share."""

    def __init__(
        self,
        drafters: int = 1,
        targets: int = 1,
        settings: ReplicaSettings = EAGER,
        loss: LossSettings | None = None,
        source: Iterator[MicroBatch] | None = None,
        target: Any = None,
        optim: OptimSettings = OPTIM,
        config: DrafterConfig | None = None,
    ) -> None:
        config = config or tiny.config()
        self.target = target or Target(tiny.target_model("qwen3"))
        loss = loss or LossSettings(chunk_blocks=5)
        self.replicas = [Replica(config, self.target.head, CPU, settings, loss) for _ in range(drafters)]
        self.replicas[0].drafter.initialize(torch.Generator().manual_seed(3))
        self.master = Master(self.replicas[0].drafter.state_dict(), optim, CPU)
        self.engine = Engine([self.target] * targets, self.replicas, self.master, source or batches(), per_step=6)

    def steps(self, count: int) -> list[StepReport]:
        with self.engine:
            return [self.engine.step(1e-2) for _ in range(count)]

    @property
    def weights(self) -> list[torch.Tensor]:
        return self.master.weights


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_the_result_does_not_depend_on_the_number_of_drafters(weighting: Any) -> None:
    runs = [Run(drafters=m, loss=LossSettings(weighting=weighting)) for m in (1, 2, 3, 4)]
    reports = [run.steps(4) for run in runs]
    for run, report in zip(runs[1:], reports[1:], strict=True):
        for ours, theirs in zip(run.weights, runs[0].weights, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-3)
        for mine, first in zip(report, reports[0], strict=True):
            assert mine.tally.loss == pytest.approx(first.tally.loss, rel=1e-4)
            assert mine.tokens == first.tokens
    assert reports[0][-1].tally.metrics()["loss"] < reports[0][0].tally.metrics()["loss"]


def test_more_drafters_than_micro_batches_are_harmless() -> None:
    first, many = Run(), Run(drafters=8)
    first.steps(2)
    many.steps(2)
    for ours, theirs in zip(many.weights, first.weights, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-3)


class Hesitant:
    """A target whose threads take turns at random."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.rng = target, random.Random(seed)
        self.head, self.device = target.head, target.device

    def features(self, ids: torch.Tensor, taps: Sequence[int]) -> torch.Tensor:
        time.sleep(self.rng.random() * 0.01)
        return self.target.features(ids, taps)


@pytest.mark.parametrize("targets", [1, 2, 3])
def test_the_same_seed_gives_the_same_bits_whatever_the_timing(targets: int) -> None:
    plain = Run(drafters=3)
    plain.steps(3)
    late = Run(drafters=3, targets=targets, target=Hesitant(Target(tiny.target_model("qwen3")), targets))
    late.steps(3)
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, late.weights, strict=True))


def test_distillation_runs_through_the_engine() -> None:
    reports = Run(drafters=2, loss=LossSettings("distill", "dpace")).steps(8)
    assert reports[-1].tally.metrics()["loss"] < reports[0].tally.metrics()["loss"]


def test_drafters_that_compile_in_their_threads_learn_the_same() -> None:
    eager, compiled = Run(drafters=1), Run(drafters=2, settings=ReplicaSettings(backend="aot_eager"))
    held_out = list(itertools.islice(batches(seed=9), 2))
    with eager.engine:
        for _ in range(3):
            eager.engine.step(1e-2)
        expected = eager.engine.measure(held_out)
    with fxsafe.install(), compiled.engine:
        for _ in range(3):
            compiled.engine.step(1e-2)
        measured = compiled.engine.measure(held_out)
    assert measured.loss == pytest.approx(expected.loss, rel=1e-3)
    assert measured.blocks == expected.blocks
    for ours, theirs in zip(compiled.weights, eager.weights, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-3)


@pytest.mark.skipif(not tiny.KEEPS_ORDER, reason="before torch 2.10 Dynamo cannot keep the order of variants")
def test_after_warm_up_nothing_is_compiled_whatever_the_anchors_and_lengths() -> None:
    torch._dynamo.reset()  # drafters share what others of their shape have compiled
    run = Run(drafters=2, settings=ReplicaSettings(backend="aot_eager"))
    with fxsafe.install(), run.engine:
        warm = [run.engine.step(1e-3) for _ in range(6)]
        # Three lengths and two sizes of chunks; both drafters may meet one at the same time.
        assert 5 <= sum(report.graphs for report in warm) <= 10
        assert sum(run.engine.step(1e-3).graphs for _ in range(50)) == 0


def test_a_step_without_a_valid_anchor_changes_nothing_on_any_drafter() -> None:
    run = Run(drafters=2, source=batches(learn=False))
    before = [w.clone() for w in run.weights]
    (report,) = run.steps(1)
    assert report.skipped
    assert report.tally.weight == report.tally.loss == 0
    assert all(torch.equal(a, b) for a, b in zip(before, run.weights, strict=True))


def test_replicas_hold_the_masters_weights_after_a_step() -> None:
    run = Run(drafters=3)
    run.steps(2)
    for replica in run.replicas:
        for name, weight in zip(run.master.names, run.weights, strict=True):
            assert torch.equal(replica.drafter.state_dict()[name], weight)


class Breaking:
    def __init__(self, target: Target, after: int) -> None:
        self.target, self.left = target, after
        self.head, self.device = target.head, target.device

    def features(self, ids: torch.Tensor, taps: Sequence[int]) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise ValueError("the cable was pulled")
        return self.target.features(ids, taps)


def test_a_target_that_fails_stops_all_threads_with_its_own_traceback() -> None:
    run = Run(drafters=2, targets=2, target=Breaking(Target(tiny.target_model("qwen3")), 14))
    before = threading.active_count()
    with pytest.raises(WorkerError, match=r"target-\d failed with ValueError: the cable was pulled") as caught:
        run.steps(10)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "in features" in "".join(traceback.format_exception(caught.value))
    assert threading.active_count() == before
    assert all(w.isfinite().all() for w in run.weights)


def test_a_drafter_that_runs_out_of_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(drafters=2)

    def learn(features: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 EiB")

    monkeypatch.setattr(run.replicas[1], "learn", learn)
    with pytest.raises(WorkerError, match=r"drafter-1 .*EiB; to need less, lower data\.max_length"):
        run.steps(1)


def test_data_that_fail_stop_the_run() -> None:
    def broken() -> Iterator[MicroBatch]:
        yield from itertools.islice(batches(), 7)
        raise OSError("the disk is gone")

    with pytest.raises(WorkerError, match="reader failed with OSError"):
        Run(source=broken()).steps(3)


def test_a_gradient_that_is_not_finite_is_not_applied_and_names_its_data() -> None:
    run = Run()
    with run.engine:
        run.engine.step(1e-2)
        before = [w.clone() for w in run.weights]
        with torch.no_grad():
            run.replicas[0].drafter.fc.weight.fill_(float("nan"))
        with pytest.raises(NotFiniteError, match="line 6"):
            run.engine.step(1e-2)
    assert all(torch.equal(a, b) for a, b in zip(before, run.weights, strict=True))


def test_measuring_does_not_disturb_training() -> None:
    plain, watched = Run(), Run()
    plain.steps(3)
    held_out = list(itertools.islice(batches(seed=9), 2))
    with watched.engine:
        for _ in range(3):
            watched.engine.step(1e-2)
            once, twice = watched.engine.measure(held_out), watched.engine.measure(held_out)
            assert once == twice
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, watched.weights, strict=True))


def test_the_recompile_limit_reaches_other_threads() -> None:
    before = recompile_limit_here()
    try:
        promise_recompile_limit()
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(recompile_limit_here()))
        thread.start()
        thread.join()
        assert seen == [RECOMPILE_LIMIT]
    finally:
        promise_recompile_limit(before)


def test_a_closed_channel_lets_everybody_go() -> None:
    channel: Channel[int] = Channel(1)
    channel.put(1)
    left: list[str] = []

    def put() -> None:
        with contextlib.suppress(Closed):
            channel.put(2)
            return
        left.append("put")

    thread = threading.Thread(target=put)
    thread.start()
    channel.close()
    thread.join()
    assert left == ["put"]
    with pytest.raises(Closed):
        channel.get()


def test_a_step_in_which_no_queue_moves_is_reported_with_all_stacks() -> None:
    reported = threading.Event()
    reports: list[str] = []

    class Stuck:
        device = CPU

        def __init__(self, target: Target) -> None:
            self.head, self._target = target.head, target

        def features(self, ids_BS: torch.Tensor, taps: Sequence[int]) -> torch.Tensor:
            assert reported.wait(60)  # here
            return self._target.features(ids_BS, taps)

    def report(text: str) -> None:
        reports.append(text)
        reported.set()

    run = Run(target=Stuck(Target(tiny.target_model("qwen3"))))
    run.engine._stall_after, run.engine._report = 0.05, report
    with run.engine as engine:
        engine.step(1e-2)
    assert "no queue of the trainer has moved" in reports[0]
    assert "thread 'target-0' is at" in reports[0]
    assert "assert reported.wait(60)  # here" in reports[0]


def test_a_step_that_is_slow_but_moves_is_not_reported() -> None:
    run = Run()
    run.engine._stall_after, run.engine._report = 1e-9, pytest.fail
    run.engine._next_report = float("inf")
    with run.engine as engine:
        engine.step(1e-2)
        run.engine._stall_after = 1e9
        engine._look()
    assert run.engine._next_report == 1e9


def test_the_sums_of_a_bf16_drafter_are_those_of_its_gradients_in_fp32() -> None:
    target = Target(tiny.target_model("qwen3"))
    config = tiny.config()
    how = ReplicaSettings(torch.bfloat16, compile=False)
    replica = Replica(config, target.head, CPU, how, LossSettings())
    replica.drafter.initialize(torch.Generator().manual_seed(3))
    taken: list[list[torch.Tensor]] = []
    some = [
        Features(batch, target.features(batch.ids_BS, config.target_layer_ids), None)
        for batch in itertools.islice(batches(), 3)
    ]
    for features in some:
        replica.learn(features)
        taken.append(replica.take()[0])
    for features in some:
        replica.learn(features)
    together, tally = replica.take()
    assert tally is not None
    assert replica.sums == []
    for number, total in enumerate(together):
        assert total.dtype == torch.float32
        assert torch.equal(total, taken[0][number] + taken[1][number] + taken[2][number])
