"""Comparing two ways of doing the same thing on a shared, noisy machine: in short turns that alternate."""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Comparison", "Row", "compare", "cpu_seconds", "median_and_error", "options", "row", "show"]


class Comparison(NamedTuple):
    """Seconds per operation.

    Attributes:
        before: median of the turns without.
        added: median over pairs of neighbouring turns of what the turn with takes more.
        error: standard error of ``added``, from the spread of the pairs.
    """

    before: float
    added: float
    error: float

    @property
    def after(self) -> float:
        return self.before + self.added

    @property
    def ratio(self) -> float:
        return self.after / self.before


class Row(NamedTuple):
    """One line of a table; see ``row``."""

    what: str
    unit: str
    without: float
    with_: float
    error: float
    limit: str
    within: bool


_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}


def row(what: str, unit: str, found: Comparison, *, seconds: float = math.inf, ratio: float = math.inf) -> Row:
    """A line of the table with its limits: ``seconds`` more at most, and at most ``ratio`` times as long.

    A limit counts as broken if it is by more than two standard errors of the difference.
    """
    per_second = _UNITS[unit]
    least = found.added - 2 * found.error
    within = least <= seconds and (ratio == math.inf or least <= (ratio - 1) * found.before)
    limits = [f"+{seconds * 1e9:.0f} ns" if seconds < 1e-6 else f"+{seconds * 1e3:.0f} ms"] * (seconds < math.inf)
    limits += [f"x{ratio:g}"] * (ratio < math.inf)
    figures = (found.before * per_second, found.after * per_second, found.error * per_second)
    return Row(what, unit, *figures, " and ".join(limits), within)


def show(title: str, rows: list[Row], *, as_json: bool) -> None:
    """Print the rows as a table, or as JSON."""
    if as_json:
        print(json.dumps({"title": title, "rows": [r._asdict() for r in rows]}))
        return
    print(title)
    for what, unit, without, with_, error, limit, within in rows:
        ratio = f"x{with_ / without:.3f}" if without else ""
        figures = f"{without:9.3f} -> {with_:9.3f} +-{error:.3f} {unit}"
        print(f"{what:48s} {figures:36s} {ratio:7s} limit {limit:16s} {'ok' if within else 'OVER'}")


def compare(without: Callable[[], float], with_: Callable[[], float], seconds: float) -> Comparison:
    """Alternate both for about ``seconds``; each call returns the seconds that one operation took."""
    without(), with_()
    before, added = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(before) < 8:
        if len(before) % 2:
            late, early = with_(), without()
        else:
            early, late = without(), with_()
        before.append(early)
        added.append(late - early)
    return Comparison(statistics.median(before), *median_and_error(added))


def median_and_error(values: list[float]) -> tuple[float, float]:
    """The median and its standard error."""
    middle = statistics.median(values)
    # Of a median of normal samples: 1.2533 sigma / sqrt(n), and sigma is 1.4826 times the median absolute deviation.
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return middle, 1.2533 * spread / len(values) ** 0.5


def options(description: str) -> argparse.Namespace:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--fix", default="thread-local", help="thread-local (default) or always-false")
    parser.add_argument("--seconds", type=float, default=10, help="measuring time of each row, in seconds (default 10)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def cpu_seconds(function: Callable[[], object], number: int) -> float:
    """CPU seconds of this thread per call, after as many calls that are not counted.

    Changing a class or a function makes CPython's caches begin anew; the first half warms them. As in ``timeit``, the
    garbage collector waits.
    """
    for _ in range(number):
        function()
    gc.collect()
    gc.disable()
    try:
        start = time.thread_time()
        for _ in range(number):
            function()
        return (time.thread_time() - start) / number
    finally:
        gc.enable()
