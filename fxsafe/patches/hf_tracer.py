"""F2, ``HFTracer`` of transformers 4: what its traces replace, they replace for their own thread or take back as one.

The race: for its length ``transformers.utils.fx.HFTracer.trace`` replaces ``torch.arange``, ``zeros``, ``tensor``,
``finfo`` and others by functions of its own, as ``MetaTracer`` does (see ``meta_tracer``), notes itself in a global of
its module, and puts classes of its own in the place of ``Cache`` and its like in the modules of transformers, all for
the whole process. When two traces overlap, the second finds the first one's functions and leaves them for good, traces
with or without the classes as the first one pleases, and makes proxies that belong to the first.

Upstream: none known; the module is gone in transformers 5. Releases: 4.36 to 4.57, one body before 4.41 and one since.

Why this place is enough: the functions of ``torch`` are the thread's own as in ``meta_tracer``. The global has one
reader, which only asks whether anybody traces and then makes a proxy: that one gets its own thread's tracer in the
method that is called next. The classes are read from the dictionaries of modules, where threads cannot be told apart:
they stay replaced until the last trace that needs them has ended, and the body, which finds them there, replaces none.
A thread that does not trace is answered by their metaclass as the original would answer it.

This file can be deleted when no supported torch is used with transformers 4.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from _thread import get_ident
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.edits import CodeWrap, Edit
from fxsafe.patches import _torch_view
from fxsafe.patches._torch_view import torch_view
from fxsafe.patches.base import Patch, Plan
from fxsafe.shapes import ShapeError, own_function, shape_of
from fxsafe.traces import FX

__all__ = ["PATCH"]

HF_TRACER = "transformers.utils.fx"
_WHERE = f"{HF_TRACER}.HFTracer"
_NAMES = "_TORCH_METHODS_TO_PATCH"
_CURRENT = "_CURRENT_TRACER"
_SCRATCH = "_fxsafe_current_tracer"  # what the body of trace writes instead

_Place = tuple[ModuleType, str]


class _Traces:
    """The traces that threads are inside of, and what stands in modules because of them."""

    def __init__(self, torch: ModuleType, fx: ModuleType) -> None:
        self._view = torch_view(torch)
        self._globals = vars(fx)
        self._lock = threading.RLock()
        self._tracers: dict[int, list[Any]] = {}  # thread ident -> its tracers, the innermost last
        self._needed: dict[object, tuple[int, list[_Place]]] = {}
        self._replaced: dict[_Place, tuple[Any, Any]] = {}  # place -> original and replacement

    def inside(self) -> tuple[int, dict[str, Any] | None]:
        """What ``end`` is to go back to."""
        return len(self._tracers.get(get_ident(), ())), self._view.own()

    def begin(self, tracer: Any) -> None:
        with self._lock:
            self._tracers.setdefault(get_ident(), []).append(tracer)
            self._view.begin(getattr(tracer, _NAMES))
            self._settle()

    def end(self, before: tuple[int, dict[str, Any] | None]) -> None:
        depth, own = before
        with self._lock:
            self._view.end(own)
            del self._tracers.get(get_ident(), [])[depth:]
            if not depth:
                self._tracers.pop(get_ident(), None)
            self._settle()

    def current(self) -> Any:
        """The tracer that the calling thread is inside of; None if it is in none."""
        tracers = self._tracers.get(get_ident())
        return tracers[-1] if tracers else None

    def original(self, cls: type) -> type | None:
        """What ``cls`` stands in for, if the calling thread is inside of no trace."""
        if self.current() is not None:
            return None
        return next((original for original, standing in [*self._replaced.values()] if standing is cls), None)

    def patch_for_tracing(self, body: FunctionType, tracer: Any, root: Any) -> Iterator[None]:
        """``HFTracer.patch_for_tracing``, with the classes in place from before its body to after it."""
        token, places = object(), list[_Place]()
        try:
            with self._lock:
                self._needed[token] = get_ident(), places
                for module, name, original, replacement in _classes(tracer, root, self._replaced):
                    places.append((module, name))
                    if (module, name) not in self._replaced:
                        self._replaced[module, name] = original, replacement
                        setattr(module, name, replacement)
            yield from body(tracer, root)
        finally:
            with self._lock:
                self._needed.pop(token, None)
                self._settle()

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        me = get_ident()
        self._tracers = {ident: tracers for ident, tracers in self._tracers.items() if ident == me}
        self._needed = {token: needs for token, needs in self._needed.items() if needs[0] == me}
        self._settle()

    def _settle(self) -> None:
        needed = {place for _, places in self._needed.values() for place in places}
        for place in [place for place in self._replaced if place not in needed]:
            module, name = place
            original, replacement = self._replaced[place]
            if vars(module).get(name) is replacement:
                setattr(module, name, original)
            del self._replaced[place]
        if _CURRENT in self._globals:
            self._globals[_CURRENT] = next((tracers[-1] for tracers in self._tracers.values() if tracers), None)
        if not self._tracers:
            self._globals.pop(_SCRATCH, None)


def _classes(
    tracer: Any, root: Any, replaced: Mapping[_Place, tuple[Any, Any]]
) -> list[tuple[ModuleType, str, Any, Any]]:
    """What the body of ``patch_for_tracing`` would replace if nothing were replaced: module, name, what, by what."""
    module_of_model = inspect.getmodule(root)
    found = []
    for key, module in [*sys.modules.items()]:
        if (module_of_model is not None and module is not module_of_model) or not key.startswith("transformers"):
            continue
        for original, replacement in tracer._CLASSES_TO_PATCH.items():
            for name, value in [*vars(module).items()]:
                if replaced.get((module, name), (value,))[0] is original:
                    found.append((module, name, original, replacement))
    return found


_traces = functools.cache(_Traces)  # one for the process: a trace may outlive the installation that it began in


class _Session:
    """What the body of ``trace`` works with."""

    def __init__(self, traces: _Traces, trace: FunctionType) -> None:
        code = trace.__code__
        trace.__code__ = code.replace(co_names=tuple(_SCRATCH if name == _CURRENT else name for name in code.co_names))
        self.trace = trace
        self.inside, self.begin, self.end = traces.inside, traces.begin, traces.end


class _Template:
    """The bodies that the functions get."""

    def trace(
        self,
        root: Any,
        concrete_args: Any = None,
        dummy_inputs: Any = None,
        complete_concrete_args_with_inputs_not_in_dummy_inputs: Any = True,
    ) -> Any:
        # The body closes over it, by its super().
        __class__  # type: ignore[name-defined]  # noqa: B018
        session: Any = "<replacement>"
        before = session.inside()
        try:
            session.begin(self)
            return session.trace(
                self, root, concrete_args, dummy_inputs, complete_concrete_args_with_inputs_not_in_dummy_inputs
            )
        finally:
            try:
                session.end(before)
            except BaseException:
                session.end(before)  # Ctrl-C on the way: nobody else would
                raise

    def patch_for_tracing(self, root: Any) -> Any:
        around: Any = "<replacement>"
        return around(self, root)

    def install_orig_cache_cls(self, orig_cache_cls: Any) -> Any:
        install: Any = "<replacement>"
        return install(self, orig_cache_cls)


def _with_own_tracer(traces: _Traces, body: FunctionType) -> Callable[[Any, Any], None]:
    def install_orig_cache_cls(proxy: Any, cls: Any) -> None:
        proxy.tracer = traces.current() or proxy.tracer
        body(proxy, cls)

    return install_orig_cache_cls


class _AsOriginal:
    """Makes the classes that stand in for others answer threads that do not trace as those others do."""

    def __init__(self, traces: _Traces, meta: type) -> None:
        self.target = f"{HF_TRACER}.{meta.__name__}"
        self._meta = meta

        def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
            original = traces.original(cls)
            return type.__call__(cls, *args, **kwargs) if original is None else original(*args, **kwargs)

        def instancecheck(cls: Any, instance: Any) -> bool:
            return type.__instancecheck__(cls, instance) or isinstance(instance, traces.original(cls) or ())

        def subclasscheck(cls: Any, other: Any) -> bool:
            return type.__subclasscheck__(cls, other) or issubclass(other, traces.original(cls) or ())

        self._new = {"__call__": call, "__instancecheck__": instancecheck, "__subclasscheck__": subclasscheck}

    def apply(self) -> None:
        for name, function in self._new.items():
            setattr(self._meta, name, function)

    def undo(self) -> bool:
        for name, function in self._new.items():
            if vars(self._meta).get(name) is function:
                delattr(self._meta, name)
        return not self._new.keys() & vars(self._meta).keys()


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    module = modules[HF_TRACER]
    tracer = vars(module).get("HFTracer")
    if not isinstance(tracer, type):
        raise ShapeError(f"{_WHERE} does not exist")
    if not isinstance(vars(tracer).get(_NAMES), (list, tuple)):
        raise ShapeError(f"{_WHERE}.{_NAMES} is no list")
    traces = _traces(modules["torch"], module)
    trace = own_function(tracer, "trace")
    replaces = trace
    edits: list[Edit] = []
    try:
        if "patch_for_tracing" in vars(tracer):
            replaces = own_function(tracer, "patch_for_tracing")
            proxy, meta = (vars(module).get(name) for name in ("HFCacheProxy", "HFProxyableClassMeta"))
            if not isinstance(proxy, type) or not isinstance(meta, type) or "_CLASSES_TO_PATCH" not in vars(tracer):
                raise ShapeError(f"{HF_TRACER} has patch_for_tracing, and not the classes that go with it")
            if added := {"__call__", "__instancecheck__", "__subclasscheck__"} & vars(meta).keys():
                raise ShapeError(f"{HF_TRACER}.{meta.__name__} has {sorted(added)} of its own")
            edits += [
                _AsOriginal(traces, meta),
                CodeWrap(
                    f"{_WHERE}.patch_for_tracing",
                    replaces,
                    _Template.patch_for_tracing,  # type: ignore[arg-type]
                    lambda body: functools.partial(traces.patch_for_tracing, body),
                ),
                CodeWrap(
                    f"{HF_TRACER}.HFCacheProxy.install_orig_cache_cls",
                    own_function(proxy, "install_orig_cache_cls"),
                    _Template.install_orig_cache_cls,  # type: ignore[arg-type]
                    functools.partial(_with_own_tracer, traces),
                ),
            ]
        if shape_of(trace.__code__).writes - {_CURRENT}:
            raise ShapeError(f"{_WHERE}.trace has an unknown shape: {shape_of(trace.__code__)}")
        used = {*replaces.__code__.co_names, *shape_of(replaces.__code__).reads}
        if not {"setattr", "torch", _NAMES} <= used:
            raise ShapeError(f"{_WHERE}.{replaces.__name__} has an unknown shape: {shape_of(replaces.__code__)}")
        edits.append(CodeWrap(f"{_WHERE}.trace", trace, _Template.trace, functools.partial(_Session, traces)))  # type: ignore[arg-type]
    except ValueError as error:
        raise ShapeError(str(error)) from None
    _torch_view.hide_frames()
    return Plan(edits)


def _after_fork_in_child() -> None:
    _torch_view.after_fork_in_child()
    _traces(sys.modules["torch"], sys.modules[HF_TRACER]).after_fork_in_child()


PATCH = Patch(
    name="hf-tracer",
    summary="what the HFTracer of transformers 4 replaces in torch, it replaces for its own thread only",
    upstream=(),
    modules=("torch", FX, HF_TRACER),
    plan=_plan,
    faults=("hf_tracer_overlap",),
    quiet=False,  # imported by those who use it, perhaps inside a trace
    after_fork_in_child=_after_fork_in_child,
)
