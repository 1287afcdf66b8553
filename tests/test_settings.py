from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from support import Task

from fxsafe import settings

LIMIT = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
NAME = f"torch._dynamo.config.{LIMIT}"
DEFAULT = getattr(torch._dynamo.config, LIMIT)
PER_THREAD = Task(lambda: setattr(torch._dynamo.config, LIMIT, 5)).result() is None and (
    getattr(torch._dynamo.config, LIMIT) == DEFAULT
)
setattr(torch._dynamo.config, LIMIT, DEFAULT)


def here() -> Any:
    return getattr(torch._dynamo.config, LIMIT)


def there() -> Any:
    return Task(here).result()


def assign(value: int) -> None:
    setattr(torch._dynamo.config, LIMIT, value)


@pytest.mark.skipif(not PER_THREAD, reason="settings are process-wide before torch 2.12")
def test_plain_torch_keeps_an_assignment_to_its_thread() -> None:
    assert (Task(lambda: [assign(77), here()][1]).result(), there()) == (77, DEFAULT)


def test_a_setting_holds_in_every_thread_and_goes_again() -> None:
    started, go = threading.Event(), threading.Event()
    running = Task(lambda: [started.set(), go.wait(60), here()][-1])
    started.wait(60)
    with settings.everywhere({NAME: 64}):
        assert (here(), there()) == (64, 64)
        go.set()
        assert running.result() == 64, "a thread that ran before"
    assert (here(), there()) == (DEFAULT, DEFAULT)


def test_autograds_threads_and_callbacks_see_it() -> None:
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            seen.append(here())
            return g

    with settings.everywhere(**{NAME: 64}):
        Task(lambda: Looks.apply(torch.ones(1, requires_grad=True)).sum().backward()).result()
    assert seen == [64]


def test_nested_settings_may_be_undone_in_any_order() -> None:
    outer = settings.everywhere({NAME: 64})
    inner = settings.everywhere({NAME: 65})
    assert there() == 65
    if PER_THREAD:
        outer.undo()
        assert there() == 65
        inner.undo()
    else:
        inner.undo()
        assert there() == 64
        outer.undo()
    outer.undo()
    assert (here(), there()) == (DEFAULT, DEFAULT)


@pytest.mark.skipif(not PER_THREAD, reason="settings are process-wide before torch 2.12")
def test_what_a_thread_assigns_goes_before_in_that_thread() -> None:
    def work() -> Any:
        before = assign(3) or here()
        with settings.everywhere({NAME: 64}):
            over = here()
            assign(9)
            own = here(), there()
        return before, over, own, here()

    assert Task(work).result() == (3, 64, (9, 64), 3)


def test_torchs_own_patches_inside_work_and_leave_nothing() -> None:
    with settings.everywhere({NAME: 64}):
        with torch._dynamo.config.patch({LIMIT: 7}):
            assert here() == 7
        assert (here(), there()) == (64, 64)
    assert (here(), there()) == (DEFAULT, DEFAULT)


def test_hashes_of_the_configuration_follow_in_every_thread() -> None:
    config = torch._inductor.config
    other = ThreadPoolExecutor(1)
    before = config.get_hash(), other.submit(config.get_hash).result()
    with settings.everywhere({"torch._inductor.config.triton.cudagraphs": not config.triton.cudagraphs}):
        during = config.get_hash(), other.submit(config.get_hash).result()
        assert during[0] == during[1] != before[0]
    assert (config.get_hash(), other.submit(config.get_hash).result()) == before


def test_dynamo_obeys_it_in_another_thread() -> None:
    compiles = []

    def counting(graph: Any, example_inputs: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    def many() -> int:
        compiles.clear()
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: x + 1, backend=counting, dynamic=False)
        for size in range(2, 14):
            compiled(torch.ones(size))
        return len(compiles)

    assert Task(many).result() == DEFAULT
    with settings.everywhere({NAME: 10}):
        assert Task(many).result() == 10


def test_an_unknown_setting_is_refused_and_nothing_changes() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        settings.everywhere({NAME: 64, "torch._dynamo.config.no_such": 1})
    with pytest.raises(AttributeError):
        settings.everywhere({"torch.no_such.config.x": 1})
    assert (here(), there()) == (DEFAULT, DEFAULT)


def test_an_alias_sets_what_it_stands_for() -> None:
    aliases = [n for n, e in vars(torch._dynamo.config)["_config"].items() if getattr(e, "alias", None) == NAME]
    for alias in aliases:
        with settings.everywhere({f"torch._dynamo.config.{alias}": 64}):
            assert there() == 64


def test_a_carried_function_has_the_settings_of_who_carried_it() -> None:
    def work() -> Any:
        assign(21)
        with ThreadPoolExecutor(1) as pool:
            inside = pool.submit(settings.carried(here)).result()
            return inside, pool.submit(here).result()

    try:
        assert Task(work).result() == (21, DEFAULT if PER_THREAD else 21)
    finally:
        assign(DEFAULT)


def test_threads_inherit_inside_the_block_only() -> None:
    def work() -> Any:
        assign(21)
        with settings.inherited():
            with ThreadPoolExecutor(1) as pool:
                inside = there(), pool.submit(here).result()
        return inside, there()

    start = threading.Thread.start
    try:
        assert Task(work).result() == ((21, 21), DEFAULT if PER_THREAD else 21)
    finally:
        assign(DEFAULT)
    assert threading.Thread.start is start


def test_a_thread_that_inherits_is_as_it_was_once_it_runs() -> None:
    class Mine(threading.Thread):
        def run(self) -> None:
            seen.append((here(), "run" in vars(self)))

    seen: list[Any] = []

    def work() -> None:
        with settings.inherited():
            plain = Mine()
            plain.start()
            plain.join()
            assign(21)
            told = Mine()
            told.start()
            told.join()
            assert told.run.__func__ is Mine.run

    try:
        Task(work).result()
    finally:
        assign(DEFAULT)
    assert seen == [(DEFAULT, False), (21, False)]


@pytest.mark.skipif(not PER_THREAD, reason="settings are process-wide before torch 2.12")
def test_inductors_own_threads_begin_with_the_defaults() -> None:
    def work() -> Any:
        assign(21)
        from_inductor: dict[str, Any] = {"__name__": "torch._inductor.async_compile", "Thread": threading.Thread}
        exec("def starts(call):\n    t = Thread(target=call)\n    t.start()\n    t.join()", from_inductor)
        seen: list[Any] = []
        with settings.inherited():
            from_inductor["starts"](lambda: seen.append(here()))
            seen.append(there())
        return seen

    assert Task(work).result() == [DEFAULT, 21]
