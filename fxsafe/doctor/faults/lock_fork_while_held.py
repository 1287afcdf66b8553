"""A process forked while another thread compiles hangs at its first compile.

The child inherits the compile lock as held, by a thread that it does not have.
"""

import os
import select
import signal
import threading
import time
from typing import Any

# Dynamo saves CUDA's random state around a compile, and torch refuses to touch CUDA in a child of a process that has.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "use the spawn or forkserver start method, or fork before any thread compiles"
# Seconds that the child gets for one small compile with everything imported.
CHILD = 15.0
inside, leave = threading.Event(), threading.Event()


def holding(module: Any, example_inputs: Any) -> Any:
    inside.set()
    leave.wait(2 * WAIT)
    return module.forward


def increment(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


if not hasattr(os, "fork"):
    cannot("needs os.fork")
torch.compile(double, backend="eager")(torch.ones(1))  # imports what the child must not import
compiling = Task(lambda: torch.compile(increment, backend=holding)(torch.ones(2)))
if not inside.wait(WAIT):
    cannot(f"the compile did not start: {compiling.result(0)}")
read, write = os.pipe()
child = os.fork()
if child == 0:
    word = b"raised"
    try:
        compiled = torch.compile(lambda x: x * 3, backend="eager")(torch.ones(2))
        word = b"right" if compiled.tolist() == [3.0, 3.0] else b"wrong"
    finally:
        os.write(write, word)
        os._exit(0)
os.close(write)
started = time.monotonic()
answer = os.read(read, 16).decode() if select.select([read], [], [], CHILD)[0] else "hangs"
seconds = time.monotonic() - started
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
leave.set()
parent = compiling.result()
parent_right = isinstance(parent, torch.Tensor) and parent.tolist() == [2.0, 2.0]
finish(answer != "right" or not parent_right, child=answer, seconds=round(seconds, 1), parent_right=parent_right)
