"""A graph module made while another thread compiles is never compiled.

Dynamo marks the code of graph modules that are made during a compile as code to skip, in whichever thread they are
made. torch.compile then runs them eagerly without a word, or fails with fullgraph=True.
"""

from typing import Any

import torch
import torch.fx
from torch import nn

from fxsafe.doctor.faults._kit import attempt, finish, held_compile

ADVICE = "make graph modules (trace, load, recompile) while no other thread compiles"


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


with held_compile():
    module = made()
beside, alone = graphs(module), graphs(made())
finish(beside != alone, graphs_alone=alone, graphs_beside=beside)
