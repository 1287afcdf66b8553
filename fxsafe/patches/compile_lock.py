"""F3, compile lock: nobody waits for an accelerator's autograd thread while holding Dynamo's compile lock.

The race: a compile holds ``torch._dynamo.convert_frame.compile_lock`` while it calls ``torch.autograd.grad`` (the joint
graph of flex_attention does), which waits for the device's autograd thread, one per device and process. That thread
may be running another thread's backward, whose lazy Inductor compile waits for the lock: both wait for ever. And a
process forked while another thread holds the lock can never compile: the thread that would release it is not there.

Upstream: pytorch/torchtitan#2975 does the same by hand; pytorch#198246 renews another lock of torch's after a fork.
Releases: 2.5 to 2.15; seen on 2.11.0 with CUDA.

Why this place is enough: torch looks the lock up by its name in ``convert_frame`` at each use (Dynamo's callback and
``reset``, Inductor's lazy backward, 2.15's backend registration), so one stand-in serves them all. While a thread holds
it, autograd runs in that thread, which AOTAutograd asks for too during its own part of a compile. The stand-in wraps
torch's own lock and adds none, so it excludes whoever took that lock before the patch came, or takes it after it went.

This file can be deleted when the oldest supported torch releases its lock, or keeps autograd in the calling thread,
while Dynamo traces through autograd, and renews the lock in a forked child.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from _thread import get_ident
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from fxsafe import traces
from fxsafe.dynamo import frame_hider
from fxsafe.edits import AttributeSwap, Edit
from fxsafe.observe import events, threads
from fxsafe.patches.base import Patch, Plan, ShapeError
from fxsafe.traces import CONVERT_FRAME

__all__ = ["PATCH", "CompileLock"]

_NAME = "compile_lock"
# A first compile with autotuning may take minutes; a wait that is longer than this deserves a line in the log.
REPORT_AFTER_S = 300.0

_log = logging.getLogger("fxsafe")
_RLOCK = type(threading.RLock())


class _Held(threading.local):
    """What the calling thread has taken through one stand-in."""

    depth = 0
    multithreading = True


class CompileLock:
    """Stands in for Dynamo's re-entrant lock; a thread that holds it runs autograd itself.

    The outermost acquisition turns autograd's multithreading off for the thread, the matching release gives the former
    setting back. Everything else is the wrapped lock's own.
    """

    def __init__(self, lock: Any) -> None:
        import torch

        self._lock = lock
        self._held = _Held()
        self._holder: int | None = None
        self._get = torch._C._is_multithreading_enabled
        self._set = torch._C._set_multithreading_enabled
        self.taken = 0
        self.waited = events.Tally()
        # A frame of ours under Dynamo's callback must run as it is; torch's own lock has no frame at all.
        frame_hider()(
            CompileLock.acquire,
            CompileLock.release,
            CompileLock.__enter__,
            CompileLock.__exit__,
            CompileLock._take,
            CompileLock._wait,
            CompileLock._report,
        )
        events.hide_frames()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As ``RLock.acquire``; a wait without a time limit that becomes long is reported to the log."""
        owned = self._lock._is_owned()
        if blocking and not owned:
            traces.gate()
        try:
            if blocking and timeout == -1:
                if not self._lock.acquire(False):
                    self._wait()
            elif not self._lock.acquire(blocking, timeout):
                return False
            self._take()
        except BaseException:
            # Ctrl-C after the lock was taken: who gets no answer does not release.
            if not owned and self._lock._is_owned():
                self.release()
            raise
        return True

    def release(self, *_: object) -> None:
        """As ``RLock.release``.

        Raises:
            RuntimeError: the calling thread does not hold the lock.
        """
        held, owned = self._held, True
        try:
            owned = self._lock._is_owned()
            if owned and held.depth == 1:
                self._holder = None
                self._set(held.multithreading)
                if events.listeners:
                    events.tell("end", "compile")
        finally:
            if owned and held.depth:
                held.depth -= 1
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    __exit__ = release  # one function less in front of which Ctrl-C may come

    def __getattr__(self, name: str) -> Any:
        if name == "_lock":  # not there yet: copying and unpickling look before __init__ has run
            raise AttributeError(name)
        return getattr(self._lock, name)

    def __repr__(self) -> str:
        return f"<fxsafe stand-in for {self._lock!r}>"

    def _take(self) -> None:
        held = self._held
        held.depth += 1
        if held.depth == 1:
            held.multithreading = self._get()
            self._set(False)
            self._holder = get_ident()
            self.taken += 1
            if events.listeners:
                events.tell("begin", "compile")

    def _wait(self) -> None:
        reported = False
        try:
            self.waited.add()
            events.begin_wait("wait for Dynamo's compile lock", self._holders)
            while not self._lock.acquire(True, REPORT_AFTER_S):
                if not reported:
                    self._report()
                    reported = True
        finally:
            events.end_wait()

    def _holders(self) -> list[int]:
        holder = self._holder
        return [] if holder is None else [holder]

    def _report(self) -> None:
        holder = self._holder
        _log.warning(
            "%s has waited %g s for Dynamo's compile lock and goes on waiting. It is held by %s, at\n%s"
            "If that thread waits for a lock or a thread of yours, this is a dead-lock in the program.",
            threads.name(get_ident()),
            REPORT_AFTER_S,
            threads.name(holder),
            threads.stack(holder),
        )

    def after_fork_in_child(self) -> None:
        """Frees the lock if a thread held it that does not exist in this process; the forking thread keeps its own.

        The wrapped lock is renewed in place, so whoever has it by another name, and the object that is given back
        when the patch goes, are free as well.
        """
        if not self._lock._is_owned():
            self._lock._at_fork_reinit()
            self._holder = None


_stand_ins: weakref.WeakSet[CompileLock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_stand_ins):
        lock.after_fork_in_child()


def _places(lock: object) -> Iterator[tuple[ModuleType, str]]:
    """Every module global that is bound to the lock: ``from ... import compile_lock`` in some library of the user's."""
    for module in {id(module): module for module in list(sys.modules.values())}.values():
        names = getattr(module, "__dict__", None)
        if type(names) is dict and isinstance(module, ModuleType):
            for name in [name for name, value in names.copy().items() if value is lock]:
                yield module, name


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    module = modules[CONVERT_FRAME]
    where = f"{CONVERT_FRAME}.{_NAME}"
    try:
        lock = vars(module)[_NAME]
    except KeyError:
        raise ShapeError(f"{where} does not exist") from None
    if type(lock) is not _RLOCK:
        raise ShapeError(
            f"{where} is a {type(lock).__module__}.{type(lock).__qualname__}, no re-entrant lock of Python's"
        )
    import torch

    for name in ("_is_multithreading_enabled", "_set_multithreading_enabled"):
        if not hasattr(torch._C, name):
            raise ShapeError(f"torch._C.{name} does not exist")
    stand_in = CompileLock(lock)
    _stand_ins.add(stand_in)
    edits: list[Edit] = [
        AttributeSwap(f"{owner.__name__}.{name}", owner, name, stand_in) for owner, name in _places(lock)
    ]
    return Plan(edits, counters=lambda: {"taken": stand_in.taken, "waited": stand_in.waited.total})


PATCH = Patch(
    name="compile-lock",
    summary="autograd stays in the thread that holds Dynamo's compile lock; a forked child gets the lock free",
    upstream=(
        "https://github.com/pytorch/torchtitan/issues/2975",
        "https://github.com/pytorch/pytorch/pull/198246",
    ),
    modules=(CONVERT_FRAME,),
    plan=_plan,
    faults=("lock_device_thread", "lock_fork_while_held"),
    quiet=False,
    after_fork_in_child=_after_fork_in_child,
)
