"""What fxsafe raises and warns with."""

__all__ = ["FxsafeError", "FxsafeWarning", "UnsupportedTorchError"]


class FxsafeError(RuntimeError):
    """A request that cannot be carried out; nothing was changed."""


class UnsupportedTorchError(FxsafeError):
    """Strict mode met a torch that a patch has no tested answer for."""


class FxsafeWarning(UserWarning):
    """Something was left out or left in place; the message says what, why and what to do."""
