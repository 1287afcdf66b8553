"""F4, first half: what ``make_fx`` keeps about the trace in progress belongs to the thread that traces.

The race: ``proxy_tensor._CURRENT_MAKE_FX_TRACER`` is a module global that ``make_fx`` sets and that the higher-order
operators (``cond``, ``map``, ``while_loop``, flex_attention; eager, and in the backward) ask for their parent trace.
They find another thread's, or none ("parent_tracer.fx_tracer should not be None"). The same holds for the stack of
pre-dispatch modes ("Trying to pop empty mode stack") and, where they are globals still, for the decomposition table
(to 2.12) and the operator that is being decomposed (to 2.11).

Upstream: pytorch#189665 (its flaky test was made serial), pytorch#134775. Releases: 2.5 to 2.15.

Why this place is enough: all readers of the tracer import it inside the function that needs it, so the module's
property serves them, and its only writer changes in place; the pre-dispatch stack is reached through one function. No
lock is taken: together with the patches of ``Tracer.trace``, of node metadata and of the dispatch caches, a trace
shares nothing with another thread's that ``make_fx`` itself changes.

This file can be deleted when the oldest supported torch keeps these per thread.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from types import ModuleType, NoneType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.patches.base import Patch, Plan, ShapeError
from fxsafe.thread_globals import ThreadGlobals, isolate, kept_state

__all__ = ["PATCH"]

PROXY_TENSOR = "torch.fx.experimental.proxy_tensor"
OPS = "torch._ops"
_TRACER = "_CURRENT_MAKE_FX_TRACER"
_MODES = "_mode_stack_state_for_pre_dispatch"
_ONCE_GLOBAL: dict[str, tuple[Callable[[], Any], str]] = {
    "CURRENT_DECOMPOSITION_TABLE": (dict, "decompose"),
    "ORIGINAL_ATEN": (NoneType, "set_original_aten_op"),
}


class _Tracing(dict[str, Any]):
    """What ``make_fx`` keeps for a thread; while it traces, the thread runs autograd itself.

    Otherwise a device's autograd thread, which has no trace of its own, would run the part of a traced backward that
    asks for the trace. AOTAutograd does the same while it traces.
    """

    _multithreading = True

    def __setitem__(self, name: str, value: Any) -> None:
        if name == _TRACER:
            import torch

            if value is not None and self[_TRACER] is None:
                self._multithreading = torch._C._is_multithreading_enabled()
                torch._C._set_multithreading_enabled(False)
            elif value is None and self[_TRACER] is not None:
                torch._C._set_multithreading_enabled(self._multithreading)
        super().__setitem__(name, value)


class _Tracings(ThreadGlobals):
    def __init__(self, initial: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__(initial)
        self._fxsafe_values = _Tracing(self._fxsafe_values)


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    proxy_tensor, ops = modules[PROXY_TENSOR], modules[OPS]
    initial: dict[str, Callable[[], Any]] = {_TRACER: NoneType}
    users = {"_set_make_fx_tracer"}
    for name, (make, user) in _ONCE_GLOBAL.items():
        value = vars(proxy_tensor).get(name)
        if name in vars(proxy_tensor) and not isinstance(value, contextvars.ContextVar):
            initial[name] = make
            users.add(user)
    stack = type(vars(ops).get(_MODES))
    if stack.__module__ != OPS:
        raise ShapeError(f"{OPS}.{_MODES} is a {stack.__module__}.{stack.__qualname__}")
    frame_hider()(_Tracings.__init__, ThreadGlobals.__init__, _Tracing.__setitem__)
    tracing = kept_state(proxy_tensor, initial, lambda: _Tracings(initial))
    modes = kept_state(ops, {_MODES}, lambda: ThreadGlobals({_MODES: stack}))
    return Plan(
        [
            # Who installs is inside no trace and needs nothing of what the globals hold.
            *isolate(proxy_tensor, tracing, frozenset(initial), frozenset(users), home=False),
            # Nobody outside uses the stack by its name.
            *isolate(
                ops,
                modes,
                frozenset({_MODES}),
                frozenset({"mode_stack_state_for_pre_dispatch"}),
                by_attribute=False,
                home=False,
            ),
        ]
    )


PATCH = Patch(
    name="make-fx",
    summary="make_fx and eager higher-order operators find their own thread's trace",
    upstream=("https://github.com/pytorch/pytorch/issues/189665", "https://github.com/pytorch/pytorch/pull/134775"),
    # torch itself, so as to wait for the end of its import: the others come in the middle of it.
    modules=("torch", PROXY_TENSOR, OPS),
    plan=_plan,
    faults=("makefx_current_tracer", "makefx_predispatch_modes"),
)
