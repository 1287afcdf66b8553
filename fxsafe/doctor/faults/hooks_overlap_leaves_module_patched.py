"""Two traces that overlap leave torch.nn.Module broken for the rest of the process.

Each takes off its patches in the order in which it ends, and puts back what it found: the other one's.
"""

import torch
import torch.fx._symbolic_trace as symbolic
from torch import nn

from fxsafe.doctor.faults._kit import WAIT, Held, Task, attempt, cannot, finish, trace

ADVICE = "hold one lock around every trace of the process; once it happened, only a new process helps"
call, getattribute = nn.Module.__call__, nn.Module.__getattr__
module, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
right = module(x)
first, second = Held(), Held()
tasks = []
for held in (first, second):
    tasks.append(Task(lambda held=held: bool(trace(held))))  # type: ignore[misc]
    if not held.inside.wait(WAIT):
        cannot(f"a trace did not start: {tasks[-1].result(0)}")
first.leave.set()
traces = [tasks[0].result()]
second.leave.set()
traces.append(tasks[1].result())
left = {
    "nn.Module.__call__": nn.Module.__call__ is not call,
    "nn.Module.__getattr__": nn.Module.__getattr__ is not getattribute,
    "CURRENT_PATCHER": getattr(symbolic, "CURRENT_PATCHER", None) is not None,
}
after = attempt(lambda: module(x))
correct = isinstance(after, torch.Tensor) and torch.equal(after, right)
finish(any(left.values()) or not correct or traces != [True, True], traces=traces, left=left, module_after=after)
