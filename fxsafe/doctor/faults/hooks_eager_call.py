"""A plain module called in one thread fails while another thread traces.

The trace replaces torch.nn.Module.__call__ and __getattr__ for the whole process; a module that does not belong to it
"is not installed as a submodule".
"""

from typing import Any

import torch
from torch import nn

from fxsafe.doctor.faults._kit import attempt, finish, held_trace

ADVICE = "hold one lock around every trace and every call of a module that may run at the same time"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 3.0))
        self.register_buffer("shift", torch.ones(2))
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * self.scale + self.shift


torch.manual_seed(0)
module, x = Scaled(), torch.ones(1, 2)
hooked = nn.Linear(2, 2)
hooked.register_forward_hook(lambda owner, inputs, output: output + 1)
compiled = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
calls: dict[str, Any] = {
    "a module with submodules": lambda: module(x),
    "a module with a hook": lambda: hooked(x),
    "an attribute": lambda: module.scale.detach(),
    "a compiled module": lambda: compiled(x),
}
right = {name: call() for name, call in calls.items()}
with held_trace():
    during = {name: attempt(call) for name, call in calls.items()}
wrong = {
    name: got for name, got in during.items() if not isinstance(got, torch.Tensor) or not torch.equal(got, right[name])
}
finish(bool(wrong), wrong=wrong)
