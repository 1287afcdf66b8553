"""F4, saving exported programs: several threads may save at the same time.

The race: while ``torch.export.save`` pickles tensors it enters a reducer for fake tensors into ``copyreg``'s table,
which the process has once, and refuses to start where another thread's is in it ("Refusing to stomp on existing
FakeTensor reducer").

Upstream: none known. Releases: 2.5 to 2.15.

Why this place is enough: every save enters the same function, in one place. The first to come enters it, the last to
leave takes it out again. A reducer that somebody else had entered is refused as before.

This file can be deleted when the oldest supported torch pickles with a table of its own.
"""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeSwap
from fxsafe.patches.base import Patch, Plan, ShapeError
from fxsafe.shapes import own_function, shape_of
from fxsafe.thread_globals import Rewrite, rewritten
from fxsafe.traces import FX

__all__ = ["PATCH"]

SERIALIZE = "torch._export.serde.serialize"
_NAME = "serialize_torch_artifact"


class _Reducers:
    """What the rewritten function has instead of ``copyreg`` and ``copyreg.dispatch_table``."""

    def __init__(self) -> None:
        self.dispatch_table = self
        self._lock = threading.Lock()
        self._users: dict[type, int] = {}  # class -> saves in progress that entered its reducer

    def pickle(self, kind: type, reducer: Any) -> None:
        with self._lock:
            if kind not in self._users:
                copyreg.pickle(kind, reducer)
            self._users[kind] = self._users.get(kind, 0) + 1

    def __contains__(self, kind: type) -> bool:
        with self._lock:
            return kind in copyreg.dispatch_table and kind not in self._users

    def __delitem__(self, kind: type) -> None:
        with self._lock:
            self._users[kind] -= 1
            if not self._users[kind]:
                del self._users[kind]
                del copyreg.dispatch_table[kind]

    def after_fork_in_child(self) -> None:
        """The saves of other threads do not go on in this process, and nobody tells ours from theirs any more."""
        self._lock = threading.Lock()


class _Copyreg:
    """The name under which the rewritten function finds the reducers."""

    def __init__(self) -> None:
        self.copyreg = reducers


reducers = _Reducers()
_named = _Copyreg()


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    where = f"{SERIALIZE}.{_NAME}"
    function = own_function(modules[SERIALIZE], _NAME)
    shape = shape_of(function.__code__)
    if not {"copyreg", "FakeTensor"} <= shape.reads:
        raise ShapeError(f"{where} has an unknown shape: {shape}")
    frame_hider()(_Reducers.pickle, _Reducers.__contains__, _Reducers.__delitem__)
    code = rewritten(where, function, Rewrite(frozenset({"copyreg"})), _named)
    return Plan([CodeSwap(where, function, code)])


PATCH = Patch(
    name="export-save",
    summary="threads may save exported programs at the same time",
    upstream=(),
    modules=("torch", FX, SERIALIZE),
    plan=_plan,
    faults=("export_save",),
    quiet=False,  # imported by the first save or load
    after_fork_in_child=reducers.after_fork_in_child,
)
