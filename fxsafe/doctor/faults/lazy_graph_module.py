"""make_fx and export get another kind of graph module while another thread compiles.

Dynamo says in a module global that graph modules are to be lazy, for the length of each compile.
"""

import threading
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "do not trace or export while another thread compiles"
inside, leave = threading.Event(), threading.Event()


def holding(module: Any, example_inputs: Any) -> Any:
    inside.set()
    leave.wait(WAIT)
    return module.forward


def compile_there() -> Any:
    return torch.compile(lambda x: x + 1, backend=holding)(torch.ones(2))


def kind() -> Any:
    return attempt(lambda: type(make_fx(lambda x: x + 1)(torch.ones(2))).__mro__[1].__name__)


alone = kind()
task = Task(compile_there)
if not inside.wait(WAIT):
    cannot(f"the compile did not start: {task.result(0)}")
beside = kind()
leave.set()
task.result()
finish(beside != alone, alone=alone, beside=beside)
