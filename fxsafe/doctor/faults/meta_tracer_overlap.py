"""Two overlapping traces by MetaTracer leave torch.zeros and others replaced.

It replaces functions of the module torch for the whole process while it traces, and puts back what it found there. The
trace that begins second finds the first one's and leaves them for good; other threads get them meanwhile.
"""

import threading
from typing import Any

import torch
from torch.fx.experimental.meta_tracer import MetaTracer

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "trace with MetaTracer in one thread, before others call torch.zeros, ones, arange, full_like or eye"
NAMES = MetaTracer._TORCH_METHODS_TO_PATCH
ORIGINALS = {name: getattr(torch, name) for name in NAMES}


def replaced() -> list[str]:
    return [name for name in NAMES if getattr(torch, name) is not ORIGINALS[name]]


class Overlapping:
    """A trace that stays inside until it is let go."""

    def __init__(self) -> None:
        self._inside, self._leave = threading.Event(), threading.Event()

        def root(x: Any) -> Any:
            self._inside.set()
            self._leave.wait(WAIT)
            return torch.full_like(x, 1.0)

        self._task = Task(lambda: MetaTracer().trace(root, {"x": torch.empty(2, device="meta")}))
        if not self._inside.wait(WAIT):
            cannot(f"the trace did not start: {self._task.result(0)}")

    def end(self) -> None:
        self._leave.set()
        self._task.result()


first, second = Overlapping(), Overlapping()
during = replaced()
first.end()
second.end()
afterwards = replaced()
finish(bool(during or afterwards), replaced_meanwhile=during, replaced_for_good=afterwards)
