"""``nn.DataParallel`` calls its replicas in a thread for each device, while something else in the program traces.

With two GPUs this is ``nn.DataParallel`` itself. It does not exist for the CPU; without GPUs two compiled copies are
called in the threads that ``parallel_apply`` would start.

    python examples/data_parallel.py [--plain]
"""

from __future__ import annotations

import argparse
import collections
import copy
import sys
import threading
from collections.abc import Callable

import torch
from torch import nn

import fxsafe


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


class Model(nn.Module):
    """Compiled inside, so that each replica's thread calls compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.body = torch.compile(self.block.forward, backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def make() -> tuple[str, Callable[[torch.Tensor], torch.Tensor], torch.device]:
    torch.manual_seed(0)
    model = Model()
    if torch.cuda.device_count() >= 2:
        # Not compiled: replicas would share the compiled function of the original, and with it its weights.
        return "nn.DataParallel", nn.DataParallel(model.block.cuda()), torch.device("cuda:0")
    copies = [copy.deepcopy(model), copy.deepcopy(model)]

    def apply(x: torch.Tensor) -> torch.Tensor:
        outcomes: list[torch.Tensor | BaseException] = [x, x]

        def work(index: int, part: torch.Tensor) -> None:
            try:
                outcomes[index] = copies[index](part)
            except BaseException as error:
                outcomes[index] = error

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(x.chunk(2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return torch.cat(outcomes)  # type: ignore[arg-type]

    return "two threads on the CPU", apply, torch.device("cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without fxsafe")
    plain = parser.parse_args().plain
    handle = None if plain else fxsafe.install()
    what, apply, device = make()
    x = torch.ones(4, 16, device=device)
    torch.manual_seed(0)
    right = Model().to(device).block(x)
    outcomes: collections.Counter[str] = collections.Counter()
    stop = threading.Event()

    def traces() -> None:
        while not stop.is_set():
            torch.fx.symbolic_trace(Block())

    tracer = threading.Thread(target=traces)
    tracer.start()
    try:
        for _ in range(50):
            try:
                good = torch.allclose(apply(x), right, atol=1e-6)
                outcomes["right" if good else "wrong"] += 1
            except Exception as error:
                outcomes[f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"] += 1
    finally:
        stop.set()
        tracer.join()
    if handle is not None:
        handle.uninstall()
    print(f"{what}: {dict(outcomes)}")
    return 0 if set(outcomes) == {"right"} else 1


if __name__ == "__main__":
    sys.exit(main())
