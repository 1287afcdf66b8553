"""F4, stance: ``with torch.compiler.set_stance(...)`` holds in the thread that enters it.

The race: the stance is a module global that each with-block and each decorated call saves, sets and restores. While one
thread forces eager, no other thread's function is compiled; with ``skip_guard_eval_unsafe`` other threads' guards are
not asked, and they get results for other inputs; overlapping blocks leave the wrong stance for ever.

Upstream: pytorch#196637 for the flags in C that go with it. Releases: 2.6 to 2.15.

A generator's block may be left in another thread than it was entered in (a server's thread pool): it then ends for the
thread that entered it.

Why this place is enough: while a thread has a stance of its own, in the global's place stands an object that answers
with the calling thread's, so functions compiled earlier, which read the global, follow; at all other times it holds the
process's stance itself, and a compiled call pays nothing. The only writer changes in place. ``set_stance(...)`` called
as a plain function goes on setting the stance of the whole process: it is told from the other uses by its object going
away without having been entered. Threads that Python did not start, autograd's device threads among them, see the
newest stance of any thread, as before.

What stays: the C code keeps one flag per process for ``skip_guard_eval_unsafe``, set by each compiled call for as long
as it runs. Two calls at the same moment, one of them under such a stance, may still see each other's.

This file can be deleted when the oldest supported torch keeps the stance per thread.
"""

from __future__ import annotations

import functools
import threading
import weakref
from _thread import get_ident
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import AttributeSwap, CodeSwap, Edit, copy_function
from fxsafe.patches.base import NotNeeded, Patch, Plan, ShapeError
from fxsafe.shapes import own_function, shape_of
from fxsafe.thread_globals import Rewrite, rewritten
from fxsafe.traces import FX

__all__ = ["PATCH"]

EVAL_FRAME = "torch._dynamo.eval_frame"
DECORATORS = "torch._dynamo.decorators"
_STANCE = "_stance"
_SET = "_set_stance"
_MARK = "_fxsafe_of_a_thread"
_NONE = "_fxsafe_none_of_its_own"
_REVOKED = "_fxsafe_revoked_in"
_NOBODY = None, None
_ENTERED = "_fxsafe_entered_in"
_FIELDS = ("stance", "skip_guard_eval_unsafe", "backend")


def _is_pythons(ident: int) -> bool:
    """Whether the threading module started this thread, or it is the main one."""
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    return thread is not None and not isinstance(thread, threading._DummyThread)


class _Own(threading.local):
    def __init__(self) -> None:
        self.stance: Any = None
        self.making = False
        self.alone = _is_pythons(get_ident())


def _unless_revoked(stance: Any) -> Any:
    """The stance, or what the calling thread has instead if another one has ended the block."""
    while stance is not None and vars(stance).get(_REVOKED, _NOBODY)[0] == get_ident():
        stance = vars(stance).pop(_REVOKED)[1]
    return stance


class _Stances:
    """Stands in for the global ``_stance``, while any thread has one of its own, and answers with the calling thread's.

    A stance made while this is in place belongs to a thread. One made before, which an old with-block or decorator
    sets or restores, goes on being set for the process. To assign a stance that ``current`` has marked is to have none
    of one's own.
    """

    def __init__(self, process: Any) -> None:
        self.__dict__.update(
            _process=process, _own=_Own(), _newest=[], _marked=[], _globals=None, _lock=threading.Lock()
        )

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(name)
        return getattr(self._effective(), name)

    def __repr__(self) -> str:
        return repr(self._effective())

    def own(self) -> Any:
        """The calling thread's own stance, if it has one."""
        stance = self._own.stance
        left = _unless_revoked(stance)
        if left is not stance:
            self._own.stance = left
        return left

    def _effective(self) -> Any:
        own = self.own()
        if own is not None:
            return own
        newest = self._newest
        if newest and not self._own.alone:
            return newest[-1][1]
        return self._process

    def current(self) -> Any:
        """What has to be assigned to come back to the present state; torch's own, for whoever does it without us."""
        own = self.own()
        if own is not None:
            return own
        process = self._process
        if _NONE not in vars(process):
            vars(process)[_NONE] = True
            self._marked.append(process)
        return process

    def set(self, stance: Any) -> None:
        ident = get_ident()
        own = None
        stance = _unless_revoked(stance)
        with self._lock:
            if stance is not None and _NONE not in vars(stance):
                if self._own.making:
                    vars(stance)[_MARK] = True
                if _MARK in vars(stance):
                    own = stance
                else:
                    self.__dict__["_process"] = stance
            self._own.stance = own
            newest = [entry for entry in self._newest if entry[0] != ident]
            self.__dict__["_newest"] = newest if own is None else [*newest, (ident, own)]
            self._show()

    def _show(self) -> None:
        if self._globals is not None:
            self._globals[_STANCE] = self if self._newest else self._process

    def begin(self, names: dict[str, Any]) -> None:
        """Take care of the global from now on."""
        with self._lock:
            self.__dict__.update(_process=names[_STANCE], _globals=names)
            self._show()

    def end(self) -> None:
        """Leave the process's stance in the global, unless somebody else has put something there."""
        with self._lock:
            if self._globals is not None and self._globals[_STANCE] is self:
                self._globals[_STANCE] = self._process
            # Blocks that are still open end without us: they must find nothing of ours.
            self.__dict__.update(_globals=None, _own=_Own(), _newest=[])
            while self._marked:
                vars(self._marked.pop()).pop(_NONE, None)

    def revoke(self, ident: int, stance: Any, previous: Any = None) -> None:
        """Another thread, that has this stance or comes back to it, has the one before instead: none, or its own."""
        if previous is not None and _MARK not in vars(previous):
            previous = None
        with self._lock:
            vars(stance)[_REVOKED] = ident, previous
            if any(entry[0] == ident and entry[1] is stance for entry in self._newest):
                newest = [entry for entry in self._newest if entry[0] != ident]
                self.__dict__["_newest"] = newest if previous is None else [*newest, (ident, previous)]
                self._show()

    def publish(self, stance: Any) -> None:
        """Make the calling thread's stance that of the process, if it still is the thread's."""
        if self.own() is stance:
            vars(stance).pop(_MARK, None)
            self.set(stance)

    def after_fork_in_child(self) -> None:
        me = get_ident()
        newest = [entry for entry in self._newest if entry[0] == me]
        self.__dict__.update(_lock=threading.Lock(), _newest=newest)


class _State:
    """Where the rewritten ``_set_stance`` finds its global."""

    def __init__(self, stances: _Stances) -> None:
        self._stances = stances

    @property
    def _stance(self) -> Any:
        return self._stances.current()

    @_stance.setter
    def _stance(self, value: Any) -> None:
        self._stances.set(value)


class _AsFunction:
    """Goes away with the ``set_stance`` that made it: unless that was entered or decorated with, it was a function."""

    def __init__(self, stances: _Stances, stance: Any) -> None:
        self._publish: Callable[[Any], None] | None = stances.publish
        self._revoke = stances.revoke
        self._stance = stance
        self._maker = get_ident()

    def entered(self) -> None:
        self._publish = None
        if self._maker != get_ident():
            self._revoke(self._maker, self._stance)

    def __del__(self) -> None:
        if self._publish is not None:
            self._publish(self._stance)


def _usage_edits(kind: type, stances: _Stances) -> list[Edit]:
    """Edits of the class ``set_stance`` that tell its three uses apart."""
    names = ("__init__", "__enter__", "__exit__", "__call__")
    originals = {name: own_function(kind, name) for name in names}
    init, enter, leave, call = map(copy_function, originals.values())

    @functools.wraps(originals["__init__"])
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        inside = stances.own() is not None
        stances._own.making = True
        try:
            init(self, *args, **kwargs)
        finally:
            stances._own.making = False
        if not inside:
            self._fxsafe_as_function = _AsFunction(stances, self.stance)

    @functools.wraps(originals["__enter__"])
    def __enter__(self: Any) -> Any:
        _unless_revoked(self.stance)  # it holds again
        vars(self)[_ENTERED] = get_ident()
        _entered(self)
        return enter(self)

    @functools.wraps(originals["__exit__"])
    def __exit__(self: Any, *details: Any) -> Any:
        entered = vars(self).pop(_ENTERED, None)
        if entered not in (None, get_ident()) and stances.own() is not self.stance:
            stances.revoke(entered, self.stance, self.prev)  # a generator's block: nothing of this thread's ends
            return None
        return leave(self, *details)

    @functools.wraps(originals["__call__"])
    def __call__(self: Any, fn: Any) -> Any:
        _entered(self)
        return call(self, fn)

    news = {"__init__": __init__, "__enter__": __enter__, "__exit__": __exit__, "__call__": __call__}
    frame_hider()(*news.values(), init, enter, leave, call, _entered, _AsFunction.__init__, _AsFunction.__del__)
    where = f"{DECORATORS}.set_stance"
    return [AttributeSwap(f"{where}.{name}", kind, name, new) for name, new in news.items()]


def _entered(instance: Any) -> None:
    as_function = instance.__dict__.pop("_fxsafe_as_function", None)
    if as_function is not None:
        as_function.entered()


class _StandIn:
    """Lets the stand-in into the global's place when it is needed; the process's stance is what it leaves there."""

    def __init__(self, eval_frame: ModuleType, stances: _Stances) -> None:
        self.target = f"{EVAL_FRAME}.{_STANCE}"
        self._globals = vars(eval_frame)
        self._stances = stances

    def apply(self) -> None:
        self._stances.begin(self._globals)

    def undo(self) -> bool:
        self._stances.end()
        return type(self._globals[_STANCE]) is not _Stances


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    eval_frame, decorators = modules[EVAL_FRAME], modules[DECORATORS]
    if _STANCE not in vars(eval_frame):
        if "set_stance" in vars(decorators):
            raise ShapeError(f"{EVAL_FRAME} has no global {_STANCE}")
        return NotNeeded("torch has no stances before 2.6")
    process = vars(eval_frame)[_STANCE]
    if type(process).__name__ != "DynamoStance" or not all(hasattr(process, n) for n in _FIELDS):
        raise ShapeError(f"{EVAL_FRAME}.{_STANCE} is a {type(process).__qualname__}")
    where = f"{EVAL_FRAME}.{_SET}"
    function = own_function(eval_frame, _SET)
    if shape_of(function.__code__).parameters != ("stance",) or shape_of(function.__code__).writes != {_STANCE}:
        raise ShapeError(f"{where} has an unknown shape: {shape_of(function.__code__)}")
    kind = vars(decorators).get("set_stance")
    if not isinstance(kind, type):
        raise ShapeError(f"{DECORATORS}.set_stance is no class")
    stances = _Stances(process)
    _known.add(stances)
    state = vars(_State)[_STANCE]
    frame_hider()(
        state.fget,
        state.fset,
        _Stances.__getattr__,
        _Stances.current,
        _Stances.own,
        _Stances.revoke,
        _unless_revoked,
        _Stances.set,
        _Stances._show,
        _Stances._effective,
        _Own.__init__,
    )
    code = rewritten(where, function, Rewrite(frozenset({_STANCE})), _State(stances), keep=False)
    return Plan([*_usage_edits(kind, stances), _StandIn(eval_frame, stances), CodeSwap(where, function, code)])


_known: weakref.WeakSet[_Stances] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for stances in list(_known):
        stances.after_fork_in_child()


PATCH = Patch(
    name="stance",
    summary="a with-block or a decorator of torch.compiler.set_stance holds in its own thread only",
    upstream=("https://github.com/pytorch/pytorch/pull/196637",),
    modules=("torch", FX, EVAL_FRAME, DECORATORS),
    plan=_plan,
    faults=("stance_leaks", "skip_guard_eval_leaks"),
    quiet=False,
    after_fork_in_child=_after_fork_in_child,
)
