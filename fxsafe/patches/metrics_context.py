"""F4, Dynamo's metrics: a thread's compile writes its metrics into a context of its own.

The race: Dynamo collects what a compile took in one context of the process, which counts how deep it is nested. A
lazy compile of a backward enters it without the compile lock, and so do an export and compiling ahead of time: what
two threads write meets in one context, and the compile fails ("Metric(s) ... have already been set in the current
context").

Upstream: per thread since 2.11. Releases: 2.6 to 2.10.

Why this place is enough: everybody gets the two contexts from two functions.

This file can be deleted when torch 2.11 is the oldest release supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.patches.base import NotNeeded, Patch, Plan
from fxsafe.thread_globals import ThreadGlobals, isolate, kept_state
from fxsafe.traces import FX

__all__ = ["PATCH"]

UTILS = "torch._dynamo.utils"
_USERS = {
    "_METRICS_CONTEXT": "get_metrics_context",
    "_RUNTIME_METRICS_CONTEXT": "get_runtime_metrics_context",  # since 2.7
}


def _another(context: Any) -> Callable[[], Any]:
    kind, on_exit = type(context), vars(context)["_on_exit"]
    return lambda: kind(on_exit=on_exit)


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    utils = modules[UTILS]
    present = {name: user for name, user in _USERS.items() if name in vars(utils)}
    if not present and not hasattr(utils, "get_metrics_context"):
        return NotNeeded("Dynamo has no such context before 2.6")
    if not present:
        return NotNeeded("torch keeps one for each thread since 2.11")
    frame_hider()(ThreadGlobals.__init__)
    initial = {name: _another(vars(utils)[name]) for name in present}
    state = kept_state(utils, present, lambda: ThreadGlobals(initial))
    return Plan(isolate(utils, state, frozenset(present), frozenset(present.values()), by_attribute=False))


PATCH = Patch(
    name="metrics-context",
    summary="the metrics of one thread's compile do not fail another's",
    upstream=(),
    modules=("torch", FX, UTILS),
    plan=_plan,
    faults=("metrics_context_shared",),
    quiet=False,
)
