"""A compile fails because another thread's has set the same metrics ("Metric(s) ... have already been set").

Up to torch 2.10 Dynamo collects the metrics of all threads' compiles in one context; a lazy backward enters it without
the compile lock.
"""

import threading
from typing import Any

import torch._dynamo.utils

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "compile forward and backward once before the threads start"
utils: Any = torch._dynamo.utils
if not hasattr(utils, "get_metrics_context"):
    cannot("this torch has no such context")
begun, entered, left = threading.Event(), threading.Event(), threading.Event()


def first() -> Any:
    with utils.get_metrics_context() as context:
        context.update({"co_name": "first"})
        begun.set()
        entered.wait(WAIT)
    left.set()


def second() -> Any:
    with utils.get_metrics_context() as context:
        entered.set()
        left.wait(WAIT)
        # The other one has left: this thread is outermost now, in the context that the other began.
        context.update_outer({"co_name": "second"})
        return "fine"


task = Task(lambda: attempt(first))
if not begun.wait(WAIT):
    cannot(f"the first context was not entered: {task.result(0)}")
got = Task(lambda: attempt(second)).result()
task.result()
finish(got != "fine", second=got)
