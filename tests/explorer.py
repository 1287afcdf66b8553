"""Every interleaving of a few threads at the switch points of given files, with a bounded number of preemptions.

One thread runs at a time and hands a baton on, at a line (or an instruction) of a watched file. A schedule says after
how many of these points the running thread is preempted: ``(3, 5)`` lets the first thread pass three points, the second
five, then the first goes on to its end and the second after it. ``explore`` tries all of them.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

# Between two switch points there are milliseconds of work; only a hang takes longer.
STALL_S = 60


@dataclass
class Result:
    """What one schedule did: a value or an exception for every thread, and how many points each passed."""

    schedule: tuple[int, ...]
    values: list[Any]
    points: list[int]


class Stalled(Exception):
    """The thread that holds the baton did not reach its next switch point."""


class Baton:
    def __init__(self, count: int, schedule: Sequence[int]) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._budgets = iter(schedule)
        self._budget = next(self._budgets, None)
        self._done = [False] * count
        self.index: dict[int, int] = {}
        self.points = [0] * count

    def start(self) -> None:
        self._turns[0].release()

    def wait(self, me: int) -> None:
        if not self._turns[me].acquire(timeout=STALL_S):
            raise Stalled

    def hand_to(self, other: int, me: int) -> None:
        self._turns[other].release()
        self.wait(me)

    def point(self, me: int) -> None:
        self.points[me] += 1
        if self._budget is None:
            return
        if self._budget > 0:
            self._budget -= 1
            return
        other = self.next(me)
        if other is not None:
            self._budget = next(self._budgets, None)
            self.hand_to(other, me)

    def finish(self, me: int) -> None:
        self._done[me] = True
        other = self.next(me)
        if other is not None:
            self._turns[other].release()

    def next(self, me: int) -> int | None:
        """The thread that runs after this one; None if all others have ended."""
        count = len(self._done)
        return next((i % count for i in range(me + 1, me + count) if not self._done[i % count]), None)


class BatonLock:
    """A re-entrant lock whose waiters hand the baton to the holder, and get it back when the lock is free."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._holder: int | None = None
        self._depth = 0
        self._waiter: int | None = None

    def __enter__(self) -> None:
        me = self._baton.index[threading.get_ident()]
        while self._holder not in (None, me):
            self._waiter = me
            self._baton.hand_to(self._holder, me)  # type: ignore[arg-type]
        self._holder = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            me, self._holder = self._holder, None
            if self._waiter is not None:
                waiter, self._waiter = self._waiter, None
                self._baton.hand_to(waiter, me)  # type: ignore[arg-type]

    def give_up_for_a_while(self) -> bool:
        """Let another thread run without the lock. False if there is none."""
        me, depth = self._holder, self._depth
        assert me is not None
        other = self._waiter if self._waiter is not None else self._baton.next(me)
        if other is None:
            return False
        self._holder, self._depth, self._waiter = None, 0, None
        self._baton.hand_to(other, me)
        self.__enter__()
        self._depth = depth
        return True


class BatonCondition:
    """A condition on a BatonLock: who waits hands the baton on, and looks again whenever it comes back."""

    def __init__(self, lock: BatonLock) -> None:
        self._lock = lock
        self._waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Raises Stalled if nobody is left to wait for, or if all that are left wait."""
        self._waits += 1
        if not self._lock.give_up_for_a_while() or self._waits > 1000:
            raise Stalled("everybody waits")
        return True

    def notify_all(self) -> None:
        """Nothing to do: whoever waits looks again."""


@dataclass(frozen=True)
class Watch:
    """Switch points: every line of ``lines`` and every instruction of ``instructions`` (file names)."""

    lines: frozenset[str] = field(default_factory=frozenset)
    instructions: frozenset[str] = field(default_factory=frozenset)

    def tracer(self, baton: Baton, me: int) -> Callable[..., Any]:
        def on_line(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                baton.point(me)
            return on_line

        def on_instruction(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode":
                baton.point(me)
            return on_instruction

        def on_call(frame: FrameType, event: str, arg: Any) -> Any:
            name = frame.f_code.co_filename
            if name in self.instructions:
                frame.f_trace_opcodes, frame.f_trace_lines = True, False
                return on_instruction
            return on_line if name in self.lines else None

        return on_call


def run(
    works: Sequence[Callable[[], Any]],
    schedule: Sequence[int],
    watch: Watch,
    use_lock: Callable[[BatonLock], None] = lambda lock: None,
) -> Result:
    """One schedule. ``use_lock`` puts the lock in the place of the one that the watched code takes."""
    baton = Baton(len(works), schedule)
    use_lock(BatonLock(baton))
    values: list[Any] = [None] * len(works)

    def body(me: int) -> None:
        baton.index[threading.get_ident()] = me
        try:
            baton.wait(me)
            sys.settrace(watch.tracer(baton, me))
            try:
                values[me] = works[me]()
            finally:
                sys.settrace(None)
        except BaseException as error:
            values[me] = error
        baton.finish(me)

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    baton.start()
    for thread in threads:
        thread.join(STALL_S * 2)
        if thread.is_alive():
            raise Stalled(f"{schedule}: {values}")
    return Result(tuple(schedule), values, baton.points)


def schedules(points: Sequence[int], preemptions: int) -> Iterator[tuple[int, ...]]:
    """All schedules of at most ``preemptions`` preemptions, for threads that pass so many points when undisturbed."""
    for count in range(preemptions + 1):
        yield from itertools.product(*(range(points[i % len(points)]) for i in range(count)))


def thinned(items: Iterable[tuple[int, ...]], limit: int | None) -> list[tuple[int, ...]]:
    """All items, or at most ``limit`` of them, evenly spread; always the same ones."""
    everything = list(items)
    if limit is None or len(everything) <= limit:
        return everything
    return [everything[i * len(everything) // limit] for i in range(limit)]


def explore(
    make: Callable[[], Sequence[Callable[[], Any]]],
    preemptions: int,
    watch: Watch,
    check: Callable[[Result], Any],
    *,
    use_lock: Callable[[BatonLock], None] = lambda lock: None,
    limit: int | None = None,
    give_up_after: int | None = None,
) -> tuple[int, list[tuple[tuple[int, ...], Any]]]:
    """Run all schedules; how many ran, and those for which ``check`` returned something, with what it returned."""
    # A thread may pass points only when it is disturbed: a dispatcher is entered only while it is in its place.
    undisturbed = [max(points, 8) for points in run(make(), (), watch, use_lock).points]
    wrong: list[tuple[tuple[int, ...], Any]] = []
    count = 0
    for schedule in thinned(schedules(undisturbed, preemptions), limit):
        found = check(run(make(), schedule, watch, use_lock))
        count += 1
        if found:
            wrong.append((schedule, found))
            if give_up_after is not None and len(wrong) >= give_up_after:
                break
    return count, wrong
