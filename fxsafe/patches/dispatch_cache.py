"""F4, dispatch caches: two threads may fill an operator's cache at the same moment.

The race: on a miss the dispatcher asks ``OpOverload._get_dispatch``, which asserts that the key is still missing; a
thread that was second in the same miss fails with "already in dispatch cache". And entering a pre-dispatch mode walks
over the set of operators with a cache while other threads add to it ("Set changed size during iteration").

Upstream: pytorch#168042. Releases: 2.5 to 2.15.

Why this place is enough: an entry is the same whoever computes it, so the second thread returns the first one's, and
whoever walks over the set gets a copy of it. Storing an entry and adding an operator are single steps already.

This file can be deleted when the oldest supported torch returns the entry that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeSwap, CodeWrap, Edit, code_with_constants
from fxsafe.patches.base import Patch, Plan
from fxsafe.shapes import Shape, ShapeError, own_function, require
from fxsafe.thread_globals import Inline

__all__ = ["PATCH"]

OPS = "torch._ops"


def _copy_of_cached_ops() -> Any:
    # A global of torch._ops, where this body goes.
    return cached_ops.copy()  # type: ignore[name-defined]  # noqa: F821


def _get_dispatch_template(self: Any, key: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(self, key)


def _wrap(original: FunctionType) -> Callable[..., Any]:
    def get_dispatch(self: Any, key: Any) -> Any:
        try:
            return original(self, key)
        except AssertionError:
            # The first thing that it does, before any effect, is to assert that the key is missing.
            entry = self._dispatch_cache.get(key)
            if entry is None:
                raise
            return entry

    frame_hider()(get_dispatch)
    return get_dispatch


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    module = modules[OPS]
    edits: list[Edit] = []
    function = own_function(module, "get_cached_ops")
    where = f"{OPS}.get_cached_ops"
    require(where, function, Shape((), frozenset({"cached_ops"}), frozenset()))
    edits += [CodeSwap(where, function, code_with_constants(_copy_of_cached_ops, {}, function.__code__))]  # type: ignore[arg-type]
    edits += [Inline(where, function)]
    function = own_function(module.OpOverload, "_get_dispatch")
    where = f"{OPS}.OpOverload._get_dispatch"
    if "_dispatch_cache" not in function.__code__.co_names:
        raise ShapeError(f"{where} no longer fills _dispatch_cache")
    try:
        edits += [CodeWrap(where, function, _get_dispatch_template, _wrap)]  # type: ignore[arg-type]
    except ValueError as error:
        raise ShapeError(str(error)) from None
    edits += [Inline(where, function)]
    frame_hider()
    return Plan(edits)


PATCH = Patch(
    name="dispatch-cache",
    summary="threads may fill the dispatch cache of one operator at the same moment",
    upstream=("https://github.com/pytorch/pytorch/issues/168042",),
    # torch itself, so as to wait for the end of its import: the others come in the middle of it.
    modules=("torch", OPS),
    plan=_plan,
    faults=("dispatch_cache_race",),
    quiet=False,
)
