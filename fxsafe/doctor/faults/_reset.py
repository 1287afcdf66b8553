"""A reset of Dynamo while another thread is inside a compiled call and waits for the compile lock."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from fxsafe.doctor.faults._kit import WAIT, Task, cannot

__all__ = ["entries_beside"]


def entries_beside(reset: Callable[[], Any]) -> int:
    """How many versions of a function are on record while the one just compiled runs; 0 is the fault.

    Args:
        reset: called while another thread, inside a call of the function, waits for the compile lock.
    """
    seen: list[int] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def backend(module: Any, example_inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append(len(_debug_get_cache_entry_list(double.__code__)))
            return module(*args)

        return run

    compiled = torch.compile(double, backend=backend)
    compiled(torch.ones(2))
    if seen != [1]:
        cannot(f"one compile left {seen} entries")
    before = set(sys._current_frames())
    with convert_frame.compile_lock:
        task = Task(lambda: compiled(torch.ones(2, dtype=torch.float64)))
        ident = next(t.ident for t in threading.enumerate() if t.ident not in before)
        deadline = time.monotonic() + WAIT
        while not _waits(sys._current_frames().get(ident)):  # type: ignore[arg-type]
            if time.monotonic() > deadline:
                cannot(f"the call did not come to the lock: {task.result(0)}")
            time.sleep(0.001)  # nothing tells when a thread waits for a lock
        reset()
    task.result()
    # What was freed shows in one way or another: the call fails, its work is not on record, or the process dies.
    return seen[1] if len(seen) == 2 else 0


def _waits(frame: Any) -> bool:
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), convert_frame.CatchErrorsWrapper):
            return True
        frame = frame.f_back
    return False
