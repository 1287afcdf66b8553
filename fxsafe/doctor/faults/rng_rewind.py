"""Random numbers drawn while another thread compiles are drawn a second time afterwards.

A compile puts the global random state back as it found it, under threads that have moved on.
"""

import random
import threading
from typing import Any

import torch

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "give each thread a torch.Generator and random.Random of its own, or compile before threads draw numbers"
inside, leave = threading.Event(), threading.Event()


def holding(module: Any, example_inputs: Any) -> Any:
    inside.set()
    leave.wait(WAIT)
    return module.forward


def compile_there() -> Any:
    return torch.compile(lambda x: x + 1, backend=holding)(torch.ones(2))


torch.manual_seed(0)
random.seed(0)
task = Task(compile_there)
if not inside.wait(WAIT):
    cannot(f"the compile did not start: {task.result(0)}")
first = torch.rand(4).tolist(), random.random()
leave.set()
task.result()
second = torch.rand(4).tolist(), random.random()
finish(first[0] == second[0] or first[1] == second[1], first=first, second=second)
