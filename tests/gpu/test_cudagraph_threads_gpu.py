"""CUDA graph trees in several threads: what is recorded and replayed is right, and threads may come and go."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.cudagraph_trees as trees
from locks_support import applied
from support import Task
from torch import nn

NAMES = ("cudagraph-threads", "tracing-flag", "compile-lock")
DEVICE = torch.device("cuda:0")
TURNS = 12


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Each in a thread of its own, which all begin together."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait(60)
        return call()

    tasks = [Task(lambda call=call: run(call)) for call in calls]
    return [task.result() for task in tasks]


def chain(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).relu() * 0.5 + x


def inputs(seed: int, count: int = TURNS) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [torch.randn(64, 64, device=DEVICE, generator=generator) for _ in range(count)]


def recorded_here() -> int:
    """Graphs that this thread has recorded."""
    manager = trees.get_manager(0, create_if_none_exists=False)
    nodes = [] if manager is None else list(manager.get_roots())
    for node in nodes:
        nodes += (child for children in node.children.values() for child in children)
    return len(nodes)


def test_plain_torch_asserts_in_a_thread() -> None:
    compiled = torch.compile(chain, mode="reduce-overhead")
    compiled(torch.ones(64, 64, device=DEVICE))
    with pytest.raises(AssertionError):
        Task(lambda: torch.compile(lambda x: chain(x) + 1, mode="reduce-overhead")(inputs(0, 1)[0])).result()


@pytest.mark.parametrize("threads", [1, 3, 6])
def test_functions_of_their_own(threads: int) -> None:
    def work(seed: int) -> Any:
        def mine(x: torch.Tensor) -> torch.Tensor:
            return chain(x) + seed

        compiled = torch.compile(mine, mode="reduce-overhead")
        pairs = [(compiled(x).clone(), mine(x)) for x in inputs(seed)]
        return pairs, recorded_here()

    with applied(*NAMES):
        for pairs, recorded in at_once([lambda seed=seed: work(seed) for seed in range(threads)]):
            assert recorded >= 1
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs)


def test_one_function_for_all_threads() -> None:
    """Replayed by another thread than recorded it, a graph gives the values of that one's inputs: silent noise."""
    compiled = torch.compile(chain, mode="reduce-overhead")

    def work(seed: int) -> Any:
        return [(compiled(x).clone(), chain(x)) for x in inputs(seed, 60)], recorded_here()

    with applied(*NAMES):
        for pairs, recorded in at_once([lambda seed=seed: work(seed) for seed in range(4)]):
            assert recorded >= 1
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs)


def losses(seed: int, compiled: bool) -> tuple[list[float], int]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, device=DEVICE, generator=generator) * 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(model, mode="reduce-overhead") if compiled else model
    values = []
    for x in inputs(seed):
        loss = (step(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        values.append(loss.item())
    return values, recorded_here()


@pytest.mark.parametrize("threads", [1, 3])
def test_training(threads: int) -> None:
    expected = [losses(seed, False)[0] for seed in range(threads)]
    with applied(*NAMES):
        results = at_once([lambda seed=seed: losses(seed, True) for seed in range(threads)])
    for (values, recorded), serial in zip(results, expected, strict=True):
        assert recorded >= 2  # forward and backward, the latter by autograd's thread
        assert values == pytest.approx(serial, rel=1e-4)


def test_threads_come_and_go() -> None:
    compiled = torch.compile(chain, mode="reduce-overhead")

    def work(seed: int) -> Any:
        return all(torch.allclose(compiled(x), chain(x), atol=1e-4) for x in inputs(seed, 5))

    with applied(*NAMES):
        memory = []
        for _ in range(15):
            assert all(at_once([lambda seed=seed: work(seed) for seed in range(3)]))
            gc.collect()
            torch.cuda.synchronize()
            memory.append(torch.cuda.memory_allocated())
        assert memory[-1] <= memory[2], memory


def test_training_threads_come_and_go() -> None:
    with applied(*NAMES):
        for _ in range(6):
            at_once([lambda seed=seed: losses(seed, True) for seed in range(3)])
            torch._dynamo.reset()


def test_what_a_thread_gave_out_outlives_it() -> None:
    compiled = torch.compile(chain, mode="reduce-overhead")
    x = inputs(0, 1)[0]

    def work() -> Any:
        for _ in range(4):
            out = compiled(x)
        return out

    with applied(*NAMES):
        kept = Task(work).result()
        expected = chain(x)
        for seed in range(1, 4):
            Task(lambda seed=seed: [compiled(y).clone() for y in inputs(seed)]).result()
            torch.randn(1 << 20, device=DEVICE)
        torch.testing.assert_close(kept, expected)
        from fxsafe.patches import cudagraph_threads

        threads = cudagraph_threads._threads
        assert threads is not None
        assert len(threads._left) == 1
        del kept
        Task(lambda: work().sum().item()).result()
        assert threads._left == []


def test_a_step_of_another_thread_ends_nothing() -> None:
    """Two graphs in one call; between them another thread calls compiled code and marks a step."""
    go, done = threading.Event(), threading.Event()

    def other() -> None:
        call = torch.compile(lambda x: x + 1, mode="reduce-overhead")
        y = torch.ones(8, device=DEVICE)
        for _ in range(TURNS):
            assert go.wait(60)
            go.clear()
            call(y)
            torch.compiler.cudagraph_mark_step_begin()
            done.set()

    @torch.compiler.disable
    def hand_over() -> None:
        done.clear()
        go.set()
        assert done.wait(60)

    def two_graphs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x @ x
        hand_over()
        return first, first + x

    with applied(*NAMES):
        task = Task(other)
        compiled = torch.compile(two_graphs, mode="reduce-overhead")
        for x in inputs(0):
            first, second = compiled(x)
            torch.testing.assert_close(first, x @ x)
            torch.testing.assert_close(second, x @ x + x)
            del first, second
        task.result()


def test_backward_called_by_another_thread() -> None:
    with applied(*NAMES):
        model = nn.Linear(64, 64, device=DEVICE)
        reference = nn.Linear(64, 64, device=DEVICE)
        reference.load_state_dict(model.state_dict())
        compiled = torch.compile(model, mode="reduce-overhead")
        for x in inputs(0):
            loss = Task(lambda x=x: compiled(x).square().mean()).result()
            loss.backward()
            reference(x).square().mean().backward()
            torch.testing.assert_close(model.weight.grad, reference.weight.grad)
            model.zero_grad()
            reference.zero_grad()


def test_install_and_uninstall_between_threads() -> None:
    compiled = torch.compile(chain, mode="reduce-overhead")
    for _ in range(3):
        with applied(*NAMES):
            for pairs in at_once(
                [lambda s=s: [(compiled(x).clone(), chain(x)) for x in inputs(s, 5)] for s in range(2)]
            ):
                for ours, theirs in pairs:
                    torch.testing.assert_close(ours, theirs)
    x = inputs(9, 1)[0]
    torch.testing.assert_close(compiled(x).clone(), chain(x))
