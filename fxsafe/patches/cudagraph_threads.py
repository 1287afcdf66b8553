"""F5, CUDA graph trees: every thread records and replays graphs of its own, in steps of its own.

The race: up to 2.12 the trees of CUDA graphs exist in the thread that imported them and in autograd's threads only, so
``mode="reduce-overhead"`` raises ``AssertionError`` in every other thread. Were that all, the first thread to record a
compiled function would lend its tree to all others, two threads that record at a time would break one another's
capture, and a step, after which outputs may be overwritten, would end with a call of any thread, since it is counted
for the process.

Upstream: 2.13 sets a thread up at its first use and records in one thread at a time, as here; the rest is as it was.
Releases: 2.5 to 2.12.

Why this place is enough: whoever wants the trees of a thread asks ``get_obj``; whoever wants the step reads a class
attribute; and a compiled function's recordings lie in the closure that ``cudagraphify_impl`` makes, of which each
thread gets one of its own. A thread's trees go when it ends, but not before what it gave out from their memory.

This file can be deleted when the oldest supported torch has trees, recordings and steps for each thread.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import os
import sys
import threading
import time
import weakref
from _thread import get_ident
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import AttributeSwap, Edit
from fxsafe.patches.base import NotNeeded, Patch, Plan, ShapeError
from fxsafe.shapes import own_function
from fxsafe.traces import FX

__all__ = ["PATCH"]

TREES = "torch._inductor.cudagraph_trees"
GUARD = "torch._dynamo.mutation_guard"
# torch's names in the C++ thread-local state, which travels with a backward into autograd's threads; and ours.
_CONTAINERS = "tree_manager_containers"
_LOCKS = "tree_manager_locks"
_OWNER = "fxsafe_cudagraph_owner"
_CACHED = "_set_cached_tensors_enabled"
# Methods of the manager that allocate from its pool or capture: the CUDA state of the process is another meanwhile.
_CAPTURING = ("__init__", "run_eager", "record_function")
_ENDING_S = 2.0


class _Owner:
    """The trees of one thread, what it has recorded, and its counters.

    Attributes:
        containers: device index -> torch's ``TreeManagerContainer``.
        locks: device index -> lock.
        recorded: number of a compiled graph -> what this thread calls for it.
        counters: name -> the thread's own value; the process's where there is none.
    """

    __slots__ = ("containers", "counters", "locks", "recorded")

    def __init__(self, containers: dict[int, Any], locks: dict[int, Any], counters: dict[str, int]) -> None:
        self.containers = containers
        self.locks = locks
        self.recorded: dict[int, Callable[..., Any]] = {}
        self.counters = counters


class _Here(threading.local):
    owner: _Owner | None = None
    foreign: _Owner | None = None  # of one of autograd's threads, for a backward whose caller has none
    end: _End | None = None
    mended: bool = False

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}


class _End:
    """Lives in the thread's Python state, which is taken down in the thread itself, while CUDA still works there."""

    def __init__(self, ended: Callable[[_Owner], None], owner: _Owner) -> None:
        self._ended = ended
        self._owner = owner
        self._thread = get_ident()

    def __del__(self) -> None:
        # A fork takes the state down of all other threads in the child, where CUDA does not work, and locks are held.
        if self._thread == get_ident() and not sys.is_finalizing():
            self._ended(self._owner)


class _Threads:
    """The owners of all threads of the process."""

    def __init__(self, torch: Any, trees: Any) -> None:
        self._c = torch._C
        self._trees = trees
        self._here = _Here()
        self.lock = threading.RLock()
        self._owners: set[_Owner] = set()
        # Trees of threads that have ended, out of whose memory somebody still has a tensor.
        self._left: list[Any] = []
        self._numbers = itertools.count()
        self.capturing = threading.RLock()
        self.on_first: Callable[[], None] | None = None
        self._takes: bool | None = None
        # Native idents of threads that have ended for Python, and perhaps not yet for C++.
        self._ending: set[int] = set()
        atexit.register(self._wait_for_ending)
        if self._c._is_key_in_tls(_CONTAINERS):  # otherwise the thread that installs needs no C++ state
            self._mend()

    def _mend(self) -> None:
        """What the C++ state of this thread got from torch, which imported the module here, or from a work-around."""
        if self._here.mended:
            return
        self._here.mended = True
        if self._takes is None:
            self._takes = _takes_references(self._c)
        for name in (_CONTAINERS, _LOCKS):
            if not self._takes and self._c._is_key_in_tls(name):
                _give_reference(self._c._get_obj_in_tls(name))

    def known(self) -> _Owner | None:
        """Of the calling thread; in a backward that one of autograd's threads runs, of the thread that called it."""
        here = self._here
        return here.owner or self._travelled() or here.foreign

    def _travelled(self) -> _Owner | None:
        # None too in the thread that has tried whether references are taken.
        return self._c._get_obj_in_tls(_OWNER) if self._c._is_key_in_tls(_OWNER) else None

    def owner(self) -> _Owner:
        return self._here.owner or self.known() or self._new()

    def _new(self) -> _Owner:
        here = self._here
        theirs = vars(self._trees.local)  # of this thread: the one that imported the module has trees of torch's
        owner = _Owner(theirs.get(_CONTAINERS, {}), theirs.get(_LOCKS, defaultdict(threading.Lock)), here.counters)
        if self._c._current_graph_task_id() != -1 and not _started_by_python():
            here.foreign = owner
        else:
            here.owner = owner
        if get_ident() != threading.main_thread().ident:
            here.end = _End(self.ended, owner)
        with self.lock:
            self._owners.add(owner)
            if self.on_first is not None:
                self.on_first()
        return owner

    def get_obj(self, local: Any, attr_name: str) -> Any:
        """``torch._inductor.cudagraph_trees.get_obj``: the trees of a thread, or their locks."""
        owner = self.owner()
        if owner is self._here.owner and self._travelled() is not owner:
            self._mend()
            # After a first use inside of a backward too, at whose end the C++ state is put back.
            for name, value in ((_CONTAINERS, owner.containers), (_LOCKS, owner.locks), (_OWNER, owner)):
                self._stash(name, value)
        self.sweep()
        return owner.containers if attr_name == _CONTAINERS else owner.locks

    def _stash(self, name: str, value: object) -> None:
        if not self._takes:
            _give_reference(value)
        self._c._stash_obj_in_tls(name, value)

    def each_its_own(self, cudagraphify_impl: FunctionType) -> Callable[..., Any]:
        """``cudagraphify_impl`` whose result keeps the recordings of each thread apart."""

        @functools.wraps(cudagraphify_impl)
        def impl(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            number = next(self._numbers)

            def run(new_inputs: Any) -> Any:
                recorded = (self._here.owner or self.owner()).recorded
                call = recorded.get(number)
                if call is None:
                    call = recorded[number] = cudagraphify_impl(model, new_inputs, *args, **kwargs)
                return call(new_inputs)

            frame_hider()(run)
            weakref.finalize(run, self._forget, number).atexit = False
            return run

        return impl

    def _forget(self, number: int) -> None:
        for owner in tuple(self._owners):
            owner.recorded.pop(number, None)

    def one_at_a_time(self, method: FunctionType) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.capturing:
                return method(*args, **kwargs)

        return run

    def ended(self, owner: _Owner) -> None:
        """In the thread that ends, while its Python state is taken down."""
        managers = [c.tree_manager for c in owner.containers.values() if c.tree_manager is not None]
        owner.recorded.clear()  # torch lets go of a manager with the last function that it has recorded
        owner.containers.clear()
        self._owners.discard(owner)
        self._ending.add(threading.get_native_id())
        self._ending.difference_update([thread for thread in tuple(self._ending) if not _exists(thread)])
        self._left.extend(managers)
        self.sweep()

    def _wait_for_ending(self) -> None:
        """At the end of the process. A thread is joined before its C++ state is gone, which takes the GIL to let go of
        what it holds; while Python shuts down that ends the process by ``std::terminate``.
        """
        until = time.monotonic() + _ENDING_S
        while any(map(_exists, tuple(self._ending))) and time.monotonic() < until:
            time.sleep(0.001)  # lets the GIL go

    def sweep(self) -> None:
        """Lets go of the trees of ended threads that nobody has a tensor of."""
        kept = []
        try:
            # Each is looked at by one thread, and no lock is held: a finalizer may come here in the middle.
            while self._left:
                try:
                    manager = self._left.pop()
                except IndexError:
                    break
                if manager.live_cudagraph_pool_storages_in_curr_execution():
                    kept.append(manager)
                    continue
                with self.capturing:
                    self._c._set_cached_tensors_enabled(True)  # off if all others have been reset
                    manager.shutdown()
        finally:
            self._left.extend(kept)

    def for_all(self, set_enabled: Callable[[bool], None]) -> Callable[[bool], None]:
        """What ``torch._dynamo.reset()`` switches off when it has shut its own thread's trees down."""

        def set_for_all(enabled: bool) -> None:
            mine = self.known()
            if enabled or not any(owner.containers for owner in tuple(self._owners) if owner is not mine):
                set_enabled(enabled)

        frame_hider()(set_for_all)
        return set_for_all

    def count(self, name: str, cls: type) -> int:
        """The calling thread's value of a counter that torch keeps in a class."""
        return self._counters().get(name, vars(cls)[name])  # type: ignore[no-any-return]

    def set_count(self, name: str, value: int) -> None:
        self._counters()[name] = value

    def _counters(self) -> dict[str, int]:
        owner = self.known()
        return self._here.counters if owner is None else owner.counters

    def farthest(self, name: str, cls: type) -> int:
        """The value that is farthest from zero; one of the counters only rises, the other only falls."""
        all_of_them = [self._counters(), *(owner.counters for owner in tuple(self._owners))]
        values = [counters[name] for counters in all_of_them if name in counters]
        return max(values, key=abs, default=vars(cls)[name])

    @property
    def some(self) -> bool:
        return bool(self._owners)

    def after_fork_in_child(self) -> None:
        self.lock = threading.RLock()
        self.capturing = threading.RLock()


def _takes_references(c: Any) -> bool:
    probe = object()
    before = sys.getrefcount(probe)
    c._stash_obj_in_tls(_OWNER, probe)
    takes = sys.getrefcount(probe) != before
    if not takes:
        _give_reference(probe)
        _give_reference(None)
    c._stash_obj_in_tls(_OWNER, None)
    return takes


def _exists(thread: int) -> bool:
    """Whether a thread of this process is still there; False where there is no /proc."""
    return os.path.exists(f"/proc/self/task/{thread}")


def _give_reference(value: object) -> None:
    """Up to torch 2.12 the C++ state drops, when its thread ends, a reference that it has not taken."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _started_by_python() -> bool:
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return thread is not None and not isinstance(thread, threading._DummyThread)


def _counting(threads: _Threads, cls: type, name: str) -> type:
    """``cls`` with a value of the class attribute for each thread; what else is set is set in ``cls``."""

    def own(_: type, attribute: str, value: Any) -> None:
        if attribute == name:
            threads.set_count(name, value)
        else:
            setattr(cls, attribute, value)

    frame_hider()(own)
    value = property(lambda _: threads.count(name, cls))
    meta = type(type(cls).__name__, (type(cls),), {name: value, "__setattr__": own})
    counting: type = meta(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    return counting


class _Counter:
    """Gives every thread its own value of a class attribute: a subclass goes wherever modules have the class."""

    def __init__(self, threads: _Threads, cls: type, name: str, *, lazy: bool = False) -> None:
        """
        Args:
            lazy: not before a thread has trees, because every compiled call counts.
        """
        self.target = f"{cls.__module__}.{cls.__qualname__}"
        self._threads = threads
        self._class = cls
        self._name = name
        self._lazy = lazy
        self._counting = _counting(threads, cls, name)
        self._swaps: list[AttributeSwap] = []

    def apply(self) -> None:
        with self._threads.lock:
            if self._lazy and not self._threads.some:
                self._threads.on_first = self._begin
            else:
                self._begin()

    def _begin(self) -> None:
        self._threads.on_first = None
        name = self._class.__name__
        for module in list(sys.modules.values()):
            # Not isinstance and vars, which make modules load that are to be loaded at their first use.
            if not issubclass(type(module), ModuleType):
                continue
            if object.__getattribute__(module, "__dict__").get(name) is self._class:
                swap = AttributeSwap(f"{module.__name__}.{name}", module, name, self._counting)
                swap.apply()
                self._swaps.append(swap)

    def undo(self) -> bool:
        with self._threads.lock:  # a thread may be about to begin
            if self._lazy:
                self._threads.on_first = None
            if self._swaps:
                # The process goes on from where the thread is that has come farthest: each sees a new step.
                setattr(self._class, self._name, self._threads.farthest(self._name, self._class))
            undone = [swap.undo() for swap in self._swaps]
            self._swaps.clear()
        return all(undone)


_threads: _Threads | None = None


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    global _threads
    trees, guard = modules[TREES], modules[GUARD]
    if "_initialize_tls" in vars(trees):
        return NotNeeded("torch sets each thread up at its first use since 2.13")
    try:
        manager, box, tracker = trees.CUDAGraphTreeManager, trees.MarkStepBox, guard.GenerationTracker
        box.mark_step_counter, tracker.generation, trees.local  # noqa: B018
    except AttributeError as error:
        raise ShapeError(f"CUDA graph trees are not as on every release so far: {error}") from None
    if _threads is None:
        _threads = _Threads(modules["torch"], trees)
    own_function(trees, "get_obj")
    impl = own_function(trees, "cudagraphify_impl")
    frame_hider()(*(method for method in vars(_Threads).values() if isinstance(method, FunctionType)))
    edits: list[Edit] = [
        _Counter(_threads, box, "mark_step_counter"),
        _Counter(_threads, tracker, "generation", lazy=True),
        AttributeSwap(f"{TREES}.cudagraphify_impl", trees, "cudagraphify_impl", _threads.each_its_own(impl)),
        AttributeSwap(f"{TREES}.get_obj", trees, "get_obj", _threads.get_obj),
    ]
    if _CACHED in vars(trees):
        set_for_all = _threads.for_all(vars(trees)[_CACHED])
        edits.append(AttributeSwap(f"{TREES}.{_CACHED}", trees, _CACHED, set_for_all))
    for name in _CAPTURING:
        method = own_function(manager, name)
        where = f"{TREES}.{manager.__name__}.{name}"
        edits.append(AttributeSwap(where, manager, name, _threads.one_at_a_time(method)))
    return Plan(edits)


def _after_fork_in_child() -> None:
    if _threads is not None:
        _threads.after_fork_in_child()


PATCH = Patch(
    name="cudagraph-threads",
    summary="CUDA graphs may be recorded and replayed in several threads",
    upstream=("https://github.com/pytorch/pytorch/issues/123177",),
    modules=("torch", FX, TREES, GUARD),
    plan=_plan,
    faults=("cudagraph_trees_in_threads", "cudagraph_trees_freed", "cudagraph_steps_shared"),
    quiet=False,
    after_fork_in_child=_after_fork_in_child,
)
