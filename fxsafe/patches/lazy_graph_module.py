"""F4, lazy graph modules: what kind of graph module a thread makes is its own affair.

The race: Dynamo makes lazy graph modules while it compiles, and says so in a module global that ``make_fx`` and export
read too. A strict export beside another thread's compile gets a lazy module where it needs a plain one ("'GraphModule'
object has no attribute '_in_spec'"), and overlapping blocks leave the setting for ever.

Upstream: none known. Releases: 2.5 to 2.15.

Why this place is enough: the two globals are set and read by three functions of their module only.

This file can be deleted when the oldest supported torch keeps the setting per thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from fxsafe.dynamo import frame_hider
from fxsafe.patches.base import Patch, Plan
from fxsafe.thread_globals import ThreadGlobals, isolate, kept_state
from fxsafe.traces import FX

__all__ = ["PATCH"]

LAZY = "torch.fx._lazy_graph_module"
_NAMES = frozenset({"_use_lazy_graph_module_flag", "_force_skip_lazy_graph_module_flag"})
_USERS = frozenset({"_use_lazy_graph_module", "_force_skip_lazy_graph_module", "_get_graph_module_cls"})


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    frame_hider()(ThreadGlobals.__init__)
    state = kept_state(modules[LAZY], _NAMES, lambda: ThreadGlobals(dict.fromkeys(_NAMES, bool)))
    return Plan(isolate(modules[LAZY], state, _NAMES, _USERS, by_attribute=False))


PATCH = Patch(
    name="lazy-graph-module",
    summary="whether graph modules are made lazily is each thread's own setting",
    upstream=(),
    modules=("torch", FX, LAZY),
    plan=_plan,
    faults=("lazy_graph_module",),
    quiet=False,
)
