from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame as eval_frame
from locks_support import applied
from support import SOON_S, Task, inside_elsewhere, thread_of_its_own

import fxsafe
from fxsafe.patches import CATALOGUE

pytestmark = pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="stances since torch 2.6")
X = torch.ones(2)


def stance() -> str:
    return eval_frame._stance.stance


def compiles() -> bool:
    ran = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        ran.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(X)
    return bool(ran)


def elsewhere(*arguments: Any, **more: Any) -> contextlib.AbstractContextManager[threading.Event]:
    return inside_elsewhere(lambda: torch.compiler.set_stance(*arguments, **more))


@pytest.fixture(autouse=True)
def default_again() -> Iterator[None]:
    yield
    assert stance() == "default"
    assert type(eval_frame._stance).__name__ == "DynamoStance"


def test_plain_torch_forces_every_thread() -> None:
    with elsewhere("force_eager"):
        assert not compiles()


def test_a_block_holds_in_its_own_thread() -> None:
    with applied("stance"), elsewhere("force_eager"):
        assert compiles()
        with torch.compiler.set_stance("force_eager"):
            assert not compiles()
            assert Task(compiles).result()
        assert compiles()


def test_a_decorated_function_has_it_in_the_thread_that_calls() -> None:
    with applied("stance"):

        @torch.compiler.set_stance("force_eager")
        def inside() -> Any:
            return stance(), Task(stance).result(), compiles()

        assert stance() == "default"
        assert inside() == ("force_eager", "default", False)
        assert stance() == "default"


def test_a_plain_call_sets_it_for_the_process() -> None:
    with applied("stance"):
        torch.compiler.set_stance("force_eager")
        assert (stance(), Task(stance).result()) == ("force_eager", "force_eager")
        with torch.compiler.set_stance("eager_on_recompile"):
            assert (stance(), Task(stance).result()) == ("eager_on_recompile", "force_eager")
        assert stance() == "force_eager"
        Task(lambda: torch.compiler.set_stance("default") and None).result()
        assert stance() == "default"


def test_a_plain_call_inside_a_block_ends_with_the_block() -> None:
    def nested() -> str:
        with torch.compiler.set_stance("force_eager"):
            torch.compiler.set_stance("eager_on_recompile")
            assert stance() == "eager_on_recompile"
        return stance()

    plain = nested()
    with applied("stance"):
        assert nested() == plain == "default"


def test_blocks_that_overlap_leave_no_stance() -> None:
    with applied("stance"):
        first, second = contextlib.ExitStack(), contextlib.ExitStack()
        first.enter_context(elsewhere("force_eager"))
        second.enter_context(elsewhere("eager_on_recompile"))
        first.close()
        second.close()
        assert stance() == "default"


def test_guards_are_asked_while_another_thread_skips_its_own() -> None:
    class Box:
        k = 3

    box = Box()
    scaled = torch.compile(lambda x: x * box.k, backend="eager", dynamic=False)
    scaled(X)
    box.k = 5
    with applied("stance"), elsewhere(skip_guard_eval_unsafe=True):
        assert torch.equal(scaled(X), X * 5)


def test_a_function_compiled_before_follows_the_threads_stance() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
    compiled(X)
    with applied("stance"), torch.compiler.set_stance("force_eager"):
        assert torch.equal(compiled(X), X + 1)


def test_threads_that_python_did_not_start_see_the_newest_as_before() -> None:
    import _thread

    seen, done = [], threading.Event()

    def looks() -> None:
        seen.append(stance())
        done.set()

    with applied("stance"), torch.compiler.set_stance("force_eager"):
        _thread.start_new_thread(looks, ())
        assert done.wait(SOON_S)
    assert seen == ["force_eager"]


def test_a_block_around_the_patch_ends_as_it_began() -> None:
    with torch.compiler.set_stance("force_eager"):
        with applied("stance"):
            assert (stance(), Task(stance).result()) == ("force_eager", "force_eager")
    assert stance() == "default"
    with contextlib.ExitStack() as stack:
        block = torch.compiler.set_stance("force_eager")
        block.__enter__()
        stack.enter_context(applied("stance"))
        block.__exit__(None, None, None)
        assert (stance(), Task(stance).result()) == ("default", "default")


def test_an_invalid_stance_is_refused_and_leaves_nothing() -> None:
    with applied("stance"):
        with pytest.raises(RuntimeError):
            torch.compiler.set_stance("force_eager", force_backend="eager")
        with pytest.raises(ArithmeticError), torch.compiler.set_stance("force_eager"):
            raise ArithmeticError
        assert stance() == "default"


def test_the_last_uninstall_inside_a_block_ends_the_block_of_every_thread() -> None:
    original = eval_frame._stance
    with contextlib.ExitStack() as outer:
        with applied("stance"):
            outer.enter_context(torch.compiler.set_stance("force_eager"))
            outer.enter_context(elsewhere("force_eager"))
        assert eval_frame._stance is original
        assert compiles()
        assert Task(compiles).result()
    assert eval_frame._stance is original
    assert set(vars(original)) == {"stance", "skip_guard_eval_unsafe", "backend"}
    with applied("stance"):
        assert fxsafe.info()[[p.name for p in CATALOGUE].index("stance")]["status"] == "active"
        assert compiles()


def test_a_block_that_another_thread_enters_is_no_longer_its_makers() -> None:
    with applied("stance"):
        made = [torch.compiler.set_stance("force_eager")]
        assert not compiles()

        def enter() -> bool:
            with made[0]:
                return compiles()

        assert not Task(enter).result()
        assert compiles()
        made.clear()
        assert compiles()


def block(name: str) -> Iterator[None]:
    with torch.compiler.set_stance(name):
        yield


def test_a_generators_block_ends_for_the_thread_that_entered_it() -> None:
    with applied("stance"), thread_of_its_own() as first, thread_of_its_own() as second:
        generator = block("force_eager")
        first(lambda: next(generator))
        assert first(stance) == "force_eager"

        def leaves_inside_a_block_of_its_own() -> str:
            with torch.compiler.set_stance("force_eager"):
                assert next(generator, None) is None
                return stance()

        assert second(leaves_inside_a_block_of_its_own) == "force_eager"
        assert first(stance) == second(stance) == "default"
        assert type(eval_frame._stance).__name__ == "DynamoStance"


@pytest.mark.parametrize("left_first", ["outer", "inner"])
def test_generators_blocks_end_in_any_order_in_other_threads(left_first: str) -> None:
    with applied("stance"), thread_of_its_own() as does:
        blocks = {"outer": block("eager_on_recompile"), "inner": block("force_eager")}
        for generator in blocks.values():
            does(lambda generator=generator: next(generator))
        next(blocks.pop(left_first), None)
        assert does(stance) == ("eager_on_recompile" if left_first == "inner" else "force_eager")
        (rest,) = blocks.values()
        does(lambda: next(rest, None))
        assert does(stance) == "default"
        assert type(eval_frame._stance).__name__ == "DynamoStance"


def test_one_object_entered_by_two_threads_ends_for_each() -> None:
    with applied("stance"), thread_of_its_own() as first, thread_of_its_own() as second:
        shared = torch.compiler.set_stance("force_eager")
        first(shared.__enter__)
        second(shared.__enter__)
        first(lambda: shared.__exit__(None, None, None))
        assert (first(stance), second(stance)) == ("default", "force_eager")
        second(lambda: shared.__exit__(None, None, None))
        assert second(stance) == "default"


def test_set_stance_has_torchs_signature() -> None:
    plain = inspect.signature(torch._dynamo.set_stance), torch._dynamo.set_stance.__init__.__qualname__
    with applied("stance"):
        assert (inspect.signature(torch._dynamo.set_stance), torch._dynamo.set_stance.__init__.__qualname__) == plain
