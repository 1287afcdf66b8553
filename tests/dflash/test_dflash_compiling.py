from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import tiny
import torch
import torch._inductor.config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fxsafe.dflash.compiling import compile_here, graph_count, promise_recompile_limit, recompile_limit_here


class Sees(CustomGraphPass):
    """Notes the setting at each compile of Inductor's."""

    def __init__(self, seen: list[bool]) -> None:
        self._seen = seen

    def __call__(self, graph: torch.fx.Graph) -> None:
        self._seen.append(torch._inductor.config.deterministic)

    def uuid(self) -> None:
        return None


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_another_thread_compiles_as_many_variants_as_were_promised() -> None:
    torch._dynamo.reset()
    before, graphs = recompile_limit_here(), graph_count()
    compiled = compile_here(twice, backend="eager")

    def call(sizes: range) -> None:
        for size in sizes:
            compiled(torch.ones(size))

    try:
        promise_recompile_limit(12)  # 8 is Dynamo's own
        with ThreadPoolExecutor(1) as other:
            other.submit(call, range(1, 15)).result()
        assert graph_count() - graphs == 12
    finally:
        promise_recompile_limit(before)
        torch._dynamo.reset()


@pytest.mark.skipif(not tiny.KEEPS_ORDER, reason="before torch 2.10 Dynamo cannot keep the order of variants")
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


@pytest.mark.skipif(not hasattr(torch._inductor.config, "deterministic"), reason="before torch 2.10")
def test_inductor_chooses_by_no_clock_in_a_first_forward_or_any_backward() -> None:
    """After a first compile the setting itself is off: Dynamo puts the process's deterministic switch back."""
    seen: list[bool] = []
    patches = {"post_grad_custom_pre_pass": Sees(seen), "force_disable_caches": True}

    def one(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp().sum()

    def other(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).exp().sum()

    with torch._inductor.config.patch(patches):
        for function in (one, other):
            compile_here(function)(torch.ones(8, requires_grad=True)).backward()
    assert seen == [True] * 4
    assert not torch._inductor.config.deterministic
