"""Functions of the module ``torch`` that some tracers replace, given to the thread that replaced them only."""

from __future__ import annotations

import functools
import threading
from _thread import get_ident
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import ModuleProperties

__all__ = ["TorchView", "after_fork_in_child", "hide_frames", "torch_view"]


class TorchView(ModuleProperties):
    """Properties of ``torch`` that are there while any thread is inside a trace that replaces such functions."""

    def __init__(self, torch: ModuleType) -> None:
        super().__init__("torch", torch, {})
        self._globals = vars(torch)
        self._lock = threading.RLock()
        # Thread ident -> name -> what the thread has there; no entry for a thread that does not trace.
        self._own: dict[int, dict[str, Any]] = {}

    def own(self) -> dict[str, Any] | None:
        return self._own.get(get_ident())

    def begin(self, names: Iterable[str]) -> None:
        """What the calling thread writes to these names from now on, it writes for itself."""
        with self._lock:
            there = {name: self._globals[name] for name in names if name in self._globals}
            new = {name: self._property(name) for name in there.keys() - self._properties.keys()}
            self._properties.update(new)
            if self._is_there():
                for name, value in new.items():
                    setattr(self._class, name, value)
            self._own[get_ident()] = there | (self.own() or {})
            self._settle()

    def end(self, before: dict[str, Any] | None) -> None:
        """
        Args:
            before: what ``own`` returned before ``begin``.
        """
        with self._lock:
            if before is None:
                self._own.pop(get_ident(), None)
            else:
                self._own[get_ident()] = before
            self._settle()

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        me = get_ident()
        self._own = {ident: own for ident, own in self._own.items() if ident == me}
        self._settle()

    def _settle(self) -> None:
        if not self._own:
            self.undo()
        elif not self._is_there():
            self.apply()

    def _is_there(self) -> bool:
        return self._class is not None and isinstance(self._module, self._class)  # or a class that others derived

    def _property(self, name: str) -> property:
        everybodys = self._globals

        def mine() -> dict[str, Any]:
            own = self._own.get(get_ident())
            return everybodys if own is None or name not in own else own

        def read(module: Any) -> Any:
            try:
                return mine()[name]
            except KeyError:
                raise AttributeError(name) from None  # torch's own __getattr__ is asked then

        def write(module: Any, value: Any) -> None:
            mine()[name] = value

        def delete(module: Any) -> None:
            try:
                del mine()[name]
            except KeyError:
                raise AttributeError(name) from None

        frame_hider()(mine, read, write, delete)
        return property(read, write, delete)


@functools.cache
def torch_view(torch: ModuleType) -> TorchView:
    """The one of the process: a trace may outlive the installation that it began in."""
    return TorchView(torch)


def hide_frames() -> None:
    """Have Dynamo skip what runs in place of a read of ``torch``."""
    for kind in (TorchView, ModuleProperties):
        frame_hider()(*(method for method in vars(kind).values() if isinstance(method, FunctionType)))


def after_fork_in_child() -> None:
    import torch

    torch_view(torch).after_fork_in_child()
