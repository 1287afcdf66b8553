"""F1 with the default fix, by behaviour. What plain torch does is asserted too, so that the tests prove something."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
import torch.fx._symbolic_trace as st
from support import FLAG_IS_GLOBAL, REFUSAL, Gate, Task, X, double_plus_one, flag, trace_elsewhere
from torch import nn
from torch._higher_order_ops import utils as hop_utils

import fxsafe


def test_plain_torch_refuses_a_warm_call_while_another_thread_traces(warm):
    with trace_elsewhere():
        if FLAG_IS_GLOBAL:
            with pytest.raises(RuntimeError, match=REFUSAL):
                warm(X)
        else:
            assert torch.equal(warm(X), double_plus_one(X))


def test_a_function_compiled_before_install_runs_while_another_thread_traces(warm):
    with fxsafe.install(), trace_elsewhere():
        assert torch.equal(warm(X), double_plus_one(X))
        assert not flag()
        assert not st.is_fx_tracing()


def test_a_function_compiled_after_install_runs_while_another_thread_traces():
    with fxsafe.install():
        compiled = torch.compile(double_plus_one, backend="eager", fullgraph=True)
        compiled(X)
        with trace_elsewhere():
            assert torch.equal(compiled(X), double_plus_one(X))


def test_a_predicate_that_somebody_imported_by_name_follows():
    predicate = st.is_fx_tracing
    with trace_elsewhere():
        assert predicate() is FLAG_IS_GLOBAL
    with fxsafe.install(), trace_elsewhere(inside=predicate) as gate:
        assert predicate() is False
        gate.let_out.set()
    assert gate.inside_gave is True


def test_a_compiled_function_inside_ones_own_trace_is_still_refused_in_torchs_words(warm):
    with fxsafe.install(), pytest.raises(RuntimeError, match=REFUSAL):
        torch.fx.symbolic_trace(lambda x: warm(x))
    assert not flag()


def test_error_on_nested_fx_trace_false_still_inlines_inside_ones_own_trace(warm):
    def graph():
        with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
            return torch.fx.symbolic_trace(lambda x: warm(x)).code

    plain = graph()
    with fxsafe.install():
        assert graph() == plain
    assert "mul" in plain


def test_error_on_nested_fx_trace_false_no_longer_runs_other_threads_eagerly():
    ran = []

    def backend(gm, example_inputs):
        def run(*args):
            ran.append(1)
            return gm.forward(*args)

        return run

    compiled = torch.compile(double_plus_one, backend=backend)
    compiled(X)
    ran.clear()
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), trace_elsewhere():
        compiled(X)
    assert len(ran) == (0 if FLAG_IS_GLOBAL else 1)
    ran.clear()
    with fxsafe.install(), torch._dynamo.config.patch(error_on_nested_fx_trace=False), trace_elsewhere():
        compiled(X)
    assert len(ran) == 1


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "force_compile_during_fx_trace"), reason="a setting of torch 2.11 and later"
)
def test_force_compile_during_fx_trace_behaves_as_before(warm):
    def outcome():
        with torch._dynamo.config.patch(force_compile_during_fx_trace=True):
            try:
                return torch.fx.symbolic_trace(lambda x: warm(x)).code
            except Exception as error:
                return type(error), str(error).splitlines()[0]

    plain = outcome()
    with fxsafe.install():
        assert outcome() == plain


def test_two_overlapping_traces_leave_no_flag_behind():
    def overlap():
        a, b = Gate(), Gate()
        first = Task(lambda: st.Tracer().trace(a))
        a.entered.wait()
        second = Task(lambda: st.Tracer().trace(b))
        b.entered.wait()
        for gate, task in ((a, first), (b, second)):
            gate.let_out.set()
            task.thread.join()
        return flag()

    with fxsafe.install():
        assert overlap() is False
        if FLAG_IS_GLOBAL:
            assert vars(st)["_is_fx_tracing_flag"] is False, "a stale value would be found by mock.patch"


@pytest.mark.skipif(not FLAG_IS_GLOBAL, reason="torch 2.14 has no such attribute")
class TestTheModuleAttribute:
    def test_reads_give_the_threads_own_value(self):
        with fxsafe.install(), trace_elsewhere(inside=flag) as gate:
            assert st._is_fx_tracing_flag is False
            gate.let_out.set()
        assert gate.inside_gave is True

    def test_writes_set_the_threads_own_value(self):
        with fxsafe.install():
            st._is_fx_tracing_flag = True
            try:
                assert st.is_fx_tracing()
                assert Task(st.is_fx_tracing).result() is False
            finally:
                st._is_fx_tracing_flag = False
            assert not st.is_fx_tracing()

    def test_mock_patch_sets_and_restores_it(self):
        with fxsafe.install():
            with mock.patch.object(st, "_is_fx_tracing_flag", True):
                assert st.is_fx_tracing()
            assert not st.is_fx_tracing()

    def test_a_thread_that_dies_with_its_flag_set_leaves_nothing_to_the_next(self):
        with fxsafe.install():
            Task(lambda: setattr(st, "_is_fx_tracing_flag", True)).result()
            assert [Task(st.is_fx_tracing).result() for _ in range(8)] == [False] * 8

    def test_set_compilation_env_switches_off_its_own_threads_flag_only(self):
        inside, out = threading.Event(), threading.Event()

        def elsewhere():
            with hop_utils._set_compilation_env():
                inside.set()
                out.wait(60)

        def during_trace():
            task = Task(elsewhere)
            inside.wait(60)
            seen = st.is_fx_tracing()
            out.set()
            task.result()
            with hop_utils._set_compilation_env():
                return seen, st.is_fx_tracing()

        gate = Gate(during_trace)
        gate.let_out.set()
        with fxsafe.install():
            torch.fx.symbolic_trace(gate)
        assert gate.inside_gave == (True, False)


def test_nested_traces_restore_the_outer_value():
    seen = []

    class Outer(nn.Module):
        def forward(self, x):
            seen.append(bool(flag()))
            torch.fx.symbolic_trace(nn.ReLU())
            seen.append(bool(flag()))
            return x + 1

    with fxsafe.install():
        torch.fx.symbolic_trace(Outer())
        seen.append(bool(flag()))
    assert seen == [True, True, False]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_the_traced_forward_raises_the_flag_comes_back(error):
    class Raises(nn.Module):
        def forward(self, x):
            raise error("from forward")

    with fxsafe.install():
        with pytest.raises(error):
            torch.fx.symbolic_trace(Raises())
        assert not flag()


def test_tracers_that_override_or_alias_trace_are_followed():
    alias = st.Tracer.trace
    seen = []

    class Overrides(st.Tracer):
        def trace(self, root, concrete_args=None):
            graph = super().trace(root, concrete_args=concrete_args)
            seen.append(bool(flag()))
            return graph

    class Aliases(st.Tracer):
        def trace(self, *args, **kwargs):
            return alias(self, *args, **kwargs)

    class Module(nn.Module):
        def forward(self, x):
            seen.append(bool(flag()))
            return x

    with fxsafe.install():
        Overrides().trace(Module())
        Aliases().trace(Module(), concrete_args=None)
    assert seen == [True, False, True]


class Pair(metaclass=torch.fx.ProxyableClassMeta):
    def __init__(self, left, right):
        self.left, self.right = left, right


def test_a_proxyable_class_is_recorded_in_the_tracing_thread_and_built_in_the_others():
    def uses_pair(x):
        return Pair(x, x).left

    with fxsafe.install():
        assert "Pair" in torch.fx.symbolic_trace(uses_pair).code
        with trace_elsewhere():
            assert Pair(1, 2).right == 2


def test_a_nested_tensor_is_made_while_another_thread_traces_and_refused_inside_ones_own_trace():
    from torch.nested import nested_tensor_from_jagged

    values, offsets = torch.randn(6, 2), torch.tensor([0, 2, 6])
    with trace_elsewhere():
        if FLAG_IS_GLOBAL:
            with pytest.raises(RuntimeError, match="does not support tracing"):
                nested_tensor_from_jagged(values, offsets)
    with fxsafe.install():
        with trace_elsewhere():
            assert nested_tensor_from_jagged(values, offsets).is_nested
        with pytest.raises(RuntimeError, match="does not support tracing"):
            torch.fx.symbolic_trace(lambda x: nested_tensor_from_jagged(x, offsets))


def test_dynamo_still_sees_the_predicates_as_constants():
    def asks(x):
        return x + 1 if st.is_fx_tracing() else x - 1

    with fxsafe.install():
        assert torch.equal(torch.compile(asks, backend="eager", fullgraph=True)(X), X - 1)


def test_a_compiled_region_that_calls_a_tracer_leaves_our_frames_alone():
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm.code)
        return gm.forward

    def region(x):
        y = x + 1
        gm = torch.fx.symbolic_trace(nn.ReLU())
        return gm(y) * 2

    torch.compile(region, backend=backend)(X)
    plain = list(graphs)
    graphs.clear()
    torch._dynamo.reset()
    with fxsafe.install():
        assert torch.equal(torch.compile(region, backend=backend)(X), (X + 1) * 2)
    assert graphs == plain


@pytest.mark.skipif(not FLAG_IS_GLOBAL, reason="torch 2.14 has no such attribute")
def test_who_mocks_the_flag_beside_another_threads_trace_gets_his_own_back():
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    with fxsafe.install(), trace_elsewhere():
        for value in (False, True):
            with mock.patch("torch.fx._symbolic_trace._is_fx_tracing_flag", value):
                assert st._is_fx_tracing_flag is value
            assert st._is_fx_tracing_flag is False
        assert torch.equal(compiled(X), X + 1)
    assert vars(st)["_is_fx_tracing_flag"] is False


@pytest.mark.skipif(not FLAG_IS_GLOBAL, reason="torch 2.14 has no such attribute")
def test_who_mocks_the_flag_inside_his_own_trace_goes_on_tracing():
    seen = []

    class Mocking(torch.nn.Module):
        def forward(self, x):
            with mock.patch("torch.fx._symbolic_trace._is_fx_tracing_flag", False):
                seen.append(st.is_fx_tracing())
            seen.append(st.is_fx_tracing())
            return x + 1

    with fxsafe.install():
        torch.fx.symbolic_trace(Mocking())
        assert seen == [False, True]
        assert not st.is_fx_tracing()
