"""A function whose first compile meets another thread's dispatch mode runs eager for good, and modes stay "active".

Up to torch 2.10 Dynamo asks module globals whether a mode is active; blocks that overlap leave them set on any release.
"""

import threading
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "compile before any thread uses FlopCounterMode, selective checkpointing or a mode of your own"


class Mode(dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def hold(inside: threading.Event, leave: threading.Event) -> None:
    with Mode():  # type: ignore[no-untyped-call]
        inside.set()
        leave.wait(WAIT)


def graphs() -> int:
    """How many graphs a new compiled function gives to its backend in two calls."""
    seen: list[Any] = []

    def backend(module: Any, example_inputs: Any) -> Any:
        seen.append(module)
        return module.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    return len(seen)


alone = graphs()
first, second = [(threading.Event(), threading.Event()) for _ in range(2)]
tasks = [Task(lambda: hold(*first))]
if not first[0].wait(WAIT):
    cannot("the mode was not entered")
beside = graphs()
tasks.append(Task(lambda: hold(*second)))
if not second[0].wait(WAIT):
    cannot("the second mode was not entered")
for (_, leave), task in zip((first, second), tasks, strict=True):
    leave.set()
    task.result()
after = graphs()
stuck = dispatch.is_in_torch_dispatch_mode()
finish(
    (beside, after, stuck) != (alone, alone, False),
    graphs_alone=alone,
    graphs_beside_a_mode=beside,
    graphs_after_overlapping_modes=after,
    still_in_a_mode=stuck,
)
