"""torch.cuda.set_rng_state does nothing while another thread compiles or exports, and for good if two overlap.

AOTAutograd replaces it, for the whole process, while it collects metadata; a checkpoint's recomputation needs it.
"""

import threading
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "compile before threads train with checkpoints, and do not let exports overlap"
calls: list[str] = []
inside = [threading.Event(), threading.Event()]
leave = [threading.Event(), threading.Event()]


def record(state: Any) -> None:
    calls.append(state)


def compile_there(at: int) -> Any:
    def held(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_rng_state("theirs")  # type: ignore[arg-type]
        inside[at].set()
        leave[at].wait(WAIT)
        return x + 1

    return aot_function(held, fw_compiler=lambda module, _: module)(torch.ones(2))


torch.cuda.set_rng_state = record  # type: ignore[assignment]
tasks = []
for at in (0, 1):
    tasks.append(Task(lambda at=at: compile_there(at)))  # type: ignore[misc]
    if not inside[at].wait(WAIT):
        cannot(f"the compile did not start: {tasks[at].result(0)}")
torch.cuda.set_rng_state("mine")  # type: ignore[arg-type]
for at in (0, 1):
    leave[at].set()
    tasks[at].result()
during, back = list(calls), torch.cuda.set_rng_state is record
finish("mine" not in during or not back, during=during, back_afterwards=back)
