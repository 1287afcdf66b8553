"""A trace in another thread begins in the middle of one of Dynamo's comparisons with nn.Module's own methods."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo.utils as dynamo_utils
from locks_support import applied
from support import FLAG_IS_GLOBAL, SOON_S, trace_elsewhere
from torch import nn

from fxsafe.patches._slots import places

X = torch.ones(3, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lin(x)).relu()


@contextlib.contextmanager
def traces_begin_or_end_after_each_look(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Whenever Dynamo has looked up ``__getattr__`` of a class, a trace elsewhere begins, or the one there is ends."""
    look = inspect.getattr_static
    running = contextlib.ExitStack()
    looks = []

    def changing(owner: Any, name: str, *default: Any) -> Any:
        found = look(owner, name, *default)
        # Nothing begins or ends while Dynamo writes its guards.
        ours = name == "__getattr__" and isinstance(owner, type) and issubclass(owner, nn.Module)
        if ours and not places.lock._is_owned():
            looks.append(1)
            if len(looks) % 2:
                running.enter_context(trace_elsewhere())
            else:
                running.close()
        return found

    with running, monkeypatch.context() as patched:
        patched.setattr(inspect, "getattr_static", changing)
        yield looks


@pytest.mark.parametrize("patches", [("module-hooks",), ("module-hooks", "dynamo-hooks")])
def test_a_modules_getattr_is_known_whenever_a_trace_begins(
    patches: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with applied(*patches), traces_begin_or_end_after_each_look(monkeypatch):
        found = [dynamo_utils.get_custom_getattr(Model(), ignore_nn_module_getattr=True) for _ in range(4)]
    assert (found == [None] * 4) is ("dynamo-hooks" in patches)


@pytest.mark.parametrize("patches", [("module-hooks",), ("module-hooks", "dynamo-hooks")])
def test_a_strict_export_names_its_parameters_as_it_does_alone(
    patches: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def export() -> str:
        return torch.export.export(Model(), (X,), strict=True).graph_module.code

    right = export()
    with applied(*patches), traces_begin_or_end_after_each_look(monkeypatch) as looks:
        code = export()
    if not looks:
        pytest.skip("a strict export looks up no __getattr__ on this torch")
    if code == right and "dynamo-hooks" not in patches:
        pytest.skip("the names do not depend on it on this torch")
    assert (code == right) is ("dynamo-hooks" in patches)


def test_a_module_with_a_getattr_of_its_own_is_told_from_others() -> None:
    class Custom(Model):
        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name)

    with applied("module-hooks", "dynamo-hooks"):
        for context in (contextlib.nullcontext, trace_elsewhere):
            with context():
                own = dynamo_utils.get_custom_getattr(Custom(), ignore_nn_module_getattr=True)
                assert own is vars(Custom)["__getattr__"]
                assert dynamo_utils.get_custom_getattr(Model(), ignore_nn_module_getattr=True) is None


def test_dynamos_functions_are_its_own_afterwards() -> None:
    code = dynamo_utils.get_custom_getattr.__code__
    with applied("module-hooks", "dynamo-hooks"):
        assert dynamo_utils.get_custom_getattr.__code__ is not code
    assert dynamo_utils.get_custom_getattr.__code__ is code


# Guards.


def a_leaf(x: torch.Tensor) -> torch.Tensor:
    return x * 3


torch.fx.wrap("a_leaf")


def calls_what_traces_replace(x: torch.Tensor) -> torch.Tensor:
    return a_leaf(x) * math.sqrt(4)


FLAG = ("tracing-flag",) if FLAG_IS_GLOBAL else ()


@pytest.mark.parametrize("patches", [(*FLAG, "module-hooks"), (*FLAG, "module-hooks", "dynamo-hooks")])
def test_a_trace_may_end_before_dynamo_writes_its_guards(patches: tuple[str, ...]) -> None:
    running = contextlib.ExitStack()
    graphs = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        running.close()
        return module.forward

    def call() -> Any:
        try:
            return compiled(X)
        except torch._dynamo.exc.InternalTorchDynamoError as error:
            return str(error)

    right = calls_what_traces_replace(X)
    before = a_leaf
    with applied(*patches), running:
        running.enter_context(trace_elsewhere())
        compiled = torch.compile(calls_what_traces_replace, backend=backend)
        found = call()
        if "dynamo-hooks" not in patches and isinstance(found, str):
            assert "'function' object has no attribute '_torchdynamo_inline'" in found
            return
        assert torch.equal(found, right)
        assert a_leaf is before
        # At most one graph for a place with a trace elsewhere, and one for a place without.
        assert torch.equal(call(), right)
        with trace_elsewhere():
            assert torch.equal(call(), right)
        assert torch.equal(call(), right)
        assert len(graphs) <= 2
    torch._dynamo.reset()
    if "dynamo-hooks" not in patches:
        pytest.skip("a compile does not fail of it on this torch")


def test_no_place_is_patched_while_dynamo_writes_and_tries_its_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = torch._dynamo.guards.CheckFunctionManager
    owned = []
    compile_check = manager.compile_check_fn

    def looking(self: Any, *args: Any) -> Any:
        owned.append(places.lock._is_owned())
        return compile_check(self, *args)

    monkeypatch.setattr(manager, "compile_check_fn", looking)
    with applied("module-hooks", "dynamo-hooks"):
        assert torch.equal(torch.compile(calls_what_traces_replace, backend="eager")(X), calls_what_traces_replace(X))
    assert owned == [True]
    assert not places.lock._is_owned()
    torch._dynamo.reset()


FILTERS = "guard_filter_fn" in inspect.signature(torch._dynamo.guards.CheckFunctionManager).parameters


@pytest.mark.skipif(not FILTERS, reason="this torch has no guard filter")
def test_a_guard_filter_may_wait_for_a_thread_that_traces() -> None:
    nodes = []

    def everything(guards: Any) -> list[bool]:
        with ThreadPoolExecutor(1) as pool:
            nodes.append(len(pool.submit(torch.fx.symbolic_trace, Model()).result(SOON_S).graph.nodes))
        return [True for _ in guards]

    with applied("module-hooks", "dynamo-hooks"):
        compiled = torch.compile(calls_what_traces_replace, backend="eager", options={"guard_filter_fn": everything})
        assert torch.equal(compiled(X), calls_what_traces_replace(X))
    assert nodes == [5]
    torch._dynamo.reset()


class Config:
    def __init__(self, value: int = 2) -> None:
        self.value = value


@functools.lru_cache
def cached(n: int) -> int:
    return n + 1


packet = torch.ops.aten.relu
module_leaf = nn.Identity()
for _name in ("Config", "cached", "packet", "module_leaf", "float"):
    torch.fx.wrap(_name)

_USES: dict[str, Any] = {
    "class": lambda x: x * Config(5).value,
    "isinstance": lambda x: x + (1 if isinstance(2.0, float) and isinstance(Config(), Config) else 5),
    "cached": lambda x: x * cached(3),
    "packet": lambda x: packet(x) * float("2"),
    "module": lambda x: module_leaf(x) * 3,
}


@pytest.mark.parametrize("use", _USES)
def test_what_is_wrapped_compiles_beside_a_trace_to_the_graph_that_it_gives_alone(use: str) -> None:
    function = _USES[use]
    graphs = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append([(node.op, str(node.target)) for node in module.graph.nodes])
        return module.forward

    torch._dynamo.reset()
    right = torch.compile(function, backend=backend)(X)
    torch._dynamo.reset()
    with applied(*FLAG, "module-hooks", "dynamo-hooks"):
        compiled = torch.compile(function, backend=backend)
        with trace_elsewhere():
            for _ in range(2):
                assert torch.equal(compiled(X), right)
            assert graphs[1:] == graphs[:1]
        assert torch.equal(compiled(X), right)
        with trace_elsewhere():
            assert torch.equal(compiled(X), right)
        assert graphs[2:] in ([], graphs[:1])
    torch._dynamo.reset()
