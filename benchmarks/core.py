"""What fxsafe costs, side by side in one run: ``python benchmarks/core.py [--json] [--fix FIX] [--seconds S]``.

Each row comes from one process, in short turns that alternate without and with fxsafe, so that the noise of a shared
machine meets both alike. In-process rows are CPU time of the thread. A row is over its limit if it is by more than two
standard errors of the difference, which is printed behind the +-. The limits are those of the project.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import turns  # noqa: E402
from turns import Comparison, Row, compare, cpu_seconds, row, show  # noqa: E402

FIRST_INSTALL = """
import torch, time
start = time.thread_time()
import fxsafe
imported = time.thread_time()
fxsafe.install({fix!r})
print(imported - start, time.thread_time() - imported)
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
    options = turns.options(__doc__.splitlines()[0])
    rows: list[Row] = []

    started = compare(lambda: interpreter("pass")[0], lambda: interpreter("import fxsafe")[0], options.seconds)
    rows.append(row("import fxsafe, fresh interpreter", "ms", started, seconds=0.030))

    import torch
    import torch.fx
    from models import Transformer
    from torch import nn
    from torch.fx.experimental.proxy_tensor import make_fx

    import fxsafe

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)

    def both(function: Callable[[], object], number: int) -> Comparison:
        def without() -> float:
            return cpu_seconds(function, number)

        def with_fxsafe() -> float:
            with fxsafe.install(options.fix):
                return cpu_seconds(function, number)

        return compare(without, with_fxsafe, options.seconds)

    firsts = [interpreter(FIRST_INSTALL.format(fix=options.fix))[1].split() for _ in range(9)]
    for what, times, limit in zip(
        ("import fxsafe", "first install()"), zip(*firsts, strict=True), (0.030, 0.020), strict=True
    ):
        found = Comparison(0.0, *turns.median_and_error([float(t) for t in times]))
        rows.append(row(f"{what} after import torch", "ms", found, seconds=limit))

    compiled, x = torch.compile(lambda x: x + 1, backend="eager"), torch.ones(2)
    rows.append(row("warm compiled call", "us", both(lambda: compiled(x), 500), seconds=50e-9, ratio=1.02))

    model = Transformer()
    traced = both(lambda: torch.fx.symbolic_trace(model), 3)
    rows.append(row("symbolic_trace, 12-layer transformer", "ms", traced, ratio=1.02))

    y = torch.ones(1, 8, 64)
    rows.append(row("make_fx, 12-layer transformer", "ms", both(lambda: make_fx(model)(y), 1), ratio=1.03))

    module, z = nn.Linear(4, 4), torch.ones(1, 4)
    rows.append(row("eager nn.Module call, nobody traces", "us", both(lambda: module(z), 1000), ratio=1.0))

    show(f"torch {torch.__version__}, fix={options.fix!r}", rows, as_json=options.json)


if __name__ == "__main__":
    main()
