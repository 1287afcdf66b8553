"""F1, thread-local: the tracing flag belongs to the thread that traces.

The race: ``Tracer.trace`` sets the module global ``torch.fx._symbolic_trace._is_fx_tracing_flag``, and every compiled
function asks for it before it runs. While one thread traces, every other thread's compiled call is refused, and two
overlapping traces, whose saving and restoring interleave, leave the flag set for ever.

Upstream: pytorch#126024; made thread-local in 2.14.0 by pytorch#168999. Releases: 2.5 to 2.13.

Why this place is enough: the predicates change in place, so functions compiled earlier, from-imports and Dynamo's rule
tables follow; ``Tracer.trace`` is the only writer inside the module; everybody else (``_set_compilation_env`` in
``torch._higher_order_ops``, nnsight, brevitas) goes through the module attribute, which becomes a property. The
module's own global says whether any thread traces: what the predicates ask first, at the price of torch's own.
``checkpoint_flag`` carries the flag to autograd's threads.

This file can be deleted when torch 2.14 is the oldest release supported.
"""

from __future__ import annotations

import sys
import threading
from _thread import get_ident
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeSwap, Edit, ModuleProperties, code_with_constants, one_of_equals
from fxsafe.observe import events
from fxsafe.patches.base import NotNeeded, Patch, Plan, ShapeError
from fxsafe.shapes import Shape, own_function, require, shape_of
from fxsafe.traces import FX, lock, registered_body, state, trace_function

if TYPE_CHECKING:
    import torch

    _is_fx_tracing_flag: Any = False

    def is_fx_tracing_warning() -> None: ...


__all__ = ["PATCH", "UPSTREAM", "flag", "is_fixed_upstream", "set_flag"]

UPSTREAM = "https://github.com/pytorch/pytorch/pull/168999"
_NAME = "_is_fx_tracing_flag"
_SCRATCH = "_fxsafe_is_fx_tracing_flag"


class _Flag(threading.local):
    tracing: Any = False


flag = _Flag()


class _Somebody:
    """What the module's own global holds while any thread traces: true, and known again when it is put back.

    ``mock.patch`` finds it in the module's dictionary, past the property, and at its end writes it to the attribute.
    """

    def __init__(self) -> None:
        self.flag = flag

    def __repr__(self) -> str:
        return "<some thread traces>"

    def __reduce__(self) -> str:
        return "_SOMEBODY"  # copied or pickled with the module's dictionary it stays the one there is

    def avoided(self, compiling: bool = False) -> bool:
        """Says False to a predicate that torch's global would have made say True, and counts it for the guard."""
        if not compiling and events.guard_asks(2):
            events.refusal_avoided()
        return False


_SOMEBODY = _Somebody()


class _Global:
    """The module's own global: ``_SOMEBODY``, or False while nobody traces.

    The body of ``Tracer.trace`` stores into another one, which stands beside it meanwhile. A thread's flag decides; a
    stale member (a thread that died with its flag set) only sends the question there.
    """

    target = f"{FX}.{_NAME}"

    def __init__(self) -> None:
        self.threads: set[int] = set()  # whose flag may be set
        self._globals: dict[str, Any] = {}
        self._value: Any = None
        self._applied = False

    def apply(self) -> None:
        with lock:
            self._globals = vars(sys.modules[FX])
            self._value = self._globals[_NAME]
            self._applied = True
            self._globals[_SCRATCH] = False
            self.settle()

    def undo(self) -> bool:
        with lock:
            if self._applied:
                self._applied = False
                self._globals[_NAME] = self._value
            self._globals.pop(_SCRATCH, None)
        return True

    def settle(self) -> None:
        with lock:
            if self._applied:
                self._globals[_NAME] = _SOMEBODY if self.threads else False


_global = _Global()


def set_flag(value: Any) -> None:
    """Sets the calling thread's flag; ``_SOMEBODY`` stands for what ``Tracer.trace`` had made of it."""
    if value is _SOMEBODY:
        value = get_ident() in state.depth
    if value:
        _global.threads.add(get_ident())
        _global.settle()
        flag.tracing = value
    else:
        flag.tracing = value
        _global.threads.discard(get_ident())
        _global.settle()


# torch's predicates again, in the three bodies that they have had, with the thread's flag behind the global. While
# nobody traces they execute what torch's own do: no placeholder is bound first.


def _tracing_2_5() -> Any:
    return _is_fx_tracing_flag and ("<somebody>".flag.tracing or "<somebody>".avoided())  # type: ignore[attr-defined]


def _tracing_2_9() -> Any:
    is_fx_tracing_warning()
    return _is_fx_tracing_flag and "<somebody>".flag.tracing  # type: ignore[attr-defined]


def _symbolic_tracing_2_9() -> Any:
    return (
        _is_fx_tracing_flag
        and ("<somebody>".flag.tracing or "<somebody>".avoided(torch.compiler.is_compiling()))  # type: ignore[attr-defined]
        and not torch.compiler.is_compiling()
    )


_PREDICATES = {
    "is_fx_tracing": {
        Shape((), frozenset({_NAME}), frozenset()): _tracing_2_5,
        Shape((), frozenset({_NAME, "is_fx_tracing_warning"}), frozenset()): _tracing_2_9,
    },
    "is_fx_symbolic_tracing": {
        Shape((), frozenset({_NAME, "torch"}), frozenset()): _symbolic_tracing_2_9,
    },
}


def _predicate_edits(module: ModuleType) -> list[Edit]:
    edits: list[Edit] = []
    for name, bodies in _PREDICATES.items():
        if name not in vars(module):
            if name == "is_fx_tracing":
                raise ShapeError(f"{FX}.{name} does not exist")
            continue
        where = f"{FX}.{name}"
        function = own_function(module, name)
        body = bodies[require(where, function, *bodies)]
        code = code_with_constants(body, {"<somebody>": _SOMEBODY}, function.__code__)  # type: ignore[arg-type]
        edits.append(CodeSwap(where, function, code))
    return edits


class _Body:
    """The body of ``Tracer.trace`` with another global for the one that says whether any thread traces."""

    target = f"{FX}.Tracer.trace"

    def __init__(self, module: ModuleType) -> None:
        """
        Raises:
            ShapeError: it sets other globals than the flag.
        """
        _, self._known = trace_function(module)
        if shape_of(self._known).writes != {_NAME}:
            raise ShapeError(f"{self.target} has an unknown shape: {shape_of(self._known)}")
        names = tuple(_SCRATCH if name == _NAME else name for name in self._known.co_names)
        self._changed = one_of_equals(self._known.replace(co_names=names))
        self._function = registered_body(module)

    def apply(self) -> None:
        if self._function.__code__ is self._known:  # and not what somebody else has put there meanwhile
            self._function.__code__ = self._changed
        state.flags.append(_WHILE_TRACING)

    def undo(self) -> bool:
        state.flags[:] = [flags for flags in state.flags if flags is not _WHILE_TRACING]
        if self._function.__code__ is self._changed:
            self._function.__code__ = self._known
        return True


_WHILE_TRACING = (lambda: flag.tracing), set_flag


def is_fixed_upstream(module: ModuleType) -> bool:
    """Whether ``module``, ``torch.fx._symbolic_trace``, keeps the flag per thread itself."""
    return _NAME not in vars(module) and "_get_is_fx_tracing" in vars(module)


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    module = modules[FX]
    if is_fixed_upstream(module):
        return NotNeeded(f"torch keeps the flag per thread since 2.14.0 ({UPSTREAM})")
    if _NAME not in vars(module):
        raise ShapeError(f"{FX}.{_NAME} does not exist")
    frame_hider()(set_flag, _Somebody.avoided, _Global.settle, _WHILE_TRACING[0])
    flag_property = property(lambda self: flag.tracing, lambda self, value: set_flag(value))
    return Plan(
        [
            _global,
            *_predicate_edits(module),
            _Body(module),
            ModuleProperties(f"{FX}.{_NAME}", module, {_NAME: flag_property}),
        ],
        counters=lambda: {"refusals_avoided": events.refusals.total},
    )


def _after_fork_in_child() -> None:
    _global.threads.clear()
    if flag.tracing:
        _global.threads.add(get_ident())
    _global.settle()


PATCH = Patch(
    name="tracing-flag",
    summary="the FX tracing flag is per thread: a trace in one no longer refuses compiled calls in the others",
    upstream=("https://github.com/pytorch/pytorch/issues/126024", UPSTREAM),
    modules=("torch", FX),
    plan=_plan,
    fixes=frozenset({"thread-local"}),
    faults=(
        "flag_warm_call",
        "flag_silent_eager",
        "flag_overlap_stuck",
        "flag_nested_tensor",
        "flag_from_import_and_attribute",
        "flag_compile_traces",
    ),
    after_fork_in_child=_after_fork_in_child,
)
