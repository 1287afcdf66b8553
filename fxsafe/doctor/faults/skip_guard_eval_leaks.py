"""set_stance(skip_guard_eval_unsafe=True) in one thread gives silent wrong results in another.

The stance is a module global, and without its guards a compiled function does not notice that a value changed.
"""

import threading
from typing import Any

import torch

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "do not use skip_guard_eval_unsafe in a process with several threads"
inside, leave = threading.Event(), threading.Event()


class Factor:
    value = 3


factor = Factor()


@torch.compile(backend="eager", dynamic=False)
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * factor.value


def set_there() -> Any:
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        inside.set()
        leave.wait(WAIT)


if not hasattr(torch.compiler, "set_stance"):
    cannot("this torch has no torch.compiler.set_stance")
x = torch.ones(2)
scaled(x)
task = Task(set_there)
if not inside.wait(WAIT):
    cannot(f"this torch has no skip_guard_eval_unsafe: {task.result(0)}")
factor.value = 5
got = attempt(lambda: scaled(x).tolist())
leave.set()
task.result()
finish(got != [5.0, 5.0], expected=[5.0, 5.0], got=got)
