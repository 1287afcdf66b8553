"""Graph modules that are unpickled at the same time get one another's code; modules called meanwhile fail.

Unpickling puts the code of a graph module on one class of torch's and traces it from there.
"""

import pickle
import threading
from typing import Any

import torch
import torch.fx
from torch import nn

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "load pickled graph modules in one thread, before others start"
before, inside = threading.Event(), threading.Event()
go_trace, go_on = threading.Event(), threading.Event()
holds = threading.local()


class Holding(torch.fx.Tracer):
    """Stops before the trace of an unpickling takes the code, and once more within it."""

    def trace(self, root: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(holds, "on", False):
            before.set()
            go_trace.wait(WAIT)
        return super().trace(root, *args, **kwargs)

    def call_module(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(holds, "on", False):
            inside.set()
            go_on.wait(WAIT)
        return super().call_module(*args, **kwargs)


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.linear(x).sin()


class Cosine(Sine):
    def forward(self, x: Any) -> Any:
        return self.linear(x).cos() + 1


def dump(module: nn.Module) -> tuple[bytes, Any]:
    graph = Holding().trace(module)
    return pickle.dumps(torch.fx.GraphModule(module, graph)), module(x)


def load_and_hold() -> Any:
    holds.on = True
    return pickle.loads(sine)


def same(module: Any, right: Any) -> bool:
    value = attempt(lambda: module(x))
    return isinstance(value, torch.Tensor) and torch.equal(value, right)


torch.manual_seed(0)
x, eager = torch.ones(1, 2), nn.Sequential(nn.Linear(2, 2))
right = eager(x)
sine, sine_right = dump(Sine())
cosine, cosine_right = dump(Cosine())
task = Task(load_and_hold)
if not before.wait(WAIT):
    cannot(f"the unpickling did not reach its trace: {task.result(0)}")
# Where loads exclude one another this one waits for the first: do not wait for it for long.
other = Task(lambda: pickle.loads(cosine))
other.result(2)
go_trace.set()
if not inside.wait(WAIT):
    cannot(f"the unpickling did not start its trace: {task.result(0)}")
called = attempt(lambda: eager(x))
go_on.set()
first, second = task.result(), other.result()
answers = {
    "held load": same(first, sine_right),
    "other load": same(second, cosine_right),
    "module called meanwhile": isinstance(called, torch.Tensor) and torch.equal(called, right),
}
finish(not all(answers.values()), right=answers, called=called, loads=[str(type(m).__name__) for m in (first, second)])
