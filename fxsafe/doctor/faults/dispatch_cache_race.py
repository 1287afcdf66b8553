"""Two threads that use an operator for the first time at the same moment fail in its dispatch cache.

pytorch#168042. The dispatcher asks for an entry that it missed; the second thread in the same miss finds it there and
fails with "already in dispatch cache". Whoever walks over the operators with a cache meets a set that grows.
"""

from typing import Any

import torch
import torch._ops

from fxsafe.doctor.faults._kit import Task, cannot, finish

ADVICE = "run each kind of trace once in one thread before others start"
ops: Any = torch._ops
key = torch._C.DispatchKey.CPU
operators = [torch.ops.aten.sin.default, torch.ops.aten.cos.default]


def miss(operator: Any) -> Any:
    return operator._get_dispatch(key)


def grow() -> None:
    for operator in operators:
        ops.add_cached_op(operator)


def walk() -> int:
    seen = 0
    for _ in ops.get_cached_ops():
        if seen == 0:
            Task(grow).result()
        seen += 1
    return seen


if not hasattr(operators[0], "_get_dispatch") or not hasattr(ops, "get_cached_ops"):
    cannot("this torch keeps its dispatch caches in another way")
wrong: dict[str, Any] = {}
for operator in operators:
    operator._dispatch_cache.pop(key, None)
    # What two threads do that both have missed already.
    entry = Task(lambda operator=operator: miss(operator)).result()  # type: ignore[misc]
    second = Task(lambda operator=operator: miss(operator)).result()  # type: ignore[misc]
    if isinstance(second, str) or second != entry:  # a key compares with no text
        wrong[str(operator)] = second
ops.reset_cached_ops()
ops.add_cached_op(torch.ops.aten.tan.default)
walked = Task(walk).result()
if walked != 1:
    wrong["walk over the operators with a cache"] = walked
finish(bool(wrong), wrong=wrong)
