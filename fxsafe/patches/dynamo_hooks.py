"""F2 beside Dynamo: a compile in one thread takes modules for unpatched while another thread traces.

The race: Dynamo keeps ``nn.Module.__call__`` and ``__getattr__`` as it saw them at its import, and asks of every module
whether it still has these very objects. While another thread traces, ``module_hooks`` has dispatchers there; Dynamo
would go through the bodies of the originals instead of its short cuts, and the same operations would come out with
other names and in another order of inputs.

Upstream: pytorch#112775. Releases: 2.5 to 2.15.

Why this place is enough: all of Dynamo's comparisons are with the module globals ``unpatched_nn_module_call`` and
``unpatched_nn_module_getattr`` of four of its modules. They follow what stands in the place. The two are not written in
one step: a comparison in between takes the long way, which is correct too.

This file can be deleted together with ``module_hooks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from fxsafe.patches._slots import original_of, places
from fxsafe.patches.base import Patch, Plan, ShapeError

__all__ = ["PATCH"]

_UTILS = "torch._dynamo.utils"
_NAMES = {"unpatched_nn_module_call": "__call__", "unpatched_nn_module_getattr": "__getattr__"}
_MODULES = (_UTILS, "torch._dynamo.guards", "torch._dynamo.variables.nn_module", "torch._dynamo.variables.user_defined")


class _Follow:
    """Keeps one global of several modules the same object as an attribute of ``nn.Module``."""

    def __init__(self, name: str, owner: type, attribute: str, original: Any, holders: list[ModuleType]) -> None:
        self.target = f"{_UTILS}.{name}"
        self._name = name
        self._place = (owner, attribute)
        self._original = original
        self._holders = holders

    def _set(self, value: Any) -> None:
        if original_of(value) is not self._original:  # somebody else's patch, which is not to be taken for unpatched
            value = self._original
        for holder in self._holders:
            vars(holder)[self._name] = value

    def apply(self) -> None:
        places.follow(*self._place, self._set)

    def undo(self) -> bool:
        places.unfollow(*self._place, self._set)
        self._set(self._original)
        return True


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    owner: Any = vars(modules["torch.nn"]).get("Module")
    edits = []
    for name, attribute in _NAMES.items():
        holders = [modules[module] for module in _MODULES if name in vars(modules[module])]
        if not holders:
            continue  # 2.5 compares __getattr__ only
        original = vars(holders[0])[name]
        if any(vars(holder)[name] is not original for holder in holders):
            raise ShapeError(f"{name} is not the same object in all of Dynamo's modules")
        if attribute not in vars(owner):
            raise ShapeError(f"torch.nn.Module.{attribute} does not exist")
        edits.append(_Follow(name, owner, attribute, original, holders))
    if not edits:
        raise ShapeError(f"{_UTILS} has neither of {sorted(_NAMES)}")
    return Plan(list(edits))


PATCH = Patch(
    name="dynamo-hooks",
    summary="a compile beside a trace gives the graph that it gives alone, names and order of inputs included",
    upstream=("https://github.com/pytorch/pytorch/issues/112775",),
    modules=("torch", "torch.nn", *_MODULES),
    plan=_plan,
    # Dynamo is imported by the first compile, which may run beside a trace and must not wait for its end.
    quiet=False,
)
