"""torch.compiler.is_compiling() is True in every thread while one compiles (2.13 and later) or exports.

Library code that asks it takes its tracing branch in threads that do neither.
"""

import threading
from typing import Any

import torch
from torch import nn

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "do not compile or export while other threads run code that asks torch.compiler.is_compiling()"
inside, leave = threading.Event(), threading.Event()


def hold() -> None:
    inside.set()
    leave.wait(WAIT)


def holding(module: Any, example_inputs: Any) -> Any:
    hold()
    return module.forward


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hold()
        return x + 1


def compile_there() -> Any:
    return torch.compile(lambda x: x + 1, backend=holding)(torch.ones(2))


def export_there() -> Any:
    return torch.export.export(Model(), (torch.ones(2),), strict=False)


def answers() -> dict[str, bool]:
    names = ("is_compiling", "is_dynamo_compiling", "is_exporting")
    return {name: bool(getattr(torch.compiler, name)()) for name in names if hasattr(torch.compiler, name)}


seen: dict[str, dict[str, bool]] = {}
for name, call in (("compile", compile_there), ("export", export_there)):
    inside.clear()
    leave.clear()
    task = Task(call)
    if not inside.wait(WAIT):
        cannot(f"the {name} did not start: {task.result(0)}")
    seen[f"during a {name}"] = answers()
    leave.set()
    task.result()
seen["after both"] = answers()
finish(any(any(found.values()) for found in seen.values()), **seen)
