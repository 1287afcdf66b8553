"""Dynamo's compile lock for what cannot be isolated: waited for, but never for ever."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fxsafe.observe import threads
from fxsafe.traces import CONVERT_FRAME

__all__ = ["WAIT_S", "under_compile_lock"]

# The holder may itself wait for this thread: a backend that exports on a pool and joins it, a lock of the user's taken
# in the other order. Beyond this the thread goes on as it would without fxsafe, which may fail but cannot hang.
WAIT_S = 60.0


class _GivenUp(threading.local):
    until = 0.0


# A thread that has waited in vain does not wait again for each further step of what it does.
_given_up = _GivenUp()

_log = logging.getLogger("fxsafe")


@contextmanager
def under_compile_lock(what: str) -> Iterator[bool]:
    """Holds Dynamo's compile lock, if Dynamo is loaded; other threads compile nothing meanwhile.

    Args:
        what: what is done under it, for the log.

    Yields:
        Whether the lock is held. False after ``WAIT_S`` seconds, which the log says, and where there is no lock.
    """
    lock: Any = vars(sys.modules.get(CONVERT_FRAME, threading)).get("compile_lock")
    held = lock is not None and lock.acquire(False)
    if lock is not None and not held and time.monotonic() >= _given_up.until:
        held = lock.acquire(True, WAIT_S)
        if not held:
            _given_up.until = time.monotonic() + WAIT_S
            _report(what)
    try:
        yield held
    finally:
        if held:
            lock.release()


def _report(what: str) -> None:
    stacks = [
        f"{threads.name(ident)} at\n{threads.stack(ident)}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
        and any("torch/_dynamo/" in f.f_code.co_filename for f, _ in traceback.walk_stack(frame))
    ]
    _log.warning(
        "%s waited %g s for Dynamo's compile lock before %s and goes on without it. Threads inside Dynamo:\n%s",
        threads.name(threading.get_ident()),
        WAIT_S,
        what,
        "\n".join(stacks) or "(none)",
    )
