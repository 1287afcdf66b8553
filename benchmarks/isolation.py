"""What isolation costs while somebody traces: ``python benchmarks/isolation.py [--json] [--fix FIX] [--seconds S]``.

All rows are with fxsafe: without it the same programs fail. The first pair is without and with a trace in flight in
another thread, which stands still inside a traced forward; CPU time of the calling thread. The second is the same
traces in a row and in four threads; wall-clock time, without the garbage collector, whose time is that of all objects
in the process. ``make_fx`` gives up the GIL in every operator, some 14,000 times in a trace of this model, and each
time the GIL may go to a thread on another core: the rows on one core leave that out and show what the isolation itself
costs.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.fx
import turns
from models import Transformer
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from turns import Comparison, Row, compare, cpu_seconds, row, show

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fxsafe

THREADS = 4


@contextmanager
def trace_in_flight() -> Iterator[None]:
    """Another thread stands inside a traced forward."""
    inside, leave = threading.Event(), threading.Event()

    class Held(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            leave.wait()
            return x + 1

    tracer = threading.Thread(target=torch.fx.symbolic_trace, args=(Held(),))
    tracer.start()
    inside.wait()
    try:
        yield
    finally:
        leave.set()
        tracer.join()


@contextmanager
def on_cores(cores: AbstractSet[int]) -> Iterator[None]:
    """This thread, and those it starts meanwhile, run on these cores. Linux only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def main() -> None:
    options = turns.options(__doc__.splitlines()[0])
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows: list[Row] = []

    def beside_a_trace(function: Callable[[], object], number: int) -> Comparison:
        def during() -> float:
            with trace_in_flight():
                return cpu_seconds(function, number)

        return compare(lambda: cpu_seconds(function, number), during, options.seconds)

    def seconds(how: Callable[..., Iterable[object]], trace: Callable[[object], object]) -> float:
        gc.collect()
        gc.disable()
        try:
            start = time.perf_counter()
            list(how(trace, range(THREADS)))
            return time.perf_counter() - start
        finally:
            gc.enable()

    all_cores = os.sched_getaffinity(0)
    model, x = Transformer(), torch.ones(1, 8, 64)
    linear, small = nn.Linear(64, 64), torch.ones(1, 64)
    compiled = torch.compile(lambda x: x + 1, backend="eager")

    with fxsafe.install(options.fix):
        for what, function, number in (
            ("eager nn.Linear call beside a trace", lambda: linear(small), 500),
            ("eager 12-layer transformer beside a trace", lambda: model(x), 3),
        ):
            rows.append(row(what, "us", beside_a_trace(function, number), ratio=1.25))
        found = beside_a_trace(lambda: compiled(small), 500)
        rows.append(row("warm compiled call beside a trace", "us", found, ratio=1.25))

        for what, trace in (
            ("symbolic_trace", lambda _: torch.fx.symbolic_trace(model)),
            ("make_fx", lambda _: make_fx(model)(x)),
        ):
            for cores in sorted({frozenset(all_cores), frozenset({min(all_cores)})}, key=len):
                with on_cores(cores), ThreadPoolExecutor(THREADS) as pool:
                    found = compare(partial(seconds, map, trace), partial(seconds, pool.map, trace), options.seconds)
                where = f"{len(cores)} core{'s' * (len(cores) > 1)}"
                rows.append(row(f"{THREADS} {what}: in a row -> in threads, {where}", "ms", found, ratio=1.0))

    show(f"torch {torch.__version__}, fix={options.fix!r}, with fxsafe", rows, as_json=options.json)


if __name__ == "__main__":
    main()
