"""A compiled function is refused while another thread merely compiles (releases before 2.13).

Every compile with AOTAutograd traces the forward and the backward, and that sets the process-wide flag. From 2.13 the
question is masked while anything compiles, so that those releases pass.
"""

import threading

import torch

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish, lowering

ADVICE = "compile everything in one thread before others serve, with mark_dynamic against later recompiles"
inside, leave = threading.Event(), threading.Event()


def slow_sin(x: torch.Tensor) -> torch.Tensor:
    inside.set()
    leave.wait(WAIT)
    return torch.cos(x - torch.pi / 2)


def affine(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def cold(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


x = torch.arange(3.0)
warm = torch.compile(affine, backend="eager")
lowered = torch.compile(affine, backend=lowering())
right = warm(x)
lowered(x)
# A decomposition runs while AOTAutograd traces.
holding = lowering(decompositions={torch.ops.aten.sin.default: slow_sin})
compiling = Task(lambda: torch.compile(cold, backend=holding)(x))
if not inside.wait(WAIT):
    cannot(f"the compile did not reach its trace: {compiling.result(0)}")
got = {"eager": attempt(lambda: warm(x)), "with AOTAutograd": attempt(lambda: lowered(x))}
leave.set()
compiled = compiling.result()
if not isinstance(compiled, torch.Tensor):
    got["the compile itself"] = compiled
else:
    got["the compile itself"] = right if torch.allclose(compiled, x.sin() + 1, atol=1e-6) else compiled
wrong = {
    name: value for name, value in got.items() if not isinstance(value, torch.Tensor) or not torch.equal(value, right)
}
finish(bool(wrong), wrong=wrong)
