"""Settings of torch that hold in every thread, on every release.

Since 2.12 an assignment like ``torch._dynamo.config.recompile_limit = 64`` holds in the thread that makes it: other
threads, autograd's device threads among them, keep the default (pytorch#186537). Before, it held everywhere.

    from fxsafe import settings

    settings.everywhere({"torch._dynamo.config.recompile_limit": 64})      # from now on, in every thread

    with settings.everywhere({"torch._inductor.config.max_autotune": True}):
        train()

    with settings.inherited():      # threads and executors started inside begin with the starter's settings
        pool = ThreadPoolExecutor(4)

Works without ``fxsafe.install()``. What a thread itself assigns, or patches, while a setting holds everywhere goes
before it in that thread, and ends with it.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

__all__ = ["Everywhere", "carried", "everywhere", "inherit", "inherited"]

_CONFIG_MODULE = "torch.utils._config_module"
# Per-thread caches of what a configuration holds (2.13 and later); a change for all threads makes them all stale.
_CACHES = {
    "_hash_dirty_var": True,
    "_hash_cache_var": None,
    "_get_dict_dirty_keys_var": None,
    "_get_dict_cache_var": None,
}
_P = ParamSpec("_P")
_R = TypeVar("_R")

_lock = threading.RLock()


class _Layer:
    """Stands in for the context variable of one setting: gives ``value`` to every thread that has not set its own."""

    def __init__(self, name: str, value: object, unset: object) -> None:
        self.value = value
        self.below: Any = None  # what it stands on: the context variable, or another layer
        self._unset = unset
        # A new variable, so that what threads had assigned before does not go before the value, and comes back.
        self._own: ContextVar[Any] = ContextVar(name, default=unset)

    def get(self, *default: Any) -> Any:
        own = self._own.get()
        return self.value if own is self._unset else own

    def own(self) -> Any:
        return self._own.get()

    def set(self, value: Any) -> Token[Any]:
        return self._own.set(value)

    def reset(self, token: Token[Any]) -> None:
        self._own.reset(token)


def _torchs() -> Any:
    return importlib.import_module(_CONFIG_MODULE)


def _find(setting: str) -> tuple[Any, str]:
    """The configuration module and the name in it, aliases followed.

    Raises:
        AttributeError: this torch has no such setting.
    """
    parts = setting.split(".")
    for at in range(len(parts) - 1, 0, -1):
        name, key = ".".join(parts[:at]), ".".join(parts[at:])
        try:
            module: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            continue
        if not isinstance(module, _torchs().ConfigModule):
            break
        config = vars(module)["_config"]
        if key not in config:
            break
        alias = getattr(config[key], "alias", None)
        return (module, key) if alias is None else _find(alias)
    raise AttributeError(f"this torch has no setting {setting!r}")


class _Setting:
    """One setting of one configuration module, in the three forms in which torch has kept the value."""

    def __init__(self, setting: str) -> None:
        self.module, self.key = _find(setting)
        self.config: dict[str, Any] = vars(self.module)["_config"]
        if self.key in getattr(self.module, "_implication_sources", ()):
            raise AttributeError(f"{setting} implies other settings; set it in each thread")

    def read(self) -> Any:
        """The raw value that users set."""
        entry = self.config[self.key]
        return entry.user_override if hasattr(entry, "user_override") else entry

    def write(self, raw: Any) -> None:
        entry = self.config[self.key]
        if hasattr(entry, "user_override"):  # 2.6 and later
            entry.user_override = raw
        else:
            self.config[self.key] = raw
        here = vars(self.module)
        if "_is_dirty" in here:  # to 2.12
            here["_is_dirty"] = True
        for name, default in _CACHES.items():
            if name in here:
                here[name] = ContextVar(name, default=default)


class Everywhere:
    """Settings that hold in every thread until ``undo``; also a context manager. ``everywhere`` makes it."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        found = {name: _Setting(name) for name in settings}  # all of them before anything is changed
        self._done: list[tuple[_Setting, Any, Any]] = []
        with _lock:
            for name, value in settings.items():
                setting = found[name]
                before = setting.read()
                new: Any = value
                if hasattr(before, "get") and hasattr(before, "set"):  # 2.12 and later
                    new = _Layer(name, value, _torchs()._UNSET_SENTINEL)
                    new.below = before
                setting.write(new)
                self._done.append((setting, before, new))

    def undo(self) -> None:
        """Every thread has again what it had before. Does nothing the second time.

        Where a setting is process-wide (before 2.12) and somebody has assigned it since, it stays as it is.
        """
        with _lock:
            while self._done:
                setting, before, new = self._done.pop()
                current = setting.read()
                if current is new:
                    setting.write(new.below if isinstance(new, _Layer) else before)
                else:
                    _take_out(current, new, setting)

    def __enter__(self) -> Everywhere:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.undo()


def _take_out(layer: Any, gone: Any, setting: _Setting) -> None:
    """Take a layer out from below others, which came later and stay."""
    while isinstance(layer, _Layer):
        if layer.below is gone:
            layer.below = gone.below
            setting.write(setting.read())
            return
        layer = layer.below


def everywhere(settings: Mapping[str, object] | None = None, /, **more: object) -> Everywhere:
    """Make settings hold in every thread: those that run and those to come, autograd's device threads included.

    Args:
        settings: full name -> value, e.g. ``{"torch._dynamo.config.recompile_limit": 64}``. Their configuration
            modules are imported.
        more: further ones, for ``everywhere(**{...})``.

    Raises:
        AttributeError: this torch has no such setting, or it cannot be set for all threads. Nothing was changed.
    """
    return Everywhere({**(settings or {}), **more})


def _own_settings() -> list[tuple[Any, Any]]:
    """What the calling thread has set itself: context variables and their values. Empty before 2.12."""
    torchs: Any = sys.modules.get(_CONFIG_MODULE)
    if torchs is None:
        return []
    own = []
    for module in list(sys.modules.values()):
        if isinstance(module, torchs.ConfigModule):
            for entry in list(vars(module)["_config"].values()):
                variable = getattr(entry, "user_override", None)
                if isinstance(variable, (ContextVar, _Layer)):
                    value = variable.own() if isinstance(variable, _Layer) else variable.get()
                    if value is not torchs._UNSET_SENTINEL:
                        own.append((variable, value))
    return own


def carried(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function``, to be called in another thread with the settings that the calling thread has now.

    For ``executor.submit(settings.carried(work), ...)`` and ``Thread(target=settings.carried(work))``. The other
    thread has its former settings again afterwards.
    """
    own = _own_settings()

    @wraps(function)
    def with_settings(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        tokens = [(variable, variable.set(value)) for variable, value in own]
        _forget_caches()
        try:
            return function(*args, **kwargs)
        finally:
            for variable, token in reversed(tokens):
                variable.reset(token)
            _forget_caches()

    return with_settings


def _forget_caches() -> None:
    torchs: Any = sys.modules.get(_CONFIG_MODULE)
    for module in list(sys.modules.values()):
        if isinstance(module, getattr(torchs, "ConfigModule", ())):
            for name, default in _CACHES.items():
                variable = vars(module).get(name)
                if isinstance(variable, ContextVar):
                    variable.set(default)
            if "_is_dirty" in vars(module):
                vars(module)["_is_dirty"] = True


def _starter_is_inductor() -> bool:
    """Whether the code that starts a thread, the standard library's aside, is Inductor's: its pools outlive a compile,
    and must not keep what was set for the length of one."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "threading" and not name.startswith("concurrent.futures"):
            return bool(name.startswith("torch._inductor"))
        frame = frame.f_back  # type: ignore[assignment]
    return False


def inherit() -> Callable[[], None]:
    """From now on a new thread begins with the settings of the thread that starts it; returns what ends that.

    Threads of a program that has set nothing are started as ever, and so are the threads of Inductor's pools.
    """
    start = vars(threading.Thread)["start"]

    @wraps(start)
    def start_with_settings(self: threading.Thread) -> None:
        if _own_settings() and not _starter_is_inductor():
            # As an attribute of the instance, where the thread finds it before the class's; ``run`` may be anybody's.
            self.run = _once(self, carried(self.run))  # type: ignore[method-assign]
        start(self)

    def end() -> None:
        with _lock:
            if vars(threading.Thread)["start"] is start_with_settings:
                threading.Thread.start = start  # type: ignore[method-assign]

    with _lock:
        threading.Thread.start = start_with_settings  # type: ignore[method-assign]
    return end


def _once(thread: threading.Thread, run: Callable[[], None]) -> Callable[[], None]:
    """``run``, after the thread has its own attributes again."""
    own = vars(thread).get("run")

    def run_once() -> None:
        if own is None:
            vars(thread).pop("run", None)
        else:
            vars(thread)["run"] = own
        run()

    return run_once


@contextmanager
def inherited() -> Iterator[None]:
    """Threads started while the block runs begin with the settings of the thread that starts them.

    Executors start their threads when work is submitted: they inherit from the thread that submits it. Autograd's
    device threads are not started by Python; use ``everywhere`` for them.
    """
    end = inherit()
    try:
        yield
    finally:
        end()
