"""A function compiled with mode="reduce-overhead" raises AssertionError in every thread but one.

The state that CUDA graph trees keep for each thread is made in the thread that imports them. The fault is there without
a GPU: what is asked for here is asked for by every such call.
"""

import torch._inductor.cudagraph_trees as trees

from fxsafe.doctor.faults._kit import Task, attempt, finish

ADVICE = "call what is compiled with CUDA graphs in one thread only, or use torch 2.13"
here = attempt(lambda: type(trees.get_container(0)).__name__)
there = attempt(lambda: Task(lambda: type(trees.get_container(0)).__name__).result())
finish(there != here, here=here, there=there)
