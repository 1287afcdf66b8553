"""Two run_decompositions of exported programs that overlap fail, or get one another's decompositions.

Each replaces the kernels of operators in their tables, for the whole process, and puts back what it has found there.
"""

import threading
from typing import Any

import torch
from torch import nn

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "hold one lock around every run_decompositions of the process"
OPERATOR = torch.ops.aten.linear.default
inside = [threading.Event(), threading.Event()]
leave = [threading.Event(), threading.Event()]


def decompose(at: int) -> Any:
    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        inside[at].set()
        leave[at].wait(WAIT)
        return torch.matmul(x, weight.t()) + bias * (at + 2)

    return program.run_decompositions({OPERATOR: linear}).graph_module.code


def both() -> list[Any]:
    first = Task(lambda: attempt(lambda: decompose(0)))
    if not inside[0].wait(WAIT):
        cannot(f"the first did not start: {first.result(0)}")
    second = Task(lambda: attempt(lambda: decompose(1)))
    # Where they exclude one another the second waits for the first: do not wait for it for long.
    inside[1].wait(3)
    leave[0].set()
    got = [first.result()]
    leave[1].set()
    return [*got, second.result()]


program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
for event in leave:
    event.set()
right = [decompose(0), decompose(1)]
for event in (*inside, *leave):
    event.clear()
got = both()
finish(got != right, wrong=[code for code, expected in zip(got, right, strict=True) if code != expected])
