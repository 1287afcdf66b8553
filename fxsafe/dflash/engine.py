"""N target threads feed M drafter threads; the calling thread adds up gradients and makes the one optimizer step.

Micro-batch ``k`` of a step goes to drafter ``k % M``, and micro-batch ``i`` of the run comes from target ``i % N``.
Each pair of threads has a bounded channel of its own, and a drafter takes from the channel whose turn it is, so that
what it computes, and in which order, is settled before any thread runs. The thread of the smallest unfinished
micro-batch never waits for another: its channel holds nothing else, so nothing can wait in a circle.

The gradient of a step is the sum of the gradients of all micro-batches, divided by the sum of all weights of the loss.
It is the same for every M up to the order of additions, and bit for bit from run to run.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from fxsafe.dflash.batches import Features, MicroBatch
from fxsafe.dflash.channels import Channel, Closed
from fxsafe.dflash.compiling import graph_count
from fxsafe.dflash.errors import DFlashError, NotFiniteError
from fxsafe.dflash.losses import Tally
from fxsafe.dflash.optim import Master
from fxsafe.dflash.replica import Replica

__all__ = ["Engine", "StepReport", "WorkerError", "advice"]


class Source(Protocol):
    """What the engine needs of a target."""

    @property
    def device(self) -> torch.device: ...

    def features(self, ids_BS: Tensor, taps: Sequence[int]) -> Tensor: ...

    def features_and_last(self, ids_BS: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]: ...


class WorkerError(DFlashError):
    """A thread failed; the cause is its own exception, with its traceback."""

    show_cause = True


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did. Times are seconds, waits are means over the threads of a kind."""

    tally: Tally
    norm: float
    skipped: bool
    """no slot had a loss, so nothing was learnt"""
    tokens: int
    """of all processes, without padding"""
    seconds: float
    drafter_wait: float
    target_wait: float
    optimizer: float
    graphs: int
    """compiled during this step"""
    position: dict[str, Any]
    """of the data, behind this step"""


def advice(memory: str) -> str:
    """What to do about too little memory, behind a message; ``memory`` is what the plan says of it."""
    return (
        (f"; the plan was {memory}" if memory else "")
        + "; to need less, lower data.max_length, data.batch_size, drafter.anchors or loss.chunk_blocks, in this "
        "order, or give the targets devices of their own"
    )


class Engine:
    """Starts its threads on entering a ``with`` block and ends them on leaving it.

    Args:
        targets: one for each target thread; the same object may stand there more than once.
        replicas: one for each drafter thread.
        master: the weights; replicas are loaded from it.
        batches: endless; read by a thread of its own.
        per_step: micro-batches of one optimizer step in this process.
        depth: features that may wait in each channel.
        reduce: adds up gradients and the tally, in place, over other processes.
        memory: what the plan of the run says of it, for the message when there was too little.
        stall_after: seconds without anything put into a queue or taken out of one, while a step is waited for, after
            which ``report`` gets the stacks of all threads; again each time they have doubled. None for never.
        report: is called with that text in the thread that waits.
    """

    def __init__(
        self,
        targets: Sequence[Source],
        replicas: Sequence[Replica],
        master: Master,
        batches: Iterator[MicroBatch],
        *,
        per_step: int,
        depth: int = 2,
        reduce: Callable[[list[Tensor]], None] | None = None,
        memory: str = "",
        stall_after: float | None = None,
        report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self._stall_after, self._report, self._next_report = stall_after, report, stall_after or 0.0
        self.targets, self.replicas, self.master = targets, replicas, master
        self._batches, self._per_step, self._reduce, self._memory = batches, per_step, reduce, memory
        self._taps = replicas[0].config.target_layer_ids
        self._distill = replicas[0].loss.kind == "distill"
        self._inbox = [Channel[MicroBatch](depth) for _ in targets]
        self._features = [[Channel[Features](depth) for _ in replicas] for _ in targets]
        self._go = [Channel[int](1) for _ in replicas]
        self._done = Channel[list[MicroBatch]](len(replicas))
        self._failure: tuple[str, BaseException] | None = None
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.committing = False
        """the master is being changed, or was and its owner has not yet counted the step"""
        self._next = 0
        for replica in replicas:
            replica.load(dict(zip(master.names, master.weights, strict=True)))

    def __enter__(self) -> Engine:
        self._spawn("reader", self._read)
        for n in range(len(self.targets)):
            self._spawn(f"target-{n}", self._feed, n)
        for m in range(len(self.replicas)):
            self._spawn(f"drafter-{m}", self._draft, m)
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        for thread in self._threads:
            thread.join()

    def step(self, lr: float) -> StepReport:
        """One optimizer step over ``per_step`` micro-batches.

        Raises:
            WorkerError: a thread failed, now or before; the master is that of the last finished step.
            NotFiniteError: naming the sequences of the step; the master is that of the last finished step.
        """
        started, graphs = time.perf_counter(), graph_count()
        first = self._next
        self._waits()  # what lies between two steps is not a step's
        try:
            for channel in self._go:
                channel.put(first)
            lists = [self._done.get(self._stall_after, self._look) for _ in self.replicas]
        except Closed:
            self._raise()
        self._next += self._per_step
        batches = sorted((b for done in lists for b in done), key=lambda b: b.index)
        reduced = time.perf_counter()
        counts = torch.tensor([sum(b.tokens for b in batches)], dtype=torch.float64, device=self.master.device)
        grads, vector = self._gather(counts)
        tally = Tally.of(vector)
        norm, moved = 0.0, False
        if tally.weight != 0:  # true for one that is not a number
            torch._foreach_div_(grads, tally.weight)
            self.committing = True
            norm, moved = self.master.update(grads, lr)
            if not moved:
                self.committing = False
                origins = ", ".join(o for b in batches for o in b.origins if o) or f"micro-batches from {first}"
                raise NotFiniteError(
                    f"the gradient is not finite (norm {norm}, loss {tally.loss / tally.weight}); "
                    "the step was not made, and the weights are those before it. Lower optim.lr, or optim.clip, or "
                    f"look at what it was computed from: {origins}"
                )
            state = dict(zip(self.master.names, self.master.weights, strict=True))
            for replica in self.replicas:
                replica.load(state)
        finished = time.perf_counter()
        waits = self._waits()
        return StepReport(
            tally=tally,
            norm=norm,
            skipped=not moved,
            tokens=int(counts),
            seconds=finished - started,
            drafter_wait=sum(w[1] for row in waits for w in row) / len(self.replicas),
            target_wait=sum(w[0] for row in waits for w in row) / len(self.targets),
            optimizer=finished - reduced,
            graphs=graph_count() - graphs,
            position=dict(batches[-1].position),
        )

    def measure(self, batches: Sequence[MicroBatch], state: dict[str, Tensor] | None = None) -> Tally:
        """The tally of some micro-batches between two steps, by the first target and drafter.

        Args:
            batches: not learnt from.
            state: weights to measure instead of the current ones, such as the moving average.
        """
        replica, target = self.replicas[0], self.targets[0]
        current = dict(zip(self.master.names, self.master.weights, strict=True))
        if state is not None:
            replica.load(state)
        try:
            vectors = [replica.measure(self._featurize(target, batch)) for batch in batches]
        finally:
            replica.load(current)
        return Tally.of(torch.stack(vectors).sum(0))

    def _gather(self, counts: Tensor) -> tuple[list[Tensor], Tensor]:
        """Sums over the replicas, in their order, on the master's device; then over the processes."""
        grads: list[Tensor] = []
        vector: Tensor | None = None
        for replica in self.replicas:
            sums, tally = replica.take()
            if tally is None:
                continue  # fewer micro-batches than drafters
            there = [s.to(self.master.device) for s in sums]
            if vector is None:
                grads, vector = there, tally.to(self.master.device)
            else:
                torch._foreach_add_(grads, there)
                vector = vector + tally.to(self.master.device)
        assert vector is not None
        if self._reduce is not None:
            self._reduce([*grads, vector, counts])
        return grads, vector

    def _waits(self) -> list[list[tuple[float, float]]]:
        return [[channel.take_waits() for channel in row] for row in self._features]

    def _featurize(self, target: Source, batch: MicroBatch) -> Features:
        # No attention mask: padding stands on the right, and a causal model does not see it from the left.
        ids = batch.ids_BS.to(target.device, non_blocking=True)
        if self._distill:
            return Features(batch, *target.features_and_last(ids, self._taps))
        return Features(batch, target.features(ids, self._taps), None)

    def _read(self) -> None:
        for number, batch in enumerate(self._batches):
            self._inbox[number % len(self._inbox)].put(batch)
        raise RuntimeError("the data ended before the last step")

    def _feed(self, n: int) -> None:
        number = n
        while True:
            features = self._featurize(self.targets[n], self._inbox[n].get())
            self._features[n][number % self._per_step % len(self.replicas)].put(features)
            del features  # not to hold it while the next one is computed
            number += len(self.targets)

    def _draft(self, m: int) -> None:
        replica = self.replicas[m]
        while True:
            first = self._go[m].get()
            done: list[MicroBatch] = []
            for k in range(m, self._per_step, len(self.replicas)):
                features = self._features[(first + k) % len(self.targets)][m].get()
                replica.learn(features)
                done.append(features.batch)
                del features
            if replica.device.type == "cuda":
                torch.cuda.synchronize(replica.device)
            self._done.put(done)

    def _spawn(self, name: str, work: Callable[..., None], *args: int) -> None:
        def guarded() -> None:
            try:
                if torch.cuda.is_available():
                    device = self._device_of(name)
                    if device is not None and device.type == "cuda":
                        torch.cuda.set_device(device)
                work(*args)
            except Closed:
                pass
            except BaseException as error:
                with self._lock:
                    if self._failure is None:
                        self._failure = name, error
            finally:
                self._close()

        # Daemons: one that hangs in a driver must not keep a process alive whose state is saved.
        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _device_of(self, name: str) -> torch.device | None:
        kind, _, number = name.partition("-")
        if kind == "reader":
            return None
        return self.targets[int(number)].device if kind == "target" else self.replicas[int(number)].device

    def _channels(self) -> list[Channel[Any]]:
        return [*self._inbox, *(c for row in self._features for c in row), *self._go, self._done]

    def _close(self) -> None:
        for channel in self._channels():
            channel.close()

    def _look(self) -> None:
        """The step has waited long: report it if nothing has moved anywhere."""
        assert self._stall_after is not None
        still = time.perf_counter() - max(channel.moved_at for channel in self._channels())
        if still < self._stall_after:
            self._next_report = self._stall_after
        elif still >= self._next_report:
            self._next_report = 2 * still
            frames, lines = sys._current_frames(), [f"no queue of the trainer has moved for {still:.0f} s\n"]
            for thread in threading.enumerate():
                if thread.ident in frames:
                    lines.append(f"thread {thread.name!r} is at\n")
                    lines += traceback.format_stack(frames[thread.ident])
            self._report("".join(lines).rstrip())

    def _raise(self) -> NoReturn:
        with self._lock:
            failure = self._failure
        if failure is None:
            raise WorkerError("the engine was closed")
        name, error = failure
        if isinstance(error, DFlashError):
            raise error
        text = "".join(str(error).splitlines()[:1])
        hint = advice(self._memory) if isinstance(error, torch.OutOfMemoryError) else ""
        raise WorkerError(f"thread {name} failed with {type(error).__name__}: {text}{hint}") from error
