"""Two torch.export calls that overlap fail, or leave flags and builtins replaced for ever.

Non-strict export replaces builtins.max, builtins.min and math.pow and sets process-wide flags while it runs.
"""

import builtins
import math
import threading
from typing import Any

import torch
from torch import nn

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "hold one lock around every torch.export of the process"
inside = [threading.Event(), threading.Event()]
leave = [threading.Event(), threading.Event()]


class Model(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        inside[self.at].set()
        leave[self.at].wait(WAIT)
        return self.linear(x).relu() + 1


def export(at: int) -> Any:
    return torch.export.export(Model(at), (torch.ones(1, 2),), strict=False).graph_module.code


originals = (builtins.max, builtins.min, math.pow)
for event in leave:
    event.set()
right = export(0)
for event in (*inside, *leave):
    event.clear()
first = Task(lambda: export(0))
if not inside[0].wait(WAIT):
    cannot(f"the export did not start: {first.result(0)}")
second = Task(lambda: export(1))
# Where exports exclude one another the second waits for the first: do not wait for it for long.
inside[1].wait(3)
leave[0].set()
got = [first.result()]
leave[1].set()
got.append(second.result())
left = {
    "is_compiling": torch.compiler.is_compiling(),
    "is_exporting": hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting(),
    "builtins or math replaced": (builtins.max, builtins.min, math.pow) != originals,
}
finish(got != [right, right] or any(left.values()), wrong=[code for code in got if code != right], left=left)
