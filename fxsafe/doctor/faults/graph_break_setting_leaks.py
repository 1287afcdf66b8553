"""error_on_graph_break(True) in one thread makes graph breaks of other threads' compiles errors.

The setting of the with-block is a module global.
"""

import threading
from typing import Any

import torch
import torch._dynamo

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "use torch.compile(fullgraph=True) where breaks must be errors, instead of the with-block"
inside, leave = threading.Event(), threading.Event()
setting: Any = getattr(torch._dynamo, "error_on_graph_break", None)


def set_there() -> None:
    with setting(True):
        inside.set()
        leave.wait(WAIT)


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


if setting is None:
    cannot("this torch has no torch._dynamo.error_on_graph_break")
task = Task(set_there)
if not inside.wait(WAIT):
    cannot(f"the other thread did not get there: {task.result(0)}")
got = attempt(lambda: torch.compile(broken, backend="eager")(torch.ones(2)).tolist())
leave.set()
task.result()
finish(got != [4.0, 4.0], got=got)
