"""F4, fake implementations: ``torch.library.get_ctx()`` answers with the context of the calling thread's own operator.

The race: while an operator's fake implementation runs, what ``get_ctx`` returns is kept in a module global, saved, set
and restored. Beside another thread's export, compile or ``make_fx`` of a custom operator it returns that one's context,
whose ``new_dynamic_size`` makes an unbacked symbol in the other's ShapeEnv: other graphs, without a word, or "Pending
unbacked symbols ... not in returned outputs"; overlapping calls leave a context, and its FakeTensorMode, in the global.

Upstream: none known. Releases: 2.5 to 2.15.

Why this place is enough: the global is set by one context manager and read by ``get_ctx``, as the module's attribute.

This file can be deleted when the oldest supported torch keeps the context per thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from fxsafe.dynamo import frame_hider
from fxsafe.patches.base import Patch, Plan
from fxsafe.shapes import ShapeError
from fxsafe.thread_globals import ThreadGlobals, isolate, kept_state
from fxsafe.traces import FX

__all__ = ["PATCH"]

FAKE_IMPL = "torch._library.fake_impl"
_NAMES = frozenset({"global_ctx_getter"})
_OUTSIDE = "get_none"


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    module = modules[FAKE_IMPL]
    outside = vars(module).get(_OUTSIDE)
    if outside is None:
        raise ShapeError(f"{FAKE_IMPL}.{_OUTSIDE} does not exist")
    frame_hider()(ThreadGlobals.__init__)
    state = kept_state(module, _NAMES, lambda: ThreadGlobals(dict.fromkeys(_NAMES, lambda: outside)))
    return Plan(isolate(module, state, _NAMES, frozenset({"set_ctx_getter"})))


PATCH = Patch(
    name="fake-impl-context",
    summary="torch.library.get_ctx() is that of the thread whose fake implementation asks",
    upstream=(),
    modules=("torch", FX, FAKE_IMPL),
    plan=_plan,
    faults=("fake_impl_context",),
)
