"""The examination: probe, try every fault twice, print."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fxsafe import FxsafeError
from fxsafe.doctor.programs import Program, programs
from fxsafe.doctor.table import table
from fxsafe.doctor.trial import Outcome, Trials
from fxsafe.doctor.verdict import MISSING, Finding, claims_by_fault, judge
from fxsafe.patches import CATALOGUE

__all__ = ["examine"]


def examine(fix: str, timeout: float, jobs: int, as_json: bool) -> int:
    """Try every known fault without fxsafe and with it, and print what was found.

    Args:
        fix: as for ``fxsafe.install``.
        timeout: seconds for each process.
        jobs: processes at one time.
        as_json: print one JSON object instead of a table.

    Returns:
        0 if fxsafe keeps its word on this torch, else 1.

    Raises:
        FxsafeError: torch or fxsafe cannot be loaded with this fix; the message is for the user.
        KeyboardInterrupt: no process is left running.
    """
    with (
        tempfile.TemporaryDirectory(prefix="fxsafe-doctor-") as folder,
        _closing(Trials(timeout, Path(folder))) as trials,
    ):
        state = trials.run(["-m", "fxsafe.doctor.probe", fix])
        if state.kind != "ok":
            said_by_itself = state.kind == "cannot-try"
            raise FxsafeError(state.detail if said_by_itself else f"importing torch with fxsafe: {state.detail}")
        findings = _try_all(trials, fix, jobs, state.facts["patches"])
    ok = not any(finding.failed for finding in findings)
    torch = state.facts["torch"]
    if as_json:
        report = {"torch": torch, "fxsafe": _version(), "fix": fix, "ok": ok, "warnings": state.facts["warnings"]}
        print(json.dumps({**report, "faults": [finding.record() for finding in findings]}, indent=2, default=str))
    else:
        for warning in state.facts["warnings"]:
            print(f"warning: {warning}", file=sys.stderr)
        print(table(f"fxsafe {_version()}, fix {fix}, on torch {torch}", findings, ok))
    return 0 if ok else 1


def _version() -> str:
    import fxsafe

    return str(fxsafe.__version__)


def _try_all(trials: Trials, fix: str, jobs: int, records: Sequence[Mapping[str, Any]]) -> list[Finding]:
    claims = claims_by_fault({patch.name: patch.faults for patch in CATALOGUE}, records)
    known = programs()
    names = {program.name for program in known}
    outcomes: dict[tuple[str, bool], Outcome] = {}
    with _pool(trials, jobs) as pool:
        futures = {}
        for program in known:
            futures[pool.submit(trials.run, ["-m", program.module])] = (program.name, False)
            with_fxsafe = ["-m", "fxsafe", "run", "--fix", fix, "-m", program.module]
            futures[pool.submit(trials.run, with_fxsafe)] = (program.name, True)
        for future in _with_progress(as_completed(futures), len(futures)):
            outcomes[futures[future]] = future.result()
    findings = [
        judge(program, outcomes[program.name, False], outcomes[program.name, True], claims.get(program.name, ()))
        for program in known
    ]
    missing = [name for name in claims if name not in names]
    return findings + [judge(Program(name, name, "-"), MISSING, MISSING, claims[name]) for name in missing]


@contextmanager
def _closing(trials: Trials) -> Iterator[Trials]:
    """SIGTERM ends us as Ctrl-C does: through the handlers that kill the processes."""

    def terminate(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    in_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, terminate) if in_main else None
    try:
        yield trials
    finally:
        trials.close()
        if in_main:
            signal.signal(signal.SIGTERM, previous)


@contextmanager
def _pool(trials: Trials, jobs: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    except BaseException:
        # The threads of the pool wait for the processes: those first.
        trials.close()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _with_progress(done: Iterator[Any], total: int) -> Iterator[Any]:
    show: Callable[[str], object] = sys.stderr.write if sys.stderr.isatty() else lambda text: None
    for count, future in enumerate(done, 1):
        show(f"\rtried {count} of {total} ")
        sys.stderr.flush()
        yield future
    show("\r" + " " * 30 + "\r")
