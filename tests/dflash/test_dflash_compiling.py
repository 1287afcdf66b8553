from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from fxsafe.dflash.compiling import compile_here, graph_count


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "_set_lru_cache"),
    reason="before torch 2.10 Dynamo cannot be told to keep the order of variants",
)
def test_a_thread_that_looks_for_its_variant_finds_it_while_another_one_uses_it() -> None:
    torch._dynamo.reset()
    compiled = compile_here(twice, backend="eager")
    inputs = [torch.ones(size) for size in (1, 2, 3)]
    for x in inputs:
        compiled(x)
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(twice)
    front, middle, last = (entry.guard_manager for entry in entries)
    (wanted,) = (x for x in inputs if last.check({"x": x}))

    # Both threads want the variant that is looked at last. The late one starts when the early one is past the front,
    # and stays there until the early one has found the variant.
    late_in_front, early_done = threading.Event(), threading.Event()
    waits: list[bool] = []
    calls: list[Future[torch.Tensor]] = []

    def in_front(_: object) -> bool:
        if threading.current_thread().name.startswith("late"):
            late_in_front.set()
            waits.append(early_done.wait(60))
        return True

    def in_the_middle(_: object) -> bool:
        if threading.current_thread().name.startswith("early"):
            calls.append(late.submit(compiled, wanted))
            waits.append(late_in_front.wait(60))
        return True

    front.root.add_lambda_guard(in_front, ["a pause"], None)
    middle.root.add_lambda_guard(in_the_middle, ["a pause"], None)
    graphs = graph_count()
    with ThreadPoolExecutor(1, "early") as early, ThreadPoolExecutor(1, "late") as late:
        early.submit(compiled, wanted).result()
        early_done.set()
        assert torch.equal(calls[0].result(), wanted * 2)
    assert waits == [True, True]
    assert graph_count() == graphs
