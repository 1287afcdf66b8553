"""make_fx before dispatch (torch.export's way) fails or records foreign operators when two threads use it.

The stack of pre-dispatch modes is one object for the whole process: "slot already occupied", "empty mode stack".
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "hold one lock around every make_fx and torch.export of the process"


def model(stop: Callable[[], None]) -> Callable[[torch.Tensor], Any]:
    def run(x: torch.Tensor) -> Any:
        y = x.sin()
        stop()
        return torch.nn.functional.relu(y) @ y

    return run


def code(stop: Callable[[], None]) -> Any:
    return make_fx(model(stop), pre_dispatch=True)(torch.ones(3)).code


def stopper(at: int) -> Callable[[], None]:
    def stop() -> None:
        inside[at].set()
        leave[at].wait(WAIT)

    return stop


right = code(lambda: None)
wrong: dict[str, Any] = {}
for order, ends in (("within", (1, 0)), ("overlapping", (0, 1))):
    inside = [threading.Event(), threading.Event()]
    leave = [threading.Event(), threading.Event()]
    tasks = [Task(lambda: code(stopper(0)))]
    if not inside[0].wait(WAIT):
        cannot(f"the trace did not start: {tasks[0].result(0)}")
    tasks.append(Task(lambda: code(stopper(1))))
    # Where traces exclude one another the second waits for the first: do not wait for it for long.
    inside[1].wait(3)
    for at in ends:
        leave[at].set()
        tasks[at].result(3 if at else WAIT)
    wrong |= {f"{order}, trace {at}": got for at, task in enumerate(tasks) if (got := task.result()) != right}
finish(bool(wrong), right=right, wrong=wrong)
