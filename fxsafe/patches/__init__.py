"""The catalogue of patches, one module each, in the order in which they are applied."""

from fxsafe.patches import (
    checkpoint_flag,
    compile_lock,
    dispatch_cache,
    dynamo_hooks,
    guard_override,
    make_fx,
    module_hooks,
    sympy_singletons,
    traceback_meta,
    tracing_flag,
)
from fxsafe.patches.base import Patch

__all__ = ["CATALOGUE", "FIXES"]

FIXES = ("thread-local", "always-false")

CATALOGUE: tuple[Patch, ...] = (
    tracing_flag.PATCH,
    checkpoint_flag.PATCH,
    guard_override.PATCH,
    module_hooks.PATCH,
    dynamo_hooks.PATCH,
    traceback_meta.PATCH,
    make_fx.PATCH,
    dispatch_cache.PATCH,
    sympy_singletons.PATCH,
    compile_lock.PATCH,
)
