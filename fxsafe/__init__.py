"""Makes PyTorch's FX tracing, and all that stands on it, safe to use from several threads of one process.

``import fxsafe; fxsafe.install()`` is all that a program needs; see ``install`` for the choices.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxsafe.errors import FxsafeError, FxsafeWarning, UnsupportedTorchError
    from fxsafe.installer import Installation, PatchInfo, info, install, installed, is_installed, uninstall

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


def __getattr__(name: str) -> Any:
    # Loaded at first use: a library that depends on fxsafe pays for it where it installs, not where it imports.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module("fxsafe.installer")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
