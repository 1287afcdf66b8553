from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from locks_support import applied
from support import SOON_S, Task
from torch._library import fake_impl
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_during = threading.local()


@torch.library.custom_op("fxsafe_tests::nonzero", mutates_args=())
def nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero()


@nonzero.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    getattr(_during, "call", lambda: None)()
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty([size, x.dim()], dtype=torch.long)


def own_symbol(during: Callable[[], Any] = lambda: None) -> bool:
    """Whether the operator's size is a symbol of this thread's ShapeEnv, with ``during`` called before it is made."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    _during.call = during
    try:
        with mode:
            size: Any = nonzero(torch.ones(3, 2)).shape[0]
        return size.node.shape_env is mode.shape_env
    finally:
        del _during.call


@pytest.mark.parametrize("patches", [(), ("fake-impl-context",)])
def test_a_fake_implementation_asks_in_the_middle_of_another_threads(patches: tuple[str, ...]) -> None:
    assert own_symbol()
    inside, other_inside, asked = (threading.Event() for _ in range(3))

    def first() -> bool:
        try:
            return own_symbol(lambda: (inside.set(), other_inside.wait(SOON_S)))
        finally:
            asked.set()

    try:
        with applied(*patches):
            task = Task(first)
            assert inside.wait(SOON_S)
            # The second one is inside when the first one asks and ends, and asks then.
            second = Task(lambda: own_symbol(lambda: (other_inside.set(), asked.wait(SOON_S))))
            assert task.result() is bool(patches)
            if patches:
                assert second.result()
            else:
                with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'new_dynamic_size'"):
                    second.result()
            assert (fake_impl.global_ctx_getter is fake_impl.get_none) is bool(patches)
    finally:
        fake_impl.global_ctx_getter = fake_impl.get_none


def test_what_one_thread_sees_is_as_ever() -> None:
    mode = FakeTensorMode()

    def getter() -> Any:
        return mode

    with applied("fake-impl-context"):
        assert torch.library.get_ctx() is None
        with pytest.raises(ArithmeticError), fake_impl.set_ctx_getter(getter):
            assert torch.library.get_ctx() is mode
            assert Task(torch.library.get_ctx).result() is None
            with fake_impl.set_ctx_getter(lambda: 1):
                assert torch.library.get_ctx() == 1
            assert fake_impl.global_ctx_getter is getter
            raise ArithmeticError
        assert torch.library.get_ctx() is None
    assert vars(fake_impl)["global_ctx_getter"] is fake_impl.get_none
