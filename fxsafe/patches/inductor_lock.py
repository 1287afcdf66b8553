"""F4, Inductor called without Dynamo: it takes Dynamo's compile lock, as ``torch.compile`` does around it.

The race: Inductor registers its patterns at their first use behind ``functools.cache``, which runs the function in each
thread that comes before the first is through ("Duplicate pattern"), and says on a class, for the whole process, that
layouts may be read ("convert FlexibleLayout to FixedLayout first"). Dynamo holds its lock around all of it;
``torch._inductor.compile``, ``standalone_compile``, ``aot_compile`` and ``aoti_compile_and_package`` do not.

Upstream: no report known. Releases: 2.5 to 2.15; ``standalone_compile`` 2.8 to 2.15.

Why this place is enough: every way into Inductor leads through one of these functions, and the lazy backward, the only
other one, takes the lock by itself (since 2.6; on 2.5 it comes through ``compile_fx_inner``). Inside a compile the
lock is the thread's already. ``compile-lock`` keeps autograd in the thread that holds it, and the wait is
bounded: a minute behind a holder that stands still, an hour behind one that gets on.

This file can be deleted when the oldest supported torch takes a lock there itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.patches._locked import under_compile_lock, wrap_in_place
from fxsafe.patches.base import Patch, Plan
from fxsafe.traces import FX

__all__ = ["PATCH", "STANDALONE_PATCH"]

COMPILE_FX = "torch._inductor.compile_fx"
STANDALONE = "torch._inductor.standalone_compile"
# One compile may take many minutes, of C++ or of autotuning. Who goes on beside it meets the fault.
STEPS = 60


# Templates: one for each list of parameters since 2.5.


def _fx(model_: Any, example_inputs_: Any, inner_compile: Any, config_patches: Any, decompositions: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(model_, example_inputs_, inner_compile, config_patches, decompositions)


def _fx_2_8(
    model_: Any,
    example_inputs_: Any,
    inner_compile: Any,
    config_patches: Any,
    decompositions: Any,
    ignore_shape_env: Any,
) -> Any:
    replacement: Any = "<replacement>"
    return replacement(model_, example_inputs_, inner_compile, config_patches, decompositions, ignore_shape_env)


def _fx_2_12(
    model_: Any,
    example_inputs_: Any,
    inner_compile: Any,
    config_patches: Any,
    decompositions: Any,
    ignore_shape_env: Any,
    compile_region_name: Any,
) -> Any:
    replacement: Any = "<replacement>"
    return replacement(
        model_, example_inputs_, inner_compile, config_patches, decompositions, ignore_shape_env, compile_region_name
    )


def _aot(model_: Any, example_inputs_: Any, inner_compile: Any, config_patches: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(model_, example_inputs_, inner_compile, config_patches)


def _inner_2_5(*args: Any, **kwargs: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(*args, **kwargs)


def _inner(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(gm, example_inputs, **kwargs)


def _inner_2_12(gm: Any, example_inputs: Any, compile_region_name: Any, **kwargs: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(gm, example_inputs, compile_region_name, **kwargs)


def _standalone(gm: Any, example_inputs: Any, *, dynamic_shapes: Any, options: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(gm, example_inputs, dynamic_shapes=dynamic_shapes, options=options)


def _standalone_2_10(gm: Any, example_inputs: Any, *, dynamic_shapes: Any, options: Any, aot: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(gm, example_inputs, dynamic_shapes=dynamic_shapes, options=options, aot=aot)


def _standalone_2_12(
    gm: Any, example_inputs: Any, *, dynamic_shapes: Any, options: Any, aot: Any, donate_graph_module: Any
) -> Any:
    replacement: Any = "<replacement>"
    return replacement(
        gm,
        example_inputs,
        dynamic_shapes=dynamic_shapes,
        options=options,
        aot=aot,
        donate_graph_module=donate_graph_module,
    )


def _standalone_2_13(
    gm: Any,
    example_inputs: Any,
    *,
    dynamic_shapes: Any,
    options: Any,
    aot: Any,
    donate_graph_module: Any,
    fake_mode: Any,
) -> Any:
    replacement: Any = "<replacement>"
    return replacement(
        gm,
        example_inputs,
        dynamic_shapes=dynamic_shapes,
        options=options,
        aot=aot,
        donate_graph_module=donate_graph_module,
        fake_mode=fake_mode,
    )


_TEMPLATES: dict[str, tuple[Callable[..., Any], ...]] = {
    "compile_fx": (_fx, _fx_2_8, _fx_2_12),
    "compile_fx_aot": (_aot,),
    "compile_fx_inner": (_inner_2_5, _inner, _inner_2_12),
    "standalone_compile": (_standalone, _standalone_2_10, _standalone_2_12, _standalone_2_13),
}


def _locked(original: FunctionType) -> Any:
    def locked(*args: Any, **kwargs: Any) -> Any:
        with under_compile_lock("it compiles with Inductor", STEPS):
            return original(*args, **kwargs)

    frame_hider()(locked)
    return locked


def _plan_of(module: str, *names: str) -> Callable[[Mapping[str, ModuleType]], Plan]:
    def plan(modules: Mapping[str, ModuleType]) -> Plan:
        frame_hider()(under_compile_lock.__wrapped__)  # type: ignore[attr-defined]
        # In place: others hold these by name, and one is the default of another's parameter.
        return Plan([wrap_in_place(modules[module], name, _TEMPLATES[name], _locked) for name in names])

    return plan


PATCH = Patch(
    name="inductor-lock",
    summary="Inductor called without Dynamo (torch._inductor.compile, AOTInductor) takes Dynamo's compile lock",
    upstream=(),
    modules=("torch", FX, COMPILE_FX),
    plan=_plan_of(COMPILE_FX, "compile_fx", "compile_fx_aot", "compile_fx_inner"),
    faults=("inductor_first_use",),
    quiet=False,
)

STANDALONE_PATCH = Patch(
    name="standalone-lock",
    summary="torch._inductor.standalone_compile takes Dynamo's compile lock (2.8 and later)",
    upstream=(),
    modules=("torch", FX, STANDALONE),
    plan=_plan_of(STANDALONE, "standalone_compile"),
    quiet=False,
    since=(2, 8),
)
