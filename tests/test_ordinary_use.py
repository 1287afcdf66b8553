"""What people do with torch.fx and what stands on it, with the right answers; ``make test`` runs it in one thread.

``make test-threads`` runs each test in four threads at once, with fxsafe installed: none of these programs knows that
it is not alone.
"""

from __future__ import annotations

import copy
import io
import operator
import pickle

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.shape_prop import ShapeProp
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

X = torch.arange(12.0).reshape(3, 4) / 7


@torch.fx.wrap
def a_leaf(x, by):
    return x * by if bool(x.sum() > 0) else x


class Block(nn.Module):
    """Submodules, a parameter, a buffer, a method, a wrapped leaf and a literal."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)  # the global one belongs to all threads
        self.norm = nn.LayerNorm(4)
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("shift", torch.ones(4))
        with torch.no_grad():
            for linear in self.linears:
                linear.weight.copy_(torch.randn(4, 4, generator=generator))
                linear.bias.zero_()

    def forward(self, x):
        for linear in self.linears:
            x = x + torch.relu(linear(self.norm(x))) * self.scale
        return a_leaf(x + self.shift, 2.0).sum(-1)


TARGETS = [
    ("placeholder", "x"),
    ("call_module", "norm"),
    ("call_module", "linears.0"),
    ("call_function", torch.relu),
    ("get_attr", "scale"),
    ("call_function", operator.mul),
    ("call_function", operator.add),
    ("call_module", "norm"),
    ("call_module", "linears.1"),
    ("call_function", torch.relu),
    ("call_function", operator.mul),  # the parameter was read already
    ("call_function", operator.add),
    ("get_attr", "shift"),
    ("call_function", operator.add),
    ("call_function", a_leaf),
    ("call_method", "sum"),
    ("output", "output"),
]


def targets(gm: torch.fx.GraphModule) -> list[tuple[str, object]]:
    return [(node.op, node.target) for node in gm.graph.nodes]


@pytest.fixture
def block() -> Block:
    return Block()


def test_symbolic_trace_and_the_module_that_it_makes(block):
    gm = torch.fx.symbolic_trace(block)
    assert targets(gm) == TARGETS
    assert torch.equal(gm(X), block(X))


def test_concrete_arguments_and_leaf_modules(block):
    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, nn.Sequential) or super().is_leaf_module(module, name)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.ReLU(), nn.Tanh())

        def forward(self, x, twice=False):
            return self.inner(self.inner(x) if twice else x)

    outer = Outer()
    for twice in (False, True):
        graph = Leaves().trace(outer, {"twice": twice})
        gm = torch.fx.GraphModule(outer, graph)
        assert [n.target for n in graph.nodes if n.op == "call_module"] == ["inner"] * (1 + twice)
        assert torch.equal(gm(X, twice), outer(X, twice))


def test_graph_modules_survive_copying_pickling_and_saving(block):
    gm = torch.fx.symbolic_trace(block)
    file = io.BytesIO()
    torch.save(gm, file)
    file.seek(0)
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm)), torch.load(file, weights_only=False)):
        assert targets(other) == TARGETS
        assert torch.equal(other(X), block(X))


def test_a_graph_is_transformed_and_interpreted(block):
    gm = torch.fx.symbolic_trace(block)
    for node in list(gm.graph.nodes):
        if node.target is torch.relu:
            node.target = torch.tanh
    gm.recompile()
    seen = []

    class Records(torch.fx.Interpreter):
        def run_node(self, n):
            seen.append(n.target)
            return super().run_node(n)

    result = Records(gm).run(X)
    assert torch.equal(result, gm(X))
    assert seen.count(torch.tanh) == 2
    assert not torch.equal(result, block(X))


def test_a_pattern_is_replaced():
    def model(x):
        return torch.relu(x + 1) * torch.relu(x + 1)

    gm = torch.fx.symbolic_trace(model)
    matches = torch.fx.replace_pattern(gm, lambda x: torch.relu(x + 1), lambda x: torch.sigmoid(x))
    assert len(matches) == 2
    assert torch.equal(gm(X), torch.sigmoid(X) * torch.sigmoid(X))


def test_a_module_is_split_and_its_shapes_are_known(block):
    gm = torch.fx.symbolic_trace(block)
    ShapeProp(gm).propagate(X)
    assert {tuple(n.meta["tensor_meta"].shape) for n in gm.graph.nodes if n.op == "call_module"} == {(3, 4)}
    part = iter(range(100))
    split = split_module(gm, block, lambda node: int(next(part) > 7))
    assert [n.target for n in split.graph.nodes if n.op == "call_module"] == ["submod_0", "submod_1"]
    assert torch.equal(split(X), block(X))


def test_a_trace_inside_a_traced_forward(block):
    class Outer(nn.Module):
        def forward(self, x):
            self.inner = torch.fx.symbolic_trace(block)
            return x + 1

    outer = Outer()
    gm = torch.fx.symbolic_trace(outer)
    assert [n.target for n in gm.graph.nodes] == ["x", operator.add, "output"]
    # The leaf is the outer trace's wrapper of it: on plain torch too.
    assert [getattr(target, "__name__", target) for _, target in targets(outer.inner)] == [
        getattr(target, "__name__", target) for _, target in TARGETS
    ]


def test_control_flow_is_refused_and_leaves_nothing():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(x) if x.sum() > 0 else x

    model = Branches()
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(model)
    assert torch.equal(model(X), model.lin(X))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx(mode, pre_dispatch):
    gm = make_fx(lambda x, y: (x @ y).relu().sum(0), tracing_mode=mode, pre_dispatch=pre_dispatch)(X, X.t())
    names = [str(n.target).partition(".")[2] for n in gm.graph.nodes if n.op == "call_function"]
    assert [name for name in names if name.partition(".")[0] in ("matmul", "mm", "relu", "sum")] == (
        ["matmul.default" if pre_dispatch else "mm.default", "relu.default", "sum.dim_IntList"]
    )
    assert torch.equal(gm(X, X.t()), (X @ X.t()).relu().sum(0))


def test_make_fx_through_a_backward():
    def gradient(w):
        w = w.detach().requires_grad_()
        return torch.autograd.grad((w * w).sin().sum(), w)[0]

    gm = make_fx(gradient)(X)
    assert torch.allclose(gm(X), 2 * X * (X * X).cos())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_training_with_recompiles(block, backend):
    compiled = torch.compile(copy.deepcopy(block), backend=backend, dynamic=False)
    for rows in (3, 2, 1):
        ours, plain = X[:rows].clone().requires_grad_(), X[:rows].clone().requires_grad_()
        compiled(ours).sum().backward()
        block(plain).sum().backward()
        torch.testing.assert_close(ours.grad, plain.grad)


def test_a_graph_break_in_the_middle():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    assert torch.equal(torch.compile(broken, backend="eager")(X), (X + 1) * 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_compiled_layers(block, reentrant):
    compiled = torch.compile(block, backend="eager")
    ours, plain = X.clone().requires_grad_(), X.clone().requires_grad_()
    checkpoint(compiled, ours, use_reentrant=reentrant).sum().backward()
    block(plain).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_eager_higher_order_operators_train():
    ours, plain = X.clone().requires_grad_(), X.clone().requires_grad_()
    torch.cond(ours.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (ours,)).sum().backward()
    plain.sin().sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_vmap_and_functional_transforms():
    result = torch.func.vmap(torch.func.grad(lambda x: (x**3).sum()))(X)
    torch.testing.assert_close(result, 3 * X**2)


class Plain(Block):
    """Without the leaf, which decides by its data."""

    def forward(self, x):
        for linear in self.linears:
            x = x + torch.relu(linear(self.norm(x))) * self.scale
        return (x + self.shift).sum(-1)


@pytest.mark.parametrize("strict", [False, True])
def test_export_and_load_again(strict):
    block = Plain()
    exported = torch.export.export(block, (X,), strict=strict)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for program in (exported, torch.export.load(file)):
        assert torch.equal(program.module()(X), block(X))
    assert set(exported.state_dict) == set(block.state_dict())


def test_a_stance_and_the_compiling_flag_are_the_threads_own(block):
    compiled = torch.compile(lambda x: x + float(torch.compiler.is_compiling()), backend="eager")
    assert torch.equal(compiled(X), X + 1)
    assert not torch.compiler.is_compiling()
    if hasattr(torch.compiler, "set_stance"):  # since 2.6
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(compiled(X), X)
    assert torch.equal(compiled(X), X + 1)


def test_autocast_and_no_grad_stay_the_threads_own(block):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.compile(lambda x: x @ x.t(), backend="eager")(X).dtype is torch.bfloat16
        with torch.no_grad():
            assert not torch.fx.symbolic_trace(block)(X).requires_grad
    assert torch.compile(lambda x: x @ x.t(), backend="eager")(X).dtype is torch.float32
    assert block(X).requires_grad
