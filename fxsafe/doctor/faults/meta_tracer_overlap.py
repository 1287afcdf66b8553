"""Two overlapping traces by MetaTracer leave torch.zeros and others replaced.

It replaces functions of the module torch for the whole process while it traces, and puts back what it found there. The
trace that begins second finds the first one's and leaves them for good; other threads get them meanwhile.
"""

import torch
from torch.fx.experimental.meta_tracer import MetaTracer

from fxsafe.doctor.faults._replacing import finish_overlap

ADVICE = "trace with MetaTracer in one thread, before others call torch.zeros, ones, arange, full_like or eye"

finish_overlap(
    MetaTracer._TORCH_METHODS_TO_PATCH,
    lambda root: MetaTracer().trace(root, {"x": torch.empty(2, device="meta")}),
)
