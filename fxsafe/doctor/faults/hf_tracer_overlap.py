"""Two overlapping traces by transformers' HFTracer leave torch.arange and others replaced (needs transformers 4).

It replaces functions of the module torch for the whole process while it traces, and puts back what it found there. The
trace that begins second finds the first one's and leaves them for good; other threads get them meanwhile.
"""

import torch

from fxsafe.doctor.faults._kit import cannot
from fxsafe.doctor.faults._replacing import finish_overlap

ADVICE = "trace with HFTracer in one thread, before others call torch.arange, zeros, tensor, clamp or finfo"
try:
    from transformers.utils.fx import HFTracer
except ImportError:
    cannot("transformers 4 is not installed, which has HFTracer")

finish_overlap(
    HFTracer._TORCH_METHODS_TO_PATCH,
    lambda root: HFTracer().trace(root, dummy_inputs={"x": torch.ones(2)}),
)
