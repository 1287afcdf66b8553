"""Export beside export and beside Dynamo, with everything that an export needs to be alone."""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import io
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.guards as guards
import torch._export.serde.serialize as serialize
import torch._functorch.aot_autograd as aot_autograd
import torch.export._trace
from locks_support import applied
from support import FLAG_IS_GLOBAL, SOON_S, Task
from torch import nn
from torch.fx import _lazy_graph_module as lazy

REPLACES_BUILTINS = hasattr(__import__("torch._export.non_strict_utils", fromlist=["x"]), "_override_builtin_ops")
HAS_SCOPE = hasattr(guards, "_get_closure_vars") and "tmp" in torch._guards.ChainedSource.get_value.__code__.co_consts
OURS = (
    *(("tracing-flag",) if FLAG_IS_GLOBAL else ()),
    "module-hooks",
    "make-fx",
    "traceback-meta",
    "dispatch-cache",
    "compiling-flags",
    "export",
    "export-lock",
    "set-rng-state",
)
X = torch.ones(2)


class Model(nn.Module):
    """Says when it is traced, and stays there until it is let go."""

    def __init__(self, inside: threading.Event, leave: threading.Event, error: type[Exception] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.held = lambda: (inside.set(), leave.wait(SOON_S))
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held()
        if self.error is not None:
            raise self.error
        return self.linear(x).relu() + max(x.shape[0], 1)


class Held:
    def __init__(self, error: type[Exception] | None = None) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        model = Model(self.inside, self.leave, error)
        self.task = Task(lambda: self._run(model))
        assert self.inside.wait(SOON_S), self.task.result()

    def _run(self, model: Model) -> str:
        try:
            return torch.export.export(model, (X,), strict=False).graph_module.code
        finally:
            self.inside.set()

    def result(self) -> Any:
        self.leave.set()
        return self.task.result()


@contextlib.contextmanager
def export_elsewhere() -> Iterator[None]:
    held = Held()
    try:
        yield
    finally:
        held.result()


@contextlib.contextmanager
def nothing_stays() -> Iterator[None]:
    before = builtins.max, builtins.min, math.pow, torch.cuda.set_rng_state, torch.compiler.is_compiling()
    yield
    after = builtins.max, builtins.min, math.pow, torch.cuda.set_rng_state, torch.compiler.is_compiling()
    assert all(a is b for a, b in zip(before, after, strict=True)), after


def overlap() -> list[str]:
    first, second = Held(), Held()
    return [first.result(), second.result()]


@pytest.fixture
def restored() -> Iterator[None]:
    builtin = builtins.max, builtins.min, math.pow
    hooks = nn.Module.__call__, nn.Module.__getattr__
    set_rng_state, fx = torch.cuda.set_rng_state, torch.fx._symbolic_trace
    patcher, flag = vars(fx).get("CURRENT_PATCHER"), vars(fx).get("_is_fx_tracing_flag")
    yield
    builtins.max, builtins.min, math.pow = builtin
    nn.Module.__call__, nn.Module.__getattr__ = hooks
    torch.cuda.set_rng_state = set_rng_state
    fx.CURRENT_PATCHER = patcher
    if FLAG_IS_GLOBAL:
        fx._is_fx_tracing_flag = flag
    for name in ("_is_compiling_flag", "_is_exporting_flag"):
        if hasattr(torch.compiler, name):
            setattr(torch.compiler, name, False)


def test_plain_exports_that_overlap_fail_or_leave_something(restored: None) -> None:
    maximum = builtins.max
    try:
        overlap()
    except Exception:
        return
    assert builtins.max is not maximum or torch.compiler.is_compiling()


def test_exports_that_overlap_give_what_one_gives_and_leave_nothing() -> None:
    alone = Held().result()
    with applied(*OURS), nothing_stays():
        assert overlap() == [alone, alone]
        with export_elsewhere():
            assert Held().result() == alone
    with nothing_stays():
        assert Held().result() == alone


@pytest.mark.skipif(not REPLACES_BUILTINS, reason="non-strict export replaces builtins since torch 2.8")
def test_other_threads_go_on_with_the_builtins() -> None:
    with export_elsewhere():
        assert type(math.pow(2, 3)) is int, "the canary: torch's replacement"
    with applied(*OURS), nothing_stays(), export_elsewhere():
        assert type(math.pow(2, 3)) is float
        assert (max([3, 1], key=lambda v: -v), min((), default=7), max(2, 5)) == (1, 7, 5)
        with pytest.raises(TypeError):
            math.pow("a", 2)


def test_an_export_that_fails_beside_another_puts_everything_back() -> None:
    with applied(*OURS), nothing_stays():
        with export_elsewhere():
            with pytest.raises(ArithmeticError):
                Held(ArithmeticError).result()


def test_exports_nested_in_one_thread_come_back_in_order() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: Callable[[], None]) -> None:
            super().__init__()
            self.inner = lambda: inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner()
            return x * max(x.shape[0], 1)

    def inside() -> None:
        view = torch._export.non_strict_utils
        if REPLACES_BUILTINS:
            before = max
            with view._override_builtin_ops():
                assert max(2, 3) == 3
            assert builtins.max is before

    with applied(*OURS), nothing_stays():
        torch.export.export(Outer(inside), (X,), strict=False)


def test_dynamo_compiles_max_as_max_while_another_thread_exports() -> None:
    compiles = []

    def counting(graph: Any, example_inputs: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * max(x.shape[0], 0)

    torch._dynamo.reset()
    with applied(*OURS), export_elsewhere():
        assert torch.equal(
            torch.compile(scaled, backend=counting, dynamic=True, fullgraph=True)(torch.ones(5)), torch.full((5,), 5.0)
        )
    assert len(compiles) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("patches", [(), ("export-load",)])
def test_threads_load_at_the_same_time(patches: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    torch.export.save(torch.export.export(nn.Linear(2, 2), (X,), strict=False), file)
    inside, leave, first = threading.Event(), threading.Event(), threading.Lock()
    plain = serialize.GraphModuleDeserializer.deserialize_graph

    def held(*args: Any, **kwargs: Any) -> Any:
        if first.acquire(False):
            inside.set()
            leave.wait(SOON_S)
        return plain(*args, **kwargs)

    monkeypatch.setattr(serialize.GraphModuleDeserializer, "deserialize_graph", held)

    def load() -> Any:
        return torch.export.load(io.BytesIO(file.getvalue())).graph_module.code

    with applied(*patches):
        task = Task(load)
        inside.wait(SOON_S)
        try:
            if patches:
                other = load()
            else:
                with pytest.raises(AssertionError):
                    load()
        finally:
            leave.set()
        if patches:
            assert task.result() == other


class Slow:
    def __init__(self, inside: threading.Event, leave: threading.Event) -> None:
        self.events = inside, leave

    def __reduce__(self) -> Any:
        inside, leave = self.events
        inside.set()
        leave.wait(SOON_S)
        return (int, (3,))


@pytest.mark.parametrize("patches", [(), ("export-save",)])
def test_threads_save_at_the_same_time(patches: tuple[str, ...]) -> None:
    inside, leave = threading.Event(), threading.Event()
    with applied(*patches):
        task = Task(lambda: serialize.serialize_torch_artifact(Slow(inside, leave)))
        inside.wait(SOON_S)
        try:
            if patches:
                assert serialize.serialize_torch_artifact({"a": 1})
                assert serialize.FakeTensor in copyreg.dispatch_table
            else:
                with pytest.raises(AssertionError, match="Refusing to stomp"):
                    serialize.serialize_torch_artifact({"a": 1})
        finally:
            leave.set()
        assert task.result()
    assert serialize.FakeTensor not in copyreg.dispatch_table


@pytest.mark.skipif(not HAS_SCOPE, reason="temporary names in the scope of guards since torch 2.10")
def test_names_put_into_the_scope_of_guards_stay_with_who_put_them() -> None:
    scope = guards._get_closure_vars()
    assert guards._get_closure_vars() is scope
    with applied("guard-scope"):
        mine = guards._get_closure_vars()
        mine["tmp"] = 1
        assert "tmp" not in guards._get_closure_vars()
        assert guards._get_closure_vars() == scope
    assert guards._get_closure_vars() is scope


@pytest.mark.parametrize("patches", [(), ("set-rng-state",)])
def test_set_rng_state_works_beside_aotautograd(patches: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def real(*args: Any) -> None:
        calls.append(args)

    monkeypatch.setattr(torch.cuda, "set_rng_state", real)
    inside, leave = threading.Event(), threading.Event()

    def backend(graph: Any, example_inputs: Any) -> Any:
        def looks(*args: Any) -> Any:
            torch.cuda.set_rng_state("theirs")
            inside.set()
            leave.wait(SOON_S)
            return graph(*args)

        return aot_autograd.aot_function(looks, fw_compiler=lambda graph, _: graph)(*example_inputs)

    with applied(*patches):
        task = Task(lambda: backend(lambda x: x + 1, (X,)))
        inside.wait(SOON_S)
        torch.cuda.set_rng_state("mine")
        leave.set()
        task.result()
        assert torch.cuda.set_rng_state is real
    assert (("mine",) in calls) is bool(patches)


@pytest.mark.parametrize("patches", [(), ("lazy-graph-module",)])
def test_another_threads_compile_makes_no_lazy_modules_here(patches: tuple[str, ...]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def compiles() -> type:
        with lazy._use_lazy_graph_module(True):
            inside.set()
            leave.wait(SOON_S)
            return lazy._get_graph_module_cls()

    with applied(*patches):
        task = Task(compiles)
        inside.wait(SOON_S)
        here = lazy._get_graph_module_cls()
        leave.set()
        assert task.result() is lazy._LazyGraphModule
    assert here is (torch.fx.GraphModule if patches else lazy._LazyGraphModule)
