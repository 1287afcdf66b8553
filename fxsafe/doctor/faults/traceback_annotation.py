"""Stack traces and annotations of one thread land on the nodes that another thread traces.

torch.fx.traceback keeps "the current metadata" in a module global that every new node reads.
"""

import threading
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish, trace

ADVICE = "do not trace or compile while another thread annotates or interprets a graph; hold one lock around both"
inside, leave = threading.Event(), threading.Event()
FOREIGN = "a line of the other thread"


def annotate_there() -> None:
    with fx_traceback.preserve_node_meta():
        fx_traceback.set_stack_trace([FOREIGN])
        if hasattr(fx_traceback, "annotate"):  # 2.9
            with fx_traceback.annotate({"owner": FOREIGN}):
                hold()
        else:
            hold()


def hold() -> None:
    inside.set()
    leave.wait(WAIT)


def affine(x: Any) -> Any:
    return x.sin() + 1


def found(graph: torch.fx.Graph) -> list[str]:
    return [f"{node.name}: {key}" for node in graph.nodes for key, value in node.meta.items() if FOREIGN in str(value)]


task = Task(annotate_there)
if not inside.wait(WAIT):
    cannot(f"the other thread did not get there: {task.result(0)}")
foreign = {"make_fx": found(make_fx(affine)(torch.ones(2)).graph), "symbolic_trace": found(trace(affine).graph)}
preserving = fx_traceback.has_preserved_node_meta()
leave.set()
task.result()
after = bool(fx_traceback.current_meta)
finish(any(foreign.values()) or preserving or after, foreign=foreign, preserving=preserving, left_behind=after)
