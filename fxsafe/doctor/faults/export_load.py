"""torch.export.load fails while another thread loads an exported program.

The deserializer at work is a module global, empty when a load begins ("_CURRENT_DESERIALIZER is already set").
"""

import io
import threading
from typing import Any

import torch
from torch import nn
from torch._export.serde import serialize

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "hold one lock around every torch.export.load of the process"
inside, leave, first = threading.Event(), threading.Event(), threading.Lock()
original = serialize.GraphModuleDeserializer.deserialize_graph


def held(*args: Any, **kwargs: Any) -> Any:
    if first.acquire(False):
        inside.set()
        leave.wait(WAIT)
    return original(*args, **kwargs)


def load() -> Any:
    return torch.export.load(io.BytesIO(file.getvalue())).graph_module.code


file = io.BytesIO()
torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(2),), strict=False), file)
right = load()
serialize.GraphModuleDeserializer.deserialize_graph = held  # type: ignore[method-assign]
task = Task(load)
if not inside.wait(WAIT):
    cannot(f"the load did not start: {task.result(0)}")
got = [attempt(load)]
leave.set()
got.append(task.result())
finish(got != [right, right], wrong=[code for code in got if code != right])
