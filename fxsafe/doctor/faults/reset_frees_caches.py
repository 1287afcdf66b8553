"""torch._dynamo.reset() frees what another thread's compiled call works with; its work is lost, or the process dies.

The other thread waits for the compile lock with a pointer to the caches that the reset frees.
"""

import torch._dynamo

from fxsafe.doctor.faults._kit import finish
from fxsafe.doctor.faults._reset import entries_beside

ADVICE = "call torch._dynamo.reset() only while no other thread runs compiled functions"
entries = entries_beside(torch._dynamo.reset)
finish(entries < 1, entries=entries)
