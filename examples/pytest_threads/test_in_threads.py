"""Run with ``pytest --parallel-threads=4 examples/pytest_threads`` (pip install pytest-run-parallel)."""

import torch
from torch import nn


def test_a_module_traces_to_the_same_graph():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for _ in range(20):
        graph = torch.fx.symbolic_trace(module).graph
        assert [node.op for node in graph.nodes] == ["placeholder", "call_module", "call_module", "output"]


def test_an_eager_module_computes_beside_traces():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.ones(2, 4)
    right = module(x)
    for _ in range(20):
        torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
        assert torch.equal(module(x), right)
