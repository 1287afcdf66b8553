"""F4, generated code: a graph module that is made while another thread compiles can itself be compiled.

The race: for the length of a compile Dynamo replaces ``_forward_from_src`` of ``torch.fx.graph_module`` by a function
that marks what it makes as code to skip, lest Dynamo convert its own graphs. A graph module that another thread makes
meanwhile, by a trace, a load or ``recompile``, is marked too: ``torch.compile`` runs it eagerly ever after, without a
word, or says "fullgraph=True found no compiled frames".

Upstream: none known. Releases: 2.5 to 2.15.

Why this place is enough: the function is Dynamo's own and does nothing else. It asks whether the calling thread is
inside a compile, which Dynamo notes per thread for all the time in which a compile makes graph modules.

This file can be deleted when the oldest supported torch marks the code of the compiling thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeWrap
from fxsafe.patches.base import Patch, Plan
from fxsafe.shapes import Shape, ShapeError, require
from fxsafe.traces import CONVERT_FRAME, FX

__all__ = ["PATCH"]

_SYMBOLIC_CONVERT = "torch._dynamo.symbolic_convert"
_NAME = "fx_forward_from_src_skip_result"
_WHERE = f"{CONVERT_FRAME}.{_NAME}"
_ORIGINAL = "original_forward_from_src"
_KNOWN = Shape(("src", "globals", "co_fields"), frozenset({_ORIGINAL, "skip_code"}), frozenset())


def _template(src: Any, globals: Any, co_fields: Any = None) -> Any:  # noqa: A002
    replacement: Any = "<replacement>"
    return replacement(src, globals, co_fields)


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    convert_frame, symbolic_convert = modules[CONVERT_FRAME], modules[_SYMBOLIC_CONVERT]
    function: Any = vars(convert_frame).get(_NAME)
    plain: Any = vars(convert_frame).get(_ORIGINAL)
    # Not own_function: torch's wraps() says that this one is fx's below it.
    if type(function) is not FunctionType or function.__globals__ is not vars(convert_frame):
        raise ShapeError(f"{_WHERE} does not exist")
    require(_WHERE, function, _KNOWN)
    here = vars(symbolic_convert).get("tls")
    translator = vars(symbolic_convert).get("InstructionTranslator")
    if here is None or "set_current_tx" not in vars(translator or object):
        raise ShapeError(f"{_SYMBOLIC_CONVERT} does not note who compiles")

    def wrap(original: FunctionType) -> Any:
        def forward_from_src(*args: Any) -> Any:
            compiles = getattr(here, "current_tx", None) is not None
            return (original if compiles else plain)(*args)

        frame_hider()(forward_from_src)
        return forward_from_src

    try:
        return Plan([CodeWrap(_WHERE, function, _template, wrap)])  # type: ignore[arg-type]
    except ValueError as error:
        raise ShapeError(str(error)) from None


PATCH = Patch(
    name="graph-module-forward",
    summary="a graph module that is made while another thread compiles can be compiled",
    upstream=(),
    modules=("torch", FX, CONVERT_FRAME, _SYMBOLIC_CONVERT),
    plan=_plan,
    faults=("graph_module_skipped",),
    quiet=False,  # imported by the first compile
)
