"""torch.autograd.forward_ad.dual_level raises while another thread is inside one.

Forward-mode levels are one list of the process, in C++, and do not nest; leaving one deletes all its tangents.
"""

import threading
from typing import Any

import torch
import torch.autograd.forward_ad

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

forward_ad: Any = torch.autograd.forward_ad
ADVICE = "use torch.func.jvp, or take a lock of your own around every dual_level"
inside, leave = threading.Event(), threading.Event()


def derivative(wait: bool) -> Any:
    def compute() -> Any:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.tensor(3.0), torch.tensor(1.0))
            if wait:
                inside.set()
                leave.wait(WAIT)
            tangent = forward_ad.unpack_dual(x * x).tangent
            return None if tangent is None else tangent.item()

    return attempt(compute)


task = Task(lambda: derivative(True))
if not inside.wait(WAIT):
    cannot(f"the level did not open: {task.result(0)}")
beside = derivative(False)
leave.set()
there = task.result()
finish([beside, there] != [6.0, 6.0], beside=beside, there=there, alone=derivative(False))
