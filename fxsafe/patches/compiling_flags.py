"""F4, compiling flags: "this thread compiles" and "this thread exports" are said of the thread that does.

The race: ``torch.compiler.is_compiling()``, ``is_exporting()`` and the flag of non-strict tracing are module globals
that every export saves, sets and restores, and since 2.13 every compile too. Library code in other threads takes its
tracing branch meanwhile, and two exports that overlap leave the flags set for ever.

Upstream: none known. Releases: 2.5 to 2.15.

Why this place is enough: the functions of ``torch.compiler`` change in place, so from-imports and Dynamo's rules, which
are keyed by them, follow; everybody else goes through the module's attributes, which are properties while any thread
has a flag set. Autograd stays in the calling thread while a thread compiles or traces with ``make_fx`` (the patches
``compile-lock`` and ``make-fx``), so no thread of autograd's has to know.

With torch 2.9 to 2.13 a compiled call is refused if somebody traces *and nobody compiles or exports*. Where the tracing
flag is still process-wide (the patch ``tracing-flag`` is disabled) that question goes on asking for anybody: the flag
that a compile in another thread sets would otherwise refuse calls that plain torch lets through.

Compiled code that has used an answer of ``is_compiling`` guards on the function's code (since 2.6): what was compiled
before the patch came is compiled once more.

This file can be deleted when the oldest supported torch keeps these flags per thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeSwap, CodeWrap, Edit, ModuleProperties
from fxsafe.patches.base import Patch, Plan
from fxsafe.shapes import ShapeError, own_function
from fxsafe.thread_globals import Kept, Session, ThreadGlobals, isolate, kept_state, properties_of, rewritten
from fxsafe.traces import FX

__all__ = ["PATCH"]

COMPILER = "torch.compiler"
_COMPILING = "_is_compiling_flag"
_SINCE: dict[str, str] = {
    "_is_exporting_flag": "is_exporting",  # 2.7
    "_is_non_strict_tracing_flag": "_is_non_strict_tracing",  # 2.12
}
EXPORT_UTILS = "torch._export.utils"
_SETTER = "_compiling_state_context"
_SESSIONS = frozenset({"_compile_session_context", "_non_strict_tracing_context"})
_KNOWN_TO_DYNAMO = frozenset({"is_compiling", "is_exporting"})
# Those whose global is set while any thread's flag is. Compiled code may have a guard on the third.
_MARKS = frozenset({_COMPILING, "_is_exporting_flag"})
_BEFORE = "before"  # among a session's flags, the flags before it
_TRACING = "_is_fx_tracing_flag"
_GUARD = "is_fx_symbolic_tracing"


class _Values:
    """A thread's flags."""

    def __init__(self) -> None:
        # Those that it has set. Inside a session those of the session, over what was there before it.
        self._fxsafe_flags: dict[str, Any] = {}

    def own(self, name: str) -> Any:
        """None if the thread has not set it."""
        flags = self._fxsafe_flags
        while name not in flags and _BEFORE in flags:
            flags = flags[_BEFORE]
        return flags.get(name)

    def outside(self) -> dict[str, Any]:
        """The flags outside of all sessions."""
        flags = self._fxsafe_flags
        while _BEFORE in flags:
            flags = flags[_BEFORE]
        return flags

    def __getitem__(self, name: str) -> Any:
        value = self.own(name) if self._fxsafe_flags else None
        return _Session.anybody.otherwise(name) if value is None else value

    def __setitem__(self, name: str, value: Any) -> None:
        _Session.anybody.set(self, name, value)


class _Anybody(ModuleProperties):
    """Properties for the flags while any thread has set one, and torch's globals, which are set while any thread's is.

    A warm compiled call asks four times. An attribute of a module of any other class than ``ModuleType`` takes longer
    to read, flag or function; and of all that a reader could ask first, the global that it has always read costs least.

    The price: a flag that others set by attribute while no thread has set one is set for everybody, as on plain torch.
    """

    def __init__(self, compiler: ModuleType, state: Kept, names: frozenset[str], *, always: bool) -> None:
        """
        Args:
            always: keep the properties all the time.
        """
        super().__init__(COMPILER, compiler, properties_of(state, names))
        self._globals = vars(compiler)
        self._names = names
        self._always = always
        self._applied = False
        self._forget()

    def _forget(self) -> None:
        # Held for a few lines that call nobody; a signal handler may come back to it.
        self._lock = threading.RLock()
        # What compiles or exports. A thread that dies meanwhile stays here.
        self._busy: set[_Values] = set()
        self._home = _Values()
        # Flags that were set by attribute while no thread had set one.
        self._of_nobody: set[str] = set()
        # Flags of home that were set when it moved in, perhaps by another thread, which will then unset it.
        self._of_before: set[str] = set()

    def apply(self) -> None:
        self._forget()
        self._applied = True
        if self._always:
            super().apply()

    def undo(self) -> bool:
        with self._lock:
            if self._applied:
                self._applied = False
                for name in self._names if self._is_there() else ():
                    self._globals[name] = name in self._of_nobody or bool(self._home.own(name))
            return super().undo() or not self._is_there()

    def move_in(self, home: _Values) -> None:
        """The globals are the flags of this thread. Called before any other can set one, or in a forked child."""
        self._forget()
        self._home = home
        before = {name: self._globals[name] for name in self._names if self._globals[name]}
        self._of_before = set(before)
        for name, value in before.items():
            self.set(home, name, value)
        self.settle()

    def begin(self, values: _Values) -> None:
        """These are about to be set."""
        with self._lock:
            self.settle()
            if not self._busy and self._applied:
                if not self._is_there():
                    super().apply()  # first: what others set by attribute from here on goes through the property
                self._of_nobody = {name for name in self._names if self._globals[name]} - self._of_before
            self._busy.add(values)

    def enter(self, values: _Values) -> None:
        """These have a session."""
        with self._lock:
            self.begin(values)
            values._fxsafe_flags = {_BEFORE: values._fxsafe_flags}

    def otherwise(self, name: str) -> Any:
        """A flag of a thread that has not set it."""
        return self._globals[name] if name in self._of_nobody or not (self._busy and self._applied) else False

    def set(self, values: _Values, name: str, value: Any) -> None:
        with self._lock:
            if not self._applied:  # the end of a block that was begun before
                if values is self._home:
                    self._globals[name] = value
                return
            flags = values._fxsafe_flags
            if _BEFORE in flags:
                flags[name] = value
            elif value:
                self.begin(values)
                if name in flags or name not in self._of_nobody:  # else perhaps the end of a block inside theirs
                    flags[name] = value
            else:
                if name not in flags:
                    self._of_nobody.discard(name)
                    if name in self._of_before:
                        values = self._home
                values.outside().pop(name, None)
                if values is self._home:
                    self._of_before.discard(name)
            self.settle()

    def settle(self) -> None:
        """Brings the globals and the module's class to what the threads' flags say, which always hold.

        Each time all of them, for Ctrl-C may have come in the middle of the time before.
        """
        with self._lock:
            if not (self._applied and self._is_there()):
                return
            self._busy = busy = {values for values in self._busy.copy() if values._fxsafe_flags}
            for name in self._names:
                holders = busy if name in _MARKS else {self._home}
                setters = [holder for holder in holders if holder.own(name)]
                self._globals[name] = name in self._of_nobody or bool(setters)
            if not (busy or self._always):
                super().undo()

    def _is_there(self) -> bool:
        return self._class is not None and isinstance(self._module, self._class)  # or a class that others derived


class _Session:
    """The length of torch's own blocks. What the thread sets inside one ends with it."""

    anybody: _Anybody

    def __init__(self, values: _Values) -> None:
        self._fxsafe_values = values
        self._fxsafe_before = values._fxsafe_flags

    def _fxsafe_begin(self) -> None:
        _Session.anybody.enter(self._fxsafe_values)

    def _fxsafe_end(self) -> None:
        _Session.anybody.settle()


# One for the process: what Dynamo guards on holds the state, and that holds what makes the values.
_anybody = functools.cache(_Anybody)


class _Flags(ThreadGlobals):
    def __init__(self) -> None:
        self._fxsafe_values: Any = _Values()

    def _fxsafe_session(self) -> _Session:
        return _Session(self._fxsafe_values)

    def _fxsafe_move_in(self, here: dict[str, Any], *, known: bool) -> None:
        if known:  # in a forked child, which may be another thread's than the one at home
            here.update({name: self._fxsafe_values[name] for name in _Session.anybody._names})
            self._fxsafe_values = _Values()
        _Session.anybody.move_in(self._fxsafe_values)


def _guard_template() -> Any:
    replacement: Any = "<replacement>"
    return replacement()


class _Guard(CodeWrap):
    """Lets the question of the compiled call ask for anybody, if it asks for anybody's tracing flag."""

    def __init__(self, fx: ModuleType, function: FunctionType, flags: dict[str, Any]) -> None:
        def wrap(original: FunctionType) -> Callable[..., Any]:
            def traces_and_nobody_compiles() -> Any:
                return original() and not flags[_COMPILING]

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
    compiler, fx, utils = modules[COMPILER], modules[FX], modules[EXPORT_UTILS]
    present = {name: user for name, user in _SINCE.items() if name in vars(compiler)}
    names = frozenset({_COMPILING, *present})
    hide = frame_hider()
    for kind in (_Values, _Anybody, _Session, _Flags, ModuleProperties):
        hide(*(function for function in vars(kind).values() if isinstance(function, FunctionType)))
    edits: list[Edit] = []
    if _TRACING in vars(fx) and _GUARD in vars(fx):
        function = own_function(fx, _GUARD)
        try:
            edits.append(_Guard(fx, function, vars(compiler)))
        except ValueError as error:
            raise ShapeError(str(error)) from None
    state = kept_state(compiler, names, _Flags)
    setter: list[Edit] = []
    if _SETTER in vars(utils):  # since 2.7; before, functions inside those of torch.export._trace
        where, function = f"{EXPORT_UTILS}.{_SETTER}", own_function(utils, _SETTER)
        setter.append(CodeSwap(where, function, rewritten(where, function, Session(), state)))
    _Session.anybody = _anybody(compiler, state, names, always=not setter)
    edits += isolate(
        compiler,
        state,
        names,
        frozenset({"is_compiling", *present.values()}),
        known_to_dynamo=_KNOWN_TO_DYNAMO,
        sessions=_SESSIONS,
        properties=_Session.anybody,
        marks=names & _MARKS,
    )
    return Plan(edits + setter)


PATCH = Patch(
    name="compiling-flags",
    summary="is_compiling() and is_exporting() are True only in the thread that compiles or exports",
    upstream=("https://github.com/pytorch/pytorch/issues/126024",),
    modules=("torch", COMPILER, FX, EXPORT_UTILS),
    plan=_plan,
    # With the other fix a traced torch.export.unflatten, which asks the process-wide tracing flag, would go wrong.
    fixes=frozenset({"thread-local"}),
    faults=("is_compiling_leaks", "export_flags_stuck"),
)
