"""Runs the test suite and the doctor on every supported torch, one release at a time, and writes docs/matrix.md.

``python tools/matrix.py [RELEASE ...] [--keep] [--failed]``: each release gets a throw-away virtual environment of
about 5 GB, which is removed before the next one. A release that is not named keeps the row it has. ``--failed`` runs
only the tests that failed in the last run of the release, after a mend; the row then names both commits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "matrix.md"
WORK = ROOT / ".matrix"
RELEASES = ("2.5.1", "2.6.0", "2.8.0", "2.9.1", "2.11.0", "2.13.0", "2.14.1", "2.15.0")
FIXES = ("thread-local", "always-false")
HEAD = """# The release matrix

Written by `tools/matrix.py`: the test suite and `fxsafe doctor` on real releases, one at a time, in throw-away
environments. Where a mend was needed, the row names the commit of the run and that of the tests that were run again.
A fault is `fails` where plain torch shows it, `-` where it does not; behind the arrow, what the same
program does with fxsafe. `can't try`: it needs what that machine lacks. `advice` marks faults that no patch claims.
"""


def run(*command: str | Path, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], cwd=ROOT, text=True, **kwargs)  # type: ignore[call-overload,no-any-return]


def failures(log: Path) -> list[str]:
    """Names of the tests that the log of a run says failed."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.split(" ", 1)[1].split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]


def suite(python: Path, log: Path, tests: list[str]) -> dict[str, int]:
    """Run the tests, all if the list is empty; how many of them passed, failed, were skipped."""
    with log.open("w") as out:
        done = run(
            *(python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "--ignore", "tests/dflash", *tests),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", log.read_text().splitlines()[-1])
    return {kind: int(number) for number, kind in counts} | {"exit": done.returncode}


def one(
    release: str, before: dict[str, object] | None, keep: bool, with_suite: bool, keep_doctor: bool
) -> dict[str, object]:
    """Install ``release``, run everything, remove it; a row of the matrix.

    Args:
        before: the row of the last run if only what failed in it is to be run again.
        keep_doctor: keep what the doctor said then.
    """
    venv, log = WORK / release, WORK / f"{release}.log"
    shutil.rmtree(venv, ignore_errors=True)
    commit = run("git", "rev-parse", "--short", "HEAD", stdout=subprocess.PIPE, check=True).stdout.strip()
    row: dict[str, object] = {"release": release, "python": platform.python_version(), "commit": commit}
    row |= {"tests": {"exit": 0}, "seconds": "suite not run"}
    again = failures(log) if before is not None else []
    try:
        run(sys.executable, "-m", "venv", venv, check=True)
        python = venv / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", f"torch=={release}", check=True)
        run(python, "-m", "pip", "install", "--quiet", "--editable", ".[test]", check=True)
        start = time.monotonic()
        if before is not None:
            old: dict[str, int] = before["tests"]  # type: ignore[assignment]
            new = suite(python, log, again) if again else {"exit": 0}
            passed = old.get("passed", 0) + new.get("passed", 0)
            row["tests"] = {
                **old,
                **new,
                "passed": passed,
                "failed": new.get("failed", 0),
                "error": new.get("error", 0),
            }
            row["seconds"] = before["seconds"]
            if again:
                row["commit"] = f"{before['commit']}, {len(again)} again at {commit}"
        elif with_suite:
            row["tests"] = suite(python, log, [])
            row["seconds"] = round(time.monotonic() - start)
        row["doctor"] = dict(before["doctor"]) if before is not None else {}  # type: ignore[call-overload]
        for fix in FIXES if before is None or not keep_doctor else ():
            done = run(python, "-m", "fxsafe", "doctor", "--json", "--fix", fix, stdout=subprocess.PIPE)
            row["doctor"][fix] = json.loads(done.stdout) | {"exit": done.returncode}  # type: ignore[index]
    finally:
        if not keep:
            shutil.rmtree(venv, ignore_errors=True)
    return row


# What stands between these in the written file is a person's, and stays.
_NOTES = "<!-- notes -->", "<!-- end of notes -->"


def cell(fault: dict[str, str] | None) -> str:
    if fault is None:
        return ""
    words = {"fault": "fails", "ok": "-", "cannot-try": "can't try"}
    plain, ours = (words.get(str(fault[k]), str(fault[k])) for k in ("plain", "with_fxsafe"))
    return plain if plain == ours == "-" or plain == ours == "can't try" else f"{plain} → {ours}"


def write(rows: dict[str, dict[str, object]]) -> None:
    written = OUTPUT.read_text() if OUTPUT.exists() else ""
    notes = written.partition(_NOTES[0])[2].partition(_NOTES[1])[0] or "\n"
    parts = [
        HEAD,
        f"{_NOTES[0]}{notes}{_NOTES[1]}",
        "\n## The suite\n",
        "| torch | Python | commit | passed | failed | skipped | seconds |",
        "|---|" + "---|" * 6,
    ]
    for release in sorted(rows, key=lambda r: [int(n) for n in r.split(".")]):
        tests = rows[release]["tests"]
        assert isinstance(tests, dict)
        failed = tests.get("failed", 0) + tests.get("error", 0)
        row = rows[release]
        cells = [release, row["python"], row["commit"], tests.get("passed", 0), failed, tests.get("skipped", 0)]
        parts.append("| " + " | ".join(map(str, [*cells, row["seconds"]])) + " |")
    for fix in FIXES:
        releases = sorted(rows, key=lambda r: [int(n) for n in r.split(".")])
        parts += ["", f'## Faults, plain torch → with `fix="{fix}"`', ""]
        parts += ["| fault | " + " | ".join(releases) + " |", "|---|" + "---|" * len(releases)]
        reports = {r: {f["name"]: f for f in rows[r]["doctor"][fix]["faults"]} for r in releases}  # type: ignore[index]
        names = list(dict.fromkeys(name for report in reports.values() for name in report))
        for name in names:
            found = [reports[r][name] for r in releases if name in reports[r]]
            advice = not any(f["claimed"] for f in found) and any(f["plain"] != "cannot-try" for f in found)
            label = f"`{name}`" + (" (advice)" if advice else "")
            parts.append(f"| {label} | " + " | ".join(cell(reports[r].get(name)) for r in releases) + " |")
    OUTPUT.write_text("\n".join(parts) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=list(RELEASES), metavar="RELEASE")
    parser.add_argument("--keep", action="store_true", help="keep the environments, about 5 GB each")
    parser.add_argument("--no-suite", action="store_true", help="the doctor only")
    parser.add_argument("--keep-doctor", action="store_true", help="with --failed: do not ask the doctor again")
    parser.add_argument("--failed", action="store_true", help="of the tests, those that failed last time")
    options = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    store = WORK / "rows.json"
    rows: dict[str, dict[str, object]] = json.loads(store.read_text()) if store.exists() else {}
    failed = []
    for release in options.releases:
        print(f"== torch {release}", flush=True)
        before = rows.get(release) if options.failed else None
        rows[release] = one(release, before, options.keep, not options.no_suite, options.keep_doctor)
        store.write_text(json.dumps(rows, indent=1))
        write(rows)
        tests = rows[release]["tests"]
        print(tests, flush=True)
        if tests["exit"] or any(d["exit"] for d in rows[release]["doctor"].values()):  # type: ignore[index,attr-defined]
            failed.append(release)
    print(f"wrote {os.path.relpath(OUTPUT)}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
