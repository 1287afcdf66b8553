"""With error_on_nested_fx_trace off, a compiled call silently runs eagerly while another thread traces.

The same flag as in flag_warm_call: the setting turns the refusal into a call of the plain function.
"""

from typing import Any

import torch
import torch._dynamo

from fxsafe.doctor.faults._kit import attempt, finish, held_trace

ADVICE = "leave torch._dynamo.config.error_on_nested_fx_trace on, so that the loss of the compiled code is seen"
runs = 0


def counting(module: Any, example_inputs: Any) -> Any:
    def run(*args: Any) -> Any:
        global runs
        runs += 1
        return module.forward(*args)

    return run


def affine(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2 + 1


torch._dynamo.config.error_on_nested_fx_trace = False
compiled = torch.compile(affine, backend=counting)
x = torch.arange(3.0)
right = compiled(x)
before = runs
with held_trace():
    got = attempt(lambda: compiled(x))
ran_compiled = runs - before == 1
correct = isinstance(got, torch.Tensor) and torch.equal(got, right)
finish(not ran_compiled or not correct, ran_compiled=ran_compiled, got=got)
