"""F1 with fix="always-false"."""

from __future__ import annotations

import pytest
import torch
import torch.fx._symbolic_trace as st
from support import FLAG_IS_GLOBAL, GUARD_ASKS_SYMBOLIC, REFUSAL, X, double_plus_one, trace_elsewhere

import fxsafe


def test_a_warm_call_runs_while_another_thread_traces(warm):
    with fxsafe.install("always-false"), trace_elsewhere():
        assert torch.equal(warm(X), double_plus_one(X))


def test_the_guard_does_not_refuse_inside_ones_own_trace(warm):
    gate = {"gave": None}

    def traced(x):
        gate["gave"] = warm(X)  # a real tensor, so that the compiled code can run
        return x + 1

    with pytest.raises(RuntimeError, match=REFUSAL):
        torch.fx.symbolic_trace(traced)
    with fxsafe.install("always-false"):
        torch.fx.symbolic_trace(traced)
    assert torch.equal(gate["gave"], double_plus_one(X))


def test_everybody_but_the_guard_gets_torchs_answer():
    seen = {}

    def traced(x):
        seen["is_fx_tracing"] = st.is_fx_tracing()
        if GUARD_ASKS_SYMBOLIC:
            seen["is_fx_symbolic_tracing"] = st.is_fx_symbolic_tracing()
        return x + 1

    with fxsafe.install("always-false"):
        torch.fx.symbolic_trace(traced)
    assert seen.pop("is_fx_tracing") is True
    assert seen == ({"is_fx_symbolic_tracing": False} if GUARD_ASKS_SYMBOLIC else {})


def test_a_proxyable_class_and_a_nested_tensor_keep_their_answer():
    from test_tracing_flag import Pair
    from torch.nested import nested_tensor_from_jagged

    offsets = torch.tensor([0, 2, 6])
    with fxsafe.install("always-false"):
        assert "Pair" in torch.fx.symbolic_trace(lambda x: Pair(x, x).left).code
        with pytest.raises(RuntimeError, match="does not support tracing"):
            torch.fx.symbolic_trace(lambda x: nested_tensor_from_jagged(x, offsets))


def test_an_unflattened_module_is_traced_as_without_us():
    class Inner(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x) + 1

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x) * 2

    class Calls(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unflattened = torch.export.unflatten(torch.export.export(Outer(), (X,)))

        def forward(self, x):
            return self.unflattened(x)

    module = Calls()

    def graph():
        return torch.fx.symbolic_trace(module).code

    plain = graph()
    with fxsafe.install("always-false"):
        assert graph() == plain


def test_the_process_wide_flag_is_left_as_it_is():
    with fxsafe.install("always-false"), trace_elsewhere():
        assert st.is_fx_tracing() is FLAG_IS_GLOBAL


def test_it_is_active_on_every_release():
    with fxsafe.install("always-false"):
        status = {r["name"]: r["status"] for r in fxsafe.info()}
    assert status["guard-override"] == "active"
    assert status["tracing-flag"] == "disabled"
