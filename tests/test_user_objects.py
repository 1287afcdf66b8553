from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.convert_frame
import torch._functorch._aot_autograd.runtime_wrappers as wrappers
from locks_support import applied, passes, plan_of
from support import SOON_S, Task, thread_of_its_own
from torch import nn

import fxsafe
from fxsafe.patches.base import NotNeeded

NAME = "user-objects"
TABLE = "index_to_external_object_weakref"
inputs: Any = sys.modules.get("torch._dynamo.graph_bytecode_inputs")
there = pytest.mark.skipif(inputs is None, reason="this torch has no table of user objects")


class Thing:
    """Can be referred to weakly."""


A, B = Thing(), Thing()


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def two_functions(between: Callable[[], None], backend: Any = "aot_eager") -> tuple[Any, Any]:
    """Two compiled functions, each with a module of its own; the first calls ``between`` after its prologue."""
    from torch._dynamo.decorators import leaf_function

    def pausing(x: torch.Tensor) -> Any:
        between()
        return (x + 0,)

    def calling(module: nn.Module, x: torch.Tensor) -> Any:
        return (module(x),)

    pause, call = leaf_function(pausing), leaf_function(calling)
    pause.register_fake(lambda x: (x + 0,))
    call.register_fake(calling)
    two, three = Times(2.0), Times(3.0)

    def first(x: torch.Tensor) -> Any:
        return call(two, pause(x)[0])[0] + 1

    def second(x: torch.Tensor) -> Any:
        return call(three, x)[0] + 1

    def quiet(function: Any) -> Callable[[], list[float]]:
        compiled = torch.compile(function, backend=backend)

        def call_it() -> list[float]:
            with torch.no_grad():
                values: list[float] = compiled(torch.ones(2)).tolist()
            return values

        return call_it

    return quiet(first), quiet(second)


@there
@pytest.mark.parametrize("patches", [(), (NAME,)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_warm_call_computes_with_its_own_module(patches: tuple[str, ...], backend: str) -> None:
    then: list[Callable[[], Any]] = []
    first, second = two_functions(lambda: [Task(other).result() for other in then] and None, backend)
    with applied(*patches):
        assert [first(), second()] == [[3.0, 3.0], [4.0, 4.0]]
        then.append(second)
        assert first() == ([3.0, 3.0] if patches else [4.0, 4.0])


@there
@pytest.mark.parametrize("patches", [(), (NAME,)])
def test_a_compile_in_another_thread_takes_nothing_away(patches: tuple[str, ...]) -> None:
    then: list[Callable[[], Any]] = []
    first, _ = two_functions(lambda: [Task(other).result() for other in then] and None)
    with applied(*patches):
        assert first() == [3.0, 3.0]
        then.append(lambda: torch.compile(lambda x: x + 3, backend="eager")(torch.ones(2)))
        if patches:
            assert first() == [3.0, 3.0]
        else:
            with pytest.raises(AssertionError, match="Index not registered"):
                first()


@there
@pytest.mark.parametrize("patches", [(), (NAME,)])
def test_what_a_call_has_made_is_kept_alive(patches: tuple[str, ...]) -> None:
    with applied(*patches):
        made = weakref.ref(inputs.stash_graph_created_object(Thing()))
        inputs.store_user_object_weakrefs(made())
        Task(inputs.reset_user_object_tracking).result()
        assert (made() is None) is (not patches)
        if patches:
            assert inputs.get_external_object_by_index(0) is made()
        inputs.reset_user_object_tracking()
        assert made() is None


def uses_of_one_thread() -> list[Any]:
    """What torch's functions give and raise, in an order that a compile and calls may have."""
    found: list[Any] = []

    def note(function: Any, *args: Any) -> None:
        try:
            found.append(function(*args))
        except AssertionError as error:
            found.append(str(error))

    note(inputs.reset_user_object_tracking)
    note(inputs.get_external_object_by_index, 0)
    note(inputs.register_user_object, A, None)
    note(inputs.register_graph_created_object, B, lambda index, cg: None)
    found.append(inputs.has_user_objects())
    for index in range(3):
        note(inputs.get_external_object_by_index, index)
    note(inputs.store_user_object_weakrefs, B, Thing())
    for index in range(3):
        note(inputs.get_external_object_by_index, index)
    if hasattr(inputs, "set_external_object_by_index"):
        for index in (1, 2, 7):
            note(inputs.set_external_object_by_index, index, A)
        for index in range(3):
            note(inputs.get_external_object_by_index, index)
    note(inputs.stash_graph_created_object, A)
    found.append(list(dict(getattr(wrappers, TABLE, {}))) if type(vars(inputs)[TABLE]) is dict else None)
    note(inputs.reset_user_object_tracking)
    note(inputs.get_external_object_by_index, 0)
    return found


@there
def test_one_thread_finds_and_meets_what_it_did() -> None:
    plain = uses_of_one_thread()
    with applied(NAME):
        assert uses_of_one_thread() == plain
        with thread_of_its_own() as other:
            assert other(uses_of_one_thread) == plain
    assert uses_of_one_thread() == plain


@there
def test_nothing_is_compiled_again() -> None:
    graphs: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    first, _ = two_functions(lambda: None, backend)
    for _ in range(2):
        assert first() == [3.0, 3.0]
        with applied(NAME):
            assert first() == [3.0, 3.0]
    assert len(graphs) == 1


@there
def test_torch_has_its_own_afterwards() -> None:
    def state() -> list[Any]:
        functions = [value for value in vars(inputs).values() if hasattr(value, "__code__")]
        return [
            *functions,
            *(f.__code__ for f in functions),
            vars(wrappers).get(TABLE),
            type(inputs),
            inputs.keep_alive,
        ]

    before, table = state(), vars(inputs)[TABLE]
    with applied(NAME):
        Task(lambda: inputs.store_user_object_weakrefs(B)).result()
        assert [value is old for value, old in zip(state(), before, strict=True)].count(False) >= 6
    assert all(value is old for value, old in zip(state(), before, strict=True))
    assert type(table) is list or vars(inputs)[TABLE] is table
    assert inputs.get_external_object_by_index(0) is B  # as on plain torch: what was stored last


@there
def test_installing_inside_a_call() -> None:
    inputs.store_user_object_weakrefs(A)
    with applied(NAME):
        Task(lambda: inputs.store_user_object_weakrefs(B)).result()
        assert inputs.get_external_object_by_index(0) is A


@there
def test_installing_while_another_thread_is_inside_a_call() -> None:
    with thread_of_its_own() as other:
        other(lambda: inputs.store_user_object_weakrefs(A))
        with applied(NAME):
            assert other(lambda: inputs.get_external_object_by_index(0)) is A


@there
def test_uninstalling_inside_a_call() -> None:
    with thread_of_its_own() as other:
        with applied(NAME):
            other(lambda: inputs.store_user_object_weakrefs(B))
            inputs.store_user_object_weakrefs(A)
        assert inputs.get_external_object_by_index(0) is A
        inputs.store_user_object_weakrefs(B)
        with applied(NAME):  # what was stored in the meantime, and not what the last installation knew
            assert inputs.get_external_object_by_index(0) is B


@there
@pytest.mark.skipif(inputs is None or type(vars(inputs)[TABLE]) is not dict, reason="no other module uses the table")
@pytest.mark.skipif(TABLE not in vars(wrappers), reason="no other module uses the table")
def test_a_forward_notes_its_own_objects_and_a_backward_puts_them_back() -> None:
    class Context:
        _external_objects: dict[int, Any]

    context = Context()
    with applied(NAME):
        inputs.store_user_object_weakrefs(A)
        Task(lambda: inputs.store_user_object_weakrefs(B, B)).result()
        wrappers._snapshot_external_objects(context)
        assert context._external_objects == {0: A}
        vars(wrappers)[TABLE][1] = weakref.ref(B)
        assert inputs.get_external_object_by_index(1) is B
        inputs.store_user_object_weakrefs(B)


@there
def test_a_thread_that_ends_leaves_nothing() -> None:
    made: list[Any] = []

    def work() -> None:
        inputs.register_graph_created_object(thing := Thing(), lambda index, cg: None)
        made.append(weakref.ref(thing))

    with applied(NAME):
        task = Task(work)
        task.result()
        inputs.reset_user_object_tracking()
        del task
        assert made[0]() is None


@there
def test_a_forked_child_has_the_table_of_its_thread() -> None:
    passes(
        """
        import os, gc, torch._dynamo.graph_bytecode_inputs as inputs
        class Thing: pass
        a, b = Thing(), Thing()
        inside, leave = threading.Event(), threading.Event()
        def other():
            inputs.store_user_object_weakrefs(b)
            inside.set()
            leave.wait(60)
        inputs.store_user_object_weakrefs(a)
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(60)
        child = os.fork()
        if child == 0:
            tables = [t for t in patch("user-objects").after_fork_in_child.__globals__["_applied"]]
            right = inputs.get_external_object_by_index(0) is a and [len(t._owns) for t in tables] == [1]
            os._exit(0 if right else 1)
        status = os.waitpid(child, 0)[1]
        leave.set()
        thread.join()
        assert status == 0, status
        """,
        NAME,
    )


class Deep(torch.autograd.Function):
    """Its backward calls backward, until autograd goes on in a thread of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, then: Any) -> torch.Tensor:
        ctx.depth, ctx.then = depth, then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.depth == 0:
            ctx.then()
        else:
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.then).sum().backward()
        return grads[0], None, None


def in_autograds_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def note() -> None:
        found.append((threading.get_ident(), function()))

    Deep.apply(torch.ones(1, requires_grad=True), 70, note).sum().backward()
    ident, value = found[0]
    assert ident != threading.get_ident()
    return value


@there
def test_autograds_thread_finds_what_the_thread_that_called_backward_has() -> None:
    with applied(NAME), thread_of_its_own() as other:
        inputs.store_user_object_weakrefs(A)
        other(lambda: inputs.store_user_object_weakrefs(B))

        def look() -> Any:
            return inputs.get_external_object_by_index(0)

        def put(index: int, value: Any) -> Any:
            inputs.set_external_object_by_index(index, value)
            return inputs.get_external_object_by_index(index)

        assert in_autograds_thread(look) is A
        assert other(lambda: in_autograds_thread(look)) is B
        if hasattr(inputs, "set_external_object_by_index"):
            thing = Thing()
            assert in_autograds_thread(lambda: put(0, thing)) is thing
            assert in_autograds_thread(lambda: put(1, thing)) is thing
            # That was one backward's affair, and its thread's.
            assert in_autograds_thread(look) is A
            assert look() is A


@there
def test_of_several_threads_inside_backward_none_is_taken_for_the_caller() -> None:
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        inputs.store_user_object_weakrefs(B)
        inside.set()
        leave.wait(SOON_S)

    with applied(NAME):
        task = Task(lambda: Deep.apply(torch.ones(1, requires_grad=True), 0, stay).sum().backward())
        assert inside.wait(SOON_S)
        inputs.store_user_object_weakrefs(A)
        assert in_autograds_thread(lambda: inputs.get_external_object_by_index(0)) is A  # stored last
        # Nor for the caller of a backward that runs in a thread which has stored nothing.
        assert Task(lambda: in_autograds_thread(lambda: inputs.get_external_object_by_index(0))).result() is A
        inputs.store_user_object_weakrefs(A, A)
        looked: list[Any] = []
        look = lambda: looked.append(inputs.get_external_object_by_index(1))  # noqa: E731
        Task(lambda: Deep.apply(torch.ones(1, requires_grad=True), 0, look).sum().backward()).result()
        assert looked == [A]
        leave.set()
        task.result()


def test_the_patch_says_where_it_is_not_needed() -> None:
    if inputs is None:
        assert isinstance(plan_of(NAME), NotNeeded)
        return
    with fxsafe.install(patches=[NAME]):
        status = [record["status"] for record in fxsafe.info() if record["name"] == NAME]
    assert status == ["active"]
