"""What the trainer raises when the user can do something about it."""

from __future__ import annotations

import fxsafe

__all__ = ["CheckpointError", "DFlashError", "DataError", "NotFiniteError", "SettingsError", "TargetError"]


class DFlashError(fxsafe.FxsafeError):
    """A fault that the message explains to the user; the command line prints it without a traceback.

    Attributes:
        show_cause: the traceback of its cause tells what the message cannot.
    """

    show_cause = False


class SettingsError(DFlashError):
    """Settings that contradict each other, the target or the machine."""


class TargetError(DFlashError):
    """A target that does not exist or that a drafter cannot be trained for."""


class DataError(DFlashError):
    """Data that cannot be read or that holds nothing to learn from."""


class CheckpointError(DFlashError):
    """A checkpoint that is damaged, foreign, or could not be written."""


class NotFiniteError(DFlashError):
    """The loss or the gradient is infinite or not a number."""
