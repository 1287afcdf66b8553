"""F1, thread-local: the tracing flag belongs to the thread that traces.

The race: ``Tracer.trace`` sets the module global ``torch.fx._symbolic_trace._is_fx_tracing_flag``, and every compiled
function asks for it before it runs. While one thread traces, every other thread's compiled call is refused, and two
overlapping traces, whose saving and restoring interleave, leave the flag set for ever.

Upstream: pytorch#126024; made thread-local in 2.14.0 by pytorch#168999. Releases: 2.5 to 2.13.

Why this place is enough: the predicates change in place, so functions compiled earlier, from-imports and Dynamo's rule
tables follow; ``Tracer.trace`` is the only writer inside the module; everybody else (``_set_compilation_env`` in
``torch._higher_order_ops``, nnsight, brevitas) goes through the module attribute, which becomes a property. The
module's own global is still written by the body of ``Tracer.trace``, and read by nobody. ``checkpoint_flag`` carries
the flag to autograd's threads.

This file can be deleted when torch 2.14 is the oldest release supported.
"""

from __future__ import annotations

import threading
from _thread import get_ident
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeSwap, CodeWrap, Edit, ModuleProperties, code_with_constants, one_of_equals
from fxsafe.observe import events
from fxsafe.patches.base import NotNeeded, Patch, Plan, ShapeError
from fxsafe.shapes import Shape, own_function, require, shape_of
from fxsafe.traces import FX, lock, registered_body, state, trace_function

if TYPE_CHECKING:
    import torch

    def is_fx_tracing_warning() -> None: ...


__all__ = ["PATCH", "UPSTREAM", "flag", "is_fixed_upstream", "set_flag"]

UPSTREAM = "https://github.com/pytorch/pytorch/pull/168999"
_NAME = "_is_fx_tracing_flag"
_SCRATCH = "_fxsafe_is_fx_tracing_flag"


class _Flag(threading.local):
    tracing: Any = False


flag = _Flag()


class _Marked(set[int]):
    # It travels among the constants of a code object, and profilers hash those.
    __hash__ = object.__hash__  # type: ignore[assignment]

    def avoided(self, compiling: bool = False) -> bool:
        """Says False to a predicate that torch's global would have made say True, and counts it for the guard.

        A method of this object, because one constant more would be loaded by every warm call.
        """
        if not compiling and events.guard_asks(2):
            events.refusal_avoided()
        return False


# Threads whose flag may be set: empty while nobody traces, and then a predicate costs what torch's own does. The flag
# itself decides; a stale member (a thread that died with its flag set) only sends the question there.
_marked = _Marked()


def set_flag(value: Any) -> None:
    if value:
        _marked.add(get_ident())
        flag.tracing = value
    else:
        flag.tracing = value
        _marked.discard(get_ident())


# torch's predicates again, in the three bodies that they have had, with the thread's flag in the global's place.


def _tracing_2_5() -> Any:
    marked: Any = "<marked>"
    flag: Any = "<flag>"
    return flag.tracing or marked.avoided() if marked else False


def _tracing_2_9() -> Any:
    marked: Any = "<marked>"
    flag: Any = "<flag>"
    is_fx_tracing_warning()
    return flag.tracing if marked else False


def _symbolic_tracing_2_9() -> Any:
    marked: Any = "<marked>"
    flag: Any = "<flag>"
    return (
        (flag.tracing or marked.avoided(torch.compiler.is_compiling())) and not torch.compiler.is_compiling()
        if marked
        else False
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


class _Global:
    """Keeps the module's own global at the value it had, although the body of ``Tracer.trace`` stores into it.

    Torch's own body stores into another one, which stands beside it meanwhile; somebody else's into this one.
    """

    def __init__(self, module: ModuleType) -> None:
        self.target = f"{FX}.{_NAME}"
        self._globals = vars(module)
        self._value: Any = None
        self._applied = False

    def apply(self) -> None:
        self._value = self._globals[_NAME]
        self._applied = True
        self._globals[_SCRATCH] = False

    def undo(self) -> bool:
        if self._applied:
            self._globals[_NAME] = self._value
            self._applied = False
        self._globals.pop(_SCRATCH, None)
        return True

    def tidy(self) -> None:
        """Overlapping traces would leave a stale True in the global, for ``mock.patch`` and its like to find."""
        with lock:
            if self._applied and sum(state.depth.values()) <= 1:  # the calling trace is at its end
                self._globals[_NAME] = self._value


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
        code = code_with_constants(body, {"<marked>": _marked, "<flag>": flag}, function.__code__)  # type: ignore[arg-type]
        edits.append(CodeSwap(where, function, code))
    return edits


class _Flagged:
    """What the body of ``_flagged`` works with."""

    def __init__(self, trace: FunctionType, kept: _Global) -> None:
        self.trace = trace
        self.flag = flag
        self.set_flag = set_flag
        self.marked = _marked
        self.get_ident = get_ident
        self.tidy = kept.tidy


def _flagged(self: Any, root: Any, concrete_args: Any = None) -> Any:
    """The body that ``Tracer.trace`` gets, below the register of traces."""
    parts: Any = "<replacement>"
    previous = parts.flag.tracing
    try:
        parts.set_flag(True)
        return parts.trace(self, root, concrete_args)
    finally:
        # Not by a call: Ctrl-C may come in front of a function's first line.
        parts.flag.tracing = previous
        if not previous:
            parts.marked.discard(parts.get_ident())
        parts.tidy()


def _with_scratch(body: CodeType) -> CodeType:
    """The body of ``Tracer.trace`` with another global for the one that nobody but others' mocks would look at."""
    return body.replace(co_names=tuple(_SCRATCH if name == _NAME else name for name in body.co_names))


def _trace_edit(module: ModuleType, kept: _Global) -> Edit:
    _, body = trace_function(module)
    hide = frame_hider()
    if shape_of(body).writes != {_NAME}:
        raise ShapeError(f"{FX}.Tracer.trace has an unknown shape: {shape_of(body)}")

    def wrap(original: FunctionType) -> _Flagged:
        hide(set_flag, _Marked.avoided)
        if original.__code__ is body:
            original.__code__ = one_of_equals(_with_scratch(body))
        return _Flagged(original, kept)

    return CodeWrap(f"{FX}.Tracer.trace", registered_body(module), _flagged, wrap)  # type: ignore[arg-type]


def is_fixed_upstream(module: ModuleType) -> bool:
    """Whether ``module``, ``torch.fx._symbolic_trace``, keeps the flag per thread itself."""
    return _NAME not in vars(module) and "_get_is_fx_tracing" in vars(module)


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    module = modules[FX]
    if is_fixed_upstream(module):
        return NotNeeded(f"torch keeps the flag per thread since 2.14.0 ({UPSTREAM})")
    if _NAME not in vars(module):
        raise ShapeError(f"{FX}.{_NAME} does not exist")
    kept = _Global(module)
    flag_property = property(lambda self: flag.tracing, lambda self, value: set_flag(value))
    return Plan(
        [
            kept,
            *_predicate_edits(module),
            _trace_edit(module, kept),
            ModuleProperties(f"{FX}.{_NAME}", module, {_NAME: flag_property}),
        ],
        counters=lambda: {"refusals_avoided": events.refusals.total},
    )


def _after_fork_in_child() -> None:
    _marked.clear()
    if flag.tracing:
        _marked.add(get_ident())


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
