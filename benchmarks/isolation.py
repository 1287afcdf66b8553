"""What isolation costs while somebody traces: ``python benchmarks/isolation.py [--json] [--fix FIX] [--seconds S]``.

All rows are with fxsafe: without it the same programs fail. The first pair is without and with a trace in flight in
another thread, which stands still inside a traced forward; CPU time of the calling thread. The second is the same
traces in a row and in four threads; wall-clock time, to which the machine's other load and the GIL belong.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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

    model, x = Transformer(), torch.ones(1, 8, 64)
    linear, small = nn.Linear(64, 64), torch.ones(1, 64)
    compiled = torch.compile(lambda x: x + 1, backend="eager")

    with fxsafe.install(options.fix), ThreadPoolExecutor(THREADS) as pool:
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

            def seconds(how: Callable[..., object], trace: Callable[[object], object] = trace) -> float:
                start = time.perf_counter()
                list(how(trace, range(THREADS)))  # type: ignore[call-overload]
                return time.perf_counter() - start

            found = compare(lambda: seconds(map), lambda: seconds(pool.map), options.seconds)
            rows.append(row(f"{THREADS} {what}: in a row -> {THREADS} threads", "ms", found, ratio=1.0))

    show(f"torch {torch.__version__}, fix={options.fix!r}, with fxsafe", rows, as_json=options.json)


if __name__ == "__main__":
    main()
