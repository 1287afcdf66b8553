"""What a stress run found: a table, JSON and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxsafe.dflash.errors import DFlashError

__all__ = ["draw", "require_picture", "summary", "table"]


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """All starts of a mode in one: sums of counts, medians of speeds, the largest memory."""
    starts: list[dict[str, Any]] = row["starts"]
    errors: dict[str, int] = {}
    for start in starts:
        for kind, count in start["errors"].items():
            errors[kind] = errors.get(kind, 0) + count

    def median(key: str) -> float | None:
        values = [start[key] for start in starts if start[key] is not None]
        return statistics.median(values) if values else None

    def most(key: str) -> float | None:
        return max((start[key] for start in starts if start[key] is not None), default=None)

    return {
        "mode": row["mode"],
        "label": row["label"],
        "starts": len(starts),
        "ok": sum(start["ok"] for start in starts),
        "tried": sum(start["tried"] for start in starts),
        "hung": sum(bool(start["hung"]) for start in starts),
        "died": sum(bool(start["died"]) for start in starts),
        "eager": sum(start["eager"] for start in starts),
        "errors": dict(sorted(errors.items(), key=lambda item: -item[1])),
        "first_s": median("first_s"),
        "first_tokens_per_second": median("first_tokens_per_second"),
        "steady_tokens_per_second": median("steady_tokens_per_second"),
        "peak_rss_mb": most("peak_rss_mb"),
        "peak_device_mb": most("peak_device_mb"),
        "residue": sorted({name for start in starts for name in start["residue"] or ()})
        if any(start["residue"] is not None for start in starts)
        else None,
    }


_HEADINGS = ("mode", "steps ok", "hangs", "eager", "first step s", "tok/s first", "steady", "peak MB", "residue")


def table(rows: Sequence[dict[str, Any]], *, markdown: bool = False) -> str:
    """The table for people, and below it the errors by kind."""
    found = [summary(row) for row in rows]
    cells = [_cells(one) for one in found]
    widths = [max(len(line[i]) for line in [_HEADINGS, *cells]) for i in range(len(_HEADINGS))]

    def line(parts: Sequence[str]) -> str:
        padded = [p.ljust(w) if i in (0, 8) else p.rjust(w) for i, (p, w) in enumerate(zip(parts, widths, strict=True))]
        return "| " + " | ".join(padded) + " |" if markdown else "  ".join(padded).rstrip()

    lines = [line(_HEADINGS)]
    if markdown:
        lines.append("|" + "|".join("---" if i in (0, 8) else "---:" for i in range(len(_HEADINGS))) + "|")
    lines += map(line, cells)
    lines.append("")
    for one in found:
        for kind, count in one["errors"].items():
            lines.append(f"{'- ' if markdown else ''}{one['label']}: {count} x {kind}")
    return "\n".join(lines).rstrip()


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    share = f" ({one['ok'] / one['tried']:.1%})" if one["tried"] else ""
    memory = one["peak_device_mb"] if one["peak_device_mb"] is not None else one["peak_rss_mb"]
    died = f", {one['died']} died" if one["died"] else ""
    return (
        one["label"],
        f"{one['ok']} of {one['tried']}{share}",
        f"{one['hung']} of {one['starts']}{died}",
        str(one["eager"]),
        _number(one["first_s"], ".1f"),
        _number(one["first_tokens_per_second"], ".0f"),
        _number(one["steady_tokens_per_second"], ".0f"),
        _number(memory, ".0f"),
        "-" if one["residue"] is None else ", ".join(one["residue"]) or "none",
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def require_picture(path: Path) -> None:
    """
    Raises:
        DFlashError: matplotlib is missing, or does not know this kind of picture.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise DFlashError("--png needs matplotlib") from error
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise DFlashError(f"--png {path}: a picture's name ends in one of .{', .'.join(sorted(known))}")


def draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Steps and speeds of the modes as bars; see ``require_picture``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [summary(row) for row in rows][::-1]
    figure = Figure(figsize=(11, 0.5 * len(found) + 1.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, sharey=True)
    labels = [one["label"] for one in found]
    good = [(one["ok"] - one["eager"]) / max(1, one["tried"]) for one in found]
    eager = [one["eager"] / max(1, one["tried"]) for one in found]
    bad = [1 - a - b if one["tried"] else 0.0 for one, a, b in zip(found, good, eager, strict=True)]
    left.barh(labels, good, color="tab:green", label="compiled")
    left.barh(labels, eager, left=good, color="tab:orange", label="ran eager in silence")
    left.barh(labels, bad, left=[a + b for a, b in zip(good, eager, strict=True)], color="tab:red", label="raised")
    for place, one in enumerate(found):
        if one["hung"]:
            left.text(0.02, place, f"{one['hung']} of {one['starts']} starts hung", va="center", weight="bold")
    left.set_xlabel("share of the steps")
    figure.legend(loc="outside lower left", ncols=3, fontsize="small")
    right.barh(labels, [one["steady_tokens_per_second"] or 0 for one in found], color="tab:blue")
    right.set_xlabel("steady tokens per second, of all drafters")
    figure.savefig(path, dpi=100)
