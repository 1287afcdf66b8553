"""A lock of the user's that is taken around one compile and inside another dead-locks with Dynamo's compile lock.

One thread has the user's lock and waits for the compile lock, the other has the compile lock and waits for the user's.
"""

import threading
from typing import Any

import torch

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "compile before taking a lock of yours, or never take that lock in code that runs inside a compile"
# Seconds that the compile waits for the user's lock before it says so; a real program would wait for ever.
PATIENCE = 5.0
mine = threading.Lock()
compiling, taken = threading.Event(), threading.Event()
got: list[bool] = []


def wants_the_lock(module: Any, example_inputs: Any) -> Any:
    compiling.set()
    taken.wait(WAIT)
    got.append(mine.acquire(timeout=PATIENCE))
    if got[0]:
        mine.release()
    return module.forward


def compile_under_the_lock() -> Any:
    compiling.wait(WAIT)
    with mine:
        taken.set()
        return torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))


first = Task(lambda: attempt(lambda: torch.compile(lambda x: x + 1, backend=wants_the_lock)(torch.ones(2))))
second = Task(compile_under_the_lock)
results = [str(first.result()), str(second.result())]
if not got:
    cannot(f"the compiles did not meet: {results}")
finish(not got[0], the_compile_got_the_lock=got[0])
