"""What fxsafe costs, side by side in one run: ``python benchmarks/core.py [--json] [--fix FIX] [--seconds S]``.

Each pair of numbers comes from the same process, in short turns that alternate without and with fxsafe, so that the
noise of a shared machine meets both alike. In-process rows are CPU time of the thread; what is compared is the lower
quartile of the turns. The limits are those of the project.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def alternate(plain: Callable[[], float], ours: Callable[[], float], seconds: float) -> tuple[float, float]:
    """Lower quartiles of both, in turns for about ``seconds``; each call returns seconds per operation."""
    plain(), ours()
    a, b = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(a) < 5:
        if len(a) % 2:
            b.append(ours()), a.append(plain())
        else:
            a.append(plain()), b.append(ours())
    return statistics.quantiles(a, n=4)[0], statistics.quantiles(b, n=4)[0]


def timed(function: Callable[[], object], number: int) -> float:
    for _ in range(number):  # changing a class or a function makes CPython's caches begin anew
        function()
    start = time.thread_time()
    for _ in range(number):
        function()
    return (time.thread_time() - start) / number


FIRST_INSTALL = """
import torch, time
start = time.thread_time()
import fxsafe
fxsafe.install({fix!r})
print((time.thread_time() - start) * 1e3)
"""


def interpreter(source: str) -> tuple[float, str]:
    """Seconds that a fresh interpreter takes for ``source``, and what it prints. Byte code is cached, as installed."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", source], check=True, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True
    )
    return time.perf_counter() - start, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", default="thread-local", help="thread-local (default) or always-false")
    parser.add_argument("--seconds", type=float, default=10, help="measuring time of each row, in seconds (default 10)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []

    bare, ours = alternate(lambda: interpreter("pass")[0], lambda: interpreter("import fxsafe")[0], options.seconds)
    rows.append(("import fxsafe, fresh interpreter", "ms", bare * 1e3, ours * 1e3, "+30 ms", ours - bare <= 0.030))

    import torch
    import torch.fx
    from models import Transformer
    from torch import nn

    import fxsafe

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)

    def with_fxsafe(function: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            with fxsafe.install(options.fix):
                return function()

        return measured

    first = sorted(float(interpreter(FIRST_INSTALL.format(fix=options.fix))[1]) for _ in range(9))[2]
    rows.append(("install() after import torch, first", "ms", 0.0, first, "20 ms", first <= 20))

    compiled, x = torch.compile(lambda x: x + 1, backend="eager"), torch.ones(2)

    def call() -> float:
        return timed(lambda: compiled(x), 500)

    bare, ours = alternate(call, with_fxsafe(call), options.seconds)
    fits = ours - bare <= 50e-9 and ours / bare <= 1.02
    rows.append(("warm compiled call", "us", bare * 1e6, ours * 1e6, "+50 ns and +2 %", fits))

    model = Transformer()

    def trace() -> float:
        return timed(lambda: torch.fx.symbolic_trace(model), 1)

    bare, ours = alternate(trace, with_fxsafe(trace), options.seconds)
    rows.append(("symbolic_trace, 12-layer transformer", "ms", bare * 1e3, ours * 1e3, "+2 %", ours / bare <= 1.02))

    module, y = nn.Linear(4, 4), torch.ones(1, 4)

    def eager() -> float:
        return timed(lambda: module(y), 1000)

    bare, ours = alternate(eager, with_fxsafe(eager), options.seconds)
    rows.append(("eager nn.Module call, nobody traces", "us", bare * 1e6, ours * 1e6, "none", ours / bare <= 1.02))

    if options.json:
        names = ("what", "unit", "without", "with", "limit", "within")
        print(
            json.dumps(
                {
                    "torch": torch.__version__,
                    "fix": options.fix,
                    "rows": [dict(zip(names, r, strict=True)) for r in rows],
                }
            )
        )
        return
    print(f"torch {torch.__version__}, fix={options.fix!r}")
    for what, unit, bare, ours, limit, within in rows:
        ratio = f"x{ours / bare:.3f}" if bare else ""
        print(
            f"{what:40s} {bare:9.3f} -> {ours:9.3f} {unit}  {ratio:7s} limit {limit:16s} {'ok' if within else 'OVER'}"
        )


if __name__ == "__main__":
    main()
