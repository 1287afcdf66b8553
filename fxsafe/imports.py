"""Waiting for torch's modules: fxsafe patches what the program has imported and imports nothing itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType

from wrapt import register_post_import_hook

__all__ = ["expect", "ready"]

_hooked: set[str] = set()
_arrived: set[str] = set()


def _initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def expect(names: Iterable[str], arrived: Callable[[], None]) -> None:
    """Have ``arrived`` called, in the importing thread, after each of these modules is imported for the first time.

    Must be called without any lock that ``arrived`` takes: another thread may be importing one of them right now, and
    is then waited for.

    Args:
        names: modules; those already imported are passed over.
        arrived: must not raise.
    """
    for name in names:
        module = sys.modules.get(name)
        if module is not None:
            if _initializing(module):
                importlib.import_module(name)  # waits for another thread's import, returns at once inside our own
                _arrived.add(name)
        elif name not in _hooked:

            def hook(module: ModuleType) -> None:
                _arrived.add(module.__name__)
                arrived()

            _hooked.add(name)
            register_post_import_hook(hook, name)


def ready(name: str) -> ModuleType | None:
    """The module, if its import has come to an end (or runs in this very thread, which cannot wait for it)."""
    module = sys.modules.get(name)
    if module is None or (_initializing(module) and name not in _arrived):
        return None
    return module
