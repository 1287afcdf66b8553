"""CUDA graph trees in threads that Python started: their thread state is set up at first use.

The race: the managers of CUDA graph trees are kept per thread, but only the thread that imported Inductor has a place
for them, and autograd's threads, which get that of their caller. ``torch.compile(mode="reduce-overhead")`` in any other
thread fails with a bare AssertionError from ``get_obj``. Where two threads have one, their captures disturb each other,
because the allocator's pools and a capture are the process's.

Upstream: fixed in 2.13.0 by pytorch#184357. Releases: 2.5 to 2.12.

Why this place is enough: everybody gets the managers through ``get_obj``; what is set up there is what the import sets
up. Captures and warm-ups exclude each other by one lock, at the three places where 2.13 takes its own. A replay takes
no lock. Replaying in one thread what another has recorded is as unsafe as it is upstream.

This file can be deleted when torch 2.13 is the oldest release supported.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeWrap, Edit
from fxsafe.patches.base import NotNeeded, Patch, Plan, ShapeError
from fxsafe.shapes import own_function, shape_of
from fxsafe.traces import FX

__all__ = ["PATCH"]

TREES = "torch._inductor.cudagraph_trees"
_KEYS: dict[str, Callable[[], Any]] = {
    "tree_manager_containers": dict,
    "tree_manager_locks": lambda: defaultdict(threading.Lock),
}


def _get_obj_template(local: Any, attr_name: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(local, attr_name)


def _init_template(self: Any, device_index: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(self, device_index)


def _run_template(self: Any, new_inputs: Any, function_id: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(self, new_inputs, function_id)


_CAPTURES = {"__init__": _init_template, "run_eager": _run_template, "record_function": _run_template}


class _Capture:
    """The lock of captures and warm-ups."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def locked(self, original: FunctionType) -> Callable[..., Any]:
        def captures(*args: Any) -> Any:
            with self.lock:
                return original(*args)

        frame_hider()(captures)
        return captures

    def after_fork_in_child(self) -> None:
        self.lock = threading.RLock()


_capture = _Capture()


def _get_obj(original: FunctionType) -> Callable[..., Any]:
    def get_obj(local: Any, attr_name: str) -> Any:
        if not hasattr(local, attr_name):
            import torch

            core: Any = torch._C
            if not core._is_key_in_tls(attr_name):
                for name, make in _KEYS.items():
                    setattr(local, name, make())
                    # For autograd's threads, which get what their caller has.
                    core._stash_obj_in_tls(name, getattr(local, name))
        return original(local, attr_name)

    frame_hider()(get_obj)
    return get_obj


def _wrap(where: str, function: FunctionType, template: Any, wrap: Callable[[FunctionType], Any]) -> Edit:
    try:
        return CodeWrap(where, function, template, wrap)
    except ValueError as error:
        raise ShapeError(str(error)) from None


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    trees: Any = modules[TREES]
    function = own_function(trees, "get_obj")
    reads = shape_of(function.__code__).reads
    if "_initialize_tls" in reads:
        return NotNeeded("torch sets up the thread state at first use since 2.13.0 (pytorch#184357)")
    where = f"{TREES}.get_obj"
    if "hasattr" not in reads or "_is_key_in_tls" not in function.__code__.co_names:
        raise ShapeError(f"{where} has an unknown shape: {shape_of(function.__code__)}")
    edits = [_wrap(where, function, _get_obj_template, _get_obj)]
    for name, template in _CAPTURES.items():
        method = own_function(trees.CUDAGraphTreeManager, name)
        edits.append(_wrap(f"{TREES}.CUDAGraphTreeManager.{name}", method, template, _capture.locked))
    return Plan(edits)


PATCH = Patch(
    name="cudagraph-threads",
    summary="CUDA graph trees (mode='reduce-overhead') work in threads other than the first",
    upstream=("https://github.com/pytorch/pytorch/pull/184357",),
    modules=("torch", FX, TREES),
    plan=_plan,
    quiet=False,  # imported by the first compile
    after_fork_in_child=_capture.after_fork_in_child,
)
