"""A compile in one thread takes away the patches of another thread's trace and brings them back too late.

pytorch#187589. Dynamo reverts "the current" tracing patches around a compile, whosever they are.
"""

import threading
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic
from torch import nn

from fxsafe.doctor.faults._kit import WAIT, Held, Task, attempt, cannot, finish, trace

ADVICE = "do not trace while another thread compiles; hold one lock around both"
compiling, go_on = threading.Event(), threading.Event()


def holding(module: Any, example_inputs: Any) -> Any:
    compiling.set()
    go_on.wait(WAIT)
    return module.forward


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def compile_there() -> Any:
    if hasattr(symbolic, "_is_fx_tracing_flag"):  # up to 2.13: past the other fault, to look at this one alone
        symbolic._is_fx_tracing_flag = False
    return torch.compile(double, backend=holding)(torch.ones(2)).tolist()


def code(held: Held) -> Any:
    return trace(held).code


call, getattribute = nn.Module.__call__, nn.Module.__getattr__
free = Held()
free.leave.set()
right = code(free)
linear, x = nn.Linear(2, 2), torch.ones(1, 2)
value = linear(x)
held = Held()
tracing = Task(lambda: code(held))
if not held.inside.wait(WAIT):
    cannot(f"the trace did not start: {tracing.result(0)}")
compile_task = Task(compile_there)
if not compiling.wait(WAIT):
    cannot(f"the compile did not start: {compile_task.result(0)}")
held.leave.set()
got = tracing.result()
go_on.set()
compiled = compile_task.result()
left = nn.Module.__call__ is not call or nn.Module.__getattr__ is not getattribute
after = attempt(lambda: linear(x))
correct = isinstance(after, torch.Tensor) and torch.equal(after, value)
finish(
    got != right or compiled != [2.0, 2.0] or left or not correct,
    graph_right=got == right,
    compiled=compiled,
    module_left_patched=left,
    module_after=after,
)
