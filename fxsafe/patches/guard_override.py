"""F1, always-false: the compiled call's guard never refuses.

The race: as in ``tracing_flag``. This fix leaves the process-wide flag as it is and answers False to the compiled
call's guard instead, on every thread. It thereby gives up the rightful refusal too: a compiled function called inside
one's own symbolic trace runs.

Upstream: pytorch#126024. Releases: all; with 2.14 and later the flag is per thread and only the rightful refusal is
left for this fix to take away.

Why this place is enough: the guard holds the predicate in a closure of each compiled function, and the predicate
changes in place. From 2.9 the guard's predicate ``is_fx_symbolic_tracing`` is asked by ``torch.export.unflatten`` too,
which traces by it and keeps its answer; it is False for everybody else. Up to 2.8 the guard asks ``is_fx_tracing``,
which many ask (``ProxyableClassMeta``, nested tensors, ``torch.export.unflatten``): there only the guard is told False.

This file can be deleted when nobody wants the refusal gone: when torch itself traces through compiled functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeSwap, code_with_constants
from fxsafe.observe import events
from fxsafe.patches.base import Patch, Plan
from fxsafe.shapes import Shape, own_function, require
from fxsafe.traces import FX, in_flight_here

if TYPE_CHECKING:
    import torch

    _is_fx_tracing_flag = False

    def _get_is_fx_tracing() -> bool: ...


__all__ = ["PATCH"]

_NOTHING: frozenset[str] = frozenset()
_FLAG = "_is_fx_tracing_flag"


# torch's predicates again, in the three bodies that the guard has asked, with one more question at the end: nothing is
# paid for it while nobody traces. Their globals are those of torch.fx._symbolic_trace, where they go.


def _tracing_2_5() -> Any:
    may_know: Any = "<may know>"
    return _is_fx_tracing_flag and may_know()


def _symbolic_tracing_2_9() -> Any:
    may_know: Any = "<may know>"
    return _is_fx_tracing_flag and not torch.compiler.is_compiling() and may_know()


def _symbolic_tracing_2_14() -> Any:
    may_know: Any = "<may know>"
    return _get_is_fx_tracing() and not torch.compiler.is_compiling() and may_know()


def _all_but_the_guard() -> bool:
    if events.guard_asks(2):
        events.refusal_avoided()
        return False
    return True


def _only_unflatten() -> bool:
    if events.guard_asks(2):
        events.refusal_avoided()
        return False
    return bool(sys._getframe(2).f_globals.get("__name__") == "torch.export.unflatten")


_KNOWN: dict[str, tuple[Callable[[], bool], dict[Shape, Callable[[], Any]]]] = {
    "is_fx_symbolic_tracing": (
        _only_unflatten,
        {
            Shape((), frozenset({_FLAG, "torch"}), _NOTHING): _symbolic_tracing_2_9,
            Shape((), frozenset({"_get_is_fx_tracing", "torch"}), _NOTHING): _symbolic_tracing_2_14,
        },
    ),
    "is_fx_tracing": (_all_but_the_guard, {Shape((), frozenset({_FLAG}), _NOTHING): _tracing_2_5}),
}


def _after_fork_in_child() -> None:
    # The trace that set the flag may have run on a thread that the child does not have; nobody would ever unset it.
    module = sys.modules[FX]
    if _FLAG in vars(module):
        vars(module)[_FLAG] = in_flight_here()


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    module = modules[FX]
    name = "is_fx_symbolic_tracing" if "is_fx_symbolic_tracing" in vars(module) else "is_fx_tracing"
    may_know, bodies = _KNOWN[name]
    where = f"{FX}.{name}"
    function = own_function(module, name)
    body = bodies[require(where, function, *bodies)]
    frame_hider()(may_know)
    code = code_with_constants(body, {"<may know>": may_know}, function.__code__)  # type: ignore[arg-type]
    return Plan([CodeSwap(where, function, code)], counters=lambda: {"refusals_avoided": events.refusals.total})


PATCH = Patch(
    name="guard-override",
    summary="a compiled call is never refused because of FX tracing, not even inside one's own trace",
    upstream=("https://github.com/pytorch/pytorch/issues/126024",),
    modules=("torch", FX),
    plan=_plan,
    fixes=frozenset({"always-false"}),
    faults=("flag_warm_call", "flag_silent_eager", "flag_compile_traces"),
    after_fork_in_child=_after_fork_in_child,
)
