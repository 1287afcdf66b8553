"""Makes PyTorch's FX tracing, and all that stands on it, safe to use from several threads of one process.

``import fxsafe; fxsafe.install()`` is all that a program needs; see ``install`` for the choices.
"""

from fxsafe.errors import FxsafeError, FxsafeWarning, UnsupportedTorchError
from fxsafe.install import Installation, PatchInfo, info, install, installed, is_installed, uninstall

__all__ = [
    "FxsafeError",
    "FxsafeWarning",
    "Installation",
    "PatchInfo",
    "UnsupportedTorchError",
    "info",
    "install",
    "installed",
    "is_installed",
    "uninstall",
]

__version__ = "0.1.0"
