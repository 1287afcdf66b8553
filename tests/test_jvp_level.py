from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from locks_support import applied
from support import SOON_S, Task
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from fxsafe.patches.jvp_level import _shared

THREE, ONE = torch.tensor(3.0), torch.tensor(1.0)


class Held:
    """A derivative of x squared at 3 in a thread of its own, which stands inside the function."""

    def __init__(self, derive: Any = torch.func.jvp) -> None:
        self.leave, inside = threading.Event(), threading.Event()

        def square(x: torch.Tensor) -> torch.Tensor:
            inside.set()
            self.leave.wait(SOON_S)
            return x * x

        self._task = Task(lambda: derive(square, (THREE,), (ONE,))[1].item())
        assert inside.wait(SOON_S)

    def result(self) -> Any:
        self.leave.set()
        return self._task.result()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    yield
    assert forward_ad._current_level == -1
    assert eager_transforms.JVP_NESTING == 0
    assert _shared.inside == 0


@pytest.mark.parametrize("patches", [(), ("jvp-level",)])
def test_who_opened_the_level_may_leave_first(patches: tuple[str, ...]) -> None:
    with applied(*patches):
        first, second = Held(), Held()
        assert first.result() == 6.0
        assert second.result() == (6.0 if patches else 0.0)


def test_any_order_and_any_number() -> None:
    with applied("jvp-level"):
        for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
            held = [Held() for _ in order]
            assert [held[i].result() for i in order] == [6.0, 6.0, 6.0]
        held = [Held()]
        for _ in range(5):  # the level never closes meanwhile
            held.append(Held())
            assert held.pop(0).result() == 6.0
        assert held[0].result() == 6.0


def test_nested_calls_and_jacobians_beside_another_threads() -> None:
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    def all_of_it() -> list[torch.Tensor]:
        def first(x: torch.Tensor) -> torch.Tensor:
            return torch.func.jvp(cube, (x,), (ONE,))[1]

        x = torch.arange(3.0)
        return [
            torch.func.jvp(first, (THREE,), (ONE,))[1],
            torch.func.jacfwd(cube)(x),
            torch.func.hessian(lambda v: cube(v).sum())(x),
            torch.func.vmap(torch.func.jacfwd(cube))(x),
            torch.func.jacfwd(torch.func.jacrev(cube))(x),
        ]

    expected = all_of_it()
    with applied("jvp-level"):
        assert all(map(torch.equal, all_of_it(), expected))
        held = Held()
        assert all(map(torch.equal, all_of_it(), expected))
        second = Held()
        assert held.result() == 6.0
        assert all(map(torch.equal, all_of_it(), expected))
        assert second.result() == 6.0


def test_a_function_that_raises_leaves_the_level_to_the_others() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError

    with applied("jvp-level"):
        held = Held()
        with pytest.raises(ArithmeticError):
            torch.func.jvp(fails, (THREE,), (ONE,))
        assert held.result() == 6.0


def test_a_call_may_outlive_the_installation() -> None:
    with applied("jvp-level"):
        first, second = Held(), Held()
    with applied("jvp-level"):
        third = Held()
        assert [first.result(), second.result(), third.result()] == [6.0, 6.0, 6.0]


def test_compiled_functions_are_as_ever() -> None:
    def derivative(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]

    x = torch.arange(4.0)
    with applied("jvp-level"):
        compiled = torch.compile(derivative, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), x.cos())
        assert torch.equal(compiled(x + 1), (x + 1).cos())
    torch._dynamo.reset()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_may_differentiate() -> None:
    with applied("jvp-level"):
        held = Held()
        child = os.fork()
        if not child:
            status = 1
            try:
                status = int(torch.func.jvp(lambda x: x * x, (THREE,), (ONE,))[1].item() != 6.0)
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert held.result() == 6.0
