"""The catalogue of patches, one module each, in the order in which they are applied."""

from fxsafe.patches import checkpoint_flag, guard_override, tracing_flag
from fxsafe.patches.base import Patch

__all__ = ["CATALOGUE", "FIXES"]

FIXES = ("thread-local", "always-false")

CATALOGUE: tuple[Patch, ...] = (
    tracing_flag.PATCH,
    checkpoint_flag.PATCH,
    guard_override.PATCH,
)
