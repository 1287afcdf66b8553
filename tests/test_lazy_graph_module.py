from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from locks_support import applied
from support import SOON_S, Task, X
from torch.fx import _lazy_graph_module as lazy
from torch.fx.experimental.proxy_tensor import make_fx

NAMES = ("_use_lazy_graph_module_flag", "_force_skip_lazy_graph_module_flag")


@contextmanager
def compile_elsewhere() -> Iterator[None]:
    inside, leave = threading.Event(), threading.Event()
    seen: list[type] = []

    def backend(module: Any, example_inputs: Any) -> Any:
        seen.append(lazy._get_graph_module_cls())
        inside.set()
        leave.wait(SOON_S)
        return module.forward

    task = Task(lambda: torch.compile(lambda x: x + 1, backend=backend)(X))
    assert inside.wait(SOON_S)
    try:
        yield
    finally:
        leave.set()
        task.result()
    assert seen == [lazy._LazyGraphModule]


def is_lazy() -> bool:
    return isinstance(make_fx(lambda x: x + 1)(X), lazy._LazyGraphModule)


@pytest.mark.parametrize("patches", [(), ("lazy-graph-module",)])
def test_another_threads_compile_makes_no_lazy_modules_here(patches: tuple[str, ...]) -> None:
    with applied(*patches), compile_elsewhere():
        assert is_lazy() is (not patches)
    assert not is_lazy()


def test_blocks_that_overlap_leave_nothing() -> None:
    def block(entered: threading.Event, leave: threading.Event) -> None:
        with lazy._use_lazy_graph_module(True):
            entered.set()
            leave.wait(SOON_S)

    with applied("lazy-graph-module"):
        events = [(threading.Event(), threading.Event()) for _ in range(2)]
        tasks = []
        for entered, leave in events:
            tasks.append(Task(lambda entered=entered, leave=leave: block(entered, leave)))
            assert entered.wait(SOON_S)
        for (_, leave), task in zip(events, tasks, strict=True):
            leave.set()
            task.result()
        assert not is_lazy()
    assert not is_lazy()


def test_the_setting_of_one_thread_is_as_ever() -> None:
    with applied("lazy-graph-module"), pytest.raises(ArithmeticError):
        with lazy._use_lazy_graph_module(True):
            assert is_lazy()
            with lazy._force_skip_lazy_graph_module(), lazy._use_lazy_graph_module(True):
                assert not is_lazy()
            assert is_lazy()
            raise ArithmeticError
    assert [vars(lazy)[name] for name in NAMES] == [False, False]
