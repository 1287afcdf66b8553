"""F4, Dynamo's caches: a strict export does not throw away compiled code that another thread is about to use.

The race: since 2.10 a strict export begins with ``torch._dynamo.reset()``, which frees the C record that every code
object compiled so far carries. A thread that is inside a compiled call and waits for the compile lock holds a pointer
to that record, and goes on with it: what it compiles is lost, or the process dies ("Segmentation fault").

Upstream: none known. Releases: 2.10 to 2.15; seen on 2.13.0 and 2.14.1 with nothing but torch.

Why this place is enough: the capture goes past the caches (it calls Dynamo's ``compile_frame`` itself), so the reset
changes nothing of the exported graph but where the numbers of Triton kernels begin. While this is the only thread the
reset is made as ever; beside other threads, which alone can be in such a call, it is left out.

What stays: a ``torch._dynamo.reset()`` of the program's own, and the two of ``torch._dynamo.explain``, whose answer
would be another one beside old caches. They must not be made while other threads run compiled code.

This file can be deleted when the oldest supported torch resets nothing in an export, or frees no record in use.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeWrap
from fxsafe.patches.base import NotNeeded, Patch, Plan, ShapeError
from fxsafe.shapes import own_function
from fxsafe.traces import FX

__all__ = ["PATCH"]

DYNAMO = "torch._dynamo"
_CALLER = "torch._dynamo.functional_export"


def _template() -> None:
    replacement: Callable[[], None] = "<replacement>"  # type: ignore[assignment]
    replacement()


def _wrap(original: FunctionType) -> Callable[[], None]:
    def reset() -> None:
        # This frame, that of ``torch._dynamo.reset``, and its caller's.
        for_an_export = sys._getframe(2).f_globals.get("__name__") == _CALLER
        if not for_an_export or (threading.active_count() == 1 and len(sys._current_frames()) == 1):
            original()

    frame_hider()(reset)
    return reset


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    if importlib.util.find_spec(_CALLER) is None:
        return NotNeeded("a strict export does not reset Dynamo before 2.10")
    function = own_function(modules[DYNAMO], "reset")
    if not {"compile_lock", "reset_code_caches"} <= set(function.__code__.co_names):
        raise ShapeError(f"{DYNAMO}.reset no longer clears the caches of code under the compile lock")
    try:
        return Plan([CodeWrap(f"{DYNAMO}.reset", function, _template, _wrap)])  # type: ignore[arg-type]
    except ValueError as error:
        raise ShapeError(str(error)) from None


PATCH = Patch(
    name="export-reset",
    summary="a strict export does not free Dynamo's caches under another thread's compiled call",
    upstream=(),
    modules=("torch", FX, DYNAMO),
    plan=_plan,
    faults=("export_resets_caches",),
    quiet=False,
)
