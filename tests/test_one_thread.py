"""A single thread gets the same graphs, outputs, gradients and generated code with and without each fix."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
import torch.fx
from support import python
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fxsafe

FIXES = ["thread-local", "always-false"]


@torch.fx.wrap
def a_leaf(x):
    return x + 41


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x):
        for linear in self.linears:
            x = x + torch.relu(linear(self.norm(x))) * self.scale
        return a_leaf(x).sum(-1)


def seeded(function):
    torch.manual_seed(0)
    torch._dynamo.reset()
    return function()


def nodes(graph):
    return [
        (n.op, n.name, str(n.target), str(n.args), str(n.kwargs), sorted(map(str, n.users)), str(n.type))
        for n in graph.nodes
    ]


def symbolic():
    gm = torch.fx.symbolic_trace(Block())
    return nodes(gm.graph), gm.code


def through_make_fx(mode):
    gm = make_fx(lambda x, w: torch.relu(x @ w).sin().sum(0), tracing_mode=mode)(torch.randn(2, 4), torch.randn(4, 4))
    return nodes(gm.graph), gm.code


def exported():
    return str(torch.export.export(Block(), (torch.randn(3, 8),)).graph)


def trained(backend):
    block = Block()
    x = torch.randn(3, 8, requires_grad=True)
    out = torch.compile(block, backend=backend)(x)
    out.sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in block.parameters())]


def checkpointed():
    block = Block()
    x = torch.randn(3, 8, requires_grad=True)
    out = checkpoint(torch.compile(block, backend="aot_eager"), x, use_reentrant=False)
    out.sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in block.parameters())]


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.parametrize(
    "function",
    [
        symbolic,
        lambda: through_make_fx("real"),
        lambda: through_make_fx("fake"),
        lambda: through_make_fx("symbolic"),
        exported,
        lambda: trained("eager"),
        lambda: trained("aot_eager"),
        checkpointed,
    ],
    ids=["symbolic_trace", "make_fx", "make_fx-fake", "make_fx-symbolic", "export", "eager", "aot_eager", "checkpoint"],
)
def test_bit_identical(function, fix):
    plain = seeded(function)
    assert equal(plain, seeded(function)), "without us the program itself does not repeat"
    with fxsafe.install(fix):
        assert equal(plain, seeded(function))


INDUCTOR = """
import contextlib, sys, torch, fxsafe
from torch._inductor.utils import run_and_get_code
torch.manual_seed(0)
with fxsafe.install(sys.argv[1]) if len(sys.argv) > 1 else contextlib.nullcontext():
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    x = torch.randn(4, 8, requires_grad=True)
    def step():
        out = torch.compile(module)(x).sum()
        out.backward()
        return out.item(), x.grad.tolist()
    result, codes = run_and_get_code(step)
print(result)
print("\\n".join(codes))
"""


def test_generated_inductor_code_is_identical(tmp_path):
    outs = []
    for i, arguments in enumerate(([], *([fix] for fix in FIXES))):
        done = python("-c", INDUCTOR, *arguments, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(i))})
        assert done.returncode == 0, done.stderr
        outs.append(done.stdout.replace(str(tmp_path / str(i)), "CACHE"))
    assert "def call(" in outs[0]
    assert [out == outs[0] for out in outs] == [True] * 3


def calls_of(function):
    """Every call of a Python or C function during ``function()``, by name and place."""
    calls = []

    def profile(frame, event, argument):
        if event == "call":
            calls.append((frame.f_code.co_filename, frame.f_code.co_name))
        elif event == "c_call":
            calls.append((getattr(argument, "__module__", None), argument.__qualname__))

    gc.collect()
    gc.disable()  # what earlier tests have left runs finalizers
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize("fix", FIXES)
def test_nothing_is_called_in_addition_while_nobody_traces(fix):
    module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(1, 4)
    compiled = torch.compile(module, backend="eager")
    # What a warm call does once is no cost of a call.
    uses = [lambda: [compiled(x) for _ in range(3)], lambda: [module(x) for _ in range(3)]]
    for use in uses:
        use()
    expected = [calls_of(use) for use in uses]
    assert all(len(calls) > 10 for calls in expected)
    with fxsafe.install(fix=fix):
        torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))  # it leaves no dispatcher behind
        for use, calls in zip(uses, expected, strict=True):
            assert calls_of(use) == calls


def test_installing_again_and_again_compiles_nothing_again():
    def asks(x):
        return x + 1 if torch.compiler.is_compiling() else x

    def nested(x):
        return torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)

    def optimises(x):
        optimizer.step()
        return x

    weight = torch.nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones(2, 3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for function in (asks, nested, optimises):
        torch._dynamo.reset()
        seen = []

        def backend(module, _, seen=seen):
            seen.append(module)
            return module.forward

        compiled = torch.compile(function, backend=backend)
        counts = []
        for _ in range(4):
            with fxsafe.install():
                compiled(torch.ones(2, 3))
            compiled(torch.ones(2, 3))
            counts.append(len(seen))
        assert counts[1:] == counts[:1] * 3, function
    torch._dynamo.reset()
