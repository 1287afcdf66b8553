"""Two traces that overlap leave the tracing flag set for ever, or take it from the one that goes on.

Each saves the process-wide flag, sets it and restores what it saved; the second one saved the first one's True.
"""

import threading
from typing import Any

import torch
from torch.fx._symbolic_trace import is_fx_tracing

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish, trace

ADVICE = "upgrade to torch 2.14, or hold one lock around every trace and compile of the process"
entered = [threading.Event(), threading.Event()]
leave = [threading.Event(), threading.Event()]
seen: dict[str, Any] = {}


def first(x: Any) -> Any:
    entered[0].set()
    leave[0].wait(WAIT)
    return x + 1


def second(x: Any) -> Any:
    entered[1].set()
    leave[1].wait(WAIT)
    seen["flag of the trace that goes on"] = is_fx_tracing()
    return x + 2


def affine(x: torch.Tensor) -> torch.Tensor:
    return x * 2


compiled = torch.compile(affine, backend="eager")
x = torch.arange(3.0)
right = compiled(x)
tasks = []
for at, function in enumerate((first, second)):
    tasks.append(Task(lambda function=function: trace(function).code))  # type: ignore[misc]
    if not entered[at].wait(WAIT):
        cannot(f"trace {at} did not start: {tasks[at].result(0)}")
leave[0].set()
tasks[0].result()
leave[1].set()
tasks[1].result()
seen["flag after both"] = is_fx_tracing()
got = attempt(lambda: compiled(x))
correct = isinstance(got, torch.Tensor) and torch.equal(got, right)
finish(seen != {"flag of the trace that goes on": True, "flag after both": False} or not correct, **seen, compiled=got)
