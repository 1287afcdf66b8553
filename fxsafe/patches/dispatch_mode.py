"""F4, dispatch modes: whether a ``TorchDispatchMode`` is active is known of each thread.

The race: entering a mode says so in module globals, and leaving it puts back what they held before. Up to 2.10 Dynamo
asks them before it compiles: a compiled function whose first call meets another thread's mode (``FlopCounterMode``,
selective checkpointing, one of the user's) runs eager, without a word and for good. Two blocks that overlap leave the
globals set, and then nothing compiles any more in the process. From 2.11 on Dynamo looks at the thread's own stack of
modes; what overlapping blocks leave is then read by guards and by Inductor's wrapped regions.

Upstream: pytorch#166417 walks the stack (2.11), pytorch#190287 lets a skip last no longer than the mode. Releases:
2.5 to 2.15.

Why this place is enough: the globals are used by functions of ``torch.utils._python_dispatch`` only. The modes
themselves are on a stack of the thread's already, which is what a thread's values begin with: blocks that overlapped
before the installation leave nothing in it.

This file can be deleted when the oldest supported torch keeps the globals per thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.patches.base import Patch, Plan
from fxsafe.thread_globals import ThreadGlobals, isolate, kept_state
from fxsafe.traces import FX

__all__ = ["PATCH"]

DISPATCH = "torch.utils._python_dispatch"
# What each says of the modes that the thread is inside, by what they ask a mode.
_NAMES: dict[str, Callable[[Any], bool]] = {
    "_is_in_torch_dispatch_mode": lambda mode: True,
    "_is_in_non_infra_torch_dispatch_mode": lambda mode: not mode.is_infra_mode(),
}
_SINCE_2_9: dict[str, Callable[[Any], bool]] = {
    "_is_in_any_mode_without_ignore_compile_internals": lambda mode: not mode.ignore_compile_internals(),
}
_USERS = frozenset({"is_in_torch_dispatch_mode", "TorchDispatchMode.__enter__", "TorchDispatchMode.__exit__"})


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    module = modules[DISPATCH]
    asked = _NAMES | {name: ask for name, ask in _SINCE_2_9.items() if name in vars(module)}
    names = frozenset(asked)

    def inside(ask: Callable[[Any], bool]) -> bool:
        return any(ask(mode) for mode in module._get_current_dispatch_mode_stack())

    frame_hider()(ThreadGlobals.__init__, inside, *asked.values())
    initial = {name: partial(inside, ask) for name, ask in asked.items()}
    state = kept_state(module, names, lambda: ThreadGlobals(initial))
    return Plan(isolate(module, state, names, _USERS, by_attribute=False, known=True))


PATCH = Patch(
    name="dispatch-mode",
    summary="another thread's TorchDispatchMode does not make a compiled function run eager",
    upstream=(
        "https://github.com/pytorch/pytorch/pull/166417",
        "https://github.com/pytorch/pytorch/pull/190287",
    ),
    modules=("torch", FX, DISPATCH),
    plan=_plan,
    faults=("dispatch_mode_beside_compile",),
    quiet=False,
)
