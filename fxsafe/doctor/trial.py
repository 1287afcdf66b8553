"""Running one module in a process of its own, bounded in time, and never leaving it behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import site
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "Trials"]

_MARK = "RESULT "


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one try ended.

    Attributes:
        kind: "ok", "fault" (the program saw it), "hangs" (killed at the timeout), "crashes" (died by a signal),
            "cannot-try" (the program says so), "broken" (ended without an answer).
        detail: what a person needs beyond the kind; may be empty.
        facts: the program's own record.
    """

    kind: str
    detail: str
    facts: dict[str, Any]

    @property
    def bad(self) -> bool:
        return self.kind in ("fault", "hangs", "crashes", "broken")


class Trials:
    """Runs modules under one timeout; ``close`` kills whatever still runs and lets nothing start.

    Safe to use from several threads.
    """

    def __init__(self, timeout: float, folder: Path) -> None:
        """
        Args:
            timeout: seconds for each process.
            folder: an empty one, so that nothing of the user's directory can be imported by accident.
        """
        self._timeout = timeout
        self._folder = folder
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def run(self, words: Sequence[str]) -> Outcome:
        """Run ``python`` with ``words`` and wait for its end.

        Raises:
            RuntimeError: the trials were closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                cwd=self._folder,
                env=_environment(),
                start_new_session=True,  # so that its own children end with it
            )
            self._running.add(process)
        try:
            out, err = process.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired:
            return Outcome("hangs", f"no answer in {self._timeout:g} s", {})
        finally:
            _kill(process)
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            with self._lock:
                self._running.discard(process)
        return _outcome(process.returncode, out, err)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and its children, at once and whether or not it has ended itself."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()


def _environment() -> dict[str, str]:
    """Ours, with fxsafe importable as it is here although the directory is another one."""
    environment = dict(os.environ)
    entries = [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    home = str(Path(__file__).resolve().parents[2])
    # Where fxsafe is installed the child finds it by itself, and before the standard library it must not stand.
    if home not in entries and home not in (*site.getsitepackages(), site.getusersitepackages()):
        entries.append(home)
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return environment


def _outcome(status: int, out: str, err: str) -> Outcome:
    record = _record(out)
    if record is None or (status == 0) != (record.get("bug") is False):
        if status < 0:
            return Outcome("crashes", _signal_name(-status), {})
        last = next((line for line in reversed(err.strip().splitlines()) if line.strip()), "no message")
        return Outcome("broken", f"exit status {status}: {last.strip()[:300]}", {})
    if status == 2:
        return Outcome("cannot-try", str(record.get("why", "")), record)
    return Outcome("fault" if record["bug"] else "ok", "", record)


def _record(out: str) -> dict[str, Any] | None:
    for line in reversed(out.splitlines()):
        if line.startswith(_MARK):
            with contextlib.suppress(ValueError):
                record = json.loads(line[len(_MARK) :])
                if isinstance(record, dict):
                    return record
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
