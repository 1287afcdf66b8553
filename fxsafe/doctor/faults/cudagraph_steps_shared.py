"""Another thread's compiled call ends this thread's step: what CUDA graphs gave it may be overwritten while in use.

The number of the step is counted for the process. The fault is there without a GPU: it is the number that the trees of
CUDA graphs ask for.
"""

import torch
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager, get_container, mark_step_begin

from fxsafe.doctor.faults._kit import Task, finish

ADVICE = "call what is compiled with CUDA graphs in one thread only"


def inside(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def another_step() -> None:
    torch.compile(inside, backend="eager")(torch.ones(2))
    mark_step_begin()


get_container(0)  # this thread has trees
before = CUDAGraphTreeManager.get_curr_generation(), CUDAGraphTreeManager.user_invoked_mark_step()
Task(another_step).result()
after = CUDAGraphTreeManager.get_curr_generation(), CUDAGraphTreeManager.user_invoked_mark_step()
finish(after != before, before=before, after=after)
