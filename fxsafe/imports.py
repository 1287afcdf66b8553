"""Waiting for torch's modules: fxsafe patches what the program has imported and imports nothing itself."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["expect", "ready"]

_expected: dict[str, Callable[[], None]] = {}
_asked: set[str] = set()
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
        elif name not in _asked:
            _asked.add(name)
            _expected[name] = arrived
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)


def ready(name: str) -> ModuleType | None:
    """The module, if its import has come to an end (or runs in this very thread, which cannot wait for it)."""
    module = sys.modules.get(name)
    if module is None or (_initializing(module) and name not in _arrived):
        return None
    return module


class _Finder:
    """Finds an expected module with the finders behind it, as ``importlib`` would.

    Python holds its one import lock around ``find_spec``. So this takes no other lock: wrapt's post-import hooks ask
    ``importlib.util.find_spec``, which waits for the parent package, and hang with the thread that imports the parent.
    """

    def __init__(self) -> None:
        self._inside = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _expected or name in vars(self._inside):
            return None
        vars(self._inside)[name] = True  # another library's finder may ask all finders again, us among them
        try:
            for finder in [*sys.meta_path]:
                find: Any = None if finder is self else getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if find is None else find(name, path, target)
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                    return spec
        finally:
            del vars(self._inside)[name]
        return None


class _Loader:
    """The loader that was found, until the module runs; then tells that it has."""

    def __init__(self, loader: Any) -> None:
        self._found = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._found.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        for holder, name in ((module, "__loader__"), (module.__spec__, "loader")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self._found)
        self._found.exec_module(module)
        arrived = _expected.pop(module.__name__, None)
        if arrived is not None:  # None: another copy of the module was executed first
            _arrived.add(module.__name__)
            arrived()


_finder = _Finder()
