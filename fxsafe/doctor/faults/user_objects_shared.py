"""A warm compiled call computes with the module of another thread's call, without a word.

Each call puts the objects that its graph uses (modules given to a leaf_function, streams, events) into one table of the
process, from which the graph takes them by number.
"""

import threading
from typing import Any

import torch
import torch._dynamo.decorators
from torch import nn

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "call compiled code that uses leaf_function, streams or events in one thread at a time"
leaf_function: Any = getattr(torch._dynamo.decorators, "leaf_function", None)
if leaf_function is None:
    cannot("this torch has no leaf_function")
armed, inside, leave = threading.Event(), threading.Event(), threading.Event()


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def pausing(x: torch.Tensor) -> Any:
    if armed.is_set():
        inside.set()
        leave.wait(WAIT)
    return (x + 0,)


def calling(module: nn.Module, x: torch.Tensor) -> Any:
    return (module(x),)


pause, call = leaf_function(pausing), leaf_function(calling)
pause.register_fake(lambda x: (x + 0,))
call.register_fake(calling)
two, three = Times(2.0), Times(3.0)


def paused(x: torch.Tensor) -> Any:
    return call(two, pause(x)[0])[0] + 1


def other(x: torch.Tensor) -> Any:
    return call(three, x)[0] + 1


first, second = (torch.compile(function, backend="aot_eager") for function in (paused, other))
x = torch.ones(2)


def quietly(function: Any) -> Any:
    with torch.no_grad():
        return function(x).tolist()


alone = attempt(lambda: [quietly(first), quietly(second)])
if alone != [[3.0, 3.0], [4.0, 4.0]]:
    cannot(f"alone it gives {alone}")
armed.set()
task = Task(lambda: quietly(first))
if not inside.wait(WAIT):
    cannot(f"the call did not start: {task.result(0)}")
beside = attempt(lambda: quietly(second))
leave.set()
got = [task.result(), beside]
finish(got != alone, got=got)
