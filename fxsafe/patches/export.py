"""F4, second half: what ``torch.export`` keeps and replaces while it runs belongs to the thread that exports.

The race: the hierarchy of the exported module and the flags of the export are module globals, set at the beginning
and None again at the end of whichever export ends first ("_EXPORT_MODULE_HIERARCHY must not be None"). Since 2.8 a
non-strict export also replaces ``builtins.max``, ``builtins.min`` and ``math.pow`` for the whole process; when two
overlap, the second takes the first one's replacements for the originals and leaves them there for ever. And it
switches mkldnn, nnpack and cuDNN off for its length; two that overlap leave them off.

Upstream: pytorch#134775 for the class of faults; none known for these names. Releases: 2.5 to 2.15.

Why this place is enough: the globals are used by functions of their own modules only, all of which change in place.
The three names are replaced in one function; in each of the places stands a dispatcher while anybody exports, the
thread's own replacement is on top of it for the thread, and the last export to end puts the identical object back.
The places change under Dynamo's compile lock, for Dynamo, compiling in another thread, must find the same object
there from its tracing to its guards; that is one step, and no lock is held while a model is traced. What is left of
an export is covered by the patches of ``make_fx``, of the tracer, of the compiling flags and of the operators'
caches. The switches of the backends are C++ state of the process: the last export to end puts them back, and until
then others see them off.

This file can be deleted when the oldest supported torch keeps these per thread and replaces no builtins.
"""

from __future__ import annotations

import builtins
import math
import threading
from collections.abc import Iterator, Mapping
from functools import cache, partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeSwap, CodeWrap, Edit
from fxsafe.patches._locked import under_compile_lock
from fxsafe.patches._slots import MISSING, original_of, places
from fxsafe.patches.base import Patch, Plan, ShapeError
from fxsafe.shapes import own_function, shape_of
from fxsafe.thread_globals import (
    Rewrite,
    ThreadGlobals,
    functions_of,
    isolate,
    kept_state,
    lines_of,
    nested,
    require_complete,
    rewritten,
    uses_global,
)
from fxsafe.traces import FX

__all__ = ["PATCH", "PlacesOf"]

TRACE = "torch.export._trace"
UTILS = "torch._export.utils"
NON_STRICT = "torch._export.non_strict_utils"
VERIFIER = "torch._export.verifier"
# The modules of Dynamo's that ask ``fn is max`` and the like.
_ASKING = ("torch._dynamo.variables.builtin", "torch._dynamo.variables.lazy")
_NAMES = frozenset({"_EXPORT_FLAGS", "_EXPORT_MODULE_HIERARCHY"})
_DISABLED_PASS = "_DISABLE_ATEN_TO_ASSERTION_PASS"
_OVERRIDE = "_override_builtin_ops"
_WRAPPER = "_log_export_wrapper"
_OPS = "allowed_builtin_ops"
_BACKENDS = "_ignore_backend_decomps"


class PlacesOf:
    """A module in whose place torch's code reads and writes attributes, for the calling thread only.

    Writing what the thread would see without its newest replacement takes that one away; writing anything else puts it
    on top. Code that saves, replaces and restores thereby does so for its own thread.
    """

    def __init__(self, module: ModuleType) -> None:
        self.__dict__["_owner"] = vars(module)
        # Each thread's replacements by name, with what was seen below them.
        self.__dict__["_mine"] = _Mine()
        frame_hider()(PlacesOf.__getattr__, PlacesOf.__setattr__, _Mine.__init__)

    def __getattr__(self, name: str) -> Any:
        value = places.seen(self._owner, name)
        if value is MISSING:
            raise AttributeError(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        stack = self._mine.below.setdefault(name, [])
        if stack and value is stack[-1][0]:
            _, replacement = stack.pop()
            with under_compile_lock(f"it puts {name} back"):
                places.take(self._owner, name, replacement)
        elif value is not (below := getattr(self, name)):
            stack.append((below, value))
            with under_compile_lock(f"it replaces {name}"):
                places.put(self._owner, name, value, below)


class _Mine(threading.local):
    def __init__(self) -> None:
        self.below: dict[str, list[tuple[Any, Any]]] = {}


class _Modules:
    """What stands in for the modules' names in the rewritten function."""

    def __init__(self) -> None:
        self.builtins = PlacesOf(builtins)
        self.math = PlacesOf(math)


_modules = cache(_Modules)  # one for the process, as a ``Kept`` is


class _Pinned:
    """Puts a builtin among a module's own globals, where its functions find it first, whatever ``builtins`` holds.

    Dynamo asks of what it compiles ``fn is max``. While an export in another thread has replaced ``max``, nothing is
    it, and Dynamo takes the other branch: it compiles ``max`` as ``min``.
    """

    def __init__(self, module: ModuleType, name: str) -> None:
        if name in vars(module):
            raise ShapeError(f"{module.__name__} has a global {name} of its own")
        self.target = f"{module.__name__}.{name}"
        self._globals = vars(module)
        self._name = name
        self._builtin = original_of(vars(builtins)[name])

    def apply(self) -> None:
        self._globals[self._name] = self._builtin

    def undo(self) -> bool:
        if self._globals.get(self._name, self._builtin) is not self._builtin:
            return False
        self._globals.pop(self._name, None)
        return True


def _override_edits(non_strict: ModuleType, asking: list[ModuleType]) -> Iterator[Edit]:
    """Nothing before 2.8."""
    manager = vars(non_strict).get(_OVERRIDE)
    if manager is None:
        return
    where = f"{NON_STRICT}.{_OVERRIDE}"
    function = own_function(non_strict, _OVERRIDE)
    if not all(uses_global(function.__code__, frozenset({name})) for name in ("builtins", "math")):
        raise ShapeError(f"{where} does not replace builtins and math")
    for module in asking:
        yield from (_Pinned(module, name) for name in ("max", "min"))
    code = rewritten(where, function, Rewrite(frozenset({"builtins", "math"})), _modules())
    yield CodeSwap(where, function, code)


def _trace_edits(trace: ModuleType) -> Iterator[Edit]:
    # A thread that is inside an export when the patch comes goes on with what is there.
    missing = _NAMES - vars(trace).keys()
    if missing:
        raise ShapeError(f"{TRACE} has no global {sorted(missing)}")
    initial = {name: partial(vars(trace).__getitem__, name) for name in _NAMES}
    state = kept_state(trace, _NAMES, lambda: ThreadGlobals(initial))
    yield state
    decorator = own_function(trace, _WRAPPER)
    wrapping = rewritten(f"{TRACE}.{_WRAPPER}", decorator, Rewrite(_NAMES, kept=True), state)
    wrapper, plain = (
        next((c for c in nested(code) if c.co_name == "wrapper"), None) for code in (wrapping, decorator.__code__)
    )
    if wrapper is None or plain is None:
        raise ShapeError(f"{TRACE}.{_WRAPPER} wraps nothing")
    yield CodeSwap(f"{TRACE}.{_WRAPPER}", decorator, wrapping)
    found = {_WRAPPER: lines_of(decorator.__code__)}
    for function in functions_of(trace):
        if function is decorator or not any(uses_global(code, frozenset(_NAMES)) for code in nested(function.__code__)):
            continue
        where = f"{TRACE}.{function.__qualname__}"
        if function.__code__ is plain:
            yield CodeSwap(where, function, wrapper)
        else:
            yield CodeSwap(where, function, rewritten(where, function, Rewrite(_NAMES, kept=True), state))
            found[function.__qualname__] = lines_of(function.__code__)
    if "_export" not in found:
        raise ShapeError(f"{TRACE}._export does not set {sorted(_NAMES)}")
    require_complete(trace, _NAMES, found)


class _Backend:
    """Has ``set_flags`` of one backend: exports that overlap switch it off once, and on again when all have ended."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._users = 0
        self._before: tuple[Any, ...] = ()

    def set_flags(self, flag: Any) -> tuple[_Backend]:
        """``set_flags(False)`` switches off; ``set_flags(*what_that_has_returned)`` ends it."""
        with self._lock:
            if flag is False:
                if not self._users:
                    self._before = self._backend.set_flags(False)
                self._users += 1
            else:
                self._users -= 1
                if not self._users:
                    self._backend.set_flags(*self._before)
            return (self,)

    def after_fork_in_child(self) -> None:
        """Other threads' exports do not go on in the child, and nobody tells ours from theirs any more."""
        self._lock = threading.Lock()


# For the process: an export may outlive the installation that it began in.
_backends: dict[str, _Backend] = {}


class _Torch:
    """What stands for ``torch`` in ``_ignore_backend_decomps``. Can be hashed, as constants of code must."""

    def __init__(self, names: frozenset[str]) -> None:
        import torch

        for name in names:
            _backends[name] = _Backend(getattr(torch.backends, name))
        self.torch = SimpleNamespace(backends=SimpleNamespace(**_backends))


_torch = cache(_Torch)  # one for the process, as a ``Kept`` is


def _backends_edit(trace: ModuleType) -> Edit:
    """Two exports that overlap would leave mkldnn, nnpack and cuDNN switched off in the whole process."""
    where = f"{TRACE}.{_BACKENDS}"
    function = getattr(vars(trace).get(_BACKENDS), "__wrapped__", None)
    if type(function) is not FunctionType:
        raise ShapeError(f"{where} is no context manager made from a function")
    names = set(function.__code__.co_names) - {"torch", "backends", "set_flags"}
    if not names or not names <= {"mkldnn", "nnpack", "cudnn"}:
        raise ShapeError(f"{where} has an unknown shape: {shape_of(function.__code__)}")
    frame_hider()(_Backend.set_flags)
    code = rewritten(where, function, Rewrite(frozenset({"torch"})), _torch(frozenset(names)))
    return CodeSwap(where, function, code)


def _after_fork_in_child() -> None:
    places.keep_only_this_thread()
    for backend in _backends.values():
        backend.after_fork_in_child()


def _ops_template(self: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(self)


def _ops_edit(verifier: ModuleType) -> Edit:
    """The verifier asks whether ``math.ceil`` and others are builtins, while a trace elsewhere has wrapped them."""
    where = f"{VERIFIER}.Verifier.{_OPS}"
    function = own_function(verifier.Verifier, _OPS)

    def wrap(original: FunctionType) -> Any:
        def seen_ops(self: Any) -> list[Any]:
            return [places.seen_value(op) for op in original(self)]

        frame_hider()(seen_ops)
        return seen_ops

    try:
        return CodeWrap(where, function, _ops_template, wrap)  # type: ignore[arg-type]
    except ValueError as error:
        raise ShapeError(str(error)) from None


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    trace, utils, non_strict = modules[TRACE], modules[UTILS], modules[NON_STRICT]
    frame_hider()(ThreadGlobals.__init__, *places._templates)
    edits = [
        *_trace_edits(trace),
        _backends_edit(trace),
        _ops_edit(modules[VERIFIER]),
        *_override_edits(non_strict, [modules[name] for name in _ASKING]),
    ]
    if _DISABLED_PASS in vars(utils):  # since 2.8
        state = kept_state(utils, {_DISABLED_PASS}, lambda: ThreadGlobals({_DISABLED_PASS: bool}))
        users = frozenset({"_disable_aten_to_metadata_assertions"})
        edits += isolate(utils, state, frozenset({_DISABLED_PASS}), users, by_attribute=False)
    return Plan(edits)


PATCH = Patch(
    name="export",
    summary="torch.export keeps its state, and its replacements of max, min and math.pow, to its own thread",
    upstream=(),
    modules=("torch", FX, TRACE, UTILS, NON_STRICT, VERIFIER, *_ASKING),
    plan=_plan,
    faults=("export_overlap", "export_backends_off"),
    quiet=False,  # imported by the first export, which may be inside a trace
    after_fork_in_child=_after_fork_in_child,
)
