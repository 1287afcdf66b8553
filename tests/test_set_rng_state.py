from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from locks_support import applied
from support import SOON_S, Task, X
from torch._functorch import aot_autograd


class Compile:
    """One of AOTAutograd's, held while it collects metadata; it calls ``set_rng_state`` itself."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.error = error
        self.task = Task(lambda: aot_autograd.aot_function(self.traced, fw_compiler=lambda graph, _: graph)(X))
        assert self.inside.wait(SOON_S)

    def traced(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_rng_state("theirs")
        if not self.inside.is_set():
            self.inside.set()
            self.leave.wait(SOON_S)
            if self.error is not None:
                raise self.error
        return x + 1

    def end(self) -> torch.Tensor:
        self.leave.set()
        return self.task.result()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The states that torch.cuda.set_rng_state was called with."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: calls.append(state))
    return calls


@pytest.mark.parametrize("patches", [(), ("set-rng-state",)])
def test_it_works_beside_another_threads_aotautograd(patches: tuple[str, ...], calls: list[Any]) -> None:
    real = torch.cuda.set_rng_state
    with applied(*patches):
        compile_ = Compile()
        torch.cuda.set_rng_state("mine")
        assert torch.equal(compile_.end(), X + 1)
    assert ("mine" in calls) is bool(patches)
    assert torch.cuda.set_rng_state is real


@pytest.mark.parametrize("patches", [(), ("set-rng-state",)])
def test_two_that_overlap_leave_the_function_itself(patches: tuple[str, ...], calls: list[Any]) -> None:
    real = torch.cuda.set_rng_state
    with applied(*patches):
        first, second = Compile(), Compile()
        first.end()
        second.end()
        assert (torch.cuda.set_rng_state is real) is bool(patches)


def test_one_that_fails_puts_it_back(calls: list[Any]) -> None:
    real = torch.cuda.set_rng_state
    with applied("set-rng-state"):
        with pytest.raises(ArithmeticError):
            Compile(ArithmeticError).end()
        assert torch.cuda.set_rng_state is real
