"""Two traces that overlap, by a tracer that replaces functions of torch while it traces."""

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

__all__ = ["finish_overlap"]


class _Overlapping:
    """A trace that stays inside until it is let go."""

    def __init__(self, trace: Callable[[Callable[[Any], Any]], Any]) -> None:
        self._inside, self._leave = threading.Event(), threading.Event()

        def root(x: Any) -> Any:
            self._inside.set()
            self._leave.wait(WAIT)
            return torch.full_like(x, 1.0)

        self._task = Task(lambda: trace(root))
        if not self._inside.wait(WAIT):
            cannot(f"the trace did not start: {self._task.result(0)}")

    def end(self) -> None:
        self._leave.set()
        self._task.result()


def finish_overlap(names: list[str], trace: Callable[[Callable[[Any], Any]], Any]) -> NoReturn:
    """Report whether two overlapping traces are seen from another thread, and whether they leave anything.

    Args:
        names: what the tracer replaces in torch.
        trace: traces a function of one tensor.
    """
    originals = {name: getattr(torch, name) for name in names}

    def replaced() -> list[str]:
        return [name for name in names if getattr(torch, name) is not originals[name]]

    first, second = _Overlapping(trace), _Overlapping(trace)
    during = replaced()
    first.end()
    second.end()
    afterwards = replaced()
    finish(bool(during or afterwards), replaced_meanwhile=during, replaced_for_good=afterwards)
