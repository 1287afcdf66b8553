"""A strict export frees what Dynamo keeps of another thread's compiled call; its work is lost, or the process dies.

The export begins with a reset of Dynamo; the other thread waits for the compile lock with a pointer to the caches.
"""

import torch
from torch import nn

from fxsafe.doctor.faults._kit import finish
from fxsafe.doctor.faults._reset import entries_beside

ADVICE = "export in strict mode only while no other thread runs compiled functions, or with strict=False"


def export() -> None:
    torch.export.export(nn.Linear(2, 2), (torch.ones(3, 2),), strict=True)


export()  # imports what it needs
entries = entries_beside(export)
finish(entries < 1, entries=entries)
