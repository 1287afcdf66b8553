"""F4, compiling flags: "this thread compiles" and "this thread exports" are said of the thread that does.

The race: ``torch.compiler.is_compiling()``, ``is_exporting()`` and the flag of non-strict tracing are module globals
that every export saves, sets and restores, and since 2.13 every compile too. Library code in other threads takes its
tracing branch meanwhile, and two exports that overlap leave the flags set for ever.

Upstream: none known. Releases: 2.5 to 2.15.

Why this place is enough: the functions of ``torch.compiler`` change in place, so from-imports and Dynamo's rules, which
are keyed by them, follow; everybody else goes through the module's attributes. Autograd stays in the calling thread
while a thread compiles or traces with ``make_fx`` (the patches ``compile-lock`` and ``make-fx``), so no thread of
autograd's has to know.

With torch 2.9 to 2.13 a compiled call is refused if somebody traces *and nobody compiles or exports*. Where the tracing
flag is still process-wide (the patch ``tracing-flag`` is disabled) that question goes on asking for anybody: the flag
that a compile in another thread sets would otherwise refuse calls that plain torch lets through.

Compiled code that has used an answer of ``is_compiling`` guards on the function's code (since 2.6): what was compiled
before the patch came is compiled once more.

This file can be deleted when the oldest supported torch keeps these flags per thread.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeWrap, Edit
from fxsafe.patches.base import Patch, Plan
from fxsafe.shapes import ShapeError, own_function
from fxsafe.thread_globals import ThreadGlobals, isolate, kept_state
from fxsafe.traces import FX

__all__ = ["PATCH"]

COMPILER = "torch.compiler"
_COMPILING = "_is_compiling_flag"
_SINCE: dict[str, str] = {
    "_is_exporting_flag": "is_exporting",  # 2.7
    "_is_non_strict_tracing_flag": "_is_non_strict_tracing",  # 2.12
}
_KNOWN_TO_DYNAMO = frozenset({"is_compiling", "is_exporting"})
_TRACING = "_is_fx_tracing_flag"
_GUARD = "is_fx_symbolic_tracing"


# Threads that compile or export, but for the one that installed, whose flag is the global. One that dies with its flag
# set stays among them until its ident is used again.
_compiling: set[int] = set()
# The same for any of the flags.
_busy: set[int] = set()


class _Values(dict[str, Any]):
    """A thread's flags, but not the installing one's, which are the globals.

    Where a global was set at the installation, a thread that unsets what is not set for it was inside the block that
    had set the global, and ends it.
    """

    def __init__(self, values: dict[str, Any], flags: dict[str, Any], was_set: frozenset[str]) -> None:
        super().__init__(values)
        self._flags = flags
        self._was_set = was_set

    def __setitem__(self, name: str, value: Any) -> None:
        if name == _COMPILING:
            (_compiling.add if value else _compiling.discard)(get_ident())
        if name in self._was_set and not value and not self[name]:
            self._flags[name] = value
        if value:
            _busy.add(get_ident())
        super().__setitem__(name, value)
        if not any(self.values()):
            _busy.discard(get_ident())


class _Flags(ThreadGlobals):
    def __init__(self, flags: dict[str, Any], names: frozenset[str], was_set: frozenset[str]) -> None:
        """
        Args:
            flags: the globals of ``torch.compiler``.
            was_set: those of the names that are set at the installation.
        """
        super().__init__(dict.fromkeys(names, bool))
        self._fxsafe_values = _Values(self._fxsafe_values, flags, was_set)


def _guard_template() -> Any:
    replacement: Any = "<replacement>"
    return replacement()


class _Guard(CodeWrap):
    """Lets the question of the compiled call ask for anybody, if it asks for anybody's tracing flag."""

    def __init__(self, fx: ModuleType, function: FunctionType, flags: dict[str, Any]) -> None:
        def wrap(original: FunctionType) -> Callable[..., Any]:
            def traces_and_nobody_compiles() -> Any:
                return original() and not (flags[_COMPILING] or _compiling)

            frame_hider()(traces_and_nobody_compiles)
            return traces_and_nobody_compiles

        super().__init__(f"{FX}.{_GUARD}", function, _guard_template, wrap)  # type: ignore[arg-type]
        self._fx = fx

    def apply(self) -> None:
        if not isinstance(getattr(type(self._fx), _TRACING, None), property):
            super().apply()

    def undo(self) -> bool:
        return self._code is None or super().undo()


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    compiler, fx = modules[COMPILER], modules[FX]
    present = {name: user for name, user in _SINCE.items() if name in vars(compiler)}
    names = frozenset({_COMPILING, *present})

    def flags() -> _Flags:
        _compiling.clear()
        _busy.clear()
        here = vars(compiler)
        return _Flags(here, names, frozenset(name for name in names if here[name]))

    frame_hider()(_Flags.__init__, ThreadGlobals.__init__, _Values.__init__, _Values.__setitem__)
    edits: list[Edit] = []
    if _TRACING in vars(fx) and _GUARD in vars(fx):
        function = own_function(fx, _GUARD)
        try:
            edits.append(_Guard(fx, function, vars(compiler)))
        except ValueError as error:
            raise ShapeError(str(error)) from None
    edits += isolate(
        compiler,
        kept_state(compiler, names, flags),
        names,
        frozenset({"is_compiling", *present.values()}),
        known_to_dynamo=_KNOWN_TO_DYNAMO,
        busy=_busy,
    )
    return Plan(edits)


def _after_fork_in_child() -> None:
    for threads in (_compiling, _busy):
        threads.intersection_update({get_ident()})


PATCH = Patch(
    name="compiling-flags",
    summary="is_compiling() and is_exporting() are True only in the thread that compiles or exports",
    upstream=("https://github.com/pytorch/pytorch/issues/126024",),
    modules=("torch", COMPILER, FX),
    plan=_plan,
    # With the other fix a traced torch.export.unflatten, which asks the process-wide tracing flag, would go wrong.
    fixes=frozenset({"thread-local"}),
    faults=("is_compiling_leaks", "export_flags_stuck"),
    after_fork_in_child=_after_fork_in_child,
)
