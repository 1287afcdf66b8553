"""torch.func.jvp, jacfwd and hessian give zero when another thread leaves its own meanwhile.

The level of forward-mode differentiation is the process's: whoever opened it closes it under the others.
"""

import threading
from functools import partial
from typing import Any

import torch

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "take a lock of your own around every jvp, jacfwd and hessian"


Held = tuple[threading.Event, threading.Event]


def derivative(held: Held) -> Any:
    """Of x squared at 3, held before its end."""

    def square(x: Any) -> Any:
        held[0].set()
        held[1].wait(WAIT)
        return x * x

    return attempt(lambda: torch.func.jvp(square, (torch.tensor(3.0),), (torch.tensor(1.0),))[1].item())


first, second = [(threading.Event(), threading.Event()) for _ in range(2)]
tasks = []
for events in (first, second):
    tasks.append(Task(partial(derivative, events)))
    if not events[0].wait(WAIT):
        cannot(f"the derivative did not start: {tasks[-1].result(0)}")
found = []
for (_, leave), task in zip((first, second), tasks, strict=True):
    leave.set()
    found.append(task.result())
finish(found != [6.0, 6.0], first=found[0], second=found[1], right=6.0)
