"""SymPy's registry of singletons, on which symbolic shapes stand, answers every thread that asks for one first.

The race: ``sympy.S`` makes a singleton at its first use: it looks the class up among those that wait, sets the
attribute and deletes the entry. Two threads that ask for the same one at once both find it waiting, and the second
deletion raises ``KeyError``; a third that comes between finds it neither waiting nor set and raises ``AttributeError``.
Torch's ``IntInfinity`` and ``NegativeIntInfinity`` are such singletons, so the first symbolic traces of a process, when
there are two, fail with ``KeyError: 'NegativeIntInfinity'``.

Upstream: sympy#28239 (SymPy in threads; sympy#30090 cures its kinds, not yet this). SymPy: 1.13 and 1.14, so torch 2.5
to 2.15.

Why this place is enough: ``S.__getattr__`` is the only reader of the waiting classes, and they are filled by imports.

This file can be deleted when SymPy's registry no longer fails for threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeSwap, code_with_constants
from fxsafe.patches.base import Patch, Plan
from fxsafe.shapes import Shape, own_function, require
from fxsafe.thread_globals import Inline

__all__ = ["PATCH"]

SINGLETON = "sympy.core.singleton"


def _getattr(self: Any, name: Any) -> Any:
    # SymPy's body again, less its assumption that nobody else came first.
    try:
        waiting = self._classes_to_install[name]
    except KeyError:
        try:
            return object.__getattribute__(self, name)
        except AttributeError:
            raise AttributeError(f"Attribute '{name}' was not installed on SymPy registry {self}") from None
    value = waiting()  # the class has one instance, whoever asks
    self.__setattr__(name, value)
    self._classes_to_install.pop(name, None)
    return value


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    function = own_function(modules[SINGLETON].SingletonRegistry, "__getattr__")
    where = f"{SINGLETON}.SingletonRegistry.__getattr__"
    require(where, function, Shape(("self", "name"), frozenset({"AttributeError"}), frozenset()))
    code = code_with_constants(_getattr, {}, function.__code__)  # type: ignore[arg-type]
    frame_hider()
    return Plan([CodeSwap(where, function, code), Inline(where, function)])


PATCH = Patch(
    name="sympy-singletons",
    summary="threads may ask SymPy for one of its singletons for the first time at the same moment",
    upstream=("https://github.com/sympy/sympy/issues/28239",),
    # torch itself, so as to wait for the end of its import: the other comes in the middle of it.
    modules=("torch", SINGLETON),
    plan=_plan,
    faults=("sympy_singleton_race",),
    quiet=False,
)
