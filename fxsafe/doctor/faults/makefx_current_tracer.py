"""make_fx traces a branch of torch.cond with the tracer of another thread.

Control flow asks a process-wide variable for the current make_fx tracer. The last one to start is the answer.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "hold one lock around every make_fx and torch.export of the process"


def model(stop: Callable[[], None]) -> Callable[[torch.Tensor], Any]:
    def run(x: torch.Tensor) -> Any:
        y = x.sin()
        stop()
        return torch.cond(y.sum() > 0, lambda a: a.cos() + 1, lambda a: a.tan() * 2, (y,))

    return run


def describe(stop: Callable[[], None]) -> Any:
    module = make_fx(model(stop), tracing_mode="symbolic")(torch.ones(3))
    parts = [getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"]
    return [module.code, *(part.code for part in parts)]


def stopper(at: int) -> Callable[[], None]:
    def stop() -> None:
        inside[at].set()
        leave[at].wait(WAIT)

    return stop


inside = [threading.Event(), threading.Event()]
leave = [threading.Event(), threading.Event()]
right = describe(lambda: None)
first = Task(lambda: describe(stopper(0)))
if not inside[0].wait(WAIT):
    cannot(f"the trace did not start: {first.result(0)}")
second = Task(lambda: describe(stopper(1)))
# Where traces exclude one another the second waits for the first: do not wait for it for long.
inside[1].wait(3)
leave[0].set()
got = [first.result()]
leave[1].set()
got.append(second.result())
finish(got != [right, right], right=right, wrong=[graph for graph in got if graph != right])
