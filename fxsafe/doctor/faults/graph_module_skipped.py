"""A graph module made while another thread compiles is never compiled.

Dynamo marks the code of graph modules that are made during a compile as code to skip, in whichever thread they are
made. torch.compile then runs them eagerly without a word, or fails with fullgraph=True.
"""

import threading
from typing import Any

import torch
import torch.fx
from torch import nn

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "make graph modules (trace, load, recompile) while no other thread compiles"
inside, leave = threading.Event(), threading.Event()


def holding(module: Any, example_inputs: Any) -> Any:
    inside.set()
    leave.wait(WAIT)
    return module.forward


def compile_there() -> Any:
    return torch.compile(lambda x: x + 1, backend=holding)(torch.ones(2))


def made() -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.cos, (graph.placeholder("x"),)))
    return torch.fx.GraphModule(nn.Module(), graph)


def graphs(module: Any) -> Any:
    seen: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    def call() -> int:
        compiled: Any = torch.compile(module, backend=backend)
        compiled(torch.ones(2))
        return len(seen)

    return attempt(call)


task = Task(compile_there)
if not inside.wait(WAIT):
    cannot(f"the compile did not start: {task.result(0)}")
module = made()
leave.set()
task.result()
beside, alone = graphs(module), graphs(made())
finish(beside != alone, graphs_alone=alone, graphs_beside=beside)
