"""F4, node metadata: what ``torch.fx.traceback`` puts on new nodes belongs to the thread that creates them.

The race: ``current_meta``, ``should_preserve_node_meta`` and their like are module globals that every ``create_node``
reads, and that ``annotate``, ``preserve_node_meta`` and every ``fx.Interpreter`` replace and put back. One thread's
annotations, stack traces and provenance land on another thread's nodes, and overlapping blocks leave them set.

Upstream: pytorch#184917 (open). Releases: 2.5 to 2.15.

Why this place is enough: the globals are used in two ways only, by the functions of ``torch.fx.traceback``, whose
bodies change in place, and as attributes of the module. Nodes are created on autograd's threads only while ``make_fx``
or AOTAutograd traces a backward, and both keep autograd in the calling thread then (the patch ``make-fx``). Since 2.13
flex_attention binds the first ``current_meta`` by name; it gets a view of the calling thread's first one, as stale as
the bound one and no staler. A block ends for the thread that began it, whichever leaves it.

This file can be deleted when the oldest supported torch keeps these per thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType, NoneType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import AttributeSwap
from fxsafe.patches.base import Patch, Plan, ShapeError
from fxsafe.thread_globals import Kept, ThreadGlobals, isolate, kept_state

__all__ = ["PATCH"]

TRACEBACK = "torch.fx.traceback"
FLEX = "torch._higher_order_ops.flex_attention"
_META = "current_meta"
_OTHERS: dict[str, Callable[[], Any]] = {
    "should_preserve_node_meta": bool,
    "_should_preserve_node_meta": bool,  # since 2.11
    "current_replay_node": NoneType,  # since 2.10
}
_USERS = frozenset({"get_current_meta", "has_preserved_node_meta", "preserve_node_meta", "set_current_meta"})


class _State(ThreadGlobals):
    def __init__(self, others: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__({_META: dict, **others})
        self.first_meta: dict[str, Any] = self._fxsafe_values[_META]


class _FirstMeta:
    """What flex_attention calls ``current_meta``: the dictionary that the calling thread's one began with."""

    def __init__(self, state: Kept) -> None:
        self._state = state

    def get(self, *arguments: Any) -> Any:
        return self._state.now.first_meta.get(*arguments)


class _Flex:
    """Puts the view where flex_attention has bound the dictionary, which the installing thread goes on with."""

    def __init__(self, flex: ModuleType, state: Kept) -> None:
        self._bound = vars(flex)[_META]
        self._swap = AttributeSwap(f"{FLEX}.{_META}", flex, _META, _FirstMeta(state))
        self.target = self._swap.target
        self._state = state

    def apply(self) -> None:
        self._state.now.first_meta = self._bound
        self._swap.apply()

    def undo(self) -> bool:
        return self._swap.undo()


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    module, flex = modules[TRACEBACK], modules[FLEX]
    here = vars(module)
    if type(here.get(_META)) is not dict or here.get("should_preserve_node_meta") not in (True, False):
        raise ShapeError(f"{TRACEBACK} no longer keeps a dictionary {_META} and a flag should_preserve_node_meta")
    others = {name: make for name, make in _OTHERS.items() if name in here}
    frame_hider()(ThreadGlobals.__init__, _State.__init__, _FirstMeta.get)
    state = kept_state(module, {_META, *others}, lambda: _State(others))
    edits = isolate(
        module,
        state,
        frozenset({_META, *others}),
        _USERS,
        known_to_dynamo=frozenset({"annotate"}),
        blocks=frozenset({"annotate", "preserve_node_meta"}),
    )
    if _META in vars(flex):
        if type(vars(flex)[_META]) is not dict:
            raise ShapeError(f"{FLEX}.{_META} is no dictionary")
        edits.append(_Flex(flex, state))
    return Plan(edits)


PATCH = Patch(
    name="traceback-meta",
    summary="annotations, stack traces and provenance go to the nodes of the thread that set them",
    upstream=("https://github.com/pytorch/pytorch/pull/184917",),
    # torch itself, so as to wait for the end of its import: the others come in the middle of it.
    modules=("torch", TRACEBACK, FLEX),
    plan=_plan,
    faults=("traceback_annotation",),
)
