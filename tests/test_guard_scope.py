from __future__ import annotations

import pytest
import torch
import torch._dynamo.guards as guards
import torch._guards
from locks_support import applied
from support import X

pytestmark = pytest.mark.skipif(
    "tmp" not in torch._guards.ChainedSource.get_value.__code__.co_consts
    if hasattr(torch._guards.ChainedSource, "get_value")
    else True,
    reason="temporary names in the scope of guards since torch 2.10",
)


def test_names_put_into_the_scope_of_guards_stay_with_who_put_them() -> None:
    scope = guards._get_closure_vars()
    assert guards._get_closure_vars() is scope, "the canary: one dictionary for everybody"
    with applied("guard-scope"):
        mine = guards._get_closure_vars()
        mine["put in by this test"] = 1
        assert "put in by this test" not in guards._get_closure_vars()
        assert guards._get_closure_vars() == scope
    assert guards._get_closure_vars() is scope


def test_guards_hold_as_before() -> None:
    compiles = []

    class Box:
        factor = 3

    box = Box()

    def backend(module, example_inputs):
        compiles.append(module)
        return module.forward

    with applied("guard-scope"):
        scaled = torch.compile(lambda x: x * box.factor, backend=backend, dynamic=True)
        assert torch.equal(scaled(X), X * 3)
        assert torch.equal(scaled(torch.ones(7)), torch.ones(7) * 3)
        box.factor = 5
        assert torch.equal(scaled(X), X * 5)
    assert torch.equal(scaled(X), X * 5)
    assert len(compiles) == 2
    torch._dynamo.reset()
