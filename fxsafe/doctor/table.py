"""The report for people."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from fxsafe.doctor.trial import Outcome
from fxsafe.doctor.verdict import Finding

__all__ = ["table"]

_HEADS = ("FAULT", "THIS TORCH", "WITH FXSAFE", "WHAT TO DO")
_WORDS = {"ok": "ok", "fault": "FAULT", "hangs": "HANGS", "cannot-try": "not tried", "broken": "no answer"}


def table(heading: str, findings: Sequence[Finding], ok: bool) -> str:
    """A heading, a row per fault and a last line that says whether fxsafe keeps its word."""
    width = max(80, min(shutil.get_terminal_size((120, 24)).columns, 160))
    middle = 12
    first = (width - 2 * middle - 6) * 9 // 20
    widths = (first, middle, middle, width - first - 2 * middle - 6)
    lines = [heading, "", *_row(_HEADS, widths)]
    for finding in sorted(findings, key=lambda finding: not finding.claimed):
        title = f"{finding.program.title} [{finding.program.name}]"
        cells = (title, _word(finding.plain), _word(finding.with_fxsafe), finding.advice)
        lines += ["", *_row(cells, widths)]
    return "\n".join([*lines, "", _summary(findings, ok)])


def _word(outcome: Outcome) -> str:
    if outcome.kind == "crashes":
        return f"CRASHES {outcome.detail}"
    return _WORDS[outcome.kind]


def _row(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    columns = [
        textwrap.wrap(cell, width, break_on_hyphens=False, break_long_words=False) or [""]
        for cell, width in zip(cells, widths, strict=True)
    ]
    height = max(map(len, columns))
    rows = zip(*(column + [""] * (height - len(column)) for column in columns), strict=True)
    return ["  ".join(part.ljust(width) for part, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _summary(findings: Sequence[Finding], ok: bool) -> str:
    claimed = [finding for finding in findings if finding.claimed]
    shown = [finding for finding in claimed if finding.plain.bad]
    open_ones = [finding for finding in findings if finding.with_fxsafe.bad and not finding.failed]
    broken = [finding.program.name for finding in findings if finding.failed]
    untried = sum(finding.plain.kind == "cannot-try" for finding in findings)
    tail = f" No patch cures {len(open_ones)} faults that show here; {untried} could not be tried here."
    if not ok:
        return f"NOT OK: fxsafe claims to cure {', '.join(broken)}, and does not.{tail}"
    return (
        f"OK: of {len(claimed)} faults that fxsafe claims to cure on this torch, {len(shown)} show without it and none "
        f"with it.{tail}"
    )
