"""F4, forward-mode differentiation: the level that ``torch.func.jvp`` opens stays open until the last thread is out.

The race: forward-mode levels are one list of the process, in C++, and do not nest. ``jvp``, ``jacfwd`` and ``hessian``
open one in the outermost call, which they know by a module global: a thread that comes second opens none and uses the
first one's. When the first one leaves it deletes that level with all tangents, those of the second thread among them:
its derivative is zero then, without a word.

Upstream: none known. Releases: 2.5 to 2.15.

Why this place is enough: several functorch levels on one level of C++ is what a ``jvp`` inside a ``jvp`` does, so
threads may share it too; only who closes it has to change. ``torch.autograd.forward_ad.dual_level`` itself cannot be
shared: what it deletes at its end is part of what it promises.

This file can be deleted when the oldest supported torch keeps forward-mode levels per thread.
"""

from __future__ import annotations

import linecache
import threading
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeSwap
from fxsafe.patches.base import Patch, Plan, ShapeError
from fxsafe.thread_globals import Inline, Rewrite, rewritten
from fxsafe.traces import FX

__all__ = ["PATCH"]

TRANSFORMS = "torch._functorch.eager_transforms"
FORWARD_AD = "torch.autograd.forward_ad"
_NAME = "_jvp_with_argnums"
_CHOICE = "fwAD.dual_level if JVP_NESTING == 1 else contextlib.nullcontext"


class _SharedLevel:
    """A context manager, and what makes it: the first one in opens the level, the last one out closes it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.forward_ad: Any = None
        self.inside = 0

    def __call__(self) -> _SharedLevel:
        return self

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.forward_ad.enter_dual_level()
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.forward_ad.exit_dual_level()


# One for ever: a call that is on its way while an installation goes and another comes still counts.
_shared = _SharedLevel()


class _Choice:
    """What the choice of a level finds: never the outermost call, and in the place of no level the shared one."""

    JVP_NESTING = 0

    class contextlib:
        nullcontext = _shared


_choice = _Choice()


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    where = f"{TRANSFORMS}.{_NAME}"
    function: Any = vars(modules[TRANSFORMS]).get(_NAME)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if type(function) is not FunctionType:
        raise ShapeError(f"{where} is not a function")
    _shared.forward_ad = modules[FORWARD_AD]
    lines = "".join(linecache.getlines(function.__code__.co_filename))
    if lines.count(_CHOICE) != 1 or function.__code__.co_names.count("nullcontext") != 1:
        raise ShapeError(f"{where} does not choose its level as on every release so far")
    code = rewritten(where, function, Rewrite(frozenset({"JVP_NESTING", "contextlib"})), _choice)
    frame_hider()(_SharedLevel.__call__, _SharedLevel.__enter__, _SharedLevel.__exit__)
    return Plan([CodeSwap(where, function, code), Inline(where, function)])


def _after_fork_in_child() -> None:
    """The level of a thread that is gone stays open: the count goes on, and the level serves who comes."""
    _shared.lock = threading.Lock()


PATCH = Patch(
    name="jvp-level",
    summary="torch.func.jvp, jacfwd and hessian may run in several threads",
    upstream=(),
    modules=("torch", FX, TRANSFORMS, FORWARD_AD),
    plan=_plan,
    faults=("jvp_level_closed",),
    quiet=False,
    after_fork_in_child=_after_fork_in_child,
)
