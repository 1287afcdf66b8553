"""F2: what a trace replaces, it replaces for its own thread only."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import linecache
import math
import pickle
import re
import sys
import types
import weakref
from pathlib import Path

import hook_faults
import pytest
import torch
import torch.fx._symbolic_trace as st
from hook_faults import FAULTS, Stop, Thread, free, held, hooks, leaf, nodes
from support import python, trace_elsewhere
from torch import nn

import fxsafe
from fxsafe.patches import module_hooks
from fxsafe.patches._slots import MISSING, Places, _Slot, is_dispatcher, original_of, places
from fxsafe.patches.base import ShapeError

torch.fx.wrap("len")
_PROGRAM = str(Path(hook_faults.__file__))
_SYMPTOMS = {
    "eager_module": "module is not installed as a submodule",
    "overlapping_modules": "Module.__call__ is another object",
    "overlapping_wrapped_functions": "leaf is another object",
    "overlapping_wrapped_methods": "Tensor.__getitem__ is another object",
    "overlapping_autowraps": "plain_leaf is another object",
    "overlapping_nested_tracers": "module is not installed as a submodule",
    "overlapping_overriding_tracers": "Module.__call__ is another object",
    "overlapping_bare_patchers": "plain_leaf is another object",
    "an_exception_ends_the_first": "leaf is another object",
    "compile_beside_trace": "the trace gave",
    "load_beside_eager_module": "module is not installed as a submodule",
    "two_loads_meet": "compute (4.0, 4.0)",
    "pickle_beside_trace": "The object provided is from",
    "targets_beside_trace": "",
    "constants_get_their_own_numbers": "_tensor_constant3",
    "fork_beside_trace": "the child counts",
}


def _outcome(name: str, which: str) -> list[str]:
    done = python(_PROGRAM, name, which)
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    assert lines, f"no outcome\n{done.stdout}\n{done.stderr}"
    outcome: list[str] = json.loads(lines[-1].removeprefix("OUTCOME "))
    return outcome


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_shows_without_the_patch(name):
    assert _SYMPTOMS[name] in " | ".join(_outcome(name, "without") or ["nothing went wrong"])
    assert _outcome(name, "without") != []


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_gone_with_it(name):
    assert _outcome(name, "with") == []


# One thread: nothing differs.


class Branchy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = hook_faults.Net(free())
        self.register_buffer("buffer", torch.ones(4))
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, x, *rest, flag: bool = True, **more):
        y = self.inner(self.net(x)) + self.buffer + torch.ones(4) + torch.zeros(1)
        return {"y": leaf(y), "n": [math.sqrt(x.size(0)), len(x)], "t": (y[0], self.net.scale)}


_MODELS = {
    "net": lambda: hook_faults.Net(free()),
    "branchy": Branchy,
    "transformer": lambda: nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 4)),
    "function": lambda: hook_faults.traced_by(free()),
    "traced again": lambda: torch.fx.symbolic_trace(Branchy()),
}


class StackTraces(torch.fx.Tracer):
    def __init__(self):
        super().__init__(param_shapes_constant=True)
        self.record_stack_traces = True


def _comparable(text: str) -> str:
    """A stack trace without what counts up; where torch records whole stacks (2.5), the traced code's part of it.

    Where it records its own frames too (2.8), ours is among them; see docs/limits.md.
    """
    text = re.sub(r"<eval_with_key>\.\d+", "", text)
    text = re.sub(r' *File "[^"]*_symbolic_trace\.py", line \d+, in dispatcher\n.*\n', "", text)
    if "_pytest" in text:
        return str(re.findall(r'File "([^"]+)", line (\d+), in (forward|body)\b', text))
    return text


@pytest.mark.parametrize("tracer", [torch.fx.Tracer, StackTraces])
@pytest.mark.parametrize("name", _MODELS)
def test_one_thread_gets_the_same_graph(name, tracer):
    def everything():
        t = tracer()
        graph = t.trace(_MODELS[name]())  # a new one each time: constants are stored on it
        metas = [{k: _comparable(str(v)) for k, v in n.meta.items()} for n in graph.nodes]
        return nodes(graph), metas, str(graph.python_code("self").src), t.node_name_to_scope, t.scope.module_path

    plain = everything()
    with hooks():
        assert everything() == plain
    assert everything() == plain


def test_ones_own_trace_sees_its_own_hooks_and_patcher():
    seen = {}

    def body(x):
        seen["patcher"] = st.CURRENT_PATCHER
        seen["names"] = {record.fn_name for record in st.CURRENT_PATCHER.patches_made}
        return leaf(x)

    with hooks():
        torch.fx.symbolic_trace(body)
        assert isinstance(seen["patcher"], st._Patcher)
        assert {"__call__", "__getattr__", "leaf", "sqrt"} <= seen["names"]
        assert st.CURRENT_PATCHER is None


def test_a_marker_by_its_plain_name_is_honoured_and_names_stack():
    def marked(x):
        return x

    marked.__dict__["__fx_already_patched"] = True
    space = {"marked": marked, "free": original_of(leaf)}
    with hooks(), st._Patcher() as patcher:
        patcher.patch(space, "marked", lambda x: None)
        assert space["marked"] is marked
        patcher.patch(space, "free", lambda x: "one")
        patcher.patch(space, "free", lambda x: "two")
        assert space["free"](1) == "two"
        with pytest.raises(KeyError):
            patcher.patch(space, "absent", lambda x: None)
        assert patcher.revert_all_patches() is patcher.patches_made
        assert space["free"] is leaf
        patcher.reapply_all_patches()
        assert space["free"](1) == "two"
    assert space == {"marked": marked, "free": leaf}


# Other threads.


def test_nothing_is_patched_while_nobody_traces():
    before = held()
    with hooks():
        assert held() == before
        torch.fx.symbolic_trace(hook_faults.Net(free()))
        assert held() == before
        assert len(places) == 0


def test_four_threads_get_the_graph_of_one():
    def work():
        return [nodes(torch.fx.symbolic_trace(make()).graph) for make in _MODELS.values()]

    plain = work()
    before, interval = held(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with hooks():
            threads = [Thread(lambda: [work() for _ in range(5)]) for _ in range(4)]
            results = [thread.result() for thread in threads]
    finally:
        sys.setswitchinterval(interval)
    assert results == [[plain] * 5] * 4
    assert held() == before


def _graphs(function, results):
    """Compiles ``function`` under a new identity; appends the graph that Dynamo makes."""

    def backend(gm, inputs):
        results.append(nodes(gm.graph) + [str(n.meta.get("nn_module_stack")) for n in gm.graph.nodes])
        return gm.forward

    fresh = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    return torch.compile(fresh, backend=backend, fullgraph=True)


class CallsSuper(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def __call__(self, *args):
        return super().__call__(*args)

    def __getattr__(self, name):
        return super().__getattr__(name)

    def forward(self, x):
        return self.lin(x)


_branchy, _calls_super, _gm = (
    hook_faults.Net(free()),
    CallsSuper(),
    torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4))),
)
_branchy.stop = lambda: None
_COMPILED = {
    "module": lambda x: _branchy(x),
    "super": lambda x: _calls_super(x),
    "graph module": lambda x: _gm(x),
    "call": lambda x: nn.Module.__call__(_gm, x),
    "math": lambda x: x * math.sqrt(x.shape[0]),
    "wrapped": lambda x: hook_faults.leaf(x),
}


@pytest.mark.parametrize("name", _COMPILED)
def test_a_compile_beside_a_trace_gives_the_graph_that_it_gives_alone(name):
    x, alone, beside = torch.ones(3, 4), [], []
    with hooks():
        expected = _graphs(_COMPILED[name], alone)(x)
        warm = _graphs(_COMPILED[name], beside)
        for _ in range(12):  # more than Dynamo's limit of recompilations
            stop = Stop()
            trace = Thread(lambda stop=stop: torch.fx.symbolic_trace(hook_faults.traced_by(stop)))
            stop.arrived()
            assert torch.equal(warm(x), expected)
            stop.go()
            trace.result()
            assert torch.equal(warm(x), expected)
    assert len(alone) == 1
    # What guards on a patched place is compiled once for each of the two objects that it can hold.
    assert 1 <= len(beside) <= 2
    assert all(graph == alone[0] for graph in beside)
    torch._dynamo.reset()


def test_someone_elses_patch_over_a_dispatcher_stays():
    before = held()
    with hooks():
        stop = Stop()
        trace = Thread(lambda: nodes(torch.fx.symbolic_trace(hook_faults.Net(stop)).graph))
        stop.arrived()
        below = vars(nn.Module)["__call__"]
        assert is_dispatcher(below)

        def theirs(module, *args, **kwargs):
            return below(module, *args, **kwargs)

        nn.Module.__call__ = theirs
        try:
            with_theirs = nodes(torch.fx.symbolic_trace(hook_faults.Net(free())).graph)
            stop.go()
            assert [n[:2] for n in trace.result()] == [n[:2] for n in with_theirs]
            assert vars(nn.Module)["__call__"] is theirs
            assert nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)
        finally:
            nn.Module.__call__ = below  # what they saved: a dispatcher that is out of use by now
        assert nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)
        torch.fx.symbolic_trace(hook_faults.Net(free()))  # the next trace puts the original back
    assert held() == before


def lines_of_patching():
    """Code and line, but for the lines of with-statements: on the way out of one a real Ctrl-C cannot come in front of
    the call of ``__exit__``, and one from a trace function can.
    """
    codes = [f.__code__ for f in (Places.put, Places._open, Places._reopen, _Slot.push)]
    lines = {(code, line) for code in codes for _, _, line in code.co_lines() if line and line > code.co_firstlineno}
    return [
        (code, line)
        for code, line in lines
        if not linecache.getline(code.co_filename, line).lstrip().startswith("with ")
    ]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("time", [1, 4])
def test_an_interrupt_in_the_middle_of_patching_leaves_nothing(time, fresh):
    interrupted = 0
    with hooks():
        before = held()
        for where in sorted(lines_of_patching(), key=str):
            seen = 0
            if fresh:
                places._closed.clear()

            def interrupt(frame, event, _, where=where):
                nonlocal seen, interrupted
                if event == "line" and (frame.f_code, frame.f_lineno) == where:
                    seen += 1
                    if seen == time:
                        interrupted += 1
                        raise KeyboardInterrupt
                return interrupt

            previous = sys.gettrace()
            sys.settrace(interrupt)
            try:
                torch.fx.symbolic_trace(hook_faults.Net(free()))
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(previous)
            assert held() == before
            assert len(places) == 0
            assert not places.lock._is_owned()
    assert interrupted >= 15


def test_a_compile_inside_a_compile_inside_a_trace_puts_the_hooks_in_once():
    inner = torch.compile(lambda x: x + 1, backend="eager")
    within = []

    def backend(module, _):
        assert torch.equal(inner(torch.ones(2)), torch.full((2,), 2.0))
        within.append((inspect.getattr_static(nn.Module, "__call__"), math.sqrt))
        return module.forward

    outer = torch.compile(lambda x: x * 2, backend=backend)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x):
            return self.lin(x) + outer(torch.ones(2))

    before, there = held(), (inspect.getattr_static(nn.Module, "__call__"), math.sqrt)
    with fxsafe.install("always-false"):
        graph = torch.fx.symbolic_trace(Net()).graph
        assert held() == before
        assert nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)
    assert [node.name for node in graph.nodes] == ["x", "lin", "_tensor_constant0", "add", "output"]
    assert within == [there]  # the rest of the outer compile sees none of the trace's hooks
    assert held() == before
    torch._dynamo.reset()


def test_what_is_put_back_twice_takes_nothing_from_another_threads_trace():
    stop = Stop()

    class Net(nn.Module):
        def forward(self, x):
            stop()
            return x * math.sqrt(x.shape[0])

    with hooks():
        right = nodes(torch.fx.symbolic_trace(hook_faults.Net(free())).graph)
        tracing = Thread(lambda: nodes(torch.fx.symbolic_trace(Net()).graph))
        stop.arrived()
        with st._new_patcher() as patcher:
            st._autowrap_check(patcher, vars(math), {id(original_of(math.sqrt))})
            assert [record.fn_name for record in patcher.patches_made] == ["sqrt"]
            patcher.revert_all_patches()
            patcher.revert_all_patches()
        stop.go()
        traced = tracing.result()
        assert nodes(torch.fx.symbolic_trace(hook_faults.Net(free())).graph) == right
    assert [node[1] for node in traced] == ["x", "getattr_1", "getitem", "sqrt", "mul", "output"]


def test_a_patcher_may_be_left_in_another_thread():
    space = {"f": leaf}
    with hooks():
        patcher = st._Patcher()
        patcher.patch(space, "f", lambda x: "mine")
        assert space["f"](1) == "mine"
        assert Thread(lambda: space["f"](1)).result() == 42
        assert Thread(lambda: patcher.__exit__(None, None, None)).result() is None
    assert space == {"f": leaf}


def test_a_bare_patcher_may_be_open_when_the_patch_comes_and_when_it_goes():
    space, other = {"f": leaf}, {"f": leaf}
    with st._Patcher() as patcher:
        patcher.patch(space, "f", lambda x: "before")
        with hooks():
            patcher.patch(other, "f", lambda x: "between")
            assert (space["f"](1), other["f"](1)) == ("before", "between")
            patcher.revert_all_patches()
            assert (space, other) == ({"f": leaf}, {"f": leaf})
            patcher.reapply_all_patches()
        assert (space["f"](1), other["f"](1)) == ("before", "between")
    assert (space, other) == ({"f": leaf}, {"f": leaf})


# Slots.


class Meta(type):
    def __setattr__(cls, name, value):
        raise AssertionError("user code under the lock")


class Base(metaclass=Meta):
    constant = 3

    @staticmethod
    def static(x):
        return ("static", x)

    def method(self, x):
        return ("method", x)


class Derived(Base):
    pass


@pytest.mark.parametrize(
    ("owner", "name", "use"),
    [
        (Base, "static", lambda: Base().static(1)),
        (Base, "constant", lambda: value() if callable(value := Base().constant) else value),
        (Base, "method", lambda: Base().method(1)),
        (Derived, "method", lambda: Derived().method(1)),
    ],
)
def test_attributes_of_any_kind_dispatch_and_come_back(owner, name, use):
    where = Places()
    before, plain = vars(owner).get(name, MISSING), use()

    def new(*args):
        return "patched"

    where.put(owner, name, new, getattr(owner, name))
    try:
        assert use() == "patched"
        assert Thread(use).result() == plain
    finally:
        where.take(owner, name, new)
    assert vars(owner).get(name, MISSING) is before
    assert len(where) == 0


def test_a_dispatcher_looks_like_what_it_stands_for():
    where, space = Places(), {"leaf": leaf}
    where.put(space, "leaf", lambda x: "mine", leaf)
    dispatcher = space["leaf"]
    assert (dispatcher.__name__, dispatcher.__module__, dispatcher.__qualname__) == ("leaf", leaf.__module__, "leaf")
    assert inspect.signature(dispatcher) == inspect.signature(leaf)
    assert dispatcher.__globals__ is leaf.__globals__
    assert original_of(dispatcher) is leaf

    def wrapper():
        return dispatcher

    wrapper.__dict__.update(dispatcher.__dict__)  # as functools.wraps does
    assert not is_dispatcher(wrapper)


@pytest.mark.parametrize("leaves", ["before the trace ends", "after it"])
def test_a_module_that_left_sys_modules_is_not_kept_alive(leaves):
    where = Places()

    def patched(name):
        module = sys.modules[name] = types.ModuleType(name)
        module.leaf, module.content = leaf, nn.Linear(1, 1)
        where.put(vars(module), "leaf", len, leaf)
        return module

    module = patched("a_module_of_a_moment")
    content = weakref.ref(module.content)
    if leaves == "after it":
        where.take(vars(module), "leaf", len)
        del sys.modules[module.__name__]
    else:
        del sys.modules[module.__name__]
        where.take(vars(module), "leaf", len)
    assert module.leaf is leaf
    del module
    other = patched("another_module")
    where.take(vars(other), "leaf", len)
    del sys.modules[other.__name__]
    gc.collect()
    assert content() is None


def test_a_compiled_region_that_makes_a_tracer_compiles_as_many_frames():
    def region(x):
        torch.fx.Tracer()
        return x + 1

    def frames():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.compile(region, backend="eager")(torch.ones(2))
        return dict(torch._dynamo.utils.counters["frames"])

    alone = frames()
    with hooks():
        assert frames() == alone
    torch._dynamo.reset()


def test_the_gate_refuses_another_shape(monkeypatch):
    modules = {name: sys.modules[name] for name in module_hooks.PATCH.modules}

    def revert_all_patches(self, how):
        return how

    revert_all_patches.__module__ = st.__name__
    monkeypatch.setattr(st._Patcher, "revert_all_patches", revert_all_patches)
    with pytest.raises(ShapeError, match=r"revert_all_patches has an unknown shape: \(self, how\)"):
        module_hooks.PATCH.plan(modules)


# Classes and objects in patched places.


class Config:
    kind = 3

    def __init__(self, value=2):
        self.value = value

    @classmethod
    def make(cls):
        return cls(1)


class Special(Config):
    pass


@functools.lru_cache
def cached(n):
    return n + 1


packet = torch.ops.aten.relu
module_leaf = nn.Linear(2, 2)
for _name in ("Config", "cached", "packet", "module_leaf", "int"):
    torch.fx.wrap(_name)


def _uses_of_what_is_wrapped():
    class Sub(Config):
        def __init__(self):
            Config.__init__(self, 5)

    Config.count = getattr(Config, "count", 0) + 1
    return {
        "isinstance": (isinstance(Special(), Config), isinstance(3, Config), isinstance(3, (str, int))),
        "issubclass": (issubclass(Special, Config), issubclass(Config, Config), issubclass(Config, object)),
        "class": (Sub().value, Sub.__mro__[1:]),
        "attributes": (Config.kind, Config.make().value, Config.__name__, Config.__class__, inspect.isclass(Config)),
        "stored": vars(original_of(Config)).get("count"),
        "equal": (type(Config()) == Config, {original_of(Config): 1}[Config], str(Config), repr(Config)),  # noqa: E721
        "union": (isinstance(Config(), Config | None), isinstance(None, None | Config)),
        "pickled": pickle.loads(pickle.dumps(Config)) == Config,
        "cached": (cached(1), cached.cache_info().maxsize, cached.__wrapped__(1)),
        "packet": (packet.default(torch.ones(1)).item(), packet(torch.ones(1)).item()),
        "module": (module_leaf.weight.shape, isinstance(module_leaf, nn.Module), module_leaf(torch.ones(2)).shape),
        "weak": weakref.ref(Config)() == Config,
    }


def test_a_wrapped_class_or_object_is_itself_beside_a_trace():
    before = Config, cached, packet, module_leaf
    Config.count = 0
    alone = _uses_of_what_is_wrapped()
    del Config.count
    with hooks():
        with trace_elsewhere():
            assert all(map(is_dispatcher, (Config, cached, packet, module_leaf, int)))
            assert _uses_of_what_is_wrapped() == alone
            del Config.count
            graph = torch.fx.Graph()
            assert graph.call_function(Config).target is before[0]
        assert (Config, cached, packet, module_leaf) == before
        assert "int" not in globals()


def test_in_ones_own_trace_a_wrapped_class_is_torchs_function():
    def look(x):
        seen.append((Config.kind, isinstance(Config, types.FunctionType), hasattr(Config, "make") and callable(Config)))
        with pytest.raises(TypeError) as error:
            isinstance(x, Config)
        seen.append(str(error.value))
        return Config(x)

    results = []
    for patched in (False, True):
        seen = []
        with hooks() if patched else contextlib.nullcontext():
            graph = torch.fx.symbolic_trace(look).graph
        results.append((seen, nodes(graph)))
    assert results[0] == results[1]


def test_a_modules_getattr_takes_its_name_by_keyword():
    with hooks(), trace_elsewhere():
        assert nn.Module.__getattr__(module_leaf, name="weight") is module_leaf.weight
