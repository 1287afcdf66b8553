"""nested_tensor_from_jagged refuses an eager call while another thread traces.

pytorch#135276. Library code that asks is_fx_tracing() takes its tracing branch in threads that do not trace.
"""

from typing import Any

import torch
from torch.nested import nested_tensor_from_jagged

from fxsafe.doctor.faults._kit import attempt, finish, held_trace

ADVICE = "upgrade to torch 2.14, or build nested tensors before any thread traces or compiles"


def build() -> Any:
    nested = nested_tensor_from_jagged(values, offsets)
    return [part.tolist() for part in nested.unbind()]


values, offsets = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 2, 6])
right = build()
with held_trace():
    got = attempt(build)
finish(got != right, got=got)
