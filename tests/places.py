"""The places that fxsafe and traces change, and whether each holds the identical object that it began with."""

from __future__ import annotations

import inspect

import torch
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
}
_BEFORE = {name: read() for name, read in _PLACES.items()}


def changed_places() -> list[str]:
    """Names of the places that do not hold the identical object that they held when the tests began."""
    return [name for name, read in _PLACES.items() if read() is not _BEFORE[name]]
