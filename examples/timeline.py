"""Five threads of one process, recorded: two trace, two compile, and one calls a compiled function beside them.

The picture in docs/observing.md is this program's timeline.

    python examples/timeline.py [FILE]
"""

from __future__ import annotations

import argparse
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import fxsafe


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model(depth: int, width: int = 16) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def tracer(deep: nn.Module) -> None:
    for _ in range(8):
        symbolic_trace(deep)
        time.sleep(0.05)


def maker(stack: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        make_fx(stack)(x)
        time.sleep(0.08)


def server(warm: Callable[..., Any], x: torch.Tensor, until: float) -> None:
    while time.perf_counter() < until:
        warm(x)  # plain torch 2.13 refuses this call while another thread traces
        time.sleep(0.04)


def compiler(x: torch.Tensor, backend: str) -> None:
    for size in 2, 3:
        torch.compile(model(size), backend=backend)(x)
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default="race.json", help="a Chrome trace, for https://ui.perfetto.dev")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fxsafe.install()
    x = torch.randn(4, 16)
    # Dynamo's own imports, which take seconds, before the recording.
    warm = torch.compile(model(1), backend="aot_eager")
    warm(x)
    deep, stack = model(100), model(3)
    make_fx(stack)(x)
    gc.freeze()  # else one collection of all that was imported stops every thread for half a second
    jobs: dict[str, tuple[Any, ...]] = {
        "symbolic_trace": (tracer, deep),
        "make_fx": (maker, stack, x),
        "server": (server, warm, x, time.perf_counter() + 1.2),
        "compile aot_eager": (compiler, x, "aot_eager"),
        "compile eager": (compiler, x, "eager"),
    }
    with fxsafe.record(options.file):
        threads = [threading.Thread(target=job, args=args, name=name) for name, (job, *args) in jobs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
