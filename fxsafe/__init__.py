"""Makes PyTorch's FX tracing, and all that stands on it, safe to use from several threads of one process.

``import fxsafe; fxsafe.install()`` is all that a program needs; see ``install`` for the choices.
"""

TYPE_CHECKING = False  # typing itself would be most of the time that this import takes
if TYPE_CHECKING:
    from fxsafe import settings
    from fxsafe.errors import FxsafeError, FxsafeWarning, UnsupportedTorchError
    from fxsafe.installer import (
        Fix,
        Installation,
        PatchInfo,
        Status,
        info,
        install,
        installed,
        is_installed,
        uninstall,
    )
    from fxsafe.observe.recorder import Recording, record

__all__ = [
    "Fix",
    "FxsafeError",
    "FxsafeWarning",
    "Installation",
    "PatchInfo",
    "Recording",
    "Status",
    "UnsupportedTorchError",
    "info",
    "install",
    "installed",
    "is_installed",
    "record",
    "settings",
    "uninstall",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Loaded at first use: a library that depends on fxsafe pays for it where it installs, not where it imports.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name == "settings":
        return importlib.import_module("fxsafe.settings")
    where = "fxsafe.observe.recorder" if name in ("Recording", "record") else "fxsafe.installer"
    module = importlib.import_module(where)
    value: object = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _load_beside_torch() -> None:
    # torch has paid for most of what the installer imports; the rest is better paid here than inside install().
    import sys

    if "torch" in sys.modules:
        import fxsafe.installer  # noqa: F401


_load_beside_torch()
