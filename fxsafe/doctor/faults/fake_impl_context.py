"""torch.library.get_ctx() gives the context of another thread's operator.

A module global says which context a fake implementation is in. While another thread's is running it is that one's, and
sizes that depend on data become symbols of the other thread's graph.
"""

import threading
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "do not trace, export or compile custom operators in two threads at once"
inside, other_inside, asked = threading.Event(), threading.Event(), threading.Event()
there = threading.local()
modes: dict[str, Any] = {}


@torch.library.custom_op("fxsafe_doctor::fake_impl_context", mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@operator.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    if getattr(there, "first", False):
        inside.set()
        other_inside.wait(WAIT)
        modes["asked"] = attempt(lambda: torch.library.get_ctx()._fake_mode)
        asked.set()
    else:
        other_inside.set()
        asked.wait(WAIT)
    return torch.empty_like(x)


def call() -> None:
    with FakeTensorMode():
        operator(torch.empty(2))


def call_first() -> None:
    there.first = True
    with FakeTensorMode() as modes["own"]:
        operator(torch.empty(2))


task = Task(call_first)
if not inside.wait(WAIT):
    cannot(f"the operator was not called: {task.result(0)}")
attempt(call)
attempt(task.result)
same = modes["asked"] is modes["own"]
finish(not same, context="its own" if same else f"not its own: {modes['asked']}"[:200])
