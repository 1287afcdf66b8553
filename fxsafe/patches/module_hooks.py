"""F2: what a trace replaces, it replaces for its own thread only.

The race: ``Tracer.trace`` replaces ``torch.nn.Module.__call__`` and ``__getattr__``, functions marked with
``torch.fx.wrap`` and functions of ``math`` for the whole process and puts them back at its end. Another thread's eager
module then raises "module is not installed as a submodule", overlapping traces put one another's hooks back, lose
leaves or leave ``nn.Module`` patched for ever, and a Dynamo compile in any thread takes away whichever trace's hooks
are in (``_maybe_revert_all_patches``).

Upstream: pytorch#112775; pytorch PR 187589 (not in 2.15.0) answers a part of it and leaves concurrent traces
unsupported. Releases: 2.5 to 2.15.

Why this place is enough: every replacement, also by code that copied an older ``Tracer.trace``, goes through
``_Patcher`` and its records ``_PatchedFn*``; these put a dispatcher into the place and the replacement on the thread's
own stack (``_slots``). What decides by identity in a patched place (``_patch_wrapped_functions``,
``_autowrap_check``, ``_create_wrapped_method``, ``Tracer.__init__``, node targets, torch.package's names) is shown what
it would see alone. All functions change in place, so from-imports follow. Two more names that concurrent traces share
are cured here: the counter of ``get_fresh_qualname`` and ``_CodeOnlyModule.forward``, which unpickling sets.

This file can be deleted when upstream's hooks are per thread in the oldest release supported.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import AttributeSwap, CodeSwap, Edit, ModuleProperties, code_with_constants
from fxsafe.patches._hook_readers import reader_edits
from fxsafe.patches._slots import MISSING, places
from fxsafe.patches.base import Patch, Plan
from fxsafe.shapes import Shape, ShapeError, own_function, shape_of

if TYPE_CHECKING:

    def _Patcher() -> Any: ...


__all__ = ["PATCH"]

_FX = "torch.fx._symbolic_trace"


class _Current(threading.local):
    patcher: Any = None
    reverted: Any = None
    """the patcher whose patches a compile of this thread has put back for its time"""

    def __init__(self) -> None:
        self.records: dict[tuple[object, str], Any] = {}


_current = _Current()


# torch's two context managers again, with the thread's patcher in the global's place.


def _new_patcher() -> Iterator[Any]:
    current: Any = "<current>"
    prior = current.patcher
    patcher = current.patcher = _Patcher()
    try:
        yield patcher
    finally:
        try:
            patcher.revert_all_patches()
        except BaseException:
            # Ctrl-C in the middle: nobody else would revert the rest, and what is reverted stays so.
            patcher.revert_all_patches()
            raise
        finally:
            current.patcher = prior


def _maybe_revert_all_patches() -> Iterator[None]:
    current: Any = "<current>"
    patcher, outer = current.patcher, current.reverted
    if patcher is outer:
        patcher = None  # a compile inside the compile: the outer one puts them in again, at its end
    patches_made = patches_removed = None
    try:
        if patcher is not None:
            current.reverted = patcher
            patches_removed = patcher.revert_all_patches()
        yield
    finally:
        if patcher is not None:
            current.reverted = outer
            patches_made = patcher.reapply_all_patches()
        if patches_made != patches_removed:
            raise AssertionError("CURRENT_PATCHER was changed during a revert_all_patches")


# Templates for the functions that look into places in order to patch them.


def _patch_wrapped_functions(patcher: Any) -> None:
    replacement: Any = "<replacement>"
    replacement(patcher)


def _autowrap_check(patcher: Any, frame_dict: Any, function_ids: Any) -> None:
    replacement: Any = "<replacement>"
    replacement(patcher, frame_dict, function_ids)


def _create_wrapped_method(cls: Any, name: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(cls, name)


def _wrapping(fx: Any) -> dict[FunctionType, Callable[..., Any]]:
    """Template -> the function that it calls."""

    def patch_wrapped_functions(patcher: Any) -> None:
        for (_, name), frame_dict in fx._wrapped_fns_to_patch.copy().items():
            there = places.seen(frame_dict, name)
            if there is MISSING:
                there = getattr(fx.builtins, name) if hasattr(fx.builtins, name) else frame_dict[name]
            patcher.patch(frame_dict, name, fx._create_wrapped_func(there))
        for cls, name in list(fx._wrapped_methods_to_patch):
            patcher.patch_method(cls, name, fx._create_wrapped_method(cls, name))

    # Every trace wraps the fifty functions of math: their wrappers and records, alike in each trace, are kept. For each
    # thread its own, since a replacement is found by identity when it is taken away.

    def autowrap_check(patcher: Any, frame_dict: Any, function_ids: Any) -> None:
        if patcher.visit_once(frame_dict):
            kept = _current.records
            create, is_math, made = fx._create_wrapped_func, frame_dict is vars(math), patcher.patches_made
            for name, value in places.snapshot(frame_dict).items():
                if id(value) in function_ids and not name.startswith("_") and callable(value):
                    record = kept.get((create, name)) if is_math else None
                    if record is not None and record.orig_fn is value:
                        made.append(record)
                        places.put(frame_dict, name, record.new_fn, value)
                        continue
                    patcher.patch(frame_dict, name, create(value))
                    if is_math and made and made[-1].orig_fn is value:
                        kept[create, name] = made[-1]

    def create_wrapped_method(cls: Any, name: str) -> Any:
        orig_fn = places.seen_attribute(cls, name)

        @functools.wraps(orig_fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            proxy = fx._find_proxy(args, kwargs)
            if proxy is not None:
                return proxy.tracer.create_proxy("call_method", name, args, kwargs)
            return orig_fn(*args, **kwargs)

        return wrapped

    return {
        _patch_wrapped_functions: patch_wrapped_functions,  # type: ignore[dict-item]
        _autowrap_check: autowrap_check,  # type: ignore[dict-item]
        _create_wrapped_method: create_wrapped_method,  # type: ignore[dict-item]
    }


def _patcher_methods(fx: Any) -> dict[str, Callable[..., Any]]:
    def patch(self: Any, frame_dict: Any, name: str, new_fn: Any, deduplicate: bool = True) -> None:
        # torch writes this attribute under its mangled name and asks for the plain one, so a name is never taken for
        # patched already and replacements of one name stack. Others rely on it by now.
        new_fn._Patcher__fx_already_patched = deduplicate
        there = places.seen(frame_dict, name)
        if there is MISSING:
            if not hasattr(fx.builtins, name):
                raise KeyError(name)
            there = None
            record = fx._PatchedFnDel(frame_dict, name, None, new_fn)
        elif getattr(there, "__fx_already_patched", False):
            return
        else:
            record = fx._PatchedFnSetItem(frame_dict, name, there, new_fn)
        self.patches_made.append(record)
        places.put(frame_dict, name, new_fn, there)  # what record.patch() does

    def patch_method(self: Any, cls: Any, name: str, new_fn: Any, deduplicate: bool = True) -> None:
        new_fn._Patcher__fx_already_patched = deduplicate
        there = places.seen_attribute(cls, name)
        if getattr(there, "__fx_already_patched", False):
            return
        record = fx._PatchedFnSetAttr(cls, name, there, new_fn)
        self.patches_made.append(record)
        record.patch()

    return {"patch": patch, "patch_method": patch_method}


def _put_record(self: Any) -> None:
    places.put_again(self.frame_dict, self.fn_name, self.new_fn, self.orig_fn)


def _take_record_or(revert: FunctionType) -> Callable[..., Any]:
    def take_record(self: Any) -> None:
        put_by_us = places.take(self.frame_dict, self.fn_name, self.new_fn)
        if not put_by_us and places.holds(self.frame_dict, self.fn_name, self.new_fn):
            revert(self)  # a bare patcher's, older than this patch

    return take_record


# What differs between releases without a meaning: annotations, and assert statements written out.
_NOISE = frozenset({"Any", "AssertionError", "_P"})


def _shape(parameters: str, reads: str = "", writes: str = "") -> Shape:
    return Shape(tuple(parameters.split()), frozenset(reads.split()), frozenset(writes.split()))


_SHAPES = {
    "_new_patcher": _shape("", "CURRENT_PATCHER _Patcher", "CURRENT_PATCHER"),
    "_maybe_revert_all_patches": _shape("", "CURRENT_PATCHER"),
    "_patch_wrapped_functions": _shape(
        "patcher",
        "_create_wrapped_func _create_wrapped_method _wrapped_fns_to_patch _wrapped_methods_to_patch"
        " builtins getattr hasattr",
    ),
    "_autowrap_check": _shape("patcher frame_dict function_ids", "_create_wrapped_func callable id"),
    "_create_wrapped_method": _shape("cls name", "functools getattr"),
    "_create_wrapped_func": _shape("orig_fn", "functools"),
}
_METHOD_SHAPES = {
    "_Patcher": {
        "patch": _shape(
            "self frame_dict name new_fn deduplicate", "_PatchedFnDel _PatchedFnSetItem builtins getattr hasattr"
        ),
        "patch_method": _shape("self cls name new_fn deduplicate", "_PatchedFnSetAttr getattr"),
        "visit_once": _shape("self thing", "id"),
        "revert_all_patches": _shape("self"),
        "reapply_all_patches": _shape("self"),
        "__exit__": _shape("self exc_type exc_val exc_tb"),
    },
    "_PatchedFnSetItem": {"patch": _shape("self"), "revert": _shape("self")},
    "_PatchedFnDel": {"patch": _shape("self"), "revert": _shape("self")},
    "_PatchedFnSetAttr": {"patch": _shape("self", "setattr"), "revert": _shape("self", "setattr")},
}


def _checked(owner: ModuleType | type, name: str, known: Shape) -> FunctionType:
    function = own_function(owner, name)
    found = shape_of(function.__code__)
    if Shape(found.parameters, found.reads - _NOISE, found.writes) != known:
        raise ShapeError(f"{owner.__name__}.{name} has an unknown shape: {found}")
    return function


def _record_edits(fx: Any, hide: Callable[..., None]) -> list[Edit]:
    edits: list[Edit] = []
    methods = _patcher_methods(fx)
    hide(*methods.values())
    for owner_name, known in _METHOD_SHAPES.items():
        owner = getattr(fx, owner_name, None)
        if not isinstance(owner, type):
            raise ShapeError(f"{_FX}.{owner_name} does not exist")
        if owner_name != "_Patcher":
            if getattr(owner, "_fields", None) != ("frame_dict", "fn_name", "orig_fn", "new_fn"):
                raise ShapeError(f"{_FX}.{owner_name} has unknown fields")
            methods = {"patch": _put_record, "revert": _take_record_or(own_function(owner, "revert"))}
            hide(*methods.values())
        for name, shape in known.items():
            _checked(owner, name, shape)
            if name in methods:
                edits.append(AttributeSwap(f"{_FX}.{owner_name}.{name}", owner, name, methods[name]))
    return edits


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    fx: Any = modules[_FX]
    for name in ("CURRENT_PATCHER", "_wrapped_fns_to_patch", "_wrapped_methods_to_patch", "_find_proxy", "builtins"):
        if name not in vars(fx):
            raise ShapeError(f"{_FX}.{name} does not exist")
    functions = {name: _checked(fx, name, shape) for name, shape in _SHAPES.items()}
    hide = frame_hider()
    edits = _record_edits(fx, hide)
    for body in (_new_patcher, _maybe_revert_all_patches):
        edits.append(_swap(functions, body, "<current>", _current))
    for template, replacement in _wrapping(fx).items():
        hide(replacement)
        edits.append(_swap(functions, template, "<replacement>", replacement))
    mine = property(lambda _: _current.patcher, lambda _, value: setattr(_current, "patcher", value))
    edits.append(ModuleProperties(f"{_FX}.CURRENT_PATCHER", fx, {"CURRENT_PATCHER": mine}))
    edits += reader_edits(modules, hide)
    hide(*places.dress(functions["_create_wrapped_func"].__code__))
    return Plan(edits, counters=lambda: {"patched_places": len(places), "patched_in_total": places.opened})


def _swap(functions: Mapping[str, FunctionType], body: Any, placeholder: str, value: object) -> Edit:
    function = functions[body.__name__]
    code = code_with_constants(body, {placeholder: value}, function.__code__, keep=False)
    return CodeSwap(f"{_FX}.{body.__name__}", function, code)


PATCH = Patch(
    name="module-hooks",
    summary="what a trace replaces (nn.Module's hooks, torch.fx.wrap, math) it replaces for its own thread only",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/112775",
        "https://github.com/pytorch/pytorch/pull/187589",
    ),
    modules=("torch", _FX, "torch.fx.graph_module", "torch.fx.graph", "torch.package.importer"),
    plan=_plan,
    faults=(
        "hooks_eager_call",
        "hooks_concurrent_traces_equal",
        "hooks_dynamo_reverts",
        "hooks_load_graphmodule",
        "hooks_overlap_leaves_module_patched",
        "hooks_wrapped_leaf_lost",
    ),
    after_fork_in_child=places.keep_only_this_thread,
)
