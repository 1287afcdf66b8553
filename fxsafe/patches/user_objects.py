"""F4, objects that a graph uses: a call of compiled code finds its own streams, events and modules.

The race: what a graph cannot take as an input (a module given to a ``leaf_function``, a stream, an event) is put into
one table of the process at the beginning of each call, which empties it first; the graph then asks for the objects by
their numbers. Of two threads inside such calls one gets the other's objects, which makes silently wrong results, or
"Index not registered in index_to_user_object_weakref"; a compile in another thread empties the table as well, and drops
the events that a call has made.

Upstream: none known. Releases: 2.11 to 2.15 at least (2.9 has no such table).

Why this place is enough: the table and the list of what is kept alive are used by functions of their module alone, by
their names; torch 2.14 imports the table itself into one other module, which gets a stand-in. Each thread has a table
and a list of its own, on which torch's own bodies run, and torch's table goes on as ever, with what was stored last: it
serves who has no table yet, and whoever is inside a call when fxsafe goes. The list imported by 2.15 is no longer the
module's after the first call; it is left alone.

A device's autograd thread has a table for the length of one backward, and only if it puts something there: from 2.14
on a backward begins with putting back what its forward has used. Before, it asks the table of the thread that called
``backward``, or torch's own where several threads are inside ``backward``.

This file can be deleted when the oldest supported torch keeps the table per thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from _thread import get_ident
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import AttributeSwap, CodeWrap, Edit
from fxsafe.patches.base import NotNeeded, Patch, Plan, ShapeError
from fxsafe.shapes import own_function
from fxsafe.thread_globals import functions_of, nested, uses_global
from fxsafe.traces import CONVERT_FRAME, FX

__all__ = ["PATCH"]

INPUTS = "torch._dynamo.graph_bytecode_inputs"  # imported by convert_frame where it exists
WRAPPERS = "torch._functorch._aot_autograd.runtime_wrappers"
_TABLE, _KEPT = "index_to_external_object_weakref", "keep_alive"
_NAMES = frozenset({_TABLE, _KEPT})
_GET, _STORE, _RESET = "get_external_object_by_index", "store_user_object_weakrefs", "reset_user_object_tracking"
_SET, _STASH = "set_external_object_by_index", "stash_graph_created_object"
_CREATED, _GIVEN = "register_graph_created_object", "register_user_object"
_SINCE_2_13 = _SET


def _not_started_by_python(ident: int) -> bool:
    return isinstance(vars(threading)["_active"].get(ident), (type(None), vars(threading)["_DummyThread"]))


class _Own:
    """One thread's table and list, and torch's functions over them.

    Attributes:
        task: the backward inside which the table was filled; -1: outside of any.
    """

    __slots__ = ("__weakref__", "call", "space", "task")

    def __init__(self, module: ModuleType, bodies: Mapping[str, CodeType], table: Any, task: int) -> None:
        self.space: dict[str, Any] = {**vars(module), _TABLE: table, _KEPT: []}
        self.call = {}
        for name, code in bodies.items():  # no comprehension: it may have a frame, which Dynamo would look at
            self.call[name] = FunctionType(code, self.space, name)
        self.task = task


class _Tables:
    """The threads' tables; an edit that comes before all that use them."""

    def __init__(self, module: ModuleType, functions: Mapping[str, FunctionType], backward: CodeType) -> None:
        import torch

        self.target = f"{INPUTS}.{_TABLE}"
        self._module = module
        self._globals = vars(module)
        self._functions = functions
        self._backward = backward
        self._task: Callable[[], int] = torch._C._current_graph_task_id
        self._bodies: dict[str, CodeType] = {}
        self._begin()

    def _begin(self) -> None:
        self._here = threading.local()
        self._owns: weakref.WeakValueDictionary[int, _Own] = weakref.WeakValueDictionary()

    def apply(self) -> None:
        self._begin()
        self._bodies = {name: self._functions[name].__code__ for name in (_GET, _STORE, _RESET)}
        self._bodies |= {name: self._functions[name].__code__ for name in (_SET, _STASH) if name in self._functions}
        # The thread that installs may be inside a call.
        self._new(self._copy_of(None), self._task())
        _applied.add(self)

    def undo(self) -> bool:
        _applied.discard(self)
        self._begin()
        return True

    def after_fork_in_child(self) -> None:
        owns: weakref.WeakValueDictionary[int, _Own] = weakref.WeakValueDictionary()
        own = vars(self._here).get("own")
        if own is not None:
            owns[get_ident()] = own
        self._owns = owns

    def _new(self, table: Any, task: int) -> _Own:
        own = _Own(self._module, self._bodies, table, task)
        self._here.own = self._owns[get_ident()] = own
        return own

    def _copy_of(self, own: _Own | None) -> Any:
        table = (self._globals if own is None else own.space)[_TABLE]
        return table.copy()

    def _mine(self, task: int) -> _Own | None:
        """The calling thread's table, unless it is what an earlier backward left in a thread of autograd's."""
        own: _Own | None = vars(self._here).get("own")
        if own is None or own.task < 0 or task < 0 or own.task == task or self._calls_backward(sys._getframe()):
            return own
        self._here.own = None
        return None

    def _calls_backward(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code is self._backward:
                return True
            frame = frame.f_back
        return False

    def _found(self, task: int) -> _Own | None:
        """The table to look things up in: one's own, or that of the only thread that is inside ``backward``, or None
        for torch's own.
        """
        own = self._mine(task)
        if own is not None or task < 0:
            return own
        callers, here = [], get_ident()
        for ident, frame in sys._current_frames().items():
            # A thread of autograd's may call backward too, on behalf of the thread that has begun.
            if self._calls_backward(frame) and not (ident == here and _not_started_by_python(ident)):
                callers.append(ident)
        return self._owns.get(callers[0]) if len(callers) == 1 else None

    def _for_writing(self, task: int) -> _Own:
        own = self._mine(task)
        return self._new(self._copy_of(self._found(task)), task) if own is None else own

    def table(self) -> Any:
        own = self._found(self._task())
        return (self._globals if own is None else own.space)[_TABLE]

    def put(self, index: int, reference: Any) -> None:
        self._for_writing(self._task()).space[_TABLE][index] = reference
        self._globals[_TABLE][index] = reference

    # What takes the place of torch's functions; ``plain`` is the one it had, over torch's own table.

    def get(self, plain: FunctionType) -> Callable[[int], Any]:
        def get(index: int) -> Any:
            own = self._found(self._task())
            return plain(index) if own is None else own.call[_GET](index)

        return get

    def store(self, plain: FunctionType) -> Callable[..., None]:
        def store(*args: Any) -> None:
            plain(*args)
            task = self._task()
            own = self._mine(task) or self._new(self._globals[_TABLE].__class__(), task)
            own.call[_STORE](*args)
            own.task = task

        return store

    def reset(self, plain: FunctionType) -> Callable[[], None]:
        def reset() -> None:
            plain()
            self._for_writing(self._task()).call[_RESET]()

        return reset

    def set(self, plain: FunctionType) -> Callable[[int, Any], None]:
        def set_(index: int, value: Any) -> None:
            self._for_writing(self._task()).call[_SET](index, value)
            with contextlib.suppress(AssertionError):  # another thread has stored fewer objects meanwhile
                plain(index, value)

        return set_

    def stash(self, plain: FunctionType) -> Callable[[Any], Any]:
        def stash(obj: Any) -> Any:
            plain(obj)
            return self._for_writing(self._task()).call[_STASH](obj)

        return stash

    def _register(self, index: int, value: Any) -> _Own:
        own = self._for_writing(self._task())
        table, reference = own.space[_TABLE], weakref.ref(value)
        if isinstance(table, list):
            table.append(reference)
        else:
            table[index] = reference
        return own

    def given(self, plain: FunctionType) -> Callable[[Any, Any], int]:
        def given(value: Any, source: Any) -> int:
            index: int = plain(value, source)
            self._register(index, value)
            return index

        return given

    def created(self, plain: FunctionType) -> Callable[[Any, Any], int]:
        def created(example_value: Any, construct_fn: Any) -> int:
            index: int = plain(example_value, construct_fn)
            self._register(index, example_value).space[_KEPT].append(example_value)
            return index

        return created


_applied: weakref.WeakSet[_Tables] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for tables in list(_applied):
        tables.after_fork_in_child()


class _StandIn(MutableMapping[int, Any]):
    """The calling thread's table, for the module of torch that has imported the one of the process."""

    def __init__(self, tables: _Tables) -> None:
        self._tables = tables

    def __getitem__(self, index: int) -> Any:
        return self._tables.table()[index]

    def __setitem__(self, index: int, reference: Any) -> None:
        self._tables.put(index, reference)

    def __delitem__(self, index: int) -> None:
        del self._tables.table()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tables.table().copy())

    def __len__(self) -> int:
        return len(self._tables.table())


def _get_template(index: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(index)


def _store_template(*args: Any) -> None:
    replacement: Any = "<replacement>"
    replacement(*args)


def _reset_template() -> None:
    replacement: Any = "<replacement>"
    replacement()


def _set_template(index: Any, value: Any) -> None:
    replacement: Any = "<replacement>"
    replacement(index, value)


def _stash_template(obj: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(obj)


def _given_template(value: Any, source: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(value, source)


def _created_template(example_value: Any, construct_fn: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(example_value, construct_fn)


# The look-up comes last and goes first: otherwise a call that begins while fxsafe goes would find what its thread's
# last call has stored.
_WRAPS: dict[str, tuple[Any, Callable[[_Tables, FunctionType], Any]]] = {
    _STORE: (_store_template, _Tables.store),
    _RESET: (_reset_template, _Tables.reset),
    _SET: (_set_template, _Tables.set),
    _STASH: (_stash_template, _Tables.stash),
    _GIVEN: (_given_template, _Tables.given),
    _CREATED: (_created_template, _Tables.created),
    _GET: (_get_template, _Tables.get),
}


def _functions(module: ModuleType) -> dict[str, FunctionType]:
    missing = _NAMES - vars(module).keys()
    if missing:
        raise ShapeError(f"{INPUTS} has no global {sorted(missing)}")
    if type(vars(module)[_TABLE]) not in (dict, list) or type(vars(module)[_KEPT]) is not list:
        raise ShapeError(f"{INPUTS}.{_TABLE} or {_KEPT} is of an unknown kind")
    users = {
        function.__qualname__
        for function in functions_of(module)
        if any(uses_global(code, _NAMES) for code in nested(function.__code__))
    }
    if users | {_SINCE_2_13} != _WRAPS.keys():
        raise ShapeError(f"{INPUTS}: {sorted(users)} use the table, and not {sorted(_WRAPS)}")
    functions = {name: own_function(module, name) for name in _WRAPS if name in users}
    for name, function in functions.items():
        if bool(function.__code__.co_flags & 4) != (name == _STORE) or function.__defaults__:
            raise ShapeError(f"{INPUTS}.{name} takes other parameters")
    return functions


def _wrap(tables: _Tables, name: str, function: FunctionType) -> Edit:
    template, make = _WRAPS[name]
    hide = frame_hider()

    def wrap(plain: FunctionType) -> Any:
        replacement = make(tables, plain)
        hide(replacement)
        return replacement

    try:
        return CodeWrap(f"{INPUTS}.{name}", function, template, wrap)
    except ValueError as error:
        raise ShapeError(str(error)) from None


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    module = sys.modules.get(INPUTS)
    if module is None:
        return NotNeeded("this torch has no such table")
    functions = _functions(module)
    import torch.autograd.graph

    backward = own_function(torch.autograd.graph, "_engine_run_backward")
    if not hasattr(torch._C, "_current_graph_task_id"):
        raise ShapeError("torch._C._current_graph_task_id does not exist")
    tables = _Tables(module, functions, backward.__code__)
    edits: list[Edit] = [tables, *(_wrap(tables, name, function) for name, function in functions.items())]
    table, wrappers = vars(module)[_TABLE], modules[WRAPPERS]
    if type(table) is dict and vars(wrappers).get(_TABLE) is table:
        edits.insert(-1, AttributeSwap(f"{WRAPPERS}.{_TABLE}", wrappers, _TABLE, _StandIn(tables)))
    ours = (value for kind in (_Own, _Tables, _StandIn) for value in vars(kind).values())
    frame_hider()(_not_started_by_python, *(value for value in ours if type(value) is FunctionType))
    return Plan(edits)


PATCH = Patch(
    name="user-objects",
    summary="a call of compiled code uses its own modules, streams and events, and not another thread's",
    upstream=(),
    modules=("torch", FX, CONVERT_FRAME, WRAPPERS),
    plan=_plan,
    faults=("user_objects_shared",),
    quiet=False,
    after_fork_in_child=_after_fork_in_child,
)
