"""A compiled function that ran before is refused while another thread traces.

pytorch#126024. The compiled call asks a process-wide flag whether "we" are inside symbolic_trace.
"""

from typing import Any

import torch

from fxsafe.doctor.faults._kit import attempt, finish, held_trace, lowering

ADVICE = "upgrade to torch 2.14, or never trace or compile while another thread calls compiled functions"


def affine(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2 + 1


def loss(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


class Owner:
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos()


def gradient(call: Any, x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    call(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


x = torch.arange(3.0)
function = torch.compile(affine, backend="eager")
whole = torch.compile(affine, backend="eager", fullgraph=True, dynamic=True)
method = torch.compile(Owner().method, backend="eager")
lowered = torch.compile(loss, backend=lowering())
calls: dict[str, Any] = {
    "function": lambda: function(x),
    "fullgraph, dynamic": lambda: whole(x),
    "method": lambda: method(x),
    "with AOTAutograd": lambda: lowered(x),
    "with gradient": lambda: gradient(lowered, x),
}
right = {name: call() for name, call in calls.items()}
with held_trace():
    during = {name: attempt(call) for name, call in calls.items()}
wrong = {
    name: got
    for name, got in during.items()
    if not isinstance(got, torch.Tensor) or not torch.equal(got.detach(), right[name].detach())
}
finish(bool(wrong), wrong=wrong)
