"""Where traces, compiles and waits are told: one line at each place, one look at an empty tuple while nobody listens.

The counts take no lock: each thread adds to an entry of its own, so none is lost, and a fork finds no lock taken.
Nothing in here imports torch.
"""

from __future__ import annotations

import sys
import time
from _thread import get_ident
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol

__all__ = [
    "Listener",
    "Phase",
    "Tally",
    "Wait",
    "after_fork_in_child",
    "begin_wait",
    "counters",
    "end_wait",
    "frames",
    "guard_asks",
    "hide_frames",
    "listen",
    "refusal_avoided",
    "refusals",
    "tell",
    "unlisten",
    "waiting",
]

Phase = Literal["begin", "end", "instant"]

# The module whose functions ask whether to refuse a compiled call.
_GUARD = "torch._dynamo.eval_frame"


class Listener(Protocol):
    """Called in the thread that it is told of; must not raise, trace or wait."""

    def __call__(self, phase: Phase, what: str, depth: int) -> None:
        """
        Args:
            what: "trace", "compile", "refusal avoided", or a sentence that begins with "wait".
            depth: how many of the kind the thread is inside of without this one: of an "end", those that are left.
        """


class Tally:
    """A count that threads add to without a lock."""

    def __init__(self) -> None:
        self._of_thread: dict[int, int] = {}

    def add(self) -> None:
        me = get_ident()
        self._of_thread[me] = self._of_thread.get(me, 0) + 1

    @property
    def total(self) -> int:
        return sum(self._of_thread.copy().values())


class Wait(NamedTuple):
    """What a thread waits for.

    Attributes:
        what: a sentence that begins with "wait".
        since: ``time.perf_counter()`` at its beginning.
        owners: the idents of the threads that could end it, as far as anybody knows, at the moment of the call.
    """

    what: str
    since: float
    owners: Callable[[], Iterable[int]]


# Asked at each place before anything is told. Replaced, never changed: a thread that tells goes through the old one.
listeners: tuple[Listener, ...] = ()
# Thread ident -> its wait. Empty while nobody waits.
waiting: dict[int, Wait] = {}
waits = Tally()
_longest: dict[int, float] = {}  # thread ident -> its longest wait in seconds, of those that are over
refusals = Tally()


def tell(phase: Phase, what: str, depth: int = 0) -> None:
    for listener in listeners:
        listener(phase, what, depth)


def listen(listener: Listener) -> None:
    """Tell ``listener`` from now on. The caller holds ``traces.lock``."""
    global listeners
    hide_frames()
    listeners = (*listeners, listener)


def unlisten(listener: Listener) -> None:
    """Harmless if it does not listen."""
    global listeners
    listeners = tuple(other for other in listeners if other is not listener)


def begin_wait(what: str, owners: Callable[[], Iterable[int]]) -> None:
    """The calling thread is about to wait. To be called where it is certain that it has to."""
    waiting[get_ident()] = Wait(what, time.perf_counter(), owners)
    waits.add()
    if listeners:
        tell("begin", what)


def end_wait() -> None:
    """Harmless if the calling thread does not wait."""
    me = get_ident()
    wait = waiting.pop(me, None)
    if wait is not None:
        _longest[me] = max(_longest.get(me, 0.0), time.perf_counter() - wait.since)
        if listeners:
            tell("end", wait.what)


def longest_wait() -> float:
    """In seconds; a wait that is not over counts as far as it went."""
    now = time.perf_counter()
    ongoing = [now - wait.since for wait in waiting.copy().values()]
    return max([0.0, *_longest.copy().values(), *ongoing])


def refusal_avoided() -> None:
    """A compiled call goes on that torch's own guard would have refused, or run eager."""
    refusals.add()
    if listeners:
        tell("instant", "refusal avoided")


def guard_asks(depth: int) -> bool:
    """Whether the frame ``depth`` above the caller's is the guard of a compiled call."""
    return sys._getframe(depth + 1).f_globals.get("__name__") == _GUARD


def counters() -> dict[str, Any]:
    """What every record of ``info()`` holds of the process."""
    return {"waits": waits.total, "longest_wait_s": round(longest_wait(), 6)}


def after_fork_in_child() -> None:
    """Nobody but the forking thread waits here, and who listened is the parent's."""
    global listeners
    listeners = ()
    me = get_ident()
    for ident in list(waiting):
        if ident != me:
            del waiting[ident]


# Functions whose frames may run under Dynamo's callback and must run as they are.
frames: list[Any] = [tell, begin_wait, end_wait, refusal_avoided, guard_asks, Tally.add]


def hide_frames() -> None:
    """Tell Dynamo to leave all ``frames`` alone, once torch is there; may be repeated."""
    from fxsafe.imports import ready

    if ready("torch") is not None:
        from fxsafe.dynamo import frame_hider

        frame_hider()(*frames)
