"""F4, guards: the names in whose scope Dynamo evaluates guards belong to one evaluation.

The race: since 2.10 Dynamo evaluates the sources of guards in one dictionary of the whole process, and puts temporary
names into it meanwhile. Strict export builds guards without Dynamo's compile lock: its names disappear under another
thread's hands, or turn up among its arguments ("name 'tmp' is not defined", "___make_guard_fn() takes 24 positional
arguments but 25 were given").

Upstream: none known. Releases: 2.10 to 2.15.

Why this place is enough: everybody gets the dictionary from one function, and nobody expects to find there what he has
put in before; each caller gets a copy of his own.

This file can be deleted when the oldest supported torch evaluates guards in a scope of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeWrap
from fxsafe.patches.base import NotNeeded, Patch, Plan, ShapeError
from fxsafe.shapes import own_function, shape_of
from fxsafe.traces import FX

__all__ = ["PATCH"]

GUARDS = "torch._dynamo.guards"
_SCOPE = "torch._guards"
_NAME = "_get_closure_vars"
_CACHE = "_CLOSURE_VARS"


def _template() -> Any:
    replacement: Any = "<replacement>"
    return replacement()


def _copied(original: FunctionType) -> Callable[..., Any]:
    def closure_vars() -> Any:
        return original().copy()

    frame_hider()(closure_vars)
    return closure_vars


def _puts_names_in(scope: ModuleType) -> bool:
    source = vars(scope).get("ChainedSource")
    get_value = vars(source).get("get_value") if isinstance(source, type) else None
    return get_value is not None and "tmp" in get_value.__code__.co_consts


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    if not _puts_names_in(modules[_SCOPE]):
        return NotNeeded("Dynamo puts no temporary names into the scope of guards before 2.10")
    function = own_function(modules[GUARDS], _NAME)
    if _CACHE not in shape_of(function.__code__).writes:
        raise ShapeError(f"{GUARDS}.{_NAME} keeps no {_CACHE}")
    try:
        return Plan([CodeWrap(f"{GUARDS}.{_NAME}", function, _template, _copied)])  # type: ignore[arg-type]
    except ValueError as error:
        raise ShapeError(str(error)) from None


PATCH = Patch(
    name="guard-scope",
    summary="threads that build guards at the same time do not see each other's temporary names",
    upstream=(),
    modules=("torch", FX, _SCOPE, GUARDS),
    plan=_plan,
    faults=("guard_names_shared",),
    quiet=False,
)
