"""Many threads use everything that traces at once, and every result is compared with that of a serial run.

``python tools/soak.py [--minutes M] [--threads N] [--seed S] [--fix FIX | --plain]``: exits 0 only if no result was
wrong, nothing was raised that should not have been, nothing is left behind and memory is flat. A clean run gives
confidence in proportion to its length, no more. ``--plain`` runs the same without fxsafe, to see what it is for.
"""

import argparse
import collections
import contextlib
import gc
import io
import json
import logging
import math
import os
import pickle
import random
import re
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch.fx
import torch.fx._symbolic_trace as st
from torch import nn
from torch.fx.experimental import meta_tracer
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

import fxsafe


@torch.fx.wrap
def a_leaf(x: Any) -> Any:
    return x + 41


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [n, 8]
        for linear in self.linears:
            x = torch.relu(linear(x)) * self.scale
        return a_leaf(x)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [n, 8]
        return torch.relu(x * self.scale).sum(-1)


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("asked for")


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x.sin() + 1
    torch._dynamo.graph_break()
    return y * 2


def unbroken(x: torch.Tensor) -> torch.Tensor:
    return (x.cos() * 3).relu()


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


def again(function: types.FunctionType) -> types.FunctionType:
    """The same function with code of its own, so that Dynamo compiles it anew."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


X = torch.linspace(-1, 1, 24).reshape(3, 8)
BLOCK = Block()
PICKLED = pickle.dumps(torch.fx.symbolic_trace(BLOCK))
buffer = io.BytesIO()
torch.save(torch.fx.symbolic_trace(BLOCK), buffer)
SAVED = buffer.getvalue()
WARM = torch.compile(unbroken, backend="eager")


def tensors(*values: torch.Tensor | None) -> list[list[float]]:
    return [v.detach().flatten().tolist() for v in values if v is not None]


def work_trace() -> Any:
    return torch.fx.symbolic_trace(Block()).code


def work_nested_trace() -> Any:
    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + len(torch.fx.symbolic_trace(nn.ReLU()).graph.nodes)

    return torch.fx.symbolic_trace(Outer()).code


def work_meta_tracer() -> Any:
    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full_like(x, 2.0) + x + torch.zeros(x.shape[0], 1, device="meta")

    return meta_tracer.symbolic_trace(Mask(), {"x": X.to("meta")}).code


def work_compile_traced() -> Any:
    graphs: list[Any] = []
    module = torch.fx.symbolic_trace(Plain())
    compiled = torch.compile(module, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    return tensors(compiled(X)), len(graphs)


def work_make_fx(mode: str) -> Any:
    return make_fx(lambda x, w: torch.relu(x @ w).sin().sum(0), tracing_mode=mode)(X, X.t()).code


def work_make_fx_cond() -> Any:
    return re.sub(r"\s+", " ", make_fx(branches)(X).code)


def work_load() -> Any:
    module = pickle.loads(PICKLED)
    return module.code, tensors(module(X))


def work_torch_load() -> Any:
    return tensors(torch.load(io.BytesIO(SAVED), weights_only=False)(X))


def work_compile_break() -> Any:
    return tensors(torch.compile(again(breaks), backend="eager")(X))


def work_recompile() -> Any:
    compiled = torch.compile(again(unbroken), backend="aot_eager", dynamic=False)
    return tensors(compiled(X), compiled(X[:2]), compiled(X.double()))


def work_warm() -> Any:
    return tensors(WARM(X))


def work_train(compiled: bool) -> Any:
    block = Block()
    function: Any = torch.compile(block, backend="aot_eager") if compiled else block
    x = X.clone().requires_grad_()
    function(x).square().sum().backward()
    return tensors(x.grad, *(p.grad for p in block.parameters()))


def work_checkpoint() -> Any:
    x = X.clone().requires_grad_()
    checkpoint(BLOCK, x, use_reentrant=False).sum().backward()
    return tensors(x.grad)


def work_cond_backward() -> Any:
    x = X.clone().requires_grad_()
    branches(x).sum().backward()
    return tensors(x.grad)


def work_jvp() -> Any:
    return tensors(*torch.func.jvp(lambda x: (x * x).sin().sum(), (X,), (X + 1,)))


def work_hessian() -> Any:
    return tensors(torch.func.hessian(lambda x: (x**3).sum())(X[0]))


def work_vmap_grad() -> Any:
    return tensors(torch.func.vmap(torch.func.grad(lambda x: x.sin().sum()))(X))


class Counter(_python_dispatch.TorchDispatchMode):
    """Not ``FlopCounterMode``: that hooks the modules of all threads (docs/limits.md)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def work_dispatch_mode() -> Any:
    with Counter() as counter:
        BLOCK(X)
    return counter.seen


def work_stance() -> Any:
    graphs: list[Any] = []
    function = torch.compile(again(unbroken), backend=lambda module, _: graphs.append(module) or module.forward)
    with torch.compiler.set_stance("force_eager"):
        eager = tensors(function(X))
    return eager, tensors(function(X)), len(graphs)


def work_export(strict: bool) -> Any:
    program = torch.export.export(Plain(), (X,), strict=strict)
    return program.graph_module.code, tensors(program.module()(X))


def work_export_file() -> Any:
    file = io.BytesIO()
    torch.export.save(torch.export.export(Plain(), (X,), strict=False), file)
    file.seek(0)
    return tensors(torch.export.load(file).module()(X))


def work_adam() -> Any:
    block = Block()
    optimizer = torch.optim.Adam(block.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        block(X).square().sum().backward()
        optimizer.step()
    return tensors(*block.parameters())


def work_eager() -> Any:
    with torch.no_grad():
        return tensors(BLOCK(X))


def work_autocast() -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return tensors(BLOCK(X).float())


def work_exception() -> Any:
    try:
        torch.fx.symbolic_trace(Raises())
    except ValueError as error:
        return str(error)
    return "nothing was raised"


WORK: dict[str, Callable[[], Any]] = {
    "symbolic_trace": work_trace,
    "nested trace": work_nested_trace,
    "MetaTracer": work_meta_tracer,
    "make_fx": lambda: work_make_fx("real"),
    "make_fx fake": lambda: work_make_fx("fake"),
    "make_fx symbolic": lambda: work_make_fx("symbolic"),
    "make_fx cond": work_make_fx_cond,
    "pickle load": work_load,
    "torch.load": work_torch_load,
    "compile of a traced module": work_compile_traced,
    "compile with a graph break": work_compile_break,
    "compile and recompile": work_recompile,
    "warm compiled call": work_warm,
    "training step": lambda: work_train(False),
    "compiled training step": lambda: work_train(True),
    "checkpointed step": work_checkpoint,
    "cond forward and backward": work_cond_backward,
    "Adam steps": work_adam,
    "jvp": work_jvp,
    "hessian": work_hessian,
    "vmap of grad": work_vmap_grad,
    "dispatch mode": work_dispatch_mode,
    "stance": work_stance,
    "export": lambda: work_export(False),
    "strict export": lambda: work_export(True),
    "export, save and load": work_export_file,
    "eager call": work_eager,
    "autocast": work_autocast,
    "exception in a trace": work_exception,
}


def places() -> dict[str, Any]:
    return {
        "Module.__call__": vars(nn.Module)["__call__"],
        "Module.__getattr__": vars(nn.Module)["__getattr__"],
        "a_leaf": globals()["a_leaf"],
        "CURRENT_PATCHER": st.CURRENT_PATCHER,
        "is_fx_tracing": st.is_fx_tracing(),
        "dispatch mode": _python_dispatch.is_in_torch_dispatch_mode(),
        "is_compiling": torch.compiler.is_compiling(),
        "is_exporting": getattr(torch.compiler, "is_exporting", bool)(),
        "torch.zeros": torch.zeros,
        "builtins.max": max,
        "math.pow": math.pow,
        "autograd multithreading": torch._C._is_multithreading_enabled(),
    }


def resident_mb() -> float:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fix", default="thread-local")
    parser.add_argument("--plain", action="store_true", help="without fxsafe")
    # torch itself keeps 0.2 to 0.5 MB of each compile of new code, whoever asks for it: 50 to 70 KB of an average job.
    parser.add_argument("--most-growth", type=float, default=150.0, metavar="KB", help="per job, after a warm-up")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)

    handle = contextlib.nullcontext() if options.plain else fxsafe.install(options.fix)
    expected = {name: work() for name, work in WORK.items()}
    repeated = [name for name, work in WORK.items() if work() != expected[name]]
    assert not repeated, f"serial runs of {repeated} differ from one another"
    before = places()
    sys.setswitchinterval(1e-5)
    done: collections.Counter[str] = collections.Counter()
    wrong: collections.Counter[str] = collections.Counter()
    first: dict[str, str] = {}
    lock = threading.Lock()
    end = time.monotonic() + 60 * options.minutes

    def loop(index: int) -> None:
        order = random.Random(options.seed * 1000 + index)
        names = list(WORK)
        while time.monotonic() < end:
            name = order.choice(names)
            try:
                got = WORK[name]()
                fault = None if got == expected[name] else f"gave {got!r:.300} and not {expected[name]!r:.300}"
            except BaseException:
                fault = traceback.format_exc()
            with lock:
                done[name] += 1
                if fault is not None:
                    wrong[name] += 1
                    first.setdefault(name, fault)

    threads = [threading.Thread(target=loop, args=(i,), daemon=True) for i in range(options.threads)]
    for thread in threads:
        thread.start()
    memory: list[tuple[int, float]] = []
    while time.monotonic() < end:
        time.sleep(min(5.0, max(0.1, end - time.monotonic())))
        memory.append((sum(done.copy().values()), resident_mb()))
    for thread in threads:
        thread.join(120)
    hung = sum(thread.is_alive() for thread in threads)
    residue = [name for name, value in places().items() if value is not before[name]]
    with handle:
        pass
    half = memory[len(memory) // 2 :]
    jobs = half[-1][0] - half[0][0]
    growth = 1024 * (half[-1][1] - half[0][1]) / jobs if jobs else 0.0
    for name, text in first.items():
        print(f"== {name}\n{text}", file=sys.stderr)
    good = not wrong and not hung and not residue and (growth <= options.most_growth or jobs < 200)
    print(
        json.dumps(
            {
                "good": good,
                "torch": torch.__version__,
                "fix": None if options.plain else options.fix,
                "threads": options.threads,
                "done": sum(done.values()),
                "of_each": dict(done),
                "wrong_or_raised": dict(wrong),
                "hung": hung,
                "residue": residue,
                "memory_mb": round(memory[-1][1]),
                "growth_kb_per_job": round(growth, 1),
            }
        )
    )
    sys.stdout.flush()
    if hung:
        os._exit(1)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
