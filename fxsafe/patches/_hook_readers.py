"""What looks into patched places, shown what its thread would see alone.

A place that one thread has patched holds a dispatcher, and every thread finds it there. torch takes such values for
node targets, compares their identity, wraps them, pickles them by name: each of these readers is handed the calling
thread's own replacement or the original instead. Two names that concurrent traces share for other reasons are here too:
``Tracer._qualname_counter`` and ``_CodeOnlyModule.forward``.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from fxsafe.edits import AttributeSwap, CodeWrap, Edit
from fxsafe.patches._slots import LINK, Places, StandIn, is_dispatcher, places
from fxsafe.shapes import ShapeError, own_function, shape_of

__all__ = ["reader_edits"]

_FX = "torch.fx._symbolic_trace"
_GRAPH_MODULE = "torch.fx.graph_module"
_IMPORTER = "torch.package.importer"
_Hide = Callable[..., None]
_Wrap = Callable[[FunctionType], Any]


# Templates: they run in torch's own functions, under torch's file name.


def _root_template(self: Any, root_fn: Any, is_module: Any, concrete_args: Any = None) -> Any:
    replacement: Any = "<replacement>"
    return replacement(self, root_fn, is_module, concrete_args)


def _create_node_template(
    self: Any, op: Any, target: Any, args: Any = None, kwargs: Any = None, name: Any = None, type_expr: Any = None
) -> Any:
    parts: Any = "<replacement>"
    original, function_type, link, stand_in, seen_value = parts
    if (type(target) is function_type and link in target.__dict__) or type(target) is stand_in:
        target = seen_value(target)
    return original(self, op, target, args, kwargs, name, type_expr)


def _load_template(forward: Any, body: Any, graph_module_cls: Any = None) -> Any:
    replacement: Any = "<replacement>"
    return replacement(forward, body, graph_module_cls)


def _get_name_template(self: Any, obj: Any, name: Any = None) -> Any:
    replacement: Any = "<replacement>"
    return replacement(self, obj, name)


def _get_key_template(self: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(self)


# Roots and node targets.


def _wrap_root(original: FunctionType) -> Callable[..., Any]:
    def create_args_for_root(self: Any, root_fn: Any, is_module: Any, concrete_args: Any) -> Any:
        if is_dispatcher(root_fn):  # read from a place that another thread has patched
            root_fn = places.seen_value(root_fn)
            fields, code = getattr(self.graph, "_co_fields", None), getattr(root_fn, "__code__", None)
            if fields is not None and code is not None:
                self.graph._co_fields = {field: getattr(code, field) for field in fields}
        return original(self, root_fn, is_module, concrete_args)

    return create_args_for_root


def _target_seen(original: FunctionType) -> Any:
    # Where every node is made, and below the point where tracers record stack traces, which an added frame would show
    # in. The template unpacks this itself: one call less for every node.
    return original, FunctionType, LINK, StandIn, places.seen_value


# Loading: unpickling traces the code that it reads.


def _wrap_load(original: FunctionType) -> Callable[..., Any]:
    names = original.__globals__

    def deserialize_graph_module(forward: Any, body: Any, graph_module_cls: Any) -> Any:
        # torch sets ``forward`` on a class for the tracer to find it there. Every load gets a class of its own.
        base = names["_CodeOnlyModule"]
        own = type(base)(base.__name__, (base,), {"__module__": base.__module__, "__qualname__": base.__qualname__})
        load = FunctionType(
            original.__code__, {**names, "_CodeOnlyModule": own}, original.__name__, original.__defaults__
        )
        # The code has just imported the functions that it calls; another thread may have patched these meanwhile.
        imported = forward.__globals__
        for name, value in imported.copy().items():
            if is_dispatcher(value):
                imported[name] = places.seen_value(value)
        return load(forward, body, graph_module_cls)

    return deserialize_graph_module


def _wrap_get_name(importer: ModuleType) -> _Wrap:
    def wrap(original: FunctionType) -> Callable[..., Any]:
        def get_name(self: Any, obj: Any, name: Any) -> Any:
            try:
                return original(self, obj, name)
            except importer.ObjMismatchError:
                # Where it belongs, a dispatcher may stand at present, which goes by the same names.
                for dispatcher in places.dispatchers_of(obj):
                    with suppress(importer.ObjMismatchError, importer.ObjNotFoundError):
                        return original(self, dispatcher, name)
                return original(self, obj, name)

        return get_name

    return wrap


def _wrap_get_key(original: FunctionType) -> Callable[..., Any]:
    def get_key(self: Any) -> Any:
        # Two modules with one key have one source text for inspect and TorchScript.
        with places.lock:
            return original(self)

    return get_key


# Tracers.


class _Counter(MutableMapping[str, int]):
    """A dictionary of counters per thread, each beginning where torch's own stood."""

    def __init__(self, start: Mapping[str, int]) -> None:
        self._start = start
        self._threads = threading.local()

    def _mine(self) -> dict[str, int]:
        counts: dict[str, int] | None = getattr(self._threads, "counts", None)
        if counts is None:
            counts = self._threads.counts = defaultdict(int, self._start)
        return counts

    def __getitem__(self, prefix: str) -> int:
        return self._mine()[prefix]

    def __setitem__(self, prefix: str, value: int) -> None:
        self._mine()[prefix] = value

    def __contains__(self, prefix: object) -> bool:
        return prefix in self._mine()  # asking by the value would store one

    def __delitem__(self, prefix: str) -> None:
        del self._mine()[prefix]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mine())

    def __len__(self) -> int:
        return len(self._mine())


def _new_init(original: FunctionType) -> Callable[..., None]:
    defaults = original.__defaults__ or ()

    @functools.wraps(original)
    def init(
        self: Any,
        autowrap_modules: Iterable[Any] = defaults[0],
        autowrap_functions: Iterable[Any] = (),
        param_shapes_constant: bool = False,
    ) -> None:
        modules = tuple(autowrap_modules)
        # torch walks through the modules' dictionaries and keeps the identities of what it finds.
        seen = []
        for module in modules:
            stand_in = SimpleNamespace()
            vars(stand_in).update(places.snapshot(vars(module)))
            seen.append(stand_in)
        original(self, tuple(seen), tuple(map(places.seen_value, autowrap_functions)), param_shapes_constant)
        self._autowrap_search = list(modules)

    # Dynamo, where a compiled region makes a tracer, goes on with torch's own.
    init._torchdynamo_inline = original  # type: ignore[attr-defined]
    return init


def _tracer_edits(tracer: Any, hide: _Hide) -> list[Edit]:
    where = f"{_FX}.Tracer"
    init = own_function(tracer, "__init__")
    shape = shape_of(init.__code__)
    expected = ("self", "autowrap_modules", "autowrap_functions", "param_shapes_constant")
    if shape.parameters != expected or len(init.__defaults__ or ()) != 3:
        raise ShapeError(f"{where}.__init__ has an unknown shape: {shape}")
    counter = vars(tracer).get("_qualname_counter")
    if type(counter) is not defaultdict:
        raise ShapeError(f"{where}._qualname_counter is not a defaultdict but {type(counter).__name__}")
    _require_names(f"{where}.get_fresh_qualname", own_function(tracer, "get_fresh_qualname"), {"_qualname_counter"})
    new_init = _new_init(init)
    hide(new_init, Places.snapshot, Places.seen_value, Places._seen)
    return [
        AttributeSwap(f"{where}.__init__", tracer, "__init__", new_init),
        AttributeSwap(f"{where}._qualname_counter", tracer, "_qualname_counter", _Counter(counter)),
        _wrap(
            f"{where}.create_args_for_root",
            own_function(tracer, "create_args_for_root"),
            _root_template,
            _wrap_root,
            hide,
        ),
    ]


def _require_names(where: str, function: FunctionType, names: set[str]) -> None:
    missing = names - set(function.__code__.co_names)
    if missing:
        raise ShapeError(f"{where} has an unknown shape: it does not use {sorted(missing)}")


def _wrap(where: str, function: FunctionType, template: Any, wrap: _Wrap, hide: _Hide) -> Edit:
    def hidden(original: FunctionType) -> Any:
        replacement = wrap(original)
        if isinstance(replacement, FunctionType):
            hide(replacement)
        return replacement

    try:
        return CodeWrap(where, function, template, hidden)
    except ValueError as error:
        raise ShapeError(f"{where} has an unknown shape: {error}") from None


def reader_edits(modules: Mapping[str, ModuleType], hide: _Hide) -> list[Edit]:
    """The edits for all readers; changes nothing.

    Raises:
        ShapeError: one of them has an unknown shape.
    """
    graph_module: Any = modules[_GRAPH_MODULE]
    importer: Any = modules[_IMPORTER]
    graph: Any = modules["torch.fx.graph"]
    fx: Any = modules[_FX]

    load = own_function(graph_module, "_deserialize_graph_module")
    _require_names(f"{_GRAPH_MODULE}._deserialize_graph_module", load, {"_CodeOnlyModule", "forward", "trace"})
    get_key = own_function(graph_module._EvalCacheLoader, "_get_key")
    _require_names(f"{_GRAPH_MODULE}._EvalCacheLoader._get_key", get_key, {"next_id"})
    get_name = own_function(importer.Importer, "get_name")
    _require_names(f"{_IMPORTER}.Importer.get_name", get_name, {"ObjMismatchError", "ObjNotFoundError"})
    create_node = own_function(graph.Graph, "create_node")
    wraps: list[tuple[str, FunctionType, Any, _Wrap]] = [
        ("torch.fx.graph.Graph.create_node", create_node, _create_node_template, _target_seen),
        (f"{_GRAPH_MODULE}._deserialize_graph_module", load, _load_template, _wrap_load),
        (f"{_GRAPH_MODULE}._EvalCacheLoader._get_key", get_key, _get_key_template, _wrap_get_key),
        (f"{_IMPORTER}.Importer.get_name", get_name, _get_name_template, _wrap_get_name(importer)),
    ]
    return [*_tracer_edits(fx.Tracer, hide), *(_wrap(*arguments, hide) for arguments in wraps)]
