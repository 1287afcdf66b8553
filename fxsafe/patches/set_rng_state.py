"""F4, AOTAutograd: ``torch.cuda.set_rng_state`` does nothing in the thread that traces, and works in the others.

The race: while AOTAutograd collects metadata it replaces ``torch.cuda.set_rng_state`` by a function that does nothing,
for the whole process. Meanwhile the recomputation of a checkpoint in another thread does not put the random state back
and draws other numbers than its forward; when two overlap (exports do), the name stays a function that does nothing.

Upstream: none known. Releases: 2.5 to 2.15.

Why this place is enough: the replacing is done by ``mock.patch`` under its name in ``torch._functorch.aot_autograd``,
which does nothing else with it. In the place stands a dispatcher meanwhile; the last to leave puts the identical
function back.

This file can be deleted when the oldest supported torch replaces nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from fxsafe.dynamo import frame_hider
from fxsafe.edits import AttributeSwap
from fxsafe.patches._slots import places
from fxsafe.patches.base import Patch, Plan, ShapeError
from fxsafe.traces import FX

__all__ = ["PATCH"]

AOT = "torch._functorch.aot_autograd"
_CUDA = "torch.cuda"
_NAME = "set_rng_state"
_TARGET = f"{_CUDA}.{_NAME}"


class _Patch:
    """``mock.patch``, but for one target only in the calling thread."""

    def __init__(self, patch: Any, cuda: ModuleType) -> None:
        self._patch = patch
        self._cuda = vars(cuda)
        frame_hider()(_Patch.__call__, _Patch.__getattr__, _Patch._here.__wrapped__)  # type: ignore[attr-defined]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        if target == _TARGET and len(args) == 1 and not kwargs:
            return self._here(args[0])
        return self._patch(target, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._patch, name)

    @contextmanager
    def _here(self, new: Any) -> Iterator[Any]:
        places.put(self._cuda, _NAME, new, self._cuda[_NAME])
        try:
            yield new
        finally:
            places.take(self._cuda, _NAME, new)


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    aot, cuda = modules[AOT], modules[_CUDA]
    if vars(aot).get("patch") is not mock.patch:
        raise ShapeError(f"{AOT}.patch is not unittest.mock.patch")
    if not callable(vars(cuda).get(_NAME)):
        raise ShapeError(f"{_TARGET} does not exist")
    frame_hider()(*places._templates)
    return Plan([AttributeSwap(f"{AOT}.patch", aot, "patch", _Patch(mock.patch, cuda))])


PATCH = Patch(
    name="set-rng-state",
    summary="torch.cuda.set_rng_state goes on working in other threads while one compiles or exports",
    upstream=(),
    modules=("torch", FX, _CUDA, AOT),
    plan=_plan,
    faults=("set_rng_state_lost",),
    quiet=False,
    after_fork_in_child=places.keep_only_this_thread,
)
