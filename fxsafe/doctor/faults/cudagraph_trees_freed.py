"""The thread that imported the trees of CUDA graphs ends: what is still in use is freed, and the process may die.

The C++ state of the thread drops a reference that it has never taken. What is counted here is held by more references
than are dropped.
"""

import os
import sys
import threading
from typing import Any

from fxsafe.doctor.faults._kit import cannot, finish

ADVICE = "import torch._inductor.cudagraph_trees in the main thread before others compile"
TIMES = 5

if "torch._inductor.cudagraph_trees" in sys.modules:
    cannot("the trees are imported with torch")
if not os.path.isdir("/proc/self/task"):
    cannot("needs /proc, to know when a thread has ended")
held: list[Any] = []


def first() -> None:
    import torch._inductor.cudagraph_trees as trees

    held.extend([vars(trees.local)["tree_manager_containers"]] * TIMES)


thread = threading.Thread(target=first)
thread.start()
thread.join()
while os.path.exists(f"/proc/self/task/{thread.native_id}"):
    os.sched_yield()  # C++ takes its state down after Python has let go of the thread
found = sys.getrefcount(held[0]) - 1
held.append(held[0])
finish(found != TIMES, references=found, held=TIMES)
