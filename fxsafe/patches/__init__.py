"""The catalogue of patches, one module each, in the order in which they are applied."""

from typing import get_args

from fxsafe.patches import (
    checkpoint_flag,
    compile_lock,
    compiling_flags,
    config_blocks,
    cudagraph_threads,
    device_guard,
    dispatch_cache,
    dispatch_mode,
    dynamo_hooks,
    export,
    export_load,
    export_lock,
    export_reset,
    export_save,
    fake_impl_context,
    graph_break_setting,
    graph_module_forward,
    guard_override,
    guard_scope,
    inductor_lock,
    jvp_level,
    lazy_graph_module,
    make_fx,
    meta_tracer,
    metrics_context,
    module_hooks,
    set_rng_state,
    stance,
    sympy_singletons,
    traceback_meta,
    tracing_flag,
)
from fxsafe.patches.base import Fix, Patch

__all__ = ["CATALOGUE", "FIXES"]

FIXES: tuple[Fix, ...] = get_args(Fix)

CATALOGUE: tuple[Patch, ...] = (
    tracing_flag.PATCH,
    checkpoint_flag.PATCH,
    guard_override.PATCH,
    module_hooks.PATCH,
    dynamo_hooks.PATCH,
    meta_tracer.PATCH,
    traceback_meta.PATCH,
    make_fx.PATCH,
    dispatch_cache.PATCH,
    sympy_singletons.PATCH,
    device_guard.PATCH,
    compile_lock.PATCH,
    compiling_flags.PATCH,  # after tracing_flag: it looks whether that one is there
    lazy_graph_module.PATCH,
    graph_module_forward.PATCH,
    fake_impl_context.PATCH,
    dispatch_mode.PATCH,
    jvp_level.PATCH,
    metrics_context.PATCH,
    guard_scope.PATCH,
    set_rng_state.PATCH,
    export.PATCH,
    export_load.PATCH,
    export_save.PATCH,
    export_lock.PATCH,
    export_lock.AOT_PATCH,
    inductor_lock.PATCH,
    inductor_lock.STANDALONE_PATCH,
    export_reset.PATCH,
    stance.PATCH,
    graph_break_setting.PATCH,
    config_blocks.PATCH,
    cudagraph_threads.PATCH,
)
