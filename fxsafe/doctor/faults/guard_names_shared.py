"""Guards that two threads build at once see each other's temporary names ("name 'tmp' is not defined").

Dynamo evaluates the sources of guards in one dictionary of the process; strict export does so without the compile lock.
"""

import threading
from typing import Any

import torch._guards
from torch._dynamo import guards
from torch._dynamo.source import AttrSource, LocalSource

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "hold one lock around every strict torch.export and around compiles"
if not hasattr(torch._guards.ChainedSource, "get_value"):
    cannot("before torch 2.10 the sources of guards are evaluated without temporary names")


class Held:
    """Waits where Dynamo looks it up among the locals, or where it asks for its value."""

    def __init__(self) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()

    def hold(self) -> None:
        self.inside.set()
        self.leave.wait(WAIT)

    @property
    def value(self) -> str:
        self.hold()
        return "right"


class Locals(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        if name == "looked_up":
            found.hold()
        return super().__getitem__(name)


class Value:
    value = "right"


found, asked = Held(), Held()
scope = {"L": Locals(looked_up=Value(), asked=asked)}


def evaluate(name: str) -> Any:
    """As ``GuardBuilderBase.get`` does."""
    return AttrSource(LocalSource(name), "value").get_value(scope, guards._get_closure_vars(), {})


first = Task(lambda: evaluate("looked_up"))  # has seen that the name is free, and is about to use it
if not found.inside.wait(WAIT):
    cannot(f"the first did not get there: {first.result(0)}")
second = Task(lambda: evaluate("asked"))  # uses it
if not asked.inside.wait(WAIT):
    cannot(f"the second did not get there: {second.result(0)}")
got = []
for held, task in ((found, first), (asked, second)):
    held.leave.set()
    got.append(task.result())
finish(got != ["right", "right"], got=got)
