"""``fxsafe.record``: a timeline of the threads, as a Chrome trace for https://ui.perfetto.dev."""

from __future__ import annotations

import atexit
import itertools
import os
import stat
import sys
import threading
import time
from _thread import get_ident
from types import CodeType, TracebackType
from typing import Any, Literal, NamedTuple

from fxsafe import traces
from fxsafe.errors import FxsafeError
from fxsafe.observe import events
from fxsafe.observe.events import Phase

__all__ = ["Recording", "record"]

# Whose frames are not where a trace or a compile was asked for.
_INNER = frozenset({"torch", "fxsafe", "contextlib", "threading", "functools", "concurrent"})


class _Lane:
    """One thread; idents and native ids are given to new threads again, lanes are not."""

    def __init__(self, ident: int, native_id: int, name: str) -> None:
        self.ident, self.native_id, self.name = ident, native_id, name


class _Event(NamedTuple):
    phase: Phase | Literal["open"]  # "open": it was found so when the recording began
    what: str
    depth: int
    lane: _Lane
    ns: int
    place: tuple[CodeType, int] | None


def _place() -> tuple[CodeType, int] | None:
    """Code and line of the innermost frame that is neither torch's nor ours; None on a thread that has none."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if name.partition(".")[0] not in _INNER or name.startswith("fxsafe.dflash"):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


def _open_now(ns: int) -> list[_Event]:
    """What threads are inside of. Called with ``traces.lock`` held, and listening.

    Each thread tells of a beginning or an end after it is written down where this reads: what is missed here is told,
    and what is both found and told is one and the same.
    """
    holder = getattr(vars(sys.modules.get(traces.CONVERT_FRAME, sys)).get("compile_lock"), "_holder", None)
    found = [(ident, "trace", depth) for ident, nested in traces.state.depth.items() for depth in range(nested)]
    found += [(holder, "compile", 0)] if holder is not None else []
    found += [(ident, wait.what, 0) for ident, wait in events.waiting.copy().items()]
    lanes = {t.ident: _Lane(t.ident, t.native_id or 1, t.name) for t in threading.enumerate() if t.ident is not None}
    return [
        _Event("open", what, depth, lanes.setdefault(ident, _Lane(ident, 1, "?")), ns, None)
        for ident, what, depth in found
    ]


class Recording:
    """Made by ``record``; a context manager, or ``start()`` and ``stop()``.

    The file is written by ``stop()``, whatever ended the block, at the latest when the interpreter ends. It appears
    whole or not at all, with the mode of the one that stood there; a device or a pipe is written to.

    Raises:
        FxsafeError: the path is neither a ``str`` nor an ``os.PathLike`` that stands for one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _named(path)
        self._file = _resolved(self.path)
        self._events: list[_Event] = []
        self._open: list[_Event] = []
        self._threads = threading.local()
        self._writing = threading.RLock()  # what is done under it takes no other lock
        self._state = "new"
        self._pid = self._from = self._to = 0
        self._began_at = 0.0

    def start(self) -> Recording:
        """
        Raises:
            FxsafeError: it was started before, its path is that of a directory, or it or its directory does not exist
                or cannot be written.
        """
        if self._state != "new":
            raise FxsafeError("a recording is started once; make another with fxsafe.record()")
        if not os.path.basename(self.path) or os.path.isdir(self._file):
            raise FxsafeError(f"fxsafe.record({self.path!r}) names no file; write fxsafe.record('race.json')")
        directory = os.path.dirname(self._file)
        if _is_special(self._file):
            if not os.access(self._file, os.W_OK):
                raise FxsafeError(f"fxsafe.record({self.path!r}): {self._file} cannot be written to")
        elif not os.path.isdir(directory) or not os.access(directory, os.W_OK):
            raise FxsafeError(f"fxsafe.record({self.path!r}): {directory} is no directory that can be written")
        self._pid = os.getpid()
        self._state = "running"
        atexit.register(self.stop)
        with traces.lock:
            self._began_at, self._from = time.time(), time.perf_counter_ns()
            events.listen(self)
            self._open = _open_now(self._from)
        return self

    def stop(self) -> None:
        """Write the file. Does nothing the second time, and in a forked child, whose parent records.

        When it returns the file is there, whoever writes it.

        Raises:
            OSError: the file cannot be written; ``stop`` can be called again.
        """
        if self._pid != os.getpid():
            return
        with traces.lock:
            if self._state == "running":
                events.unlisten(self)
                self._to = time.perf_counter_ns()
                self._state = "stopped"
        if self._state == "stopped":
            try:
                self._write()
            except KeyboardInterrupt:
                self._write()  # what was recorded is not lost by it
                raise

    def __enter__(self) -> Recording:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def __call__(self, phase: Phase, what: str, depth: int) -> None:
        try:
            lane = self._threads.lane
        except AttributeError:
            name = threading.current_thread().name
            lane = self._threads.lane = _Lane(get_ident(), threading.get_native_id(), name)
        place = None if phase == "end" else _place()
        self._events.append(_Event(phase, what, depth, lane, time.perf_counter_ns(), place))

    def _write(self) -> None:
        import json

        told = self._events.copy()
        # Who was inside of something tells of its end before another thread can get its ident.
        lanes = {event.lane.ident: event.lane for event in reversed(told)}
        open_ = [event._replace(lane=lanes.get(event.lane.ident, event.lane)) for event in self._open]
        content = {
            "traceEvents": chrome_events(open_ + told, self._from, self._to, self._pid),
            "displayTimeUnit": "ms",
            "otherData": {"began_at": self._began_at, **_circumstances()},
        }
        with self._writing:
            if self._state == "stopped":
                _put(self._file, json.dumps(content))
                self._state = "written"
                atexit.unregister(self.stop)


# For the names of files that are not whole: a signal handler may stop what is being stopped.
_numbers = itertools.count()


def _named(path: Any) -> str:
    try:
        name = os.fspath(path)
    except TypeError:
        name = None
    if not isinstance(name, str):
        raise FxsafeError(
            f"fxsafe.record() takes a path as a str or an os.PathLike of one, not {type(path).__name__}; write "
            "fxsafe.record('race.json')"
        )
    return name


def _is_special(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)


def _resolved(path: str) -> str:
    """As the path is meant now: the program may change its directory."""
    # What /dev/stdout links to may have no name that can be opened.
    return os.path.abspath(path) if _is_special(path) else os.path.realpath(path)


def _put(path: str, text: str) -> None:
    """Write the file beside and rename it: whoever reads finds the old one or the new one."""
    if _is_special(path):
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
        return
    beside = f"{path}.{os.getpid()}-{next(_numbers)}.new"
    try:
        with open(beside, "w", encoding="utf-8") as stream:
            if os.path.exists(path):
                os.chmod(beside, stat.S_IMODE(os.stat(path).st_mode))
            stream.write(text)
        os.replace(beside, path)
    except BaseException:
        if os.path.exists(beside):
            os.unlink(beside)
        raise


def record(path: str | os.PathLike[str]) -> Recording:
    """Record which thread traces, compiles and waits, and where a compiled call would have been refused.

    ``with fxsafe.record("race.json"): ...``, or ``recording = fxsafe.record("race.json").start()`` and
    ``recording.stop()``. What is recorded is what the patches see: without ``install()`` there is nothing.

    Args:
        path: of the file to write, as the current directory has it now; one that stands there is replaced when the
            recording stops.
    """
    return Recording(path)


def _circumstances() -> dict[str, Any]:
    import fxsafe

    patches = {entry["name"]: entry["status"] for entry in fxsafe.info()}
    torch = getattr(sys.modules.get("torch"), "__version__", None)
    return {"fxsafe": fxsafe.__version__, "torch": torch, "python": sys.version.split()[0], "patches": patches}


def chrome_events(told: list[_Event], begin_ns: int, end_ns: int, pid: int) -> list[dict[str, Any]]:
    """The list ``traceEvents`` of the Trace Event Format; times are microseconds since ``begin_ns``.

    What had not ended by ``end_ns`` ends there and is marked ``unfinished``; what had begun before ``begin_ns``
    begins there and is marked ``begun_earlier``.
    """
    out: list[dict[str, Any]] = []
    open_: dict[tuple[_Lane, str], list[dict[str, Any]]] = {}
    tids: dict[_Lane, int] = {}

    def at(ns: int) -> float:
        return max(0, ns - begin_ns) / 1000

    def close(stack: list[dict[str, Any]], depth: int, ns: int) -> None:
        while len(stack) > depth:
            span = stack.pop()
            span["dur"] = max(0.0, at(ns) - span["ts"])

    # A thread that was about to tell may do so after the end.
    for event in sorted((e for e in told if e.ns <= end_ns), key=lambda e: e.ns):
        tid = tids.setdefault(event.lane, _free_number(event.lane.native_id, tids.values()))
        category = event.what.partition(" ")[0]
        common = {"name": event.what, "cat": category, "pid": pid, "tid": tid}
        arguments: dict[str, Any] = {} if event.place is None else {"at": _spelt(*event.place)}
        stack = open_.setdefault((event.lane, category), [])
        if event.phase == "instant":
            out.append({**common, "ph": "i", "s": "t", "ts": at(event.ns), "args": arguments})
        elif event.phase == "end":
            close(stack, event.depth, event.ns)
        elif stack[event.depth :] and "begun_earlier" in stack[-1]["args"]:
            stack[-1]["args"].update(arguments)  # found open while its thread was about to tell that it begins
        else:
            close(stack, event.depth, event.ns)  # those whose end was not told
            if event.phase == "open":
                arguments["begun_earlier"] = True
            span: dict[str, Any] = {**common, "ph": "X", "ts": at(event.ns), "dur": 0.0, "args": arguments}
            out.append(span)
            stack.append(span)
    for stack in open_.values():
        for span in stack:
            span["args"]["unfinished"] = True
        close(stack, 0, end_ns)
    names = [_metadata(pid, 0, "process_name", {"name": f"python {pid}"})]
    names += [_metadata(pid, tid, "thread_name", {"name": lane.name}) for lane, tid in tids.items()]
    out.sort(key=lambda e: (e["ts"], -e.get("dur", 0.0)))
    return names + out + _tracing_counts(out, pid)


def _tracing_counts(spans: list[dict[str, Any]], pid: int) -> list[dict[str, Any]]:
    """How many threads traced at a time, as a track of its own."""
    until: dict[int, float] = {}
    steps: list[tuple[float, int]] = []
    for span in spans:
        if span["cat"] == "trace" and span["ts"] >= until.get(span["tid"], -1.0):  # else nested in one
            until[span["tid"]] = span["ts"] + span["dur"]
            steps += [(span["ts"], 1), (until[span["tid"]], -1)]
    number, out = 0, []
    for ts, change in sorted(steps):
        number += change
        out.append({"name": "threads that trace", "ph": "C", "pid": pid, "tid": 0, "ts": ts, "args": {"n": number}})
    return out


def _free_number(wanted: int, taken: Any) -> int:
    numbers = set(taken)
    while wanted in numbers:
        wanted += 1_000_000
    return wanted


def _spelt(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line} {code.co_name}"


def _metadata(pid: int, tid: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": arguments}


events.frames += [Recording.__call__, _Lane.__init__, _place]
