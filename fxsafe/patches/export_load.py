"""F4, loading exported programs: each thread has its own deserializer.

The race: ``torch.export.load`` says which deserializer is at work in the module global ``_CURRENT_DESERIALIZER``, for
the functions that pickle calls back, and asserts that there is none yet ("_CURRENT_DESERIALIZER is already set").

Upstream: pytorch#195099, pytorch#195100 (open). Releases: 2.5 to 2.15.

Why this place is enough: the global is set, read and cleared in three functions of its module, within one call. What
else a load does, unpickling and making a ``GraphModule``, is covered by the patches of the tracer.

This file can be deleted when the oldest supported torch keeps the deserializer per thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from fxsafe.dynamo import frame_hider
from fxsafe.patches.base import Patch, Plan
from fxsafe.thread_globals import ThreadGlobals, isolate, kept_state
from fxsafe.traces import FX

__all__ = ["PATCH"]

SERIALIZE = "torch._export.serde.serialize"
_NAME = "_CURRENT_DESERIALIZER"


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    frame_hider()(ThreadGlobals.__init__)
    state = kept_state(modules[SERIALIZE], {_NAME}, lambda: ThreadGlobals({_NAME: lambda: None}))
    users = frozenset({"GraphModuleDeserializer.deserialize", "_reconstruct_fake_tensor"})
    return Plan(isolate(modules[SERIALIZE], state, frozenset({_NAME}), users))


PATCH = Patch(
    name="export-load",
    summary="threads may load exported programs at the same time",
    upstream=("https://github.com/pytorch/pytorch/issues/195099", "https://github.com/pytorch/pytorch/pull/195100"),
    modules=("torch", FX, SERIALIZE),
    plan=_plan,
    faults=("export_load",),
    quiet=False,  # imported by the first save or load
)
