"""What the fault programs share: a thread held inside a trace, and the way to report."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.fx
from torch import nn

__all__ = [
    "WAIT",
    "Held",
    "Task",
    "attempt",
    "cannot",
    "finish",
    "held_compile",
    "held_trace",
    "lowering",
    "short",
    "trace",
]

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")

# Seconds to wait for what must come at once unless the fault shows. Long enough for a cold compile on a busy machine.
WAIT = 30.0

trace: Callable[..., Any] = torch.fx.symbolic_trace


def lowering(**options: Any) -> Callable[..., Any]:
    """A backend with AOTAutograd whose compiled code calls no module, so that only the traces of it matter."""
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: Any, example_inputs: Any) -> Any:
        # A lazy graph module writes its code at its first call, and through a call of itself.
        getattr(graph, "real_recompile", graph.recompile)()
        return graph.forward

    backend: Callable[..., Any] = aot_autograd(fw_compiler=compiler, **options)
    return backend


def finish(bug: bool, **facts: object) -> NoReturn:
    """Report, and end at once: a thread that hangs must not keep the process."""
    _end(1 if bug else 0, bug=bug, **facts)


def cannot(why: str) -> NoReturn:
    """Report that the fault cannot be tried here."""
    _end(2, bug=None, why=why)


def _end(status: int, **record: object) -> NoReturn:
    print("RESULT " + json.dumps({**record, "torch": torch.__version__}, default=str))
    sys.stdout.flush()
    os._exit(status)


def short(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0][:160]
    return re.sub(r"<[^>]*>|0x[0-9a-f]+", "..", f"{type(error).__name__}: {first}")


def attempt(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or the text of what it raises."""
    try:
        return call()
    except BaseException as error:  # whatever torch raises is the finding
        return short(error)


class Task:
    """A call in a thread of its own, which does not keep the process alive."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: Any = "still running"
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._result = attempt(self._call)

    def result(self, timeout: float = WAIT) -> Any:
        """The value, the text of the exception, or "still running" after the timeout."""
        self._thread.join(timeout)
        return self._result


class Held(nn.Module):
    """Says when it is inside ``forward`` and stays there until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        # Past nn.Module's own attribute handling, which is what some of the faults break.
        object.__setattr__(self, "inside", threading.Event())
        object.__setattr__(self, "leave", threading.Event())

    inside: threading.Event
    leave: threading.Event

    def forward(self, x: Any) -> Any:
        self.inside.set()
        self.leave.wait(WAIT)
        return self.linear(x)


@contextlib.contextmanager
def held_trace() -> Iterator[Task]:
    """While the body runs, another thread is inside ``symbolic_trace``; afterwards its task has ended."""
    held = Held()
    task = Task(lambda: trace(held).code)
    if not held.inside.wait(WAIT):
        cannot(f"the trace did not start: {task.result(0)}")
    try:
        yield task
    finally:
        held.leave.set()
        task.result()


@contextlib.contextmanager
def held_compile() -> Iterator[Task]:
    """While the body runs, another thread is inside ``torch.compile``'s backend; afterwards its task has ended."""
    inside, leave = threading.Event(), threading.Event()

    def holding(module: Any, example_inputs: Any) -> Any:
        inside.set()
        leave.wait(WAIT)
        return module.forward

    task = Task(lambda: torch.compile(lambda x: x + 1, backend=holding)(torch.ones(2)))
    if not inside.wait(WAIT):
        cannot(f"the compile did not start: {task.result(0)}")
    try:
        yield task
    finally:
        leave.set()
        task.result()
