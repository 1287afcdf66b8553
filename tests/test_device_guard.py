"""What enters FakeTensorMode sets torch's device guard once. The fault needs a CUDA build of torch 2.10 or 2.11."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from locks_support import applied, plan_of
from support import SOON_S, Task
from torch._subclasses.fake_tensor import FakeTensorMode

from fxsafe.patches.base import ShapeError
from fxsafe.patches.device_guard import once

NAME = "_ensureCUDADeviceGuardSet"
needs_it = pytest.mark.skipif(not hasattr(torch._C, NAME), reason="torch does it since 2.10")


def test_the_first_call_is_the_only_one_and_others_wait_for_it() -> None:
    inside, leave, calls = threading.Event(), threading.Event(), []

    def original() -> None:
        calls.append(1)
        inside.set()
        leave.wait(SOON_S)

    ensure = once(original)
    first = Task(ensure)
    assert inside.wait(SOON_S)
    second = Task(ensure)
    second.thread.join(0.2)
    assert second.thread.is_alive()
    leave.set()
    first.result(), second.result(), ensure()
    assert calls == [1]


def test_a_call_that_fails_is_made_again() -> None:
    calls: list[int] = []

    def original() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ArithmeticError

    ensure = once(original)
    with pytest.raises(ArithmeticError):
        ensure()
    ensure(), ensure()
    assert calls == [1, 1]


@needs_it
def test_fake_tensors_ask_for_it_once_and_torchs_own_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original: Any = getattr(torch._C, NAME)

    class Counts:
        def __call__(self) -> None:
            calls.append(1)
            original()

    counts = Counts()
    monkeypatch.setattr(torch._C, NAME, counts)

    def enter() -> tuple[int, ...]:
        with FakeTensorMode() as mode:
            return tuple(mode.from_tensor(torch.ones(2, 3)).shape)

    assert [enter(), enter()] == [(2, 3)] * 2
    plain = len(calls)
    assert plain >= 2, "the canary"
    with applied("device-guard"):
        tasks = [Task(enter) for _ in range(4)]
        assert [task.result() for task in tasks] == [(2, 3)] * 4
        assert len(calls) == plain + 1
    assert getattr(torch._C, NAME) is counts


@needs_it
def test_somebody_elses_function_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, NAME, lambda: None)
    with pytest.raises(ShapeError, match=NAME):
        plan_of("device-guard")
