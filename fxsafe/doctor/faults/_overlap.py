"""Two exports of which the one that began first ends first, while the other is inside its model."""

import threading
from typing import Any

import torch
from torch import nn

from fxsafe.doctor.faults._kit import WAIT, Task, cannot

__all__ = ["overlapping_exports"]

_inside = [threading.Event(), threading.Event()]
_leave = [threading.Event(), threading.Event()]


class _Model(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        _inside[self.at].set()
        _leave[self.at].wait(WAIT)
        return self.linear(x).relu() + 1


def _export(at: int) -> Any:
    return torch.export.export(_Model(at), (torch.ones(1, 2),), strict=False).graph_module.code


def overlapping_exports() -> tuple[Any, list[Any]]:
    """What an export gives alone, and what the two gave."""
    for event in _leave:
        event.set()
    right = _export(0)
    for event in (*_inside, *_leave):
        event.clear()
    first = Task(lambda: _export(0))
    if not _inside[0].wait(WAIT):
        cannot(f"the export did not start: {first.result(0)}")
    second = Task(lambda: _export(1))
    # Where exports exclude one another the second waits for the first: do not wait for it for long.
    _inside[1].wait(3)
    _leave[0].set()
    got = [first.result()]
    _leave[1].set()
    return right, [*got, second.result()]
