"""Programs in which threads' traces meet, one exact interleaving each.

Run as ``python tests/hook_faults.py NAME with|without``: prints what went wrong as a JSON list, empty if nothing did.
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import sqrt
from typing import Any

import torch
import torch.fx
import torch.fx._symbolic_trace as st
import torch.nn.functional as F
from torch import nn

import fxsafe

SOON_S = 60
HOOKS = ("module-hooks", "dynamo-hooks")


@contextmanager
def hooks(wanted: bool = True) -> Iterator[None]:
    """fxsafe with or without the patches under test; always with the others."""
    os.environ["FXSAFE_DISABLE"] = "" if wanted else ",".join(HOOKS)
    with fxsafe.install():
        yield


class Stop:
    """The first ``stop()`` says that a thread has arrived and keeps it until ``go``; ``arrived`` waits for it."""

    def __init__(self) -> None:
        self._arrived, self._go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        if self._arrived.is_set():
            return
        self._arrived.set()
        if not self._go.wait(SOON_S):
            raise TimeoutError("nobody let the thread go on")

    def arrived(self) -> None:
        assert self._arrived.wait(SOON_S), "the thread did not arrive"

    def go(self) -> None:
        self._go.set()


def free() -> Stop:
    stop = Stop()
    stop.go()
    return stop


class Thread:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive(), "the thread hangs"
        return self.value if self.error is None else f"{type(self.error).__name__}: {self.error}"


def overlap(work: Callable[[Stop], Any]) -> tuple[Any, Any]:
    """``work`` in two threads: the first enters, the second enters, the first ends, the second ends."""
    a, b = Stop(), Stop()
    first = Thread(lambda: work(a))
    a.arrived()
    second = Thread(lambda: work(b))
    b.arrived()
    a.go()
    first_result = first.result()
    b.go()
    return first_result, second.result()


def nodes(graph: torch.fx.Graph) -> list[Any]:
    """A graph node by node, targets by identity."""
    return [
        (
            n.op,
            n.name,
            n.target if isinstance(n.target, str) else (str(n.target), id(n.target)),
            str(n.args),
            str(n.kwargs),
        )
        for n in graph.nodes
    ]


PLACES = {
    "Module.__call__": (vars(nn.Module), "__call__"),
    "Module.__getattr__": (vars(nn.Module), "__getattr__"),
    "math.sqrt": (vars(math), "sqrt"),
    "sqrt": (globals(), "sqrt"),
    "leaf": (globals(), "leaf"),
    "plain_leaf": (globals(), "plain_leaf"),
    "len": (globals(), "len"),
    "Tensor.__getitem__": (vars(torch.Tensor), "__getitem__"),
    "softmax": (vars(F), "softmax"),
}


def held() -> dict[str, int]:
    return {name: id(where.get(key)) for name, (where, key) in PLACES.items()}


def residue(before: dict[str, int]) -> list[str]:
    left = [f"{name} is another object" for name, identity in held().items() if identity != before[name]]
    if st.CURRENT_PATCHER is not None:
        left.append("CURRENT_PATCHER is set")
    with suppress(BaseException):
        nn.Sequential(nn.Linear(2, 2))(torch.ones(1, 2))
        return left
    return [*left, "an eager module raises"]


def compared(work: Callable[[Stop], Any]) -> list[str]:
    """What two overlapping runs of ``work`` give beside what one alone gives, and what they leave behind."""
    alone = work(free())
    before = held()
    results = overlap(work)
    wrong = [f"{which}: {got}" for which, got in zip(("first", "second"), results, strict=True) if got != alone]
    return wrong + residue(before)


torch.fx.wrap("len")


@torch.fx.wrap
def leaf(x):
    return x + 41


def plain_leaf(x):
    return x * 7


def traced_by(stop: Stop):
    def body(x):
        y = leaf(x)
        stop()
        return leaf(y) + math.sqrt(x) + sqrt(x) + len(x)

    return body


class Net(nn.Module):
    def __init__(self, stop: Stop) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))
        self.stop = stop

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) * self.scale
            if i == 1:
                self.stop()
        return F.softmax(x, -1)


# The faults.


def eager_module() -> list[str]:
    module, stop = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Stop()
    trace = Thread(lambda: torch.fx.symbolic_trace(Net(stop)).code)
    stop.arrived()
    eager = Thread(lambda: tuple(module(torch.ones(1, 2)).shape)).result()
    stop.go()
    trace.result()
    return [] if eager == (1, 2) else [str(eager)]


def overlapping_modules() -> list[str]:
    return compared(lambda stop: nodes(torch.fx.symbolic_trace(Net(stop)).graph))


def overlapping_wrapped_functions() -> list[str]:
    return compared(lambda stop: nodes(torch.fx.symbolic_trace(traced_by(stop)).graph))


def overlapping_wrapped_methods() -> list[str]:
    st._wrapped_methods_to_patch.append((torch.Tensor, "__getitem__"))
    constant = torch.ones(3)

    def work(stop: Stop) -> Any:
        def body(x):
            stop()
            return constant[x], constant[0]

        return nodes(torch.fx.symbolic_trace(body).graph)

    return compared(work)


def overlapping_autowraps() -> list[str]:
    def work(stop: Stop) -> Any:
        def body(x):
            stop()
            return plain_leaf(x) + math.floor(x)

        return nodes(torch.fx.Tracer(autowrap_functions=(plain_leaf,)).trace(body))

    return compared(work)


def overlapping_nested_tracers() -> list[str]:
    class Outer(torch.fx.Tracer):
        def call_module(self, m, forward, args, kwargs):
            inner = torch.fx.Tracer().trace(m)
            return super().call_module(m, lambda *_: (leaf(args[0]), len(inner.nodes)), args, kwargs)

        def is_leaf_module(self, m, name):
            return False

    class Twice(nn.Module):
        def __init__(self, stop):
            super().__init__()
            self.net = Net(stop)

        def forward(self, x):
            return leaf(x), self.net(x), sqrt(x)

    return compared(lambda stop: nodes(Outer().trace(Twice(stop))))


def overlapping_overriding_tracers() -> list[str]:
    class Overriding(torch.fx.Tracer):
        """What HF's tracer, torchvision's feature extractor and copies of older traces do."""

        def __init__(self):
            super().__init__(autowrap_modules=(math,), autowrap_functions=())
            self.seen = []

        def trace(self, root, concrete_args=None):
            graph = super().trace(root, concrete_args)
            for node in graph.nodes:
                node.meta["mine"] = True
            return graph

        def call_module(self, m, forward, args, kwargs):
            self.seen.append(self.path_of_module(m))
            return forward(*args, **kwargs)

        def getattr(self, attr, attr_val, parameter_proxy_cache):
            self.seen.append(attr)
            return attr_val if attr == "bias" else super().getattr(attr, attr_val, parameter_proxy_cache)

    def work(stop: Stop) -> Any:
        tracer = Overriding()
        return nodes(tracer.trace(Net(stop))), tracer.seen

    return compared(work)


def overlapping_bare_patchers() -> list[str]:
    """``with _Patcher() as patcher``, as code that copied an older ``Tracer.trace`` says."""

    def work(stop: Stop) -> Any:
        with st._Patcher() as patcher:
            patcher.patch_method(nn.Module, "__call__", lambda module, x: ("mine", x), deduplicate=False)
            patcher.patch(globals(), "plain_leaf", lambda x: ("replaced", x))
            stop()
            return nn.Linear(1, 1)(3), plain_leaf(4)

    return compared(work)


def an_exception_ends_the_first() -> list[str]:
    def work(stop: Stop) -> Any:
        def body(x):
            leaf(x)
            stop()
            raise KeyboardInterrupt("in the traced forward")

        with suppress(KeyboardInterrupt):
            torch.fx.symbolic_trace(body)
        return nodes(torch.fx.symbolic_trace(traced_by(free())).graph)

    return compared(work)


def compile_beside_trace() -> list[str]:
    def target(x):
        return F.relu(x) * 2

    entered, leave = threading.Event(), threading.Event()

    def backend(gm, inputs):
        entered.set()
        assert leave.wait(SOON_S)
        return gm.forward

    alone = nodes(torch.fx.symbolic_trace(Net(free())).graph)
    before, stop = held(), Stop()
    trace = Thread(lambda: nodes(torch.fx.symbolic_trace(Net(stop)).graph))
    stop.arrived()
    compiled = Thread(lambda: torch.compile(target, backend=backend, fullgraph=True)(torch.ones(2)).tolist())
    assert entered.wait(SOON_S)
    stop.go()
    got = trace.result()
    leave.set()
    result = compiled.result()
    wrong = [] if got == alone else [f"the trace gave {got}"]
    if result != [2.0, 2.0]:
        wrong.append(f"the compiled function gave {result}")
    return wrong + residue(before)


class GateTracer(torch.fx.Tracer):
    before_trace: Callable[[], None] = staticmethod(lambda: None)
    in_trace: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self):
        super().__init__()
        type(self).before_trace()

    def call_module(self, m, forward, args, kwargs):
        type(self).in_trace()
        return super().call_module(m, forward, args, kwargs)


def _pickled(body: nn.Module, tracer: torch.fx.Tracer) -> bytes:
    return pickle.dumps(torch.fx.GraphModule(body, tracer.trace(body)))


def load_beside_eager_module() -> list[str]:
    stop, before, file = Stop(), held(), io.BytesIO()
    torch.save(pickle.loads(_pickled(nn.Sequential(nn.Linear(2, 2)), GateTracer())), file)
    file.seek(0)
    GateTracer.in_trace = staticmethod(stop)
    load = Thread(lambda: torch.load(file, weights_only=False).code)
    stop.arrived()
    eager = Thread(lambda: tuple(nn.Linear(2, 2)(torch.ones(1, 2)).shape)).result()
    stop.go()
    wrong = [] if "def forward" in str(load.result()) else [f"the load gave {load.result()}"]
    return wrong + ([] if eager == (1, 2) else [str(eager)]) + residue(before)


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


def two_loads_meet() -> list[str]:
    slow, fast = _pickled(Doubled(), GateTracer()), _pickled(Halved(), torch.fx.Tracer())
    stop = Stop()
    GateTracer.before_trace = staticmethod(stop)
    first = Thread(lambda: pickle.loads(slow)(8))
    stop.arrived()
    second = Thread(lambda: pickle.loads(fast)(8)).result()
    stop.go()
    got = (first.result(), second)
    return [] if got == (16, 4.0) else [f"the loaded modules compute {got} and not (16, 4.0)"]


def pickle_beside_trace() -> list[str]:
    gm = torch.fx.symbolic_trace(lambda x: leaf(x) + math.sqrt(x))
    alone, stop = pickle.loads(pickle.dumps(gm)), Stop()
    trace = Thread(lambda: torch.fx.symbolic_trace(traced_by(stop)).code)
    stop.arrived()
    again = Thread(lambda: nodes(pickle.loads(pickle.dumps(copy.deepcopy(gm))).graph)).result()
    stop.go()
    trace.result()
    return [] if again == nodes(alone.graph) else [str(again)]


def targets_beside_trace() -> list[str]:
    """Readers of places that another thread has patched: node targets, roots, autowrap's identities."""

    def body(x):
        return F.softmax(x, -1)

    def by_hand():
        graph = torch.fx.Graph()
        graph.output(graph.call_function(leaf, (graph.placeholder("x"),)))
        return nodes(graph)

    def read_all() -> Any:
        return [
            nodes(torch.fx.symbolic_trace(body).graph),
            nodes(torch.fx.symbolic_trace(leaf).graph),
            nodes(torch.fx.Tracer(autowrap_functions=(plain_leaf,)).trace(lambda x: plain_leaf(x))),
            by_hand(),
        ]

    alone, stop = read_all(), Stop()

    def other(x):
        stop()
        return F.softmax(plain_leaf(leaf(x)), -1)

    tracer = torch.fx.Tracer(autowrap_modules=(math, F), autowrap_functions=(F.softmax, plain_leaf))
    trace = Thread(lambda: tracer.trace(other))
    stop.arrived()
    got = Thread(read_all).result()
    stop.go()
    trace.result()
    if isinstance(got, str):
        return [got]
    return [f"{b}" for a, b in zip(alone, got, strict=True) if a != b]


def constants_get_their_own_numbers() -> list[str]:
    def work(stop: Stop) -> Any:
        def body(x):
            x = x + torch.ones(1)
            stop()
            return x + torch.ones(2) + torch.ones(3)

        return nodes(torch.fx.symbolic_trace(body).graph)

    alone, stop = work(free()), Stop()
    first = Thread(lambda: work(stop))
    stop.arrived()
    Thread(lambda: work(free())).result()
    stop.go()
    got = first.result()
    return [] if got == alone else [str(got)]


def fork_beside_trace() -> list[str]:
    before, stop = held(), Stop()
    alone = nodes(torch.fx.symbolic_trace(traced_by(free())).graph)
    trace = Thread(lambda: torch.fx.symbolic_trace(traced_by(stop)).code)
    stop.arrived()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks beside threads
        child = os.fork()
    if child == 0:
        wrong = residue(before)
        with suppress(BaseException):
            wrong += [] if nodes(torch.fx.symbolic_trace(traced_by(free())).graph) == alone else ["another graph"]
            wrong += residue(before)
            os._exit(len(wrong))
        os._exit(99)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    stop.go()
    trace.result()
    return ([f"the child counts {status} faults"] if status else []) + residue(before)


FAULTS = {
    function.__name__: function
    for function in (
        eager_module,
        overlapping_modules,
        overlapping_wrapped_functions,
        overlapping_wrapped_methods,
        overlapping_autowraps,
        overlapping_nested_tracers,
        overlapping_overriding_tracers,
        overlapping_bare_patchers,
        an_exception_ends_the_first,
        compile_beside_trace,
        load_beside_eager_module,
        two_loads_meet,
        pickle_beside_trace,
        targets_beside_trace,
        constants_get_their_own_numbers,
        fork_beside_trace,
    )
}

if __name__ == "__main__":
    name, which = sys.argv[1:]
    sys.modules["hook_faults"] = sys.modules["__main__"]  # as pickles of this module's classes name it
    with hooks(which == "with"):
        try:
            outcome = FAULTS[name]()
        except BaseException as error:
            outcome = [f"{type(error).__name__}: {error}"]
    print("OUTCOME " + json.dumps([text[:400] for text in outcome]), flush=True)
    os._exit(0)
