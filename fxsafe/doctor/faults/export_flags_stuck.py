"""Two torch.export calls that overlap leave torch.compiler.is_compiling() True for ever.

Each export saves, sets and restores flags of the whole process.
"""

import torch

from fxsafe.doctor.faults._kit import finish
from fxsafe.doctor.faults._overlap import overlapping_exports

ADVICE = "hold one lock around every torch.export of the process"
overlapping_exports()
left = {
    "is_compiling": torch.compiler.is_compiling(),
    "is_exporting": hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting(),
}
finish(any(left.values()), left=left)
