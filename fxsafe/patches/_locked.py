"""Dynamo's compile lock for what cannot be isolated: waited for, but never for ever."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fxsafe.edits import CodeWrap
from fxsafe.observe import threads
from fxsafe.shapes import ShapeError, own_function
from fxsafe.traces import CONVERT_FRAME

__all__ = ["WAIT_S", "under_compile_lock", "wrap_in_place"]

# The holder may itself wait for this thread: a backend that exports on a pool and joins it, a lock of the user's taken
# in the other order. Beyond this the thread goes on as it would without fxsafe, which may fail but cannot hang.
WAIT_S = 60.0
_COMPILERS = ("torch/_dynamo/", "torch/_inductor/")


class _GivenUp(threading.local):
    until = 0.0


# A thread that has waited in vain does not wait again for each further step of what it does.
_given_up = _GivenUp()

_log = logging.getLogger("fxsafe")


@contextmanager
def under_compile_lock(what: str, steps: int = 1) -> Iterator[bool]:
    """Holds Dynamo's compile lock, if Dynamo is loaded; other threads compile nothing meanwhile.

    Args:
        what: what is done under it, for the log.
        steps: how many times ``WAIT_S`` seconds are waited at most, as long as the holder gets on meanwhile.

    Yields:
        Whether the lock is held. False when the wait was in vain, which the log says, and where there is no lock.
    """
    lock: Any = vars(sys.modules.get(CONVERT_FRAME, threading)).get("compile_lock")
    held = lock is not None and lock.acquire(False)
    if lock is not None and not held and time.monotonic() >= _given_up.until:
        began = time.monotonic()
        held = _wait(lock, steps)
        if not held:
            _given_up.until = time.monotonic() + WAIT_S
            _report(what, time.monotonic() - began)
    try:
        yield held
    finally:
        if held:
            lock.release()


def wrap_in_place(
    owner: ModuleType, name: str, templates: Iterable[Callable[..., Any]], wrap: Callable[[FunctionType], object]
) -> CodeWrap:
    """A ``CodeWrap`` of a function with the first of the templates that takes its parameters.

    Raises:
        ShapeError: none does.
    """
    where = f"{owner.__name__}.{name}"
    function = own_function(owner, name)
    for template in templates:
        try:
            return CodeWrap(where, function, template, wrap)  # type: ignore[arg-type]
        except ValueError:
            continue
    raise ShapeError(f"{where} takes other parameters than on every release so far")


def _wait(lock: Any, steps: int) -> bool:
    place = _place(lock)
    for _ in range(steps):
        if lock.acquire(True, WAIT_S):
            return True
        before, place = place, _place(lock)
        if place == before:
            break
    return False


def _place(lock: Any) -> tuple[CodeType, int] | None:
    """Where the thread that holds the lock is; None if nobody knows which one that is."""
    frame = sys._current_frames().get(getattr(lock, "_holder", None) or 0)
    return None if frame is None else (frame.f_code, frame.f_lasti)


def _report(what: str, waited_s: float) -> None:
    stacks = [
        f"{threads.name(ident)} at\n{threads.stack(ident)}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
        and any(part in f.f_code.co_filename for f, _ in traceback.walk_stack(frame) for part in _COMPILERS)
    ]
    _log.warning(
        "%s waited %.3g s for Dynamo's compile lock before %s and goes on without it. "
        "Threads inside Dynamo or Inductor:\n%s",
        threads.name(threading.get_ident()),
        waited_s,
        what,
        "\n".join(stacks) or "(none)",
    )
