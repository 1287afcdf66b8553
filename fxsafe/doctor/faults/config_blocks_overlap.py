"""Two blocks that change a setting of torch.compile and overlap in two threads leave it changed for good (up to 2.11).

Each call of a function compiled with ``dynamic=True`` is one, and so are eager ``torch.cond`` and ``config.patch``.
"""

import threading
from functools import partial
from typing import Any

import torch
import torch._dynamo

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "up to torch 2.11, set what torch.compile shall do once, before threads start, and not with blocks in several"
config: Any = torch._dynamo.config
inside = [threading.Event(), threading.Event()]
leave = [threading.Event(), threading.Event()]


def warm_call(at: int) -> None:
    """What a call of a function compiled with ``dynamic=True`` does around the function."""
    revert = config._make_closure_patcher(assume_static_by_default=False)()
    try:
        inside[at].set()
        leave[at].wait(WAIT)
    finally:
        revert()


before = config.assume_static_by_default
tasks = []
for at in range(2):
    tasks.append(Task(partial(warm_call, at)))
    if not inside[at].wait(WAIT):
        cannot(f"the call did not begin: {tasks[at].result(0)}")
for at in range(2):
    leave[at].set()
    tasks[at].result()
after = config.assume_static_by_default
finish(after != before, before=before, after=after)
