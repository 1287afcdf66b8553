from __future__ import annotations

import contextlib
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
import torch._export.utils
import torch.fx._symbolic_trace as st
from locks_support import applied
from support import FLAG_IS_GLOBAL, RELEASE, SOON_S, Task, trace_elsewhere
from torch import nn

from fxsafe import edits, thread_globals
from fxsafe.patches import compiling_flags

COMPILES_ARE_SESSIONS = hasattr(torch.compiler, "_compile_session_context")
NAMES = [
    n for n in ("_is_compiling_flag", "_is_exporting_flag", "_is_non_strict_tracing_flag") if hasattr(torch.compiler, n)
]
ALWAYS_ISOLATED = RELEASE < (2, 7)
SET_BY_EXPORT = NAMES[:2]
KEEPERS = {module.__file__ for module in (compiling_flags, edits, thread_globals)}
OURS = ("tracing-flag", "compiling-flags") if FLAG_IS_GLOBAL else ("compiling-flags",)
X = torch.ones(2)


def answers() -> list[bool]:
    names = ("is_compiling", "is_exporting", "_is_non_strict_tracing")
    return [bool(getattr(torch.compiler, name)()) for name in names if hasattr(torch.compiler, name)]


class Held(nn.Module):
    """Keeps a compile or an export going, and what it was told meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        # Not as attributes: export watches those of the module.
        inside, leave, seen = threading.Event(), threading.Event(), []
        self.of = lambda: (inside, leave, seen)

    inside = property(lambda self: self.of()[0])
    leave = property(lambda self: self.of()[1])
    seen = property(lambda self: self.of()[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(answers())
        self.inside.set()
        assert self.leave.wait(SOON_S)
        return x + 1


@contextlib.contextmanager
def elsewhere(call: Any, held: Held) -> Iterator[Task]:
    def run() -> Any:
        try:
            return call(held)
        finally:
            held.inside.set()

    task = Task(run)
    assert held.inside.wait(SOON_S)
    try:
        assert held.seen, task.result()
        yield task
    finally:
        held.leave.set()
        task.result()


def export(held: Held) -> Any:
    return torch.export.export(held, (X,), strict=False)


def compile_(held: Held) -> Any:
    def backend(graph: Any, example_inputs: Any) -> Any:
        held.forward(X)  # not by a call of the module, which a trace elsewhere would break
        return graph.forward

    def add_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    add_one.__code__ = add_one.__code__.replace()  # Dynamo compiles one code object eight times at most
    return torch.compile(add_one, backend=backend)(X)


@pytest.mark.parametrize("call", [export, compile_])
def test_plain_torch_says_it_in_every_thread(call: Any) -> None:
    with elsewhere(call, Held()):
        assert torch.compiler.is_compiling() is (call is export or COMPILES_ARE_SESSIONS)


@pytest.mark.parametrize("call", [export, compile_])
def test_only_the_thread_that_compiles_or_exports_says_so(call: Any) -> None:
    plain, held = Held(), Held()
    with elsewhere(call, plain):
        pass
    with applied(*OURS):
        with elsewhere(call, held):
            assert not any(answers())
        assert held.seen == plain.seen
    assert not any(answers())


def overlap() -> list[bool]:
    first, second = Held(), Held()
    with contextlib.ExitStack() as one:
        one.enter_context(elsewhere(inside_an_exports_flags, first))
        with elsewhere(inside_an_exports_flags, second):
            one.close()
    return [getattr(torch.compiler, name) for name in SET_BY_EXPORT]


def inside_an_exports_flags(held: Held) -> None:
    with exports_flags():
        held(X)


@contextlib.contextmanager
def set_by_attribute() -> Iterator[None]:
    """What an export did up to torch 2.6, and what others do."""
    old = [getattr(torch.compiler, name) for name in SET_BY_EXPORT]
    for name in SET_BY_EXPORT:
        setattr(torch.compiler, name, True)
    yield
    for name, value in zip(SET_BY_EXPORT, old, strict=True):
        setattr(torch.compiler, name, value)


exports_flags = getattr(torch._export.utils, "_compiling_state_context", set_by_attribute)


def test_overlapping_exports_leave_no_flag_set() -> None:
    try:
        assert all(overlap()), "the canary"
    finally:
        for name in NAMES:
            setattr(torch.compiler, name, False)
    with applied(*OURS):
        assert not any(overlap())
    assert not any(vars(torch.compiler)[name] for name in NAMES)


def inside_flags_set_by_attribute(held: Held) -> None:
    with set_by_attribute():
        held(X)
        held.seen.append([getattr(torch.compiler, name) for name in SET_BY_EXPORT])


def test_a_flag_that_others_set_by_attribute_stays_set_for_them_whatever_begins_beside_it() -> None:
    """Alone, it is set for everybody, as on plain torch; beside an export or a compile, for the thread that sets it."""
    with applied(*OURS):
        for exporting_first in (False, True):
            third, exporter = Held(), Held()
            held = [(inside_flags_set_by_attribute, third), (export, exporter)]
            with contextlib.ExitStack() as stack:
                for call, of in reversed(held) if exporting_first else held:
                    stack.enter_context(elsewhere(call, of))
                assert Task(torch.compiler.is_compiling).result() is not (exporting_first or ALWAYS_ISOLATED)
                assert torch.compiler._is_compiling_flag is torch.compiler.is_compiling()
            assert third.seen[0][0] is exporter.seen[0][0] is True
            assert third.seen[-1] == [True] * len(SET_BY_EXPORT)
            assert not any(answers())
            assert not any(Task(answers).result())
            assert not any(vars(torch.compiler)[name] for name in NAMES)


@pytest.mark.skipif(ALWAYS_ISOLATED, reason="up to torch 2.6 the module keeps its properties")
@pytest.mark.parametrize("call", [export, compile_] if COMPILES_ARE_SESSIONS else [export])
def test_a_flag_that_others_set_is_not_put_back_by_what_began_inside_of_it_and_ends_later(call: Any) -> None:
    with applied(*OURS), pytest.MonkeyPatch.context() as theirs:
        theirs.setattr(torch.compiler, "_is_compiling_flag", True)
        with elsewhere(lambda held: (call(held), answers()), Held()) as task:
            theirs.undo()
            assert not any(answers())
        assert not any(task.result()[1])
        assert not any(answers())
        assert not any(vars(torch.compiler)[name] for name in NAMES)
        assert type(torch.compiler) is ModuleType


def stops(run: Callable[[], Any], at: int | None = None) -> int:
    """Calls ``run`` with Ctrl-C in front of a line of ours; how many lines there are."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in KEEPERS:
            return None
        # Not on the way out of a with-statement: a real Ctrl-C cannot come in front of the call of ``__exit__``.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "call" or (event == "line" and not line.lstrip().startswith("with ")):
            seen += 1
            if seen - 1 == at:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        assert at is not None
    finally:
        sys.settrace(previous)
    return seen


@pytest.mark.skipif(ALWAYS_ISOLATED, reason="up to torch 2.6 an export has no context manager of its own")
def test_a_session_that_another_thread_leaves_ends_in_the_thread_that_entered_it() -> None:
    with applied(*OURS):
        session = torch._export.utils._compiling_state_context()
        session.__enter__()
        assert torch.compiler.is_exporting()
        Task(lambda: session.__exit__(None, None, None)).result()
        assert not any(answers())
        assert not any(vars(torch.compiler)[name] for name in NAMES)
        assert type(torch.compiler) is ModuleType


@pytest.mark.skipif(ALWAYS_ISOLATED, reason="up to torch 2.6 an export has no context manager of its own")
@pytest.mark.parametrize(
    "name", ["_compiling_state_context", "_compile_session_context", "_non_strict_tracing_context"]
)
def test_an_interrupt_anywhere_in_a_session_leaves_no_flag_set(name: str) -> None:
    manager = getattr(torch._export.utils, name, None) or getattr(torch.compiler, name, None)
    if manager is None:
        pytest.skip("not in this release")

    def session() -> None:
        with manager():
            pass

    with applied(*OURS):
        count = stops(session)
        assert count > 20
        for at in range(count):
            stops(session, at)
            assert not any(answers())
            assert not any(Task(answers).result())
            with elsewhere(inside_an_exports_flags, Held()):
                assert not any(answers())
            assert not any(vars(torch.compiler)[name] for name in NAMES)
            assert type(torch.compiler) is ModuleType


@pytest.mark.skipif(ALWAYS_ISOLATED, reason="up to torch 2.6 the module keeps its properties")
@pytest.mark.parametrize("call", [export, compile_])
def test_torch_compiler_is_a_plain_module_while_no_thread_compiles_or_exports(call: Any) -> None:
    """A compiled call reads it four times, which is slower for any other class."""
    with applied(*OURS):
        assert type(torch.compiler) is ModuleType
        with elsewhere(call, Held()):
            assert (type(torch.compiler) is ModuleType) is (call is compile_ and not COMPILES_ARE_SESSIONS)
        assert type(torch.compiler) is ModuleType
        call_here = Held()
        call_here.leave.set()
        call(call_here)
        assert type(torch.compiler) is ModuleType


def test_code_that_asked_is_not_compiled_again_when_others_begin_and_end_to_compile() -> None:
    compiles = []

    def counting(graph: Any, example_inputs: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    @torch.compile(backend=counting, fullgraph=True)
    def asks(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_compiling() else x - 1

    with applied(*OURS):
        assert torch.equal(asks(X), X + 1)
        with elsewhere(export, Held()):
            assert torch.equal(asks(X), X + 1)
        assert torch.equal(asks(X), X + 1)
    assert len(compiles) == 1


def test_an_exception_in_an_export_leaves_no_flag_set() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert torch.compiler.is_compiling()
            raise ArithmeticError

    with applied(*OURS):
        with pytest.raises(ArithmeticError):
            torch.export.export(Fails(), (X,), strict=False)
        assert not any(answers())


def test_the_installing_thread_goes_on_with_the_value_it_sees() -> None:
    torch.compiler._is_compiling_flag = True
    try:
        with applied("compiling-flags"):
            assert torch.compiler.is_compiling()
            assert Task(torch.compiler.is_compiling).result() is False
            torch.compiler._is_compiling_flag = False
            assert not torch.compiler.is_compiling()
    finally:
        torch.compiler._is_compiling_flag = False


def test_compiled_code_takes_the_same_branch_and_is_compiled_once_more_at_most() -> None:
    compiles = []

    def branches(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_compiling() else x - 1

    def counting(graph: Any, example_inputs: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    before = torch.compile(branches, backend=counting, fullgraph=True)
    assert torch.equal(before(X), X + 1)
    with applied(*OURS):
        for _ in range(3):
            assert torch.equal(before(X), X + 1)
        assert torch.equal(branches(X), X - 1)
    assert torch.equal(before(X), X + 1)
    # Dynamo guards on the code of a function whose answer it has used (not yet in 2.5).
    assert len(compiles) <= 2


def test_torchscript_compiles_the_question_as_before() -> None:
    with applied("compiling-flags"):
        scripted = torch.jit.script(asks_in_torchscript)
        assert scripted(X) == 2


def asks_in_torchscript(x: torch.Tensor) -> int:
    if torch.compiler.is_compiling():
        return 1
    return 2


def warm() -> Any:
    compiled = torch.compile(lambda x: x * 3, backend="eager")
    compiled(X)
    return compiled


@pytest.mark.skipif(
    not (FLAG_IS_GLOBAL and COMPILES_ARE_SESSIONS), reason="torch 2.13 hides the tracing flag while it compiles"
)
@pytest.mark.parametrize("patches", [(), ("compiling-flags",), OURS])
def test_a_warm_call_is_not_refused_while_others_trace_and_compile(patches: tuple[str, ...]) -> None:
    compiled = warm()
    with applied(*patches), elsewhere(compile_, Held()), trace_elsewhere():
        assert torch.equal(compiled(X), X * 3)


@pytest.mark.skipif(
    not (FLAG_IS_GLOBAL and hasattr(st, "is_fx_symbolic_tracing")), reason="the refusal as it was from 2.9 to 2.13"
)
def test_without_the_threads_own_tracing_flag_the_refusal_is_plain_torchs() -> None:
    compiled = warm()
    with applied("compiling-flags"), trace_elsewhere():
        with pytest.raises(RuntimeError, match="Detected that you are using FX"):
            compiled(X)


def trained_with_adam() -> torch.Tensor:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(16, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return model.weight.detach()


@pytest.mark.skipif(not COMPILES_ARE_SESSIONS, reason="a compile says is_compiling() in every thread since torch 2.13")
@pytest.mark.parametrize("patches", [(), OURS])
def test_eager_adam_computes_the_same_bits_beside_another_threads_compile(patches: tuple[str, ...]) -> None:
    alone = trained_with_adam()
    with applied(*patches), elsewhere(compile_, Held()):
        beside = trained_with_adam()
    assert torch.equal(beside, alone) is bool(patches)
