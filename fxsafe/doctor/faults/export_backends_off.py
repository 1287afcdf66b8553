"""Two torch.export calls that overlap leave mkldnn, nnpack and cuDNN switched off in the whole process.

An export saves, switches off and restores process-wide flags (``torch.export._trace._ignore_backend_decomps``).
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.export._trace

from fxsafe.doctor.faults._kit import Task, cannot, finish

ADVICE = "hold one lock around every torch.export of the process"
ends: Any = torch.export._trace


def enabled() -> dict[str, bool]:
    return {
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "nnpack": torch._C._get_nnpack_enabled(),
        "cudnn": torch._C._get_cudnn_enabled(),
    }


def overlapping() -> dict[str, bool]:
    """What is enabled after the switches of two exports have overlapped, the exports themselves left out."""
    first, second = ExitStack(), ExitStack()
    for stack in (first, second):
        Task(partial(stack.enter_context, ends._ignore_backend_decomps())).result()
    for stack in (first, second):
        Task(stack.close).result()
    return enabled()


before = enabled()
if not hasattr(ends, "_ignore_backend_decomps"):
    cannot("this torch's exports switch no backend off")
after = overlapping()
finish(after != before, before=before, after=after)
