"""Blocks that change torch's settings, in several threads and in one; collected up to torch 2.11 (conftest.py)."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._higher_order_ops.utils
import torch.export._trace
import torch.utils._config_module as config_module
from locks_support import applied
from support import RELEASE, SOON_S, Task, inside_elsewhere, program, thread_of_its_own

import fxsafe

pytestmark = pytest.mark.skipif(RELEASE >= (2, 12), reason="torch keeps settings per thread since 2.12")

NAME = "config-blocks"
config: Any = torch._dynamo.config
KEY = "assume_static_by_default"
LIMIT = "recompile_limit" if RELEASE >= (2, 7) else "cache_size_limit"


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    modules = (config, torch._functorch.config)
    keys = (KEY, LIMIT, f"accumulated_{LIMIT}", "allow_empty_graphs", "capture_scalar_outputs", "verbose")
    keys += ("decompose_custom_triton_ops",)
    before = [(module, key, getattr(module, key)) for module in modules for key in keys if hasattr(module, key)]
    yield
    for module, key, value in before:
        setattr(module, key, value)


@contextlib.contextmanager
def closure(value: Any = False) -> Iterator[None]:
    """What a call of a function that is compiled with ``dynamic=True`` does."""
    revert = config._make_closure_patcher(**{KEY: value})()
    try:
        yield
    finally:
        revert()


SHARED = config.patch({KEY: False})
BLOCKS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Any, str]] = {
    "closure": (closure, config, KEY),
    "patch": (lambda: config.patch({KEY: False}), config, KEY),
    "made-before": (lambda: SHARED, config, KEY),
    "cache-limit": (torch._dynamo.utils.disable_cache_limit, config, LIMIT),
    "triton-ops": (
        lambda: torch.export._trace._disable_custom_triton_op_functional_decomposition(),
        torch._functorch.config,
        "decompose_custom_triton_ops",
    ),
    "cond": (torch._higher_order_ops.utils._set_compilation_env, config, "allow_empty_graphs"),
}
_MISSING = {
    "cond": RELEASE < (2, 8),
    "triton-ops": not hasattr(torch.export._trace, "_disable_custom_triton_op_functional_decomposition"),
}
KINDS = [kind for kind in BLOCKS if not _MISSING.get(kind)]


def overlap(block: Callable[[], AbstractContextManager[Any]], look: Callable[[], Any]) -> list[Any]:
    """Before, while both are inside, after the first has ended, after both."""
    seen = [look()]
    with thread_of_its_own() as one, thread_of_its_own() as other:
        blocks = [block(), block()]
        for does, entering in zip((one, other), blocks, strict=True):
            does(entering.__enter__)
        seen.append(look())
        for does, leaving in zip((one, other), blocks, strict=True):
            does(lambda leaving=leaving: leaving.__exit__(None, None, None))
            seen.append(look())
    return seen


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "made-before"])
def test_without_it_overlapping_blocks_leave_the_setting_changed(kind: str) -> None:
    block, module, key = BLOCKS[kind]
    before, inside, between, after = overlap(block, lambda: getattr(module, key))
    setattr(module, key, before)
    assert inside != before
    assert between == before  # taken away from the one that is inside
    assert after == inside  # and there for good


@pytest.mark.parametrize("kind", KINDS)
def test_overlapping_blocks_end_as_blocks_one_after_the_other(kind: str) -> None:
    block, module, key = BLOCKS[kind]
    with applied(NAME):
        before, inside, between, after = overlap(block, lambda: getattr(module, key))
    assert inside == between != before
    assert after == before
    assert getattr(module, key) == before


def test_one_patch_object_is_refused_a_second_thread_without_it() -> None:
    block = config.patch({KEY: False})
    with inside_elsewhere(lambda: block), pytest.raises(AssertionError), block:
        pass


@pytest.mark.parametrize("when", ["before", "with"])
def test_a_decorated_function_runs_in_several_threads(when: str) -> None:
    entered, leave = threading.Barrier(3), threading.Event()

    def look() -> Any:
        entered.wait(SOON_S)
        assert leave.wait(SOON_S)
        return getattr(config, KEY)

    decorated = config.patch({KEY: False})(look)
    with applied(NAME):
        if when == "with":
            decorated = config.patch({KEY: False})(look)
        tasks = [Task(decorated) for _ in range(2)]
        entered.wait(SOON_S)
        leave.set()
        assert [task.result() for task in tasks] == [False, False]
        assert getattr(config, KEY) is True
    assert getattr(config, KEY) is True


def test_a_thread_cannot_enter_one_object_twice_as_ever() -> None:
    def messages() -> list[str]:
        block = config.patch({KEY: False})
        found = []
        with block:
            with pytest.raises(AssertionError) as caught:
                block.__enter__()
            found.append(str(caught.value).partition("\n")[0])
        with block:
            pass
        return found

    plain = messages()
    with applied(NAME):
        ours = messages()
    if RELEASE >= (2, 9):  # before, pytest writes the message
        assert ours == plain
    assert getattr(config, KEY) is True


class Steps:
    """A program of blocks, assignments and looks, written by a seed, each step in the thread that it names."""

    def __init__(self, seed: int, threads: int, *, orderly: bool) -> None:
        self.random = random.Random(seed)
        self.threads = threads
        self.orderly = orderly

    def run(self, does: list[Callable[[Callable[[], Any]], Any]]) -> list[Any]:
        log: list[Any] = []
        stacks: list[list[Callable[[], Any]]] = [[] for _ in range(self.threads)]
        pool = [config.patch({KEY: False}), config.patch(**{KEY: 7, "verbose": True}), config.patch({LIMIT: 3})]
        for _ in range(60):
            at = self.random.randrange(self.threads)
            step = self.random.choice(["patch", "shared", "closure", "generator", "leave", "leave", "assign", "hash"])
            value = self.random.choice([True, False, 2, 3])
            stack = stacks[at]
            try:
                if step == "leave" and stack:
                    does[at](stack.pop(-1 if self.orderly else self.random.randrange(len(stack))))
                elif step == "closure":
                    stack.append(does[at](config._make_closure_patcher(**{KEY: value})))
                elif step == "assign" and not self.orderly:
                    does[at](lambda value=value: setattr(config, KEY, value))
                elif step == "hash":
                    log.append(does[at](config.get_hash) if self.threads == 1 else None)
                elif step in ("patch", "shared", "generator"):
                    manager = {
                        "patch": lambda value=value: config.patch({KEY: value, LIMIT: value}),
                        "shared": lambda: self.random.choice(pool),
                        "generator": torch._dynamo.utils.disable_cache_limit,
                    }[step]()
                    does[at](manager.__enter__)
                    stack.append(lambda manager=manager: manager.__exit__(None, None, None))
            except AssertionError:
                log.append("refused")
            log.append((step, [getattr(config, key) for key in (KEY, LIMIT, "verbose")], config._is_dirty))
        for at, stack in enumerate(stacks):
            while stack:
                does[at](stack.pop())
        log.append([getattr(config, key) for key in (KEY, LIMIT, "verbose")])
        return log


@pytest.mark.parametrize("orderly", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_one_thread_does_exactly_what_it_did(seed: int, orderly: bool) -> None:
    before = {key: getattr(config, key) for key in (KEY, LIMIT, "verbose")}

    def run() -> list[Any]:
        for key, value in before.items():
            setattr(config, key, value)
        config._is_dirty, config._hash_digest = True, None  # 2.5 does not see to it
        return Steps(seed, 1, orderly=orderly).run([lambda function: function()])

    plain = run()
    with applied(NAME):
        assert run() == plain
    run_again = run()
    assert run_again == plain


@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_order_all_is_as_before_in_the_end(seed: int) -> None:
    before = [getattr(config, key) for key in (KEY, LIMIT, "verbose")]
    with applied(NAME), ExitStack() as threads:
        does = [threads.enter_context(thread_of_its_own()) for _ in range(3)]
        log = Steps(seed, 3, orderly=True).run(does)
        info = next(record for record in fxsafe.info() if record["name"] == NAME)
    assert log[-1] == before
    assert info["counters"]["overlaps"] >= 0


@pytest.mark.parametrize("ends", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("kind", ["closure", "patch", "mixed"])
def test_three_blocks_in_any_order(kind: str, ends: tuple[int, ...]) -> None:
    makers = {"closure": [closure] * 3, "patch": [lambda v: config.patch({KEY: v})] * 3}
    makers["mixed"] = [makers["patch"][0], closure, makers["patch"][0]]
    with applied(NAME), ExitStack() as threads:
        does = [threads.enter_context(thread_of_its_own()) for _ in range(3)]
        blocks = [make(value) for make, value in zip(makers[kind], (11, 12, 13), strict=True)]
        inside = []
        for does_it, block, value in zip(does, blocks, (11, 12, 13), strict=True):
            does_it(block.__enter__)
            inside.append(value)
        for at in ends:
            assert getattr(config, KEY) == inside[-1]  # the newest that is still inside
            does[at](lambda at=at: blocks[at].__exit__(None, None, None))
            inside.remove(11 + at)
        assert getattr(config, KEY) is True


def test_a_plain_assignment_in_between_holds() -> None:
    with applied(NAME):
        with inside_elsewhere(closure):
            config.assume_static_by_default = 5
            assert Task(lambda: config.assume_static_by_default).result() == 5
        assert config.assume_static_by_default == 5
        with inside_elsewhere(closure), inside_elsewhere(lambda: config.patch({KEY: 4})):
            config.assume_static_by_default = 6
            assert config.assume_static_by_default == 6
        assert config.assume_static_by_default == 6


def test_an_assignment_inside_ends_with_the_block_of_its_thread() -> None:
    with applied(NAME), thread_of_its_own() as other:
        block = config.patch({KEY: 4})
        with config.patch({KEY: 3}):
            other(block.__enter__)
            config.assume_static_by_default = 5
            other(lambda: block.__exit__(None, None, None))
            assert config.assume_static_by_default == 5
        assert config.assume_static_by_default is True


def test_what_is_raised_inside_goes_out_and_the_setting_comes_back() -> None:
    with applied(NAME):
        with inside_elsewhere(closure), pytest.raises(KeyError, match="mine"), config.patch({KEY: 3}):
            raise KeyError("mine")
        assert config.assume_static_by_default is True


def test_a_setting_that_there_is_not_is_refused_and_nothing_is_left() -> None:
    def error() -> tuple[type, bool]:
        block = config.patch(**{KEY: 3, "no_such_setting": 1})
        with pytest.raises((AttributeError, KeyError)) as caught:
            block.__enter__()
        with pytest.raises(AssertionError):
            block.__enter__()
        return caught.type, config.assume_static_by_default

    plain = error()
    with applied(NAME):
        assert error() == plain
        with inside_elsewhere(closure):
            assert error()[0] is plain[0]
        assert config.assume_static_by_default is True


def test_threads_see_what_is_set_in_a_block_of_another_thread() -> None:
    with applied(NAME), config.patch({KEY: 3}):
        assert Task(lambda: config.assume_static_by_default).result() == 3


def test_a_block_may_end_in_another_thread() -> None:
    with applied(NAME), thread_of_its_own() as one, thread_of_its_own() as other:
        for block in (config.patch({KEY: 3}), closure(), torch._dynamo.utils.disable_cache_limit()):
            before = getattr(config, KEY), getattr(config, LIMIT)
            one(block.__enter__)
            other(lambda block=block: block.__exit__(None, None, None))
            assert (getattr(config, KEY), getattr(config, LIMIT)) == before


@pytest.mark.skipif(RELEASE < (2, 7), reason="aliases came later")
def test_an_alias_is_the_same_setting() -> None:
    before = config.recompile_limit
    with applied(NAME), thread_of_its_own() as one, thread_of_its_own() as other:
        first, second = config.patch(cache_size_limit=31), config.patch(recompile_limit=32)
        one(first.__enter__)
        other(second.__enter__)
        one(lambda: first.__exit__(None, None, None))
        assert config.recompile_limit == config.cache_size_limit == 32
        other(lambda: second.__exit__(None, None, None))
        assert config.recompile_limit == config.cache_size_limit == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first_ends", [True, False])
def test_blocks_that_are_inside_when_fxsafe_goes_or_comes(kind: str, first_ends: bool) -> None:
    block, module, key = BLOCKS[kind]
    before = getattr(module, key)
    others = ("accumulated_" + LIMIT, "capture_scalar_outputs")
    all_before = {name: getattr(module, name) for name in (key, *others) if hasattr(module, name)}
    blocks = [block(), block()]
    with thread_of_its_own() as one, thread_of_its_own() as other:
        does = [one, other]
        ends = [lambda at=at: does[at](lambda: blocks[at].__exit__(None, None, None)) for at in (0, 1)]
        with applied(NAME):  # both begin with it, and end without
            one(blocks[0].__enter__)
            other(blocks[1].__enter__)
        ends[not first_ends]()
        ends[first_ends]()
        if kind not in ("cache-limit", "triton-ops", "cond"):  # these keep what they bring back in their frames
            assert getattr(module, key) == before
        for name, value in all_before.items():
            setattr(module, name, value)
        blocks = [block(), block()]
        one(blocks[0].__enter__)  # one begins without it, and ends with it
        with applied(NAME):
            if kind == "made-before":  # entered already, nobody knows by whom
                with pytest.raises(AssertionError):
                    other(blocks[1].__enter__)
                blocks[1] = config.patch({KEY: False})
            other(blocks[1].__enter__)
            ends[not first_ends]()
            ends[first_ends]()
            assert getattr(module, key) == before
            assert not _open()
        blocks = [block(), block()]
        with applied(NAME):
            one(blocks[0].__enter__)
        with applied(NAME):  # and one ends in the next installation
            ends[0]()
            assert getattr(module, key) == before
            assert not _open()


def _open() -> Any:
    from fxsafe.patches import config_blocks

    return any(config_blocks._blocks.stacks.values()) or config_blocks._blocks.entered


def test_the_identical_bodies_afterwards() -> None:
    kind: Any = config_module.ConfigModule
    made = config.patch({KEY: False}), config._make_closure_patcher(**{KEY: False})

    def bodies(block: Any, change: Any) -> list[Any]:
        return [type(block).__enter__.__code__, type(block).__exit__.__code__, change.__code__]

    def all_of_them() -> list[Any]:
        names = ("patch", "_make_closure_patcher", "__setattr__")
        functions = [vars(kind)[name] for name in names]
        return [*functions, *(function.__code__ for function in functions), *bodies(*made)]

    before = all_of_them()
    with applied(NAME):
        assert all(old is not new for old, new in zip(before[2:5], all_of_them()[2:5], strict=True))
        within = config.patch({KEY: False}), config._make_closure_patcher(**{KEY: False})
        first = bodies(*within)
        assert all(a is b for a, b in zip(first, bodies(*made), strict=True))
    assert all(old is new for old, new in zip(before, all_of_them(), strict=True))
    assert all(old is new for old, new in zip(bodies(*within), bodies(*made), strict=True))
    with applied(NAME):  # Dynamo guards on code objects
        assert all(a is b for a, b in zip(first, bodies(*made), strict=True))
    with within[0]:
        assert getattr(config, KEY) is False
    assert getattr(config, KEY) is True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_childs_blocks_end_as_if_it_had_never_had_other_threads() -> None:
    program(f"""
        import os, sys, threading
        import torch, torch._dynamo, fxsafe
        config = torch._dynamo.config
        inside, leave = threading.Event(), threading.Event()
        def hold():
            with config.patch({KEY}=4):
                inside.set()
                leave.wait({SOON_S})
        with fxsafe.install():
            with config.patch({KEY}=3):
                thread = threading.Thread(target=hold)
                thread.start()
                inside.wait({SOON_S})
                child = os.fork()
                if not child:
                    seen = config.{KEY}
            if not child:
                os._exit(0 if (seen, config.{KEY}) == (4, True) else 1)
            leave.set()
            thread.join()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert config.{KEY} is True
    """)


def test_functions_compiled_with_dynamic_in_threads() -> None:
    with applied(NAME):
        inside, leave = threading.Event(), threading.Event()

        def wait() -> None:
            inside.set()
            assert leave.wait(SOON_S)

        def function(x: torch.Tensor, hook: Callable[[], None]) -> torch.Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            hook()
            return y * 2

        wait = torch._dynamo.disable(wait)
        compiled = torch.compile(function, backend="eager", dynamic=True)
        compiled(torch.ones(3), torch._dynamo.disable(lambda: None))
        task = Task(lambda: compiled(torch.ones(4), wait))
        assert inside.wait(SOON_S)
        other = torch.compile(function, backend="eager", dynamic=True)
        second = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
        assert torch.equal(second(torch.ones(3)), torch.full((3,), 2.0))
        del other
        leave.set()
        assert torch.equal(task.result(), torch.full((4,), 4.0))
        assert config.assume_static_by_default is True
        assert not _open()


def test_cond_in_threads() -> None:
    def cond() -> Any:
        x = torch.ones(3)
        return torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,))

    before = config.get_config_copy()
    with applied(NAME):
        right = cond()
        assert torch.equal(right, torch.ones(3).sin())
        assert not _open()
    assert config.get_config_copy() == before


def test_dynamo_compiles_the_same_around_a_block() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with config.patch({KEY: False}):
            y = x + 1
        return y * 2

    def outcome() -> Any:
        torch._dynamo.reset()
        explained = torch._dynamo.explain(function)(torch.ones(3))
        return explained.graph_count, explained.graph_break_count, explained.op_count

    def attempt() -> Any:
        try:
            return outcome()
        except Exception as error:
            return type(error)

    plain = attempt()
    with applied(NAME):
        assert attempt() == plain
    assert config.assume_static_by_default is True


def test_the_limit_is_not_left_at_the_largest_number() -> None:
    with applied(NAME):
        overlap(torch._dynamo.utils.disable_cache_limit, lambda: None)
    assert getattr(config, LIMIT) != sys.maxsize
