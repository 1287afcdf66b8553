"""Which threads trace, export or compile, so that patches change only while none does.

A patch that appeared or went in the middle of a trace would leave that trace half in one world and half in the other.
While anything is installed, ``Tracer.trace`` enters and leaves this register; a change waits until it is empty and
holds new traces back meanwhile. Traces that began before the register was in place are found on the threads' stacks,
and so is what torch does around its traces: ``make_fx``, an export, a compile. A change takes Dynamo's compile lock.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator, Set
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeSwap, CodeWrap, Edit, body_below, copy_function
from fxsafe.errors import FxsafeError
from fxsafe.observe import events, threads
from fxsafe.shapes import ShapeError, own_function, shape_of
from fxsafe.thread_globals import Gated, rewritten

__all__ = [
    "CONVERT_FRAME",
    "FX",
    "change_in_quiet",
    "changed",
    "gate",
    "gates",
    "in_flight_here",
    "lock",
    "refuse_inside_change",
    "register_edit",
    "registered_body",
    "state",
    "trace_function",
]

FX = "torch.fx._symbolic_trace"
CONVERT_FRAME = "torch._dynamo.convert_frame"
# How often a wait looks again at the stacks of traces that began before the register was in place: nothing can tell
# us when those end.
_LOOK_AGAIN_S = 0.002

# One lock for the register and for everything that is installed: a trace cannot begin while patches change, and
# nobody waits while holding it (a condition's wait releases it).
# ``with lock`` and not ``with changed``: a condition enters and leaves by functions of Python, in front of which Ctrl-C
# may come, and the lock would stay taken for ever.
lock = threading.RLock()
_RLOCK = type(lock)
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
        self.held: set[int] = set()  # idents of the threads that wait for the change to end
        # Flags of the calling thread that are True inside a trace, as functions that get and set them. Here, and not a
        # wrap of Tracer.trace each: what stands on the stack of a trace is read again for each node that make_fx makes.
        self.flags: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []


state = _State()


# What keeps state of torch's around its traces, or in place of one, by module and function. By name, for they may have
# any of our bodies or torch's.
_AROUND = {
    "torch.fx.experimental.proxy_tensor": ("trace", "trace_subgraph"),
    "torch.export": ("export", "load", "save"),
    "torch._export.serde.serialize": ("deserialize", "serialize"),
    "torch.export._trace": ("wrapper",),  # what runs every export
    "torch._dynamo.eval_frame": ("inner",),  # what torch._dynamo.export returns
    CONVERT_FRAME: ("_compile", "fullgraph_capture"),
    "torch._functorch.aot_autograd": (
        "aot_module_simplified",
        "aot_export_module",
        "aot_export_joint_simple",
        "aot_export_joint_with_descriptors",
        "create_aot_dispatcher_function",
    ),
    "torch._inductor": ("aot_compile",),
}


def _around() -> set[tuple[str, str]]:
    """File and name of each function of ``_AROUND`` whose module is imported."""
    found = ((getattr(sys.modules.get(module), "__file__", None), names) for module, names in _AROUND.items())
    return {(file, name) for file, names in found if file is not None for name in names}


def _busy(frames: Iterable[FrameType], around: Set[tuple[str, str]] = frozenset()) -> bool:
    """Whether one of the frames is a trace, or one of the functions ``around`` traces, by file and name."""
    trace = state.trace_code
    return any(f.f_code is trace or (f.f_code.co_filename, f.f_code.co_name) in around for f in frames)


def in_flight_here() -> bool:
    """Whether the calling thread is inside a trace, registered or not."""
    return get_ident() in state.depth or _busy(threads.frames(get_ident()))


def _in_flight_elsewhere(around: Set[tuple[str, str]]) -> dict[int, bool]:
    """Idents of other threads inside a trace, or inside what is around one -> whether the register knows of it."""
    me = get_ident()
    idents = [ident for ident in sys._current_frames() if ident != me and ident not in state.held]
    found = {ident: False for ident in idents if _busy(threads.frames(ident), around)}
    found.update((ident, True) for ident in state.depth if ident != me)
    return found


def _compile_lock() -> Any:
    """Dynamo's own re-entrant lock, behind our stand-in or not; None where Dynamo is not loaded."""
    lock = vars(sys.modules.get(CONVERT_FRAME, sys)).get("compile_lock")
    lock = vars(lock).get("_lock") if hasattr(lock, "__dict__") else lock
    return lock if type(lock) is _RLOCK else None


def _who_is_busy() -> list[int]:
    """For the watchdog: whom a change waits for."""
    return list(_in_flight_elsewhere(_around()))


def _describe(idents: Iterable[int]) -> str:
    stacks = [f"{threads.name(ident)} is tracing at:\n{threads.stack(ident)}" for ident in idents]
    stacks = stacks or ["Dynamo's compile lock is held by a thread that does not compile.\n"]
    held = [f"held back meanwhile, {threads.name(ident)} at:\n{threads.stack(ident)}" for ident in state.held]
    return "".join(stacks + held).rstrip()


def change_in_quiet(
    what: str,
    timeout: float,
    change: Callable[[bool], None],
    still_wanted: Callable[[], bool] = lambda: True,
    *,
    compiles: bool = True,
) -> None:
    """Calls ``change`` with ``changed`` held and no trace in flight anywhere; new ones wait until it has returned.

    No context manager, for Ctrl-C in front of its ``__exit__`` would leave everything held.

    Args:
        what: the call that wants quiet, for messages, e.g. ``"fxsafe.uninstall()"``.
        timeout: the longest wait for other threads' traces, in seconds.
        change: called with whether it is still wanted; if not, there may be traces in flight.
        still_wanted: asked, under the lock, after each wait.
        compiles: whether it also waits for the compiles, exports and ``make_fx`` of other threads, and holds Dynamo's
            compile lock meanwhile. Not for who holds an import lock, which these need.

    Raises:
        FxsafeError: the calling thread itself is inside a trace, or inside a compile with ``compiles``, or the time is
            over. The stacks of the tracing threads are in the message, and of those that were held back.
    """
    with lock:
        compile_lock = _compile_lock() if compiles else None
        inside = "trace" if in_flight_here() else "compile" if compile_lock and compile_lock._is_owned() else None
        if inside:
            raise FxsafeError(
                f"{what} was called inside a {inside} on this thread: patches cannot change under a running {inside}. "
                f"Call it before or after the {inside}."
            )
        refuse_inside_change(what)
        deadline = time.monotonic() + min(timeout, threading.TIMEOUT_MAX)
        while state.changing and still_wanted():
            if not changed.wait(max(0.0, deadline - time.monotonic())):
                raise FxsafeError(f"{what} waited {timeout:g} s for another thread that installs or uninstalls")
        if not still_wanted():
            change(False)
            return
        state.changer, state.changing = get_ident(), True
        try:
            wanted = True
            while wanted and (
                (tracing := _in_flight_elsewhere(_around() if compiles else frozenset()))
                or (compile_lock is not None and not compile_lock.acquire(False))
            ):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise FxsafeError(
                        f"{what} waited {timeout:g} s for traces and compiles on other threads to end; nothing was "
                        f"changed. Call {what} when they have ended.\n{_describe(tracing)}"
                    )
                if get_ident() not in events.waiting:
                    events.begin_wait(f"wait in {what} for traces to end", _who_is_busy)
                registered = tracing and all(tracing.values())
                changed.wait(left if registered else min(left, _LOOK_AGAIN_S))
                wanted = still_wanted()
            events.end_wait()
            change(wanted)
        finally:
            state.changing = False  # before any call: Ctrl-C comes in front of a function, and all others wait for this
            try:
                _end_quiet(compile_lock)
            except BaseException:
                _end_quiet(compile_lock)
                raise


def _end_quiet(compile_lock: Any) -> None:
    if compile_lock is not None and compile_lock._is_owned():
        compile_lock.release()
    changed.notify_all()
    events.end_wait()


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


def _enter(flags: list[tuple[Callable[[Any], None], Any]]) -> None:
    """
    Args:
        flags: gets what sets each flag and what it was, in time for ``_leave``.
    """
    me = get_ident()
    with lock:
        if state.changing:
            _hold_back(1)
        state.depth[me] = depth = state.depth.get(me, 0) + 1
        state.total += 1
        state.most_at_once = max(state.most_at_once, len(state.depth))
        for get, set_flag in state.flags:
            flags.append((set_flag, get()))
            set_flag(True)
    if events.listeners:
        events.tell("begin", "trace", depth - 1)


def gate() -> None:
    """What keeps a thread from beginning to export, to trace with ``make_fx`` or to compile while patches change."""
    if state.changing:
        with lock:
            _hold_back(2)


def _hold_back(above: int) -> None:
    """Wait until nothing changes.

    What is nested in something that is waited for must go on, or the wait could not end; and so must what a signal
    handler does in the thread that waits.

    Args:
        above: how many frames up to the one whose callers count.
    """
    me, compile_lock = get_ident(), _compile_lock()
    busy = me in state.depth or (compile_lock is not None and compile_lock._is_owned())
    if state.changing and state.changer != me and not busy and not _busy(_callers(sys._getframe(above)), _around()):
        _wait_for_change()


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and (frame := frame.f_back) is not None:
        yield frame


def _wait_for_change() -> None:
    me = get_ident()
    try:
        state.held.add(me)
        events.begin_wait("wait for fxsafe to be installed or undone", _who_changes)
        while state.changing:
            changed.wait()
    finally:
        state.held.discard(me)
        events.end_wait()


def _who_changes() -> list[int]:
    return [state.changer] if state.changing else []


def _leave(depth: int, flags: Iterable[tuple[Callable[[Any], None], Any]]) -> None:
    """Put the calling thread's depth and flags back to what they were before ``_enter``; may be repeated."""
    me = get_ident()
    with lock:
        for set_flag, before in flags:
            set_flag(before)
        if depth:
            state.depth[me] = depth
        else:
            state.depth.pop(me, None)
            if state.changing:
                changed.notify_all()
    if events.listeners:  # behind the change, as in _enter: a recording that begins in between knows what is open
        events.tell("end", "trace", depth)


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


# Tracer.trace -> the function that its registered body calls, with torch's own body. One for ever: a thread that is on
# its way into the register while an installation goes and another comes must find what has come.
_inner: weakref.WeakKeyDictionary[FunctionType, FunctionType] = weakref.WeakKeyDictionary()


def registered_body(module: ModuleType) -> FunctionType:
    """The function that ``Tracer.trace`` calls once it is in the register, for a patch that changes torch's body.

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


def _registered(self: Any, root: Any, concrete_args: Any = None) -> Any:
    """The body that ``Tracer.trace`` gets."""
    register: Any = "<replacement>"
    depth = register.depth()
    flags: list[Any] = []
    try:
        register.enter(flags)
        return register.trace(self, root, concrete_args)
    finally:
        try:
            register.leave(depth, flags)
        except BaseException:
            register.leave(depth, flags)  # Ctrl-C on the way: nobody else would
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
        hide(register.depth, _enter, _leave, gate, _hold_back, _wait_for_change)
        events.hide_frames()
        return register

    return CodeWrap(f"{FX}.Tracer.trace", function, _registered, wrap)  # type: ignore[arg-type]


class _Gates:
    _fxsafe_gate = staticmethod(gate)


_GATES = (("torch.fx.experimental.proxy_tensor", "_MakefxTracer", "trace"), ("torch.export", None, "export"))


def gates(there: Iterable[str]) -> Iterator[Edit]:
    """The edits that hold back new exports and calls of ``make_fx`` while a change waits.

    Where torch has no such function there is none; a change may then wait longer, for what begins meanwhile.

    Args:
        there: targets of those that are applied already.
    """
    for module_name, owner_name, name in _GATES:
        module = sys.modules.get(module_name)
        target = ".".join(filter(None, (module_name, owner_name, name)))
        owner: Any = module if owner_name is None else vars(module or sys).get(owner_name)
        if owner is None or target in there:
            continue
        try:
            function = own_function(owner, name)
            code = rewritten(target, function, Gated(), _Gates)
        except ShapeError:
            continue
        yield CodeSwap(target, function, code)


def after_fork_in_child() -> None:
    """Only the forking thread lives on: forget the traces of the others. Called with ``changed`` held."""
    me = get_ident()
    state.depth = {ident: depth for ident, depth in state.depth.items() if ident == me}
    state.held.clear()
    events.after_fork_in_child()
    state.changing = False
