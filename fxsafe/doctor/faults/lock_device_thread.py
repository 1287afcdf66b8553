"""A compile and a backward in two threads wait for each other for ever (needs CUDA).

The compile holds the compile lock and waits for the device's autograd thread; that thread runs the backward, which
compiles and waits for the lock.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "run one training step of each compiled model in one thread before others start, or use a process per model"
compiling, in_backward = threading.Event(), threading.Event()


def backend(module: Any, example_inputs: Any) -> Any:
    compiling.set()
    in_backward.wait(WAIT)
    with torch.enable_grad():  # what flex_attention does within a compile
        x = torch.ones(4, device="cuda", requires_grad=True)
        torch.autograd.grad((x * 2).sum(), x)
    return module.forward


class CompilesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        in_backward.set()
        return torch.compile(increment, backend="eager")(gradient)


def increment(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def compile_there() -> Any:
    return torch.compile(double, backend=backend)(torch.ones(4, device="cuda")).tolist()


def train_there() -> Any:
    compiling.wait(WAIT)
    x = torch.ones(4, device="cuda", requires_grad=True)
    apply: Callable[[torch.Tensor], torch.Tensor] = CompilesInBackward.apply
    return torch.autograd.grad(apply(x).sum(), x)[0].tolist()


if not torch.cuda.is_available():
    cannot("needs a CUDA device")
torch.ones(1, device="cuda")
tasks = [Task(compile_there), Task(train_there)]
got = [task.result(WAIT) for task in tasks]
# The backward adds 1 to a gradient of ones.
finish(got != [[2.0] * 4, [2.0] * 4], got=got)
