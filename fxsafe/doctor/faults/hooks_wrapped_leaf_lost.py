"""A function marked with torch.fx.wrap is traced through when another thread's trace ends first.

The mark works by replacing the function in its module's globals; the trace that ends first puts the original back, and
the other one then sees an ordinary function.
"""

import math
import sys
import threading
from typing import Any

import torch.fx

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish, trace

ADVICE = "hold one lock around every trace of the process"
torch.fx.wrap("leaf")
torch.fx.wrap("len")
torch.fx.wrap("sqrt")
sqrt = math.sqrt


def leaf(x: Any) -> Any:
    return x + 41


original_leaf, original_sqrt, module = leaf, sqrt, sys.modules[__name__]
entered = [threading.Event(), threading.Event()]
release = [threading.Event(), threading.Event()]


def first(x: Any) -> Any:
    entered[0].set()
    release[0].wait(WAIT)
    return leaf(x) * len(x) + sqrt(x)


def second(x: Any) -> Any:
    entered[1].set()
    release[1].wait(WAIT)
    return leaf(x) * len(x) + sqrt(x)


def targets(function: Any) -> Any:
    return [getattr(n.target, "__name__", n.target) for n in trace(function).graph.nodes if n.op == "call_function"]


for event in release:
    event.set()
right = targets(first)
for event in (*entered, *release):
    event.clear()
tasks = []
for at, function in enumerate((first, second)):
    tasks.append(Task(lambda function=function: targets(function)))  # type: ignore[misc]
    if not entered[at].wait(WAIT):
        cannot(f"trace {at} did not start: {tasks[at].result(0)}")
got = []
for at in (0, 1):
    release[at].set()
    got.append(tasks[at].result())
left = [name for name, want in (("leaf", original_leaf), ("sqrt", original_sqrt)) if getattr(module, name) is not want]
left += ["len"] if "len" in vars(module) else []
finish(got != [right, right] or bool(left), right=right, got=got, globals_left_replaced=left)
