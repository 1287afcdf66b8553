"""Fake tensors on a CUDA build without a GPU: the guard of the device is replaced once, and not under other threads.

The race: every ``FakeTensorMode.__enter__`` calls ``torch._C._ensureCUDADeviceGuardSet``, which, where there is no GPU,
puts a new no-op guard into the process's table and frees the one that is there. Another thread that uses it at that
moment dies with a segmentation fault: any two threads that trace, compile or export.

Upstream: pytorch#178950 (the same use after free). Releases: 2.10 and 2.11 with CUDA and no GPU; seen on 2.11.0.

Why this place is enough: the function is called by this one name, and calling it again never does anything else. It is
called at the first use, as ever, and not before: it asks the driver for devices, which a program that forks later may
not want yet.

This file can be deleted when 2.12 is the oldest release supported.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import AttributeSwap
from fxsafe.patches.base import NotNeeded, Patch, Plan, ShapeError

__all__ = ["PATCH"]

_NAME = "_ensureCUDADeviceGuardSet"


@functools.cache
def once(original: Callable[[], None]) -> Callable[[], None]:
    """A function that calls ``original`` the first time it is called; whoever else comes meanwhile waits for it.

    There is one for each ``original``, whatever number of installations: to call it again is the fault.
    """
    lock, done = threading.Lock(), threading.Event()
    locks.append(lock)

    def ensure_device_guard() -> None:
        if not done.is_set():
            with lock:
                if not done.is_set():
                    original()
                    done.set()

    return ensure_device_guard


locks: list[Any] = []


def _after_fork_in_child() -> None:
    for lock in locks:
        lock._at_fork_reinit()


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    extension: Any = modules["torch"]._C
    original = vars(extension).get(_NAME)
    if original is None:
        return NotNeeded("torch does not replace the guard before 2.10")
    if not callable(original) or hasattr(original, "__code__"):
        raise ShapeError(f"torch._C.{_NAME} is not torch's own")
    replacement = once(original)
    frame_hider()(replacement)
    return Plan([AttributeSwap(f"torch._C.{_NAME}", extension, _NAME, replacement)])


PATCH = Patch(
    name="device-guard",
    summary="threads may enter FakeTensorMode at the same moment on a CUDA build without a GPU",
    upstream=("https://github.com/pytorch/pytorch/pull/178950",),
    modules=("torch",),
    plan=_plan,
    quiet=False,
    after_fork_in_child=_after_fork_in_child,
)
