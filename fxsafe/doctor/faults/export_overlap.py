"""Two torch.export calls that overlap fail, or leave builtins replaced for ever.

Non-strict export replaces builtins.max, builtins.min and math.pow for the whole process while it runs.
"""

import builtins
import math

from fxsafe.doctor.faults._kit import finish
from fxsafe.doctor.faults._overlap import overlapping_exports

ADVICE = "hold one lock around every torch.export of the process"
originals = (builtins.max, builtins.min, math.pow)
right, got = overlapping_exports()
replaced = (builtins.max, builtins.min, math.pow) != originals
finish(got != [right, right] or replaced, wrong=[code for code in got if code != right], replaced=replaced)
