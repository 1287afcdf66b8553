"""Two threads whose symbolic shapes are the first to need a SymPy singleton fail with KeyError.

``sympy.S`` makes its singletons at their first use, and deletes the entry of those that wait twice then.
"""

import threading
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from fxsafe.doctor.faults._kit import WAIT, Task, finish

ADVICE = "run one trace with symbolic shapes in one thread before others start"
both = threading.Barrier(2)


def initialize(number: Any) -> None:
    both.wait(WAIT)  # both threads have found the class waiting


# Registered as torch's ``IntInfinity`` is.
Number: Any = sympy.core.singleton.Singleton("Number_", (sympy.Basic,), {"__init__": initialize})
tasks = [Task(lambda: sympy.S.Number_) for _ in range(2)]
found = [task.result() for task in tasks]
wrong = [f for f in found if f is not Number._instance]
finish(bool(wrong), wrong=wrong, sympy=sympy.__version__, torch=str(torch.__version__))
