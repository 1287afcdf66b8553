"""Export beside export and beside Dynamo, with everything that an export needs to be alone."""

from __future__ import annotations

import builtins
import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.guards as guards
import torch.export._trace
from locks_support import applied
from support import FLAG_IS_GLOBAL, SOON_S, Task, python
from torch import nn

REPLACES_BUILTINS = hasattr(__import__("torch._export.non_strict_utils", fromlist=["x"]), "_override_builtin_ops")
GET_VALUE = getattr(torch._guards.ChainedSource, "get_value", None)  # since 2.10
HAS_SCOPE = hasattr(guards, "_get_closure_vars") and GET_VALUE is not None and "tmp" in GET_VALUE.__code__.co_consts
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
    held = [Held(), Held()]
    try:
        return [export.result() for export in held]
    finally:
        for export in held:  # whatever the other one has raised
            export.leave.set()
            export.task.thread.join(SOON_S)


def test_plain_exports_that_overlap_fail_or_leave_something() -> None:
    done = python(__file__)  # in a process of its own: what they leave would stay
    assert done.stdout in ("fail\n", "leave something\n"), done.stdout + done.stderr


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


if __name__ == "__main__":
    maximum = builtins.max
    try:
        overlap()
    except Exception:
        print("fail")
    else:
        print("leave something" if builtins.max is not maximum or torch.compiler.is_compiling() else "leave nothing")


def backends() -> list[bool]:
    return [torch._C._get_mkldnn_enabled(), torch._C._get_nnpack_enabled(), torch._C._get_cudnn_enabled()]


@pytest.mark.parametrize("patches", [(), ("export",)])
def test_exports_that_overlap_leave_the_backends_as_they_were(patches: tuple[str, ...]) -> None:
    """Without a model: ``_ignore_backend_decomps`` is what every export enters."""
    before = backends()
    assert before[0]
    events = [(threading.Event(), threading.Event()) for _ in range(3)]

    def block(inside: threading.Event, leave: threading.Event) -> None:
        with torch.export._trace._ignore_backend_decomps():
            inside.set()
            leave.wait(SOON_S)

    with applied(*patches):
        tasks = []
        for inside, leave in events:
            tasks.append(Task(lambda inside=inside, leave=leave: block(inside, leave)))
            assert inside.wait(SOON_S)
            assert not backends()[0]
        for (_, leave), task in zip(events, tasks, strict=True):
            assert not patches or not backends()[0]
            leave.set()
            task.result()
        after = backends()
    torch._C._set_mkldnn_enabled(before[0])
    torch._C._set_nnpack_enabled(before[1])
    torch._C._set_cudnn_enabled(before[2])
    assert (after == before) is bool(patches)


def test_the_switches_of_one_export_are_as_ever() -> None:
    before = backends()
    with applied("export"):
        with pytest.raises(ArithmeticError), torch.export._trace._ignore_backend_decomps():
            with torch.export._trace._ignore_backend_decomps():
                assert not any(backends()[:2])
            assert not any(backends()[:2])
            raise ArithmeticError
        assert backends() == before
        with torch.backends.mkldnn.flags(enabled=False):
            with torch.export._trace._ignore_backend_decomps():
                pass
            assert not backends()[0]
        assert backends() == before


def test_code_that_holds_our_stand_ins_can_be_hashed() -> None:
    """Profilers do that, and so does what gives the next installation the same code."""
    with applied("export"):
        for function in (torch.export._trace._ignore_backend_decomps, torch.export._trace._export):
            hash(getattr(function, "__wrapped__", function).__code__)
