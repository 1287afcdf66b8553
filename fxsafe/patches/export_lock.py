"""F4, what of an export cannot be isolated: it takes Dynamo's compile lock, like a compile.

The race: strict export and ahead-of-time compiling run Dynamo without the lock that ``torch.compile`` takes around it,
and ``run_decompositions`` replaces the kernels of operators in their tables for the whole process, saving and
putting back what may be another thread's replacements ("Trying to override a python impl for DispatchKey...").

Upstream: pytorch#198246 (open) puts one lock around captures for precompile. Releases: 2.5 to 2.15.

Why this place is enough: Dynamo's own state is written under its lock by everybody else; decompositions are replaced in
one function. Nothing is traced under the lock but by Dynamo itself, and in a decomposition, whose model is a graph.
The wait is bounded (``_locked``). The tracing of a non-strict export takes no lock: one that runs beside a
``run_decompositions`` with decompositions of the user's own may get these as well.

This file can be deleted when the oldest supported torch takes a lock there itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import AttributeSwap, Edit
from fxsafe.patches._locked import under_compile_lock, wrap_in_place
from fxsafe.patches.base import Patch, Plan
from fxsafe.shapes import own_function
from fxsafe.traces import FX

__all__ = ["AOT_PATCH", "PATCH"]

TRACE = "torch.export._trace"
PROGRAM = "torch.export.exported_program"
AOT_COMPILE = "torch._dynamo.aot_compile"
_OVERRIDE = "_override_composite_implicit_decomp"


def _override_template(cia_ops_to_callable: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(cia_ops_to_callable)


def _override_template_2_6(cia_ops_to_callable: Any, safe: Any = True) -> Any:
    replacement: Any = "<replacement>"
    return replacement(cia_ops_to_callable, safe)


def _override_template_2_5(ops_to_preserve: Any, decomp_table: Any, safe: Any = True) -> Any:
    replacement: Any = "<replacement>"
    return replacement(ops_to_preserve, decomp_table, safe)


_OVERRIDE_TEMPLATES = (_override_template, _override_template_2_6, _override_template_2_5)


def _locked_generator(original: FunctionType) -> Any:
    def overridden(*args: Any) -> Iterator[Any]:
        with under_compile_lock("it replaces decompositions"):
            yield from original(*args)

    frame_hider()(overridden)
    return overridden


def _locked_call(owner: ModuleType, name: str) -> Edit:
    function = own_function(owner, name)

    @functools.wraps(function)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with under_compile_lock("it captures with Dynamo"):
            return function(*args, **kwargs)

    frame_hider()(locked)
    return AttributeSwap(f"{owner.__name__}.{name}", owner, name, locked)


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    frame_hider()(under_compile_lock.__wrapped__)  # type: ignore[attr-defined]
    override = wrap_in_place(modules[PROGRAM], _OVERRIDE, _OVERRIDE_TEMPLATES, _locked_generator)
    return Plan([override, _locked_call(modules[TRACE], "_export_to_torch_ir")])


def _aot_plan(modules: Mapping[str, ModuleType]) -> Plan:
    frame_hider()(under_compile_lock.__wrapped__)  # type: ignore[attr-defined]
    return Plan([_locked_call(modules[AOT_COMPILE], "aot_compile_fullgraph")])


PATCH = Patch(
    name="export-lock",
    summary="strict export and run_decompositions take Dynamo's compile lock, as a compile does",
    upstream=("https://github.com/pytorch/pytorch/pull/198246",),
    modules=("torch", FX, TRACE, PROGRAM),
    plan=_plan,
    faults=("export_decompositions",),
    quiet=False,
)

AOT_PATCH = Patch(
    name="aot-compile-lock",
    summary="compiling ahead of time takes Dynamo's compile lock, as a compile does (2.9 and later)",
    upstream=("https://github.com/pytorch/pytorch/pull/198246",),
    modules=("torch", FX, AOT_COMPILE),
    plan=_aot_plan,
    quiet=False,
    since=(2, 9),
)
