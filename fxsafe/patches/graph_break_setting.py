"""F4, graph breaks: ``with torch._dynamo.error_on_graph_break(...)`` holds in the thread that enters it.

The race: the setting is a module global that the block, and each call of a function compiled with ``fullgraph``, sets
and restores. Meanwhile another thread's compile refuses a graph break that it may have, or lets one pass.

Upstream: none known. Releases: 2.9 to 2.15 (before, there is no such setting).

Why this place is enough: the global is read and written by two functions of its module, under their own names.
Autograd's device threads see the default: what they compile lazily has no graph breaks.

This file can be deleted when the oldest supported torch keeps the setting per thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from fxsafe.dynamo import frame_hider
from fxsafe.patches.base import NotNeeded, Patch, Plan
from fxsafe.thread_globals import ThreadGlobals, isolate, kept_state
from fxsafe.traces import FX

__all__ = ["PATCH"]

UTILS = "torch._dynamo.utils"
_NAME = "_error_on_graph_break"
_USERS = frozenset({"_get_error_on_graph_break", "_set_error_on_graph_break"})


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    utils = modules[UTILS]
    if not {_NAME, *_USERS} & vars(utils).keys():
        return NotNeeded("torch has no such setting before 2.9")
    frame_hider()(ThreadGlobals.__init__)
    state = kept_state(utils, {_NAME}, lambda: ThreadGlobals({_NAME: bool}))
    return Plan(isolate(utils, state, frozenset({_NAME}), _USERS, by_attribute=False))


PATCH = Patch(
    name="graph-break-setting",
    summary="whether a graph break is an error is each thread's own setting",
    upstream=("https://github.com/pytorch/pytorch/pull/196637",),
    modules=("torch", FX, UTILS),
    plan=_plan,
    faults=("graph_break_setting_leaks",),
    quiet=False,
)
