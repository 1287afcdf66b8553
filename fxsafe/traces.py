"""Which threads are inside ``torch.fx.Tracer.trace``, so that patches change only while none is.

A patch that appeared or went in the middle of a trace would leave that trace half in one world and half in the other.
While anything is installed, ``Tracer.trace`` enters and leaves this register; a change waits until it is empty and
holds new traces back meanwhile. Traces that began before the register was in place are found on the threads' stacks.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from _thread import get_ident
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeWrap, Edit, body_below, copy_function
from fxsafe.errors import FxsafeError
from fxsafe.observe import events, threads
from fxsafe.shapes import ShapeError, own_function, shape_of

__all__ = [
    "FX",
    "changed",
    "in_flight_here",
    "lock",
    "quiet",
    "refuse_inside_change",
    "register_edit",
    "registered_body",
    "state",
    "trace_function",
]

FX = "torch.fx._symbolic_trace"
# How often a wait looks again at the stacks of traces that began before the register was in place: nothing can tell
# us when those end.
_LOOK_AGAIN_S = 0.002

# One lock for the register and for everything that is installed: a trace cannot begin while patches change, and
# nobody waits while holding it (a condition's wait releases it).
# ``with lock`` and not ``with changed``: a condition enters and leaves by functions of Python, in front of which Ctrl-C
# may come, and the lock would stay taken for ever.
lock = threading.RLock()
changed = threading.Condition(lock)


class _State:
    """Guarded by ``changed``, but for ``trace_code``, which is written once."""

    def __init__(self) -> None:
        self.depth: dict[int, int] = {}  # thread ident -> traces nested on it; absent when none
        self.total = 0
        self.most_at_once = 0
        self.changing = False
        self.changer = 0  # ident of the thread that changes something, while one does
        self.trace_code: CodeType | None = None  # the body of Tracer.trace itself


state = _State()


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _traces_on_stack(frame: FrameType | None) -> bool:
    code = state.trace_code
    return code is not None and any(f.f_code is code for f in _frames(frame))


def in_flight_here() -> bool:
    """Whether the calling thread is inside a trace, registered or not."""
    return get_ident() in state.depth or _traces_on_stack(sys._getframe())


def _in_flight_elsewhere() -> dict[int, bool]:
    """Idents of other threads inside a trace -> whether the register knows of it."""
    me = get_ident()
    found = {ident: False for ident, frame in sys._current_frames().items() if _traces_on_stack(frame)}
    found.update(dict.fromkeys(state.depth, True))
    found.pop(me, None)
    return found


def _describe(idents: Mapping[int, bool]) -> str:
    return "".join(f"{threads.name(ident)} is tracing at:\n{threads.stack(ident)}" for ident in idents).rstrip()


@contextmanager
def quiet(what: str, timeout: float, still_wanted: Callable[[], bool] = lambda: True) -> Iterator[bool]:
    """Holds ``changed`` with no trace in flight anywhere; new ones wait until the block ends.

    Args:
        what: the call that wants quiet, for messages, e.g. ``"fxsafe.uninstall()"``.
        timeout: the longest wait for other threads' traces, in seconds.
        still_wanted: asked, under the lock, after each wait.

    Yields:
        False if ``still_wanted`` said no meanwhile; there may be traces in flight then.

    Raises:
        FxsafeError: the calling thread itself is inside a trace, or the time is over. The stacks of the tracing
            threads are in the message.
    """
    with lock:
        if in_flight_here():
            raise FxsafeError(
                f"{what} was called inside a trace on this thread: patches cannot change under a running trace. "
                "Call it before or after the trace."
            )
        refuse_inside_change(what)
        deadline = time.monotonic() + min(timeout, threading.TIMEOUT_MAX)
        while state.changing and still_wanted():
            if not changed.wait(max(0.0, deadline - time.monotonic())):
                raise FxsafeError(f"{what} waited {timeout:g} s for another thread that installs or uninstalls")
        if not still_wanted():
            yield False
            return
        state.changer, state.changing = get_ident(), True
        try:
            wanted = True
            while wanted and (tracing := _in_flight_elsewhere()):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise FxsafeError(
                        f"{what} waited {timeout:g} s for traces on other threads to end; nothing was changed. "
                        f"Call {what} when they have ended.\n{_describe(tracing)}"
                    )
                if get_ident() not in events.waiting:
                    events.begin_wait(f"wait in {what} for traces to end", _in_flight_elsewhere)
                changed.wait(left if all(tracing.values()) else min(left, _LOOK_AGAIN_S))
                wanted = still_wanted()
            events.end_wait()
            yield wanted
        finally:
            state.changing = False  # before any call: Ctrl-C comes in front of a function, and all others wait for this
            try:
                changed.notify_all()
                events.end_wait()
            except BaseException:
                changed.notify_all()
                events.end_wait()
                raise


def refuse_inside_change(what: str) -> None:
    """
    Raises:
        FxsafeError: the calling thread is inside a change already: this is a signal handler, or the like.
    """
    if state.changing and state.changer == get_ident():
        raise FxsafeError(
            f"{what} was called while this thread installs or uninstalls fxsafe, by a signal handler perhaps. "
            "Call it afterwards."
        )


def _enter() -> None:
    me = get_ident()
    with lock:
        # A trace nested in one that is waited for must go on, or the wait could not end; and so must one of a signal
        # handler in the thread that waits.
        waits = state.changing and state.changer != me
        if waits and me not in state.depth and not _traces_on_stack(sys._getframe()):
            _wait_for_change()
        state.depth[me] = depth = state.depth.get(me, 0) + 1
        state.total += 1
        state.most_at_once = max(state.most_at_once, len(state.depth))
    if events.listeners:
        events.tell("begin", "trace", depth - 1)


def _wait_for_change() -> None:
    try:
        events.begin_wait("wait for fxsafe to be installed or undone", _who_changes)
        while state.changing:
            changed.wait()
    finally:
        events.end_wait()


def _who_changes() -> list[int]:
    return [ident for ident, wait in events.waiting.copy().items() if wait.owners is _in_flight_elsewhere]


def _leave(depth: int) -> None:
    """Put the calling thread's depth back to what it was before ``_enter``; may be repeated."""
    me = get_ident()
    if events.listeners:
        events.tell("end", "trace", depth)
    with lock:
        if depth:
            state.depth[me] = depth
        else:
            state.depth.pop(me, None)
            if state.changing:
                changed.notify_all()


def trace_function(module: ModuleType) -> tuple[FunctionType, CodeType]:
    """``Tracer.trace`` of ``torch.fx._symbolic_trace`` and torch's own body of it, below our wraps.

    Raises:
        ShapeError: it takes other arguments than on every release so far, or was replaced.
    """
    function = own_function(module.Tracer, "trace")
    code = body_below(function)
    if shape_of(code).parameters != ("self", "root", "concrete_args") or code.co_freevars:
        raise ShapeError(f"{FX}.Tracer.trace has an unknown shape: {shape_of(code)}")
    return function, code


# Tracer.trace -> the function that its registered body calls. One for ever: a thread that is on its way into the
# register while an installation goes and another comes must find what has come.
_inner: weakref.WeakKeyDictionary[FunctionType, FunctionType] = weakref.WeakKeyDictionary()


def registered_body(module: ModuleType) -> FunctionType:
    """The function that ``Tracer.trace`` calls once it is in the register: what a patch of tracing wraps.

    While a trace is in the register nothing changes, so what this function is then it is to the end of the trace.

    Raises:
        ShapeError: see ``trace_function``.
    """
    function, _ = trace_function(module)
    if function not in _inner:
        _inner[function] = copy_function(function)
    return _inner[function]


class _Register:
    """What the body of ``_registered`` works with."""

    def __init__(self, trace: FunctionType) -> None:
        self.trace = trace
        self.depth = lambda: state.depth.get(get_ident(), 0)
        self.enter = _enter
        self.leave = _leave


# No function below the body: everything that stands on the stack of a trace is read again for each node that make_fx
# makes.
def _registered(self: Any, root: Any, concrete_args: Any = None) -> Any:
    """The body that ``Tracer.trace`` gets."""
    register: Any = "<replacement>"
    depth = register.depth()
    try:
        register.enter()
        return register.trace(self, root, concrete_args)
    finally:
        try:
            register.leave(depth)
        except BaseException:
            register.leave(depth)  # Ctrl-C on the way: nobody else would
            raise


def register_edit(module: ModuleType) -> Edit:
    """The edit that makes ``Tracer.trace`` enter and leave the register.

    Args:
        module: ``torch.fx._symbolic_trace``.

    Raises:
        ShapeError: see ``trace_function`` and ``frame_hider``.
    """
    function, state.trace_code = trace_function(module)
    inner = registered_body(module)
    hide = frame_hider()

    def wrap(original: FunctionType) -> _Register:
        inner.__code__ = original.__code__
        register = _Register(inner)
        hide(register.depth, _enter, _leave, _wait_for_change)
        events.hide_frames()
        return register

    return CodeWrap(f"{FX}.Tracer.trace", function, _registered, wrap)  # type: ignore[arg-type]


def after_fork_in_child() -> None:
    """Only the forking thread lives on: forget the traces of the others. Called with ``changed`` held."""
    me = get_ident()
    state.depth = {ident: depth for ident, depth in state.depth.items() if ident == me}
    events.after_fork_in_child()
    state.changing = False
