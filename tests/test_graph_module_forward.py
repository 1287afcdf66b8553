from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.fx
from locks_support import applied, plan_of
from support import SOON_S, Task, X
from torch._dynamo import convert_frame
from torch.fx import graph_module

from fxsafe.shapes import ShapeError

PATCHES = pytest.mark.parametrize("patches", [(), ("graph-module-forward",)])


def made() -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.cos, (graph.placeholder("x"),)))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def graphs(module: Any) -> int:
    """How many graphs Dynamo makes of it."""
    seen: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    assert torch.equal(torch.compile(module, backend=backend)(X), X.cos())
    return len(seen)


def compile_with(inside: Callable[[], Any]) -> Any:
    """What ``inside`` returns in the middle of a compile."""
    gave: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        gave.append(inside())
        return graph.forward

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    torch.compile(function, backend=backend)(X)
    return gave[0]


@contextmanager
def compile_elsewhere() -> Iterator[None]:
    inside, leave = threading.Event(), threading.Event()
    task = Task(lambda: compile_with(lambda: (inside.set(), leave.wait(SOON_S))))
    assert inside.wait(SOON_S)
    try:
        yield
    finally:
        leave.set()
        task.result()


@PATCHES
def test_what_is_made_while_another_thread_compiles_can_be_compiled(patches: tuple[str, ...]) -> None:
    with applied(*patches):
        with compile_elsewhere():
            module = made()
        assert graphs(module) == len(patches)
        assert graphs(made()) == 1


@PATCHES
def test_what_a_compile_makes_is_skipped_as_ever(patches: tuple[str, ...]) -> None:
    with applied(*patches):
        assert graphs(compile_with(made)) == 0
        assert graphs(compile_with(lambda: compile_with(made))) == 0
        assert graphs(made()) == 1


def test_it_does_no_harm_where_it_has_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    with applied("graph-module-forward"):
        monkeypatch.setattr(graph_module, "_forward_from_src", convert_frame.fx_forward_from_src_skip_result)
        assert graphs(made()) == 1


def test_the_gate_refuses_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of("graph-module-forward").edits
    name = "fx_forward_from_src_skip_result"
    with monkeypatch.context() as changed:
        changed.setattr(convert_frame, name, convert_frame.convert_frame)
        with pytest.raises(ShapeError, match="unknown shape"):
            plan_of("graph-module-forward")
    with monkeypatch.context() as changed:
        changed.setattr(convert_frame, name, made)
        with pytest.raises(ShapeError, match="does not exist"):
            plan_of("graph-module-forward")
    with monkeypatch.context() as changed:
        changed.delattr(torch._dynamo.symbolic_convert.InstructionTranslator, "set_current_tx")
        with pytest.raises(ShapeError, match="who compiles"):
            plan_of("graph-module-forward")
