"""The places that fxsafe and traces change, and whether each holds the identical object that it began with."""

from __future__ import annotations

import builtins
import inspect
import math
import sys
import threading

import torch
import torch._dynamo
import torch.fx._symbolic_trace as st
from torch import nn

# The first compile replaces Tracer.trace and others for good (torch._dynamo.eval_frame.TorchPatcher).
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))

_PLACES = {
    "Tracer.trace.__code__": lambda: inspect.unwrap(st.Tracer.trace).__code__,
    "Tracer.trace": lambda: vars(st.Tracer)["trace"],
    "is_fx_tracing.__code__": lambda: st.is_fx_tracing.__code__,
    "is_fx_symbolic_tracing.__code__": lambda: getattr(st, "is_fx_symbolic_tracing", st.is_fx_tracing).__code__,
    "type(torch.fx._symbolic_trace)": lambda: type(st),
    "_is_fx_tracing_flag": lambda: vars(st).get("_is_fx_tracing_flag"),
    "CURRENT_PATCHER": lambda: vars(st).get("CURRENT_PATCHER"),
    "Module.__call__": lambda: vars(nn.Module)["__call__"],
    "Module.__getattr__": lambda: vars(nn.Module)["__getattr__"],
    "max": lambda: builtins.max,
    "min": lambda: builtins.min,
    "math.pow": lambda: math.pow,
    "torch.zeros": lambda: torch.zeros,
    "type(torch)": lambda: type(torch),
    "torch.cuda.set_rng_state": lambda: torch.cuda.set_rng_state,
    "type(torch.compiler)": lambda: type(torch.compiler),
    "_is_compiling_flag": lambda: vars(torch.compiler)["_is_compiling_flag"],
    "is_compiling.__code__": lambda: torch.compiler.is_compiling.__code__,
    "reset.__code__": lambda: torch._dynamo.reset.__code__,
    "compile_lock": lambda: torch._dynamo.convert_frame.compile_lock,
    "Thread.start": lambda: threading.Thread.start,
}
_BEFORE = {name: read() for name, read in _PLACES.items()}


def changed_places() -> list[str]:
    """Names of the places that do not hold the identical object that they held when the tests began.

    And of functions marked with ``torch.fx.wrap`` in whose place a trace has left its replacement.
    """
    changed = [name for name, read in _PLACES.items() if read() is not _BEFORE[name]]
    for (_, name), where in st._wrapped_fns_to_patch.copy().items():
        ours = vars(sys.modules[where["__name__"]]) is where if where.get("__name__") in sys.modules else False
        if ours and hasattr(where.get(name), "_Patcher__fx_already_patched"):
            changed.append(f"{where['__name__']}.{name}")
    return changed
