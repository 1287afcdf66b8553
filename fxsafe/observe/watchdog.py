"""The watchdog: prints who waits, for whom, and both stacks, once a wait or a trace lasts longer than was asked for.

Its thread exists only while an installation asks for it. It reads what ``events`` keeps and is told of traces; it
takes no lock that anybody else takes.
"""

from __future__ import annotations

import sys
import threading
import time
from _thread import get_ident
from typing import NamedTuple

from fxsafe import traces
from fxsafe.observe import events, threads
from fxsafe.observe.events import Phase

__all__ = ["after_fork_in_child", "watch"]

# Looks for each bound: a stall is reported by a quarter of the bound late at most.
_LOOKS = 4


class _Stall(NamedTuple):
    ident: int
    since: float
    what: str
    owners: tuple[int, ...]


class _Watchdog:
    def __init__(self, bound: float) -> None:
        self.bound = bound
        self._tracing: dict[int, float] = {}  # thread ident -> when its outermost trace began
        self._due: dict[tuple[int, float], float] = {}  # ident and beginning of a stall -> next report, in seconds
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="fxsafe-watchdog", daemon=True)

    def start(self) -> None:
        events.listen(self)
        for ident in traces.state.depth.copy():
            self._tracing.setdefault(ident, time.perf_counter())
        self.thread.start()

    def stop(self) -> None:
        events.unlisten(self)
        self._stop.set()

    def __call__(self, phase: Phase, what: str, depth: int) -> None:
        if what == "trace" and not depth:
            if phase == "begin":
                self._tracing[get_ident()] = time.perf_counter()
            else:
                self._tracing.pop(get_ident(), None)

    def _run(self) -> None:
        while not self._stop.wait(min(self.bound / _LOOKS, threading.TIMEOUT_MAX)):
            for stall in self.look(time.perf_counter()):
                _say(_report(stall))

    def look(self, now: float) -> list[_Stall]:
        """What has to be reported now: at the bound, and whenever the time has doubled since."""
        stalls = [
            _Stall(ident, wait.since, wait.what, tuple(wait.owners()))
            for ident, wait in events.waiting.copy().items()
            if now - wait.since >= self.bound
        ]
        stalls += [
            _Stall(ident, began, "trace", ())
            for ident, began in self._tracing.copy().items()
            if now - began >= self.bound and ident in traces.state.depth
        ]
        due, self._due = self._due, {}
        out = []
        for stall in stalls:
            key, lasted = (stall.ident, stall.since), now - stall.since
            self._due[key] = due.get(key, self.bound)
            if lasted >= self._due[key]:
                self._due[key] = 2 * lasted
                out.append(stall)
        return out


def _report(stall: _Stall) -> str:
    lasted = time.perf_counter() - stall.since
    who = threads.name(stall.ident)
    if stall.what == "trace":
        lines = [f"fxsafe: {who} has been inside one trace for {lasted:.1f} s, at\n"]
    else:
        lines = [f"fxsafe: {who} has had to {stall.what} for {lasted:.1f} s, at\n"]
    lines.append(threads.stack(stall.ident))
    for owner in stall.owners:
        lines += f"{threads.name(owner)} could end that and is at\n", threads.stack(owner)
    if stall.what != "trace" and not stall.owners:
        lines.append("who could end that is not known\n")
    return "".join(lines)


def _say(text: str) -> None:
    stream = sys.stderr
    if stream is not None:
        try:
            stream.write(text)
            stream.flush()
        except Exception:  # closed, or whatever a stream of the program's own raises: the next report may get through
            pass


_running: _Watchdog | None = None


def watch(bound: float | None) -> threading.Thread | None:
    """Run the watchdog with this bound in seconds, or none. The caller holds the lock of everything installed.

    Returns:
        The thread of a watchdog that was told to end.
    """
    global _running
    old = _running
    if (None if old is None else old.bound) == bound:
        return None
    _running = None
    if old is not None:
        old.stop()
    if bound is not None:
        _running = _Watchdog(bound)
        _running.start()
    return None if old is None else old.thread


def after_fork_in_child() -> None:
    """The child has what its parent had, but not its threads."""
    global _running
    old, _running = _running, None
    if old is not None:
        old.stop()
        watch(old.bound)


events.frames += [_Watchdog.__call__]
