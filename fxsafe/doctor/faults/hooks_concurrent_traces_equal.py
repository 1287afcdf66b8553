"""Traces that run at the same time return other graphs than one after the other, or raise.

Tried in both orders: one trace within the other, and one that ends while the other goes on.
"""

import threading
from typing import Any

import torch
from torch import nn

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish, trace

ADVICE = "hold one lock around every trace of the process"


class Stops(nn.Module):
    """Not a leaf: it is traced through, and stops halfway in the forward of its owner."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "inside", threading.Event())
        object.__setattr__(self, "leave", threading.Event())
        self.inner = nn.Linear(4, 4)

    inside: threading.Event
    leave: threading.Event

    def forward(self, x: Any) -> Any:
        self.inside.set()
        self.leave.wait(WAIT)
        return self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.weight = nn.Parameter(torch.ones(4))
        self.stops = Stops()
        self.register_buffer("shift", torch.ones(4))

    shift: torch.Tensor

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.layers[0](x)) * self.weight
        x = self.stops(x)
        return torch.relu(self.layers[1](x)) * self.weight + self.shift


def describe(model: Model) -> list[str]:
    return [f"{node.op} {node.name} {node.target} {node.args}" for node in trace(model).graph.nodes]


free = Model()
free.stops.leave.set()
right = describe(free)
wrong: dict[str, Any] = {}
for order in ("within", "overlapping"):
    models = [Model(), Model()]
    tasks = []
    for model in models:
        tasks.append(Task(lambda model=model: describe(model)))  # type: ignore[misc]
        if not model.stops.inside.wait(WAIT):
            cannot(f"a trace did not start: {tasks[-1].result(0)}")
    for at in (1, 0) if order == "within" else (0, 1):
        models[at].stops.leave.set()
        got = tasks[at].result()
        if got != right:
            wrong[f"{order}, trace {at}"] = (
                got if isinstance(got, str) else [n for n in got if n not in right] or "less"
            )
finish(bool(wrong), wrong=wrong)
