from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.fx.traceback as fx_traceback
from locks_support import applied, fails, passes, plan_of, run
from support import thread_of_its_own
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxsafe.patches.base import ShapeError

OURS = ("make-fx", "traceback-meta", "dispatch-cache")

# Another thread is inside make_fx, without the rest of what Tracer.trace does, which other patches are for.
ELSEWHERE = """
    from contextlib import contextmanager
    from torch.fx.experimental import proxy_tensor
    from torch.fx.experimental.proxy_tensor import make_fx

    def grads():
        x = torch.ones(3, requires_grad=True)
        torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,)).sum().backward()
        return x.grad

    @contextmanager
    def elsewhere(block):
        entered, leave = threading.Event(), threading.Event()
        def hold():
            with block():
                entered.set(); leave.wait()
        thread = threading.Thread(target=hold, daemon=True); thread.start(); entered.wait()
        try:
            yield
        finally:
            leave.set(); thread.join()

    tracers = []
    def traced(x):
        tracers.append(proxy_tensor._CURRENT_MAKE_FX_TRACER)
        return x + 1
    make_fx(traced)(torch.ones(1))
    (tracer,) = tracers
    assert proxy_tensor._CURRENT_MAKE_FX_TRACER is None
"""

GRADIENTS_OF_COND = (
    ELSEWHERE
    + """
    expected = grads()
    with elsewhere(lambda: proxy_tensor._set_make_fx_tracer(tracer)):
        assert torch.equal(grads(), expected)
"""
)


def test_without_the_patch_cond_takes_another_threads_trace_for_its_own() -> None:
    fails(GRADIENTS_OF_COND, "AssertionError")


def test_cond_finds_no_trace_of_another_thread() -> None:
    passes(GRADIENTS_OF_COND, *OURS)


PRE_DISPATCH = (
    ELSEWHERE
    + """
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer
    def mode():
        return ProxyTorchDispatchMode(PythonKeyTracer(), "real", pre_dispatch=True)
    with elsewhere(mode):
        assert torch._ops._len_torch_dispatch_stack_pre_dispatch() == 0, "a mode of another thread"
        with mode():
            assert torch._ops._len_torch_dispatch_stack_pre_dispatch() == 1
    assert torch._ops._len_torch_dispatch_stack_pre_dispatch() == 0
"""
)


def test_without_the_patch_pre_dispatch_modes_are_one_stack_for_all_threads() -> None:
    fails(PRE_DISPATCH, "a mode of another thread")


def test_each_thread_has_its_own_pre_dispatch_modes() -> None:
    passes(PRE_DISPATCH, *OURS)


ANNOTATE = (
    ELSEWHERE
    + """
    import torch.fx.traceback as tb
    @contextmanager
    def annotated():
        with tb.preserve_node_meta():
            tb.current_meta["custom"] = "theirs"
            tb.set_stack_trace(["theirs"])
            yield
            assert tb.get_current_meta()["custom"] == "theirs" and tb.has_preserved_node_meta()
    with elsewhere(annotated):
        nodes = make_fx(lambda x: x.sin() + 1)(torch.ones(2)).graph.nodes
        tags = [node.meta.get("custom") for node in nodes]
        assert tags == [None] * len(tags), f"another thread's metadata: {tags}"
        assert not tb.has_preserved_node_meta() and "custom" not in tb.current_meta
"""
)


def test_without_the_patch_node_metadata_crosses_threads() -> None:
    fails(ANNOTATE, "another thread's metadata", "make-fx")


def test_node_metadata_stays_in_its_thread() -> None:
    passes(ANNOTATE, *OURS)


TWO_MISSES = """
    from torch._ops import OpOverload
    op, key = torch.ops.aten.sin.default, torch._C.DispatchKey.CPU
    op._dispatch_cache.pop(key, None)
    first = op._get_dispatch(key)
    assert op._get_dispatch(key) is first
    op._uncache_dispatch(key)
    assert op._get_dispatch(key) == first
"""


BLOCKS = {
    "annotate": lambda: fx_traceback.annotate({"a": 1}),
    "preserve_node_meta": fx_traceback.preserve_node_meta,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_generators_block_ends_for_the_thread_that_entered_it(name: str) -> None:
    if not hasattr(fx_traceback, name):
        pytest.skip(f"this torch has no {name}")

    def block() -> Any:
        with BLOCKS[name]():
            yield

    def state() -> Any:
        return dict(fx_traceback.get_current_meta()), fx_traceback.has_preserved_node_meta()

    outside = state()
    with applied("traceback-meta"), thread_of_its_own() as first, thread_of_its_own() as second:
        generator = block()
        first(lambda: next(generator))
        assert first(state) != outside
        assert second(state) == outside
        assert second(lambda: next(generator, None)) is None
        assert first(state) == second(state) == state() == outside


@pytest.mark.skipif(not hasattr(fx_traceback, "annotate"), reason="torch has had annotate since 2.9")
def test_another_threads_block_ends_in_peace_though_fxsafe_went_and_came_again() -> None:
    with thread_of_its_own() as does:
        with applied("traceback-meta"):
            block = fx_traceback.annotate({"a": 1})
            does(block.__enter__)
        with applied("traceback-meta"):
            does(lambda: block.__exit__(None, None, None))
            assert "custom" not in does(lambda: dict(fx_traceback.get_current_meta()))


def test_a_child_forked_inside_a_block_leaves_it() -> None:
    passes(
        """
    import os
    import torch.fx.traceback as tb
    def blocks():
        with tb.preserve_node_meta():
            child = os.fork()
            assert tb.has_preserved_node_meta()
        if not child:
            os._exit(tb.has_preserved_node_meta())
        statuses.append(os.waitpid(child, 0)[1])
    statuses = []
    thread = threading.Thread(target=blocks); thread.start(); thread.join()
    assert statuses == [0], statuses
    """,
        "traceback-meta",
    )


def test_without_the_patch_the_second_of_two_misses_fails() -> None:
    fails(TWO_MISSES, "AssertionError: aten.sin.default DispatchKey.CPU")


def test_the_second_of_two_misses_gets_the_entry() -> None:
    passes(TWO_MISSES, "dispatch-cache")


WALK = """
    torch._ops.add_cached_op(torch.ops.aten.sin.default)
    walk = iter(torch._ops.get_cached_ops())
    torch._ops.add_cached_op(torch.ops.aten.cos.default)
    assert next(walk) is not None
"""


def test_without_the_patch_the_set_of_cached_operators_may_grow_under_a_walk() -> None:
    fails(WALK, "Set changed size during iteration")


def test_a_walk_over_the_cached_operators_is_over_a_copy() -> None:
    passes(WALK, "dispatch-cache")


SINGLE_THREAD = """
    import re
    import torch.fx.traceback as tb
    from torch.fx.experimental import proxy_tensor
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch._higher_order_ops.map import map as hop_map
    try:
        from torch._higher_order_ops.while_loop import while_loop
    except ImportError:
        from torch._higher_order_ops import while_loop
    from torch.nn.attention.flex_attention import flex_attention
    torch.manual_seed(0)
    torch.set_printoptions(precision=17)
    x, w = torch.randn(4, 4, dtype=torch.double), torch.randn(4, 4, dtype=torch.double)
    IDS = ("id=", "0x")

    def show(name, gm):
        code = [gm.code] + [child.code for _, child in gm.named_modules() if isinstance(child, torch.fx.GraphModule)]
        print(name, *code, sep="\\n")
        for node in gm.graph.nodes:
            print(node.op, node.name, sorted(k for k in node.meta), str(node.meta.get("original_aten")),
                  node.meta.get("custom"), node.meta.get("stack_trace"), node.meta.get("partitioner_tag"))

    def plain(x, w):
        return torch.relu(x @ w).sin().sum(0)
    def with_grad(x, w):
        w = w.detach().requires_grad_()
        return torch.autograd.grad((x @ w).tanh().sum(), w)
    def branches(x, w):
        return torch.cond(x.sum() > 0, lambda x: x.sin() @ w, lambda x: x.cos() @ w, (x,))
    def mapped(x, w):
        return hop_map(lambda row, w: (row * 2) @ w, x, w)
    def looped(x, w):
        return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.sin()), (torch.tensor(0), x))

    def settings():
        print("multithreading", torch._C._is_multithreading_enabled(), proxy_tensor._CURRENT_MAKE_FX_TRACER,
              tb.has_preserved_node_meta(), tb.get_current_meta(), torch._ops._len_torch_dispatch_stack_pre_dispatch())

    for mode in ("real", "fake", "symbolic"):
        for function in (plain, with_grad, branches, mapped, looped):
            for pre_dispatch in (False, True):
                try:
                    show(f"{function.__name__} {mode} {pre_dispatch}",
                         make_fx(function, tracing_mode=mode, pre_dispatch=pre_dispatch)(x, w))
                except Exception as e:
                    message = re.sub(r"\\d{9,}", "ID", str(e)).split("\\n")[0]
                    print(function.__name__, mode, pre_dispatch, type(e), message[:80])
                settings()
    table = {torch.ops.aten.relu.default: lambda x: x.clamp(min=0)}
    with tb.preserve_node_meta():
        show("decomposed", make_fx(plain, decomposition_table=table)(x, w))
    settings()
    def fails(x, w):
        raise ZeroDivisionError
    try:
        make_fx(fails, pre_dispatch=True)(x, w)
    except ZeroDivisionError:
        settings()

    def gradient(function):
        a = x.clone().requires_grad_(); b = w.clone().requires_grad_()
        out = function(a, b)
        out.sum().backward()
        print(out.detach(), a.grad, b.grad)
    gradient(branches)
    gradient(mapped)
    print(looped(x, w))
    q = torch.randn(1, 1, 128, 16)
    print(flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j)).double().sum())
    settings()

    if hasattr(tb, "annotate"):
        with tb.preserve_node_meta(), tb.annotate({"stage": 1}):
            show("annotated", make_fx(plain)(x, w))
    gm = torch.fx.symbolic_trace(lambda x: x.sin() + 1)
    for node in gm.graph.nodes:
        node.meta["custom"] = {"n": node.name}
    with tb.preserve_node_meta():
        show("interpreted", make_fx(torch.fx.Interpreter(gm).run)(x))

    # What Dynamo inlines of torch.fx.traceback and proxy_tensor must be what it was.
    graphs = []
    def backend(gm, inputs):
        show("compiled", gm); return gm.forward
    def uses_traceback(x):
        with tb.preserve_node_meta():
            y = x.sin()
        return y + (1 if tb.has_preserved_node_meta() else 2)
    def imports(x):
        from torch.fx.traceback import get_current_meta
        return x + len(get_current_meta())
    def annotates(x):
        with tb.annotate({"stage": 2}):
            return x.cos() + 1
    def proxies(x):
        return x + (3 if proxy_tensor.get_proxy_mode() is None else 4)
    for function in (uses_traceback, imports, proxies, *([annotates] if hasattr(tb, "annotate") else [])):
        torch._dynamo.reset()
        try:
            print(torch.compile(function, backend=backend)(torch.ones(2)))
        except Exception as e:
            print(function.__name__, type(e), str(e).split("\\n")[0])
    torch._dynamo.reset()
    from torch._dynamo.backends.common import aot_autograd
    def show_aot(gm, inputs):
        show("aot", gm); return gm.forward
    both = aot_autograd(fw_compiler=show_aot, bw_compiler=show_aot)
    a = x.clone().requires_grad_()
    torch.compile(lambda a: (a @ a).sin().sum(), backend=both)(a).backward()
    print(a.grad)
    settings()
"""


def without_ids(output: str) -> list[str]:
    """Lines without what differs between any two processes."""
    import re

    return [re.sub(r"0x[0-9a-f]+|\.pyc?\b|line \d+", "", line) for line in output.splitlines()]


def test_a_single_thread_gets_the_same_graphs_and_gradients() -> None:
    plain, patched = run(SINGLE_THREAD), run(SINGLE_THREAD, *OURS)
    assert plain.returncode == 0, plain.stderr
    assert patched.returncode == 0, patched.stderr
    assert without_ids(patched.stdout) == without_ids(plain.stdout)
    assert "multithreading True None False" in patched.stdout


def test_autograd_stays_in_the_tracing_thread_and_returns_to_its_setting() -> None:
    seen = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch._C._is_multithreading_enabled())
        inner = make_fx(lambda y: y + 1)(torch.ones(1))
        seen.append(torch._C._is_multithreading_enabled())
        return x + len(inner.graph.nodes)

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with applied(*OURS):
        for setting in (True, False):
            torch._C._set_multithreading_enabled(setting)
            try:
                make_fx(traced)(torch.ones(1))
                with pytest.raises(ZeroDivisionError):
                    make_fx(fails)(torch.ones(1))
                assert torch._C._is_multithreading_enabled() is setting
            finally:
                torch._C._set_multithreading_enabled(True)
    assert seen == [False] * 4


def places() -> list[Any]:
    functions = [
        fx_traceback.preserve_node_meta.__wrapped__,  # type: ignore[attr-defined]
        fx_traceback.has_preserved_node_meta,
        proxy_tensor._set_make_fx_tracer.__wrapped__,  # type: ignore[attr-defined]
        torch._ops.mode_stack_state_for_pre_dispatch,
        torch._ops.OpOverload._get_dispatch,
        torch._ops.get_cached_ops,
    ]
    modules = [fx_traceback, proxy_tensor, torch._ops, torch._higher_order_ops.flex_attention]
    return [
        *(part for function in functions for part in (function, function.__code__, dict(vars(function)))),
        *(type(module) for module in modules),
        *(value for module in modules for value in vars(module).values()),
    ]


def same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(
        a is b or (type(a) is dict and type(b) is dict and a == b) for a, b in zip(before, after, strict=True)
    )


def test_every_place_gets_its_own_object_back() -> None:
    before = places()
    with applied(*OURS):
        assert not same(before, places())
        make_fx(lambda x: x + 1, pre_dispatch=True)(torch.ones(1))
    assert same(before, places())


def test_the_bodies_keep_their_file_lines_and_names() -> None:
    def where(function: Any) -> tuple[Any, ...]:
        code = function.__code__
        return code.co_filename, code.co_firstlineno, code.co_name, code.co_flags, list(code.co_lines())[-1][2]

    functions = [fx_traceback.set_current_meta.__wrapped__, torch._ops.mode_stack_state_for_pre_dispatch]  # type: ignore[attr-defined]
    before = [where(function) for function in functions]
    with applied(*OURS):
        assert [where(function) for function in functions] == before


def test_the_installing_thread_goes_on_with_what_it_has_set() -> None:
    with fx_traceback.preserve_node_meta(), applied(*OURS):
        assert fx_traceback.has_preserved_node_meta()
        other = []
        thread = threading.Thread(target=lambda: other.append(fx_traceback.has_preserved_node_meta()))
        thread.start()
        thread.join()
        assert other == [False]
    assert not fx_traceback.has_preserved_node_meta()


def test_a_global_that_is_gone_or_written_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, pytest.raises(ShapeError, match="_CURRENT_MAKE_FX_TRACER"):
        patched.delattr(proxy_tensor, "_CURRENT_MAKE_FX_TRACER")
        plan_of("make-fx")
    with monkeypatch.context() as patched, pytest.raises(ShapeError, match="_set_make_fx_tracer"):
        patched.setattr(proxy_tensor, "_set_make_fx_tracer", lambda tracer: None)
        plan_of("make-fx")
    with monkeypatch.context() as patched, pytest.raises(ShapeError, match="current_meta"):
        patched.setattr(fx_traceback, "current_meta", None)
        plan_of("traceback-meta")


def test_a_function_that_somebody_rewrote_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = (lambda self, key: key).__code__
    monkeypatch.setattr(torch._ops.OpOverload._get_dispatch, "__code__", theirs)
    with pytest.raises(ShapeError, match="_get_dispatch"):
        plan_of("dispatch-cache")


TOGETHER = """
    import collections, re, sys, torch._dynamo
    import torch.fx.traceback as tb
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch._higher_order_ops.map import map as hop_map
    from torch._higher_order_ops import while_loop
    sys.setswitchinterval(1e-5)
    x, w = torch.randn(2, 4), torch.randn(4, 4)
    def net(x, w):
        return torch.relu(x @ w).sin().sum(0)
    def with_grad(x, w):
        w = w.detach().requires_grad_()
        return torch.autograd.grad((x @ w).tanh().sum(), w)
    def gradients(function):
        def step():
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            function(a, b).sum().backward()
            return a.grad.tolist(), b.grad.tolist()
        return step
    def annotated():
        with tb.preserve_node_meta():
            tb.set_stack_trace(["mine"])
            tb.current_meta["custom"] = "mine"
            gm = make_fx(net)(x, w)
        return [(node.name, node.meta.get("custom")) for node in gm.graph.nodes]
    def compiled():
        function = torch.compile(lambda a, b: net(a, b).sum(), backend="aot_eager")
        a = x.clone().requires_grad_()
        function(a, w).backward()
        return a.grad.tolist()
    jobs = {
        f"make_fx {f.__name__} {mode} {pre}": lambda f=f, mode=mode, pre=pre:
            make_fx(f, tracing_mode=mode, pre_dispatch=pre)(x, w).code
        for f in (net, with_grad) for mode in ("real", "fake", "symbolic") for pre in (False, True)
    }
    jobs["cond"] = gradients(lambda a, b: torch.cond(a.sum() > 0, lambda a: a.sin() @ b, lambda a: a.cos() @ b, (a,)))
    jobs["map"] = gradients(lambda a, b: hop_map(lambda row, b: (row * 2) @ b, a, b))
    jobs["while_loop"] = lambda: while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, a.sin()), (torch.tensor(0), x))[1].tolist()
    jobs["annotated"], jobs["compiled"] = annotated, compiled
    jobs["symbolic_trace"] = lambda: torch.fx.symbolic_trace(net).code
    results, barrier = [], threading.Barrier(4)
    def outcome(name):
        try:
            return jobs[name]()
        except BaseException as error:  # torch 2.8 cannot trace one of these, alone or not
            return f"{type(error)} {re.sub(r'[0-9]{9,}|<[^>]*>', '', str(error))}"
    def work(first):
        barrier.wait()
        names = list(jobs)
        for name in (names[first:] + names[:first]) * 2:
            results.append((name, outcome(name)))
    threads = [threading.Thread(target=work, args=(4 * i,)) for i in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    alone = {name: outcome(name) for name in jobs}
    assert sum(str(result).startswith("<class") for result in alone.values()) <= 1, alone
    wrong = [(name, result) for name, result in results if result != alone[name]]
    assert not wrong, wrong[:3]
    assert len(results) == 4 * 2 * len(jobs)
"""


@pytest.mark.skipif(find_spec("fxsafe.patches.module_hooks") is None, reason="needs the patch module-hooks")
def test_everything_traced_from_cold_in_four_threads_is_as_when_traced_alone() -> None:
    others = ("tracing-flag", "module-hooks", "sympy-singletons", "device-guard", "compile-lock", "metrics-context")
    passes(TOGETHER, *others, *OURS)
