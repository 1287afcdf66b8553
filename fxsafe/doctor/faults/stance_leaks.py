"""torch.compiler.set_stance in one thread holds in every other one, and overlapping uses leave a wrong stance.

The stance is a module global that each with-block saves and restores.
"""

import threading
from typing import Any

import torch
import torch._dynamo

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "set the stance once, before threads start, and not with with-blocks in several threads"
compiles = 0


def counting(module: Any, example_inputs: Any) -> Any:
    global compiles
    compiles += 1
    return module.forward


def compiles_here() -> bool:
    torch._dynamo.reset()  # or the second question would find what the first has compiled
    before = compiles
    torch.compile(lambda x: x + 1, backend=counting)(torch.ones(2))
    return compiles > before


inside = [threading.Event(), threading.Event()]
leave = [threading.Event(), threading.Event()]


def with_stance(at: int, stance: str) -> None:
    with torch.compiler.set_stance(stance):
        inside[at].set()
        leave[at].wait(WAIT)


if not hasattr(torch.compiler, "set_stance"):
    cannot("this torch has no torch.compiler.set_stance")
first = Task(lambda: with_stance(0, "force_eager"))
if not inside[0].wait(WAIT):
    cannot(f"the other thread did not get there: {first.result(0)}")
during = compiles_here()
second = Task(lambda: with_stance(1, "eager_on_recompile"))
inside[1].wait(WAIT)
leave[0].set()
first.result()
leave[1].set()
second.result()
after = compiles_here()
finish(not during or not after, compiled_meanwhile=during, compiled_after_both=after)
