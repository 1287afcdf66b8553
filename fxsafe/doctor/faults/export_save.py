"""torch.export.save fails while another thread saves an exported program.

A save enters a reducer into the one table of copyreg ("Refusing to stomp on existing FakeTensor reducer").
"""

import threading
from typing import Any

from torch._export.serde import serialize

from fxsafe.doctor.faults._kit import WAIT, Task, attempt, cannot, finish

ADVICE = "hold one lock around every torch.export.save of the process"
inside, leave = threading.Event(), threading.Event()


class Slow:
    """Part of what is saved; keeps the save going."""

    def __reduce__(self) -> Any:
        inside.set()
        leave.wait(WAIT)
        return (int, (3,))


def save(what: Any) -> str:
    return type(serialize.serialize_torch_artifact(what)).__name__


right = save({"a": 1})
task = Task(lambda: save(Slow()))
if not inside.wait(WAIT):
    cannot(f"the save did not start: {task.result(0)}")
got = [attempt(lambda: save({"a": 1}))]
leave.set()
got.append(task.result())
finish(got != [right, right], got=got)
