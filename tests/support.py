"""What several test modules share: a trace held open by an event, and programs run in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.fx._symbolic_trace as st
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
# Deadlines for what happens at once unless something is broken; generous because test machines are shared.
SOON_S = 60
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
FLAG_IS_GLOBAL = hasattr(st, "_is_fx_tracing_flag")  # torch up to 2.13
GUARD_ASKS_SYMBOLIC = hasattr(st, "is_fx_symbolic_tracing")  # torch from 2.9
REFUSAL = "Detected that you are using FX to symbolically trace a dynamo-optimized function"

X = torch.ones(3)


def double_plus_one(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


class Gate(nn.Module):
    """Its forward says that it is entered, then waits until it is let out: holds a trace open."""

    def __init__(self, inside: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        object.__setattr__(self, "entered", threading.Event())
        object.__setattr__(self, "let_out", threading.Event())
        object.__setattr__(self, "inside", inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        if not self.let_out.wait(SOON_S):
            raise TimeoutError("nobody let the traced forward out")
        if self.inside is not None:
            object.__setattr__(self, "inside_gave", self.inside())
        return self.lin(x)


class Task:
    """A callable in a thread of its own; ``result`` joins it and returns or raises what it did."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.thread.join(SOON_S)
        assert not self.thread.is_alive(), "the thread hangs"
        if self._error is not None:
            raise self._error
        return self._value


@contextmanager
def trace_elsewhere(inside: Callable[[], Any] | None = None) -> Iterator[Gate]:
    """Another thread is inside ``symbolic_trace`` for the length of the block."""
    gate = Gate(inside)
    task = Task(lambda: torch.fx.symbolic_trace(gate))
    assert gate.entered.wait(SOON_S)
    try:
        yield gate
    finally:
        gate.let_out.set()
        task.result()


@contextmanager
def thread_of_its_own() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Calls what it is given in one and the same other thread, and returns or raises what that does."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda function: thread.submit(function).result(SOON_S)


@contextmanager
def inside_elsewhere(manager: Callable[[], AbstractContextManager[Any]]) -> Iterator[threading.Event]:
    """Another thread is inside a context manager, which it makes itself, to the end of the block or of the event."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with manager():
            inside.set()
            leave.wait(SOON_S)

    task = Task(hold)
    assert inside.wait(SOON_S)
    try:
        yield leave
    finally:
        leave.set()
        task.result()


def flag() -> Any:
    """The tracing flag as a reader by attribute sees it."""
    return st._is_fx_tracing_flag if FLAG_IS_GLOBAL else st._get_is_fx_tracing()


def compiled_graphs() -> int:
    """How many graphs Dynamo makes of a function that it has not met before, called twice."""
    seen: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        seen.append(module)
        return module.forward

    # A code object of its own: Dynamo remembers for good which ones it has skipped.
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(types.FunctionType(add.__code__.replace(), globals()), backend=backend)
    for _ in range(2):
        assert torch.equal(compiled(X), X + 1)
    return len(seen)


def python(*arguments: str, env: dict[str, str] | None = None, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with this checkout's fxsafe on its path."""
    full = {k: v for k, v in os.environ.items() if not k.startswith("FXSAFE_")}
    full["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [full.get("PYTHONPATH")])])
    full.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return subprocess.run(
        [sys.executable, *arguments], env=full | (env or {}), capture_output=True, text=True, timeout=300, **kwargs
    )


def program(source: str, env: dict[str, str] | None = None) -> str:
    """Run a program that must succeed; its stdout."""
    done = python("-c", textwrap.dedent(source), env=env)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
