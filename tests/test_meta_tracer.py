from __future__ import annotations

import contextlib
import inspect
import pickle
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.fx
from locks_support import applied, fails, passes, plan_of
from support import SOON_S, Task
from torch import nn
from torch.fx.experimental.meta_tracer import MetaTracer, symbolic_trace

import fxsafe
from fxsafe.shapes import ShapeError

NAMES = tuple(MetaTracer._TORCH_METHODS_TO_PATCH)
ORIGINALS = {name: vars(torch)[name] for name in NAMES}
# What else goes wrong beside a trace, and is not what is looked at here.
OTHERS = ("tracing-flag", "module-hooks", "dynamo-hooks")


def replaced() -> list[str]:
    """Names under which the calling thread does not find torch's own."""
    return [name for name in NAMES if getattr(torch, name) is not ORIGINALS[name]]


class Mask(nn.Module):
    def __init__(self, during: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        object.__setattr__(self, "during", during)

    def forward(self, x: torch.Tensor, n: Any) -> Any:  # [b, 4], a number
        self.during()
        y = self.lin(x) + torch.full_like(x, 2.0) + torch.ones(x.shape[0], 1)
        return y, torch.zeros(n, device=x.device), torch.arange(n), torch.eye(n)


def trace(during: Callable[[], Any] = lambda: None, tracer: Any = None) -> list[Any]:
    """The nodes of a graph, with the shapes that the tracer has found."""
    tracer = tracer or MetaTracer()
    metas = {"x": torch.empty(2, 4, device="meta"), "n": 3}
    found: dict[str, Any] = {}
    proxy = tracer.create_proxy

    def create_proxy(*args: Any, **kwargs: Any) -> Any:
        made = proxy(*args, **kwargs)
        found[made.node.name] = getattr(getattr(made, "_tensor_meta", None), "shape", None)
        return made

    tracer.create_proxy = create_proxy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = tracer.trace(Mask(during), metas)
    # Inside another trace the target is what that one has put there.
    targets = [(inspect.unwrap(n.target), hasattr(n.target, "__wrapped__")) for n in graph.nodes]
    return [(t, n.op, str(n.args), str(n.kwargs), found.get(n.name)) for t, n in zip(targets, graph.nodes, strict=True)]


@contextmanager
def meta_trace_elsewhere() -> Iterator[Callable[[], None]]:
    """Another thread is inside a ``MetaTracer``'s trace to the end of the block, or until it is told to end it."""
    inside, leave = threading.Event(), threading.Event()
    task = Task(lambda: trace(lambda: (inside.set(), leave.wait(SOON_S))))
    assert inside.wait(SOON_S)

    def end() -> None:
        leave.set()
        task.result()

    try:
        yield end
    finally:
        end()


@pytest.fixture
def put_back() -> Iterator[None]:
    yield
    for name, original in ORIGINALS.items():
        setattr(torch, name, original)


@pytest.mark.parametrize("patched", [False, True])
def test_two_traces_that_overlap_leave_nothing_and_show_it_to_nobody(patched: bool, put_back: None) -> None:
    alone = trace()
    first_in, second_in, others_looked, first_out = (threading.Event() for _ in range(4))
    seen: dict[str, Any] = {}

    def first() -> Any:
        def during() -> None:
            first_in.set()
            assert others_looked.wait(SOON_S)
            seen["first"] = replaced()

        try:
            return trace(during)
        finally:
            first_out.set()

    def second() -> Any:
        def during() -> None:
            second_in.set()
            assert first_out.wait(SOON_S)
            seen["second"] = replaced()

        return trace(during)

    with applied(*OTHERS, *["meta-tracer"] * patched):
        one = Task(first)
        assert first_in.wait(SOON_S)
        two = Task(second)
        assert second_in.wait(SOON_S)
        seen["others"] = replaced()
        others_looked.set()
        graphs = []
        for task in (one, two):
            # Without the patch the second finds the originals, which up to torch 2.8 refuse what it gives them.
            with contextlib.nullcontext() if patched else contextlib.suppress(TypeError):
                graphs.append(task.result())
        seen["afterwards"] = replaced()
    if patched:
        assert seen == {"first": list(NAMES), "second": list(NAMES), "others": [], "afterwards": []}
        assert graphs == [alone, alone]
        assert type(torch) is types.ModuleType
    else:
        assert seen["others"] == seen["afterwards"] == list(NAMES)


def tracer_of(*more: str) -> type[MetaTracer]:
    return type("Derived", (MetaTracer,), {"_TORCH_METHODS_TO_PATCH": [*NAMES, *more]})


@pytest.mark.parametrize("tracer", [MetaTracer, tracer_of("tensor", "finfo")])
def test_one_thread_gets_the_same_nodes(tracer: type[MetaTracer]) -> None:
    def nodes() -> list[Any]:
        seen: list[Any] = []

        def during() -> None:
            names = tracer._TORCH_METHODS_TO_PATCH
            seen.append([getattr(torch, name).__code__.co_filename for name in names])
            outer = torch.zeros
            if len(seen) == 1:  # a trace inside the trace, by another tracer
                seen.append(trace(during, tracer_of("tensor")()))
            assert torch.zeros is outer

        return [trace(during, tracer()), seen]

    plain = nodes()
    with applied("meta-tracer"):
        assert nodes() == plain
    assert any(node[0] == (torch.zeros, False) for node in plain[0])


def test_what_raises_leaves_nothing(put_back: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "fxsafe_tests_unhashable", [], raising=False)
    with applied("meta-tracer"):
        with pytest.raises(KeyboardInterrupt):
            trace(stop)
        with pytest.raises(AssertionError):
            symbolic_trace(Mask(), meta_args=None)
        with pytest.raises(AttributeError, match="fxsafe_tests_unknown"):
            trace(tracer=tracer_of("fxsafe_tests_unknown")())
        with pytest.raises(TypeError, match="unhashable"):  # when it has replaced the others already
            trace(tracer=tracer_of("fxsafe_tests_unhashable")())
        with meta_trace_elsewhere(), pytest.raises(KeyboardInterrupt):
            trace(stop)
        assert replaced() == []
    assert type(torch) is types.ModuleType


# Other threads.


def uses(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(3) + torch.arange(3) + torch.full_like(x, 1.0)


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x + torch.zeros(3)
    torch._dynamo.graph_break()
    return y * torch.ones(3)


@pytest.mark.parametrize("ends", ["never", "before the guards"])
@pytest.mark.parametrize("function", [uses, breaks])
def test_a_compile_beside_a_trace_gives_the_graph_that_it_gives_alone(function: Any, ends: str) -> None:
    def graphs(between: Callable[[], None] = lambda: None) -> tuple[list[Any], Callable[[], Any]]:
        seen: list[Any] = []

        def backend(module: Any, _: Any) -> Any:
            between()
            seen.append([(n.op, n.target, str(n.args)) for n in module.graph.nodes])
            return module.forward

        again = types.FunctionType(function.__code__.replace(), globals())
        compiled = torch.compile(again, backend=backend, fullgraph=function is uses)
        compiled(torch.ones(3))
        return seen, lambda: compiled(torch.ones(3))

    alone, _ = graphs()
    with applied(*OTHERS, "meta-tracer"):
        with meta_trace_elsewhere() as end:
            beside, call = graphs(end if ends == "before the guards" else lambda: None)
            call()
        assert beside == alone
        call()
        assert len(beside) == len(alone), "compiled again when the trace had ended"
        afterwards, call = graphs()
        with meta_trace_elsewhere():
            call()
        assert afterwards == alone


def sums(x: Any) -> Any:
    return x + torch.full_like(x, 2)


def test_other_threads_have_the_identical_functions_beside_a_trace() -> None:
    def results() -> list[Any]:
        module = torch.fx.symbolic_trace(sums)
        return [
            [(n.op, n.target) for n in module.graph.nodes],
            module.code,
            [pickle.dumps(getattr(torch, name)) for name in NAMES],
            torch.jit.script(uses).code,
            replaced(),
            Task(replaced).result(),
        ]

    with applied(*OTHERS, "meta-tracer"):
        alone = results()
        with meta_trace_elsewhere():
            assert results() == alone
            assert torch.zeros(2).tolist() == [0.0, 0.0]


FIRST_COMPILE = """
    from torch.fx.experimental.meta_tracer import symbolic_trace
    inside, leave = threading.Event(), threading.Event()
    def root(x):
        inside.set()
        leave.wait(60)
        return x
    def zeros(x):
        return x + torch.zeros(3)
    def ones(x):
        return x + torch.ones(3)
    def compiles(function):
        try:
            torch.compile(function, backend="eager", fullgraph=True)(torch.ones(3))
        except Exception as error:
            raise SystemExit(f"{function.__name__} is unknown to Dynamo: {error}")
    thread = threading.Thread(target=symbolic_trace, args=(root, {"x": torch.ones(3, device="meta")}))
    thread.start()
    assert inside.wait(60)
    beside = threading.Thread(target=lambda: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3)))
    beside.start()
    beside.join()
    leave.set()
    thread.join()
    compiles(zeros)
    compiles(ones)
"""


def test_the_first_compile_of_a_process_may_run_beside_a_trace() -> None:
    # Not those that import Dynamo, which makes its table then. device-guard: torch 2.10 and 2.11 die without a GPU.
    names = ("tracing-flag", "device-guard")
    fails(FIRST_COMPILE, "zeros is unknown to Dynamo", *names)
    passes(FIRST_COMPILE, *names, "meta-tracer")


def test_what_others_write_beside_a_trace_is_everybodys() -> None:
    def theirs() -> None: ...

    with applied("module-hooks", "meta-tracer"):
        with meta_trace_elsewhere() as end:
            # As tracers do that are not torch's and replace the same names.
            torch.zeros = theirs  # type: ignore[assignment]
            try:
                assert Task(lambda: torch.zeros).result() is theirs
                end()
                assert torch.zeros is theirs
            finally:
                torch.zeros = ORIGINALS["zeros"]
        with meta_trace_elsewhere():
            del torch.eye
            try:
                assert not hasattr(torch, "eye")
                with pytest.raises(AttributeError):
                    del torch.eye
            finally:
                torch.eye = ORIGINALS["eye"]
            assert torch.eye is ORIGINALS["eye"]


def test_the_patch_may_come_and_go_in_the_middle_of_traces() -> None:
    (edit,) = plan_of("meta-tracer").edits
    alone = trace()
    with applied("module-hooks"):
        for first, then in ((lambda: None, edit.apply), (edit.apply, edit.undo)):
            first()
            with meta_trace_elsewhere():
                then()
                trace()
            assert replaced() == []
            edit.undo()
        assert trace() == alone


FORK = """
    import os, types
    from torch.fx.experimental.meta_tracer import symbolic_trace
    inside, leave = threading.Event(), threading.Event()
    def root(x):
        inside.set()
        leave.wait(60)
        return x
    before = torch.zeros
    def trace():
        symbolic_trace(root, {"x": torch.ones(3, device="meta")})
    thread = threading.Thread(target=trace)
    thread.start()
    assert inside.wait(60)
    assert type(torch) is not types.ModuleType
    child = os.fork()
    if not child:
        leave.set()
        untouched = type(torch) is types.ModuleType and torch.zeros is before
        trace()
        os._exit(not (untouched and type(torch) is types.ModuleType))
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_child_has_no_trace_of_other_threads() -> None:
    passes(FORK, *OTHERS, "meta-tracer")


def test_the_gate_refuses_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of("meta-tracer").edits

    def trace(self: Any, root: Any, meta_args: Any, concrete_args: Any = None, more: Any = None) -> Any:
        return setattr(torch, self._TORCH_METHODS_TO_PATCH, more)

    trace.__module__ = MetaTracer.__module__
    with monkeypatch.context() as changed:
        changed.setattr(MetaTracer, "trace", trace)
        with pytest.raises(ShapeError, match="other parameters"):
            plan_of("meta-tracer")
    with monkeypatch.context() as changed:
        changed.setattr(MetaTracer, "trace", MetaTracer.path_of_module)
        with pytest.raises(ShapeError):
            plan_of("meta-tracer")
    with monkeypatch.context() as changed:
        changed.delattr(MetaTracer, "_TORCH_METHODS_TO_PATCH")
        with pytest.raises(ShapeError, match="is no list"):
            plan_of("meta-tracer")
    assert not fxsafe.is_installed()
