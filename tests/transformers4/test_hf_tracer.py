"""``HFTracer`` of transformers 4."""

from __future__ import annotations

import contextlib
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from locks_support import applied, passes, plan_of
from support import SOON_S, Task
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, cache_utils
from transformers.models.llama import modeling_llama
from transformers.utils import fx
from transformers.utils.fx import HFTracer

import fxsafe
from fxsafe.shapes import ShapeError

NAMES = tuple(HFTracer._TORCH_METHODS_TO_PATCH)
ORIGINALS = {name: vars(torch)[name] for name in NAMES}
CLASSES = [cls.__name__ for cls in HFTracer._CLASSES_TO_PATCH if cls.__name__ in vars(modeling_llama)]
OTHERS = ("tracing-flag", "module-hooks", "dynamo-hooks")
# transformers 4.46 is older than the torch, the numpy and the Python that it meets.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def replaced() -> list[str]:
    """What the calling thread finds replaced in torch, and anybody in the module of the model."""
    here = [name for name in NAMES if getattr(torch, name) is not ORIGINALS[name]]
    return here + [name for name in CLASSES if vars(modeling_llama)[name] is not getattr(cache_utils, name)]


class Norm(nn.Module):
    """Traced through, as nothing of ``torch.nn`` is."""

    def __init__(self, during: Callable[[], Any]) -> None:
        super().__init__()
        object.__setattr__(self, "during", during)

    def forward(self, x: Any) -> Any:
        self.during()
        return x * torch.ones(x.shape[-1], device=x.device)


def model(during: Callable[[], Any] = lambda: None) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes)).eval()
    # At the end, when proxies of caches have been made, and before them.
    made.model.norm = Norm(during)
    made.model.embed_tokens = nn.Sequential(made.model.embed_tokens, Norm(during))
    return made


def trace(during: Callable[[], Any] = lambda: None, *more: str) -> list[Any]:
    """The nodes of the model's graph."""
    tracer = type("Derived", (HFTracer,), {"_TORCH_METHODS_TO_PATCH": [*NAMES, *more]}) if more else HFTracer
    names = ["input_ids", "attention_mask", "past_key_values"]
    graph = fx.symbolic_trace(model(during), names, tracer_cls=tracer).graph
    return [(n.op, getattr(n.target, "__qualname__", n.target), str(n.args), str(n.kwargs)) for n in graph.nodes]


@contextmanager
def trace_elsewhere() -> Iterator[Callable[[], list[Any]]]:
    """Another thread is inside a trace to the end of the block, or until it is told to end it; that gives its nodes."""
    inside, leave = threading.Event(), threading.Event()
    task = Task(lambda: trace(lambda: (inside.set(), leave.wait(SOON_S))))
    assert inside.wait(SOON_S)

    def end() -> list[Any]:
        leave.set()
        nodes: list[Any] = task.result()
        return nodes

    try:
        yield end
    finally:
        end()


@pytest.fixture
def put_back() -> Iterator[None]:
    yield
    for name, original in ORIGINALS.items():
        setattr(torch, name, original)
    for name in CLASSES:
        setattr(modeling_llama, name, getattr(cache_utils, name))


def overlapping(again: Callable[[], Any]) -> dict[str, Any]:
    """Two traces of which the first to begin is the first to end; what was seen, and their nodes.

    Args:
        again: called where the first has ended and the second has not.
    """
    first_in, second_in, looked, first_out = (threading.Event() for _ in range(4))
    seen: dict[str, Any] = {}

    def first_does() -> None:
        first_in.set()
        assert looked.wait(SOON_S)
        seen["first"] = replaced()

    def second_does() -> None:
        second_in.set()
        assert first_out.wait(SOON_S)
        seen["second"] = replaced()

    first = Task(lambda: trace(first_does))
    assert first_in.wait(SOON_S)
    second = Task(lambda: trace(second_does))
    assert second_in.wait(SOON_S)
    seen["others"] = replaced()
    looked.set()
    try:
        seen["nodes"] = [first.result()]
        seen["between"] = again()
    except BaseException:
        first_out.set()
        with contextlib.suppress(Exception):
            second.result()
        raise
    first_out.set()
    seen["nodes"].append(second.result())
    return seen


def test_without_it_two_traces_that_overlap_leave_what_they_replaced_and_one_fails(put_back: None) -> None:
    with applied(*OTHERS):
        with pytest.raises(RuntimeError, match="Found multiple different tracers"):
            overlapping(lambda: None)
    assert set(NAMES) <= set(replaced())


def test_two_traces_that_overlap_give_the_graphs_that_they_give_alone(put_back: None) -> None:
    alone = trace()
    assert any("Cache" in str(node[1]) for node in alone)
    with applied(*OTHERS, "hf-tracer"):
        seen = overlapping(trace)
        afterwards = replaced()
    everything = [*NAMES, *CLASSES]
    assert seen["first"] == seen["second"] == everything
    assert seen["others"] == CLASSES, "read from the module's dictionary, by all"
    assert seen["nodes"] == [alone, alone]
    assert seen["between"] == alone
    assert afterwards == []
    assert fx._CURRENT_TRACER is None
    assert "_fxsafe_current_tracer" not in vars(fx)
    assert type(torch) is types.ModuleType


def test_one_thread_gets_the_same_nodes() -> None:
    def nodes() -> list[Any]:
        seen: list[Any] = []

        def during() -> None:
            seen.append(replaced())
            if len(seen) == 1:
                seen.append(str(torch.fx.Tracer().trace(lambda x: torch.zeros(2) + x)))

        return [trace(during), trace(during, "outer", "sum"), seen, replaced()]

    plain = nodes()
    with applied("hf-tracer"):
        assert nodes() == plain
    assert plain[-1] == []


def test_a_trace_inside_a_trace_goes_on_with_its_own_tracer() -> None:
    alone, inner = trace(), []
    with applied(*OTHERS, "hf-tracer"):
        assert trace(lambda: None if inner else inner.append(Task(trace).result())) == alone
    assert inner == [alone]


def test_what_raises_leaves_nothing(put_back: None) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with applied("module-hooks", "hf-tracer"):
        with pytest.raises(KeyboardInterrupt):
            trace(stop)
        assert replaced() == []
        with pytest.raises(AttributeError, match="fxsafe_tests_unknown"):
            trace(lambda: None, "fxsafe_tests_unknown")
        assert replaced() == []
        with trace_elsewhere(), pytest.raises(KeyboardInterrupt):
            trace(stop)
        assert replaced() == []
    assert type(torch) is types.ModuleType


def test_a_model_runs_beside_a_trace_as_alone() -> None:
    ids, running = torch.tensor([[1, 2, 3]]), model()

    def run() -> Any:
        past = cache_utils.DynamicCache()
        first = running(ids, past_key_values=past, use_cache=True)
        second = running(ids, past_key_values=first.past_key_values, use_cache=True)
        compiled = torch.compile(lambda x: x + torch.arange(3) + torch.zeros(3), backend="eager", fullgraph=True)
        kinds = type(past), isinstance(past, modeling_llama.Cache), type(modeling_llama.DynamicCache())
        return (
            (*kinds, issubclass(cache_utils.StaticCache, modeling_llama.Cache), issubclass(int, modeling_llama.Cache)),
            (first.logits.tolist(), second.logits.tolist(), past.get_seq_length()),
            compiled(torch.ones(3)).tolist(),
        )

    alone = run()
    with applied(*OTHERS, "hf-tracer"):
        with trace_elsewhere():
            assert run() == alone
        assert run() == alone


def test_a_traced_model_is_loaded_beside_a_trace_as_alone() -> None:
    # Each load is a trace, by the tracer that made the graph.
    saved = pickle.dumps(fx.symbolic_trace(LlamaForCausalLM(model().config).eval(), ["input_ids", "attention_mask"]))
    ids = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}

    def load() -> Any:
        loaded = pickle.loads(saved)
        return loaded.code, loaded(**ids)["logits"].tolist()

    alone = load()
    with applied(*OTHERS, "hf-tracer"):
        with trace_elsewhere():
            assert load() == alone
        assert load() == alone
        assert replaced() == []


def test_the_patch_may_come_and_go_in_the_middle_of_traces() -> None:
    edits = plan_of("hf-tracer").edits
    alone = trace()

    def come() -> None:
        for edit in edits:
            edit.apply()

    def go() -> None:
        for edit in reversed(edits):
            assert edit.undo()

    with applied("tracing-flag", "module-hooks"):
        for first, then in ((lambda: None, come), (come, go)):
            first()
            with trace_elsewhere() as end:
                then()
                assert end() == alone
            assert replaced() == []
            go()
        assert trace() == alone
    assert "_fxsafe_current_tracer" not in vars(fx)


FORK = """
    import os, types
    from transformers.utils.fx import HFTracer
    inside, leave = threading.Event(), threading.Event()
    def root(x):
        inside.set()
        leave.wait(60)
        return x
    before = torch.zeros
    def trace():
        HFTracer().trace(root, dummy_inputs={"x": torch.ones(3)})
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
    passes(FORK, *OTHERS, "hf-tracer")


LATER = """
    import fxsafe
    with fxsafe.install():
        import transformers.utils.fx
        status = {record["name"]: record["status"] for record in fxsafe.info()}
        assert status["hf-tracer"] == "active", status
"""


def test_transformers_may_be_imported_later() -> None:
    passes(LATER)


def test_the_gate_refuses_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(plan_of("hf-tracer").edits) == 4

    def trace(self: Any, root: Any, concrete_args: Any = None, more: Any = None) -> Any:
        return setattr(torch, self._TORCH_METHODS_TO_PATCH, more)

    trace.__module__ = HFTracer.__module__
    for change in (
        lambda m: m.setattr(HFTracer, "trace", trace),
        lambda m: m.setattr(HFTracer, "trace", HFTracer.path_of_module),
        lambda m: m.delattr(HFTracer, "_TORCH_METHODS_TO_PATCH"),
        lambda m: m.delattr(HFTracer, "_CLASSES_TO_PATCH"),
        lambda m: m.delattr(fx, "HFCacheProxy"),
        lambda m: m.delattr(fx, "HFTracer"),
    ):
        with monkeypatch.context() as changed:
            change(changed)
            with pytest.raises(ShapeError):
                plan_of("hf-tracer")
    assert not fxsafe.is_installed()
