"""Installing, undoing and reporting: one installation per process, counted, all or nothing.

Everything here is guarded by ``traces.lock``. Nothing is imported and no hook is registered while it is held,
because the import of torch ends in our own hook, which takes it.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple, TypedDict, TypeVar

from fxsafe import imports, thread_globals, traces
from fxsafe.edits import Edit
from fxsafe.errors import FxsafeError, FxsafeWarning, UnsupportedTorchError
from fxsafe.gate import Status, Verdict, ask, predates, release_doubt
from fxsafe.observe import events, watchdog
from fxsafe.patches import CATALOGUE, FIXES
from fxsafe.patches.base import Fix, Patch, Plan, ShapeError

__all__ = [
    "Fix",
    "FxsafeError",
    "FxsafeWarning",
    "Installation",
    "PatchInfo",
    "Status",
    "UnsupportedTorchError",
    "info",
    "install",
    "installed",
    "is_installed",
    "uninstall",
]

# How long a change waits for traces on other threads, in seconds. A cold compile of a large model traces for tens of
# seconds; beyond this the caller is told who traces and where.
QUIET_TIMEOUT_S = 60.0

# How an environment variable says yes and no.
_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")

_F = TypeVar("_F", bound=Callable[..., Any])


class PatchInfo(TypedDict):
    """What ``info()`` says of one patch.

    Keys:
        name: as ``install(patches=...)`` spells it.
        status: "active"; "not-needed" (fixed upstream); "waiting" (its torch modules are not imported yet);
            "unsupported" (the gate said no); "disabled" (by the user).
        fix: the fix that the patch belongs to, or the installed one if it goes with both.
        target: the places it changes, comma-separated; the modules it waits for while waiting.
        reason: why it has this status; empty for an active patch that is tested on this torch.
        upstream: links, separated by spaces.
        torch: ``torch.__version__``, or None while torch is not imported.
        counters: for an active patch ``traces``, ``most_traces_at_once``, ``waits`` and ``longest_wait_s`` since the
            process began, and its own.
    """

    name: str
    status: Status
    fix: Fix | None
    target: str
    reason: str
    upstream: str
    torch: str | None
    counters: dict[str, Any]


class _Request(NamedTuple):
    fix: Fix
    patches: tuple[str, ...] | None  # None: all that go with the fix
    strict: bool
    disabled: dict[str, str]  # name -> who disabled it

    def wants(self, patch: Patch) -> bool:
        return patch.name not in self.disabled


class _Applied(NamedTuple):
    patch: Patch
    plan: Plan
    edits: list[Edit]  # those that may have been applied


class _State:
    """What is installed; guarded by ``traces.lock``."""

    def __init__(self) -> None:
        self.handles: list[Installation] = []
        self.request: _Request | None = None
        self.verdicts: dict[str, Verdict] = {}
        self.applied: list[_Applied] = []
        self.registers: list[Edit] = []  # what traces and the like enter, or wait at
        self.left: list[str] = []  # targets that somebody else had changed when we left


_state = _State()
_warned: set[str] = set()


class Installation:
    """One counted installation; ``install`` makes it. As a context manager it is undone at the end of the block."""

    def __init__(self, fix: Fix, stall_after: float | None = None) -> None:
        self.fix = fix
        self.stall_after = stall_after
        self.origin = _origin()

    def uninstall(self, timeout: float = QUIET_TIMEOUT_S) -> None:
        """Give this installation back; the last one out restores every original object.

        Does nothing if it was given back before.

        Args:
            timeout: the longest wait, in seconds, for other threads to end what they trace, export or compile.

        Raises:
            FxsafeError: ``timeout`` is no number of seconds; this thread is inside a trace, or what another thread
                traces, exports or compiles outlasted ``timeout``. The installation is then as it was, and ``uninstall``
                can be called again.
        """
        if not isinstance(timeout, (int, float)) or not timeout >= 0:
            raise FxsafeError(f"uninstall(timeout=...) is a number of seconds, not {timeout!r}")
        try:
            self._uninstall(timeout)
        finally:
            _watch()
        _warn_of_left()

    def _uninstall(self, timeout: float) -> None:
        with traces.lock:
            if self not in _state.handles:
                return
            if len(_state.handles) > 1 or not _state.applied:
                _state.handles.remove(self)
                _reset_if_last()
                return
            traces.change_in_quiet("fxsafe.uninstall()", timeout, self._leave, lambda: _state.handles == [self])

    def _leave(self, last: bool) -> None:
        try:
            if last:
                _undo()
        finally:
            if not last or not _state.applied:
                if self in _state.handles:
                    _state.handles.remove(self)
                _reset_if_last()

    def __enter__(self) -> Installation:
        """
        Raises:
            FxsafeError: it was given back before; the block would run without it.
        """
        if self not in _state.handles:
            raise FxsafeError("this installation was given back; call fxsafe.install() again")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        return f"<fxsafe.Installation fix={self.fix!r} {'open' if self in _state.handles else 'given back'}>"


def _origin() -> str:
    """Whose line it is that installs, as file and line."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("fxsafe", "contextlib"):
        if frame.f_globals["__name__"] == "fxsafe.cli":
            return "python -m fxsafe run"
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _env_flag(name: str) -> bool:
    """
    Raises:
        FxsafeError: the variable says neither yes nor no.
    """
    text = os.environ.get(name, "").strip()
    if text.lower() not in ("", *_OFF, *_ON):
        raise FxsafeError(f"{name}={text!r} is neither one of {', '.join(_ON)} nor one of {', '.join(_OFF)}")
    return text.lower() in _ON


def _names(where: str, names: Iterable[str]) -> tuple[str, ...]:
    known = [p.name for p in CATALOGUE]
    if isinstance(names, str):
        raise FxsafeError(f"{where} takes a list of patch names, not the string {names!r}; known: {', '.join(known)}")
    try:
        names = tuple(names)
    except TypeError:
        raise FxsafeError(f"{where} takes a list of patch names, not {names!r}") from None
    if unknown := [n for n in names if n not in known]:
        what = "the unknown patch" if len(unknown) == 1 else "the unknown patches"
        said = ", ".join(map(repr, unknown))
        raise FxsafeError(f"{where} names {what} {said}; {_meant(unknown, known)}known: {', '.join(known)}")
    return tuple(n for n in known if n in names)  # in one order, whoever wrote them down


def _meant(unknown: Iterable[object], known: Iterable[str]) -> str:
    """The question what was meant, to stand before the list of what is known; empty if nothing is close."""
    import difflib

    known = list(known)
    close = [name for u in unknown for name in difflib.get_close_matches(str(u).lower(), known, n=1)]
    return f"did you mean {', '.join(map(repr, dict.fromkeys(close)))}? " if close else ""


def _make_request(fix: Fix, patches: Iterable[str] | None, strict: bool | None) -> _Request:
    if fix not in FIXES:
        raise FxsafeError(f"fix={fix!r} is unknown; {_meant([fix], FIXES)}known: {', '.join(map(repr, FIXES))}")
    chosen = None if patches is None else _names("install(patches=...)", patches)
    env = os.environ.get("FXSAFE_DISABLE", "").strip()
    off: tuple[str, ...] = ()
    if env and env.lower() not in (*_ON, *_OFF):
        off = _names("FXSAFE_DISABLE", [n.strip() for n in env.split(",") if n.strip()])
    elif _env_flag("FXSAFE_DISABLE"):
        off = tuple(p.name for p in CATALOGUE)
    disabled = {}
    for patch in CATALOGUE:
        if fix not in patch.fixes:
            if chosen is not None and patch.name in chosen:
                raise FxsafeError(
                    f"patch {patch.name!r} goes with fix={' or '.join(map(repr, sorted(patch.fixes)))}, not with "
                    f"fix={fix!r}"
                )
            disabled[patch.name] = f"fix={fix!r} was chosen"
        elif patch.name in off:
            disabled[patch.name] = f"FXSAFE_DISABLE={env}"
        elif chosen is not None and patch.name not in chosen:
            disabled[patch.name] = f"not among install(patches={list(chosen)})"
    return _Request(fix, chosen, _env_flag("FXSAFE_STRICT") if strict is None else strict, disabled)


def install(
    fix: Fix = "thread-local",
    *,
    patches: Iterable[str] | None = None,
    strict: bool | None = None,
    stall_after: float | None = None,
) -> Installation:
    """Make FX tracing, and what stands on it, safe to use from several threads of this process.

    May be called before torch is imported, and any number of times from any thread: each call returns a handle, and
    the last handle given back restores every original object.

    Args:
        fix: "thread-local": the tracing flag belongs to the thread, as in torch 2.14. "always-false": a compiled
            call is never refused because of FX tracing, not even inside one's own trace.
        patches: names of the patches to apply, none if empty; None for all that go with ``fix``.
        strict: raise where a patch would be left out or is untested on this torch, instead of warning. None reads
            the environment variable ``FXSAFE_STRICT``. What is left out when a module of torch is imported later is
            warned about only: the import must not fail by it.
        stall_after: seconds after which a wait for Dynamo's lock or for traces to end, or a trace that does not end,
            is reported on stderr with the stacks of whoever waits and whoever is waited for. None reads the
            environment variable ``FXSAFE_STALL_AFTER``; nothing is watched if that is unset. Of several
            installations the smallest number counts.

    Raises:
        FxsafeError: an unknown fix or patch name; an installation with another fix or other patches exists; this
            thread is inside a trace, or what another thread traces, exports or compiles outlasted a minute. Nothing was
            changed.
        UnsupportedTorchError: see ``strict``. Nothing was changed.

    Warns:
        FxsafeWarning: a patch was left out because this torch is unsupported, or applied although it is untested.
    """
    request = _make_request(fix, patches, strict)
    handle = Installation(fix, _stall_bound(stall_after))
    imports.expect(_modules_of(request), _arrived)
    torch_version = _torch_version()
    if request.strict and torch_version is None and any(request.wants(p) for p in CATALOGUE):
        _refuse_by_metadata()
    with traces.lock:
        traces.refuse_inside_change("fxsafe.install()")
        while traces.state.changing and not _state.handles and not traces.in_flight_here():
            traces.changed.wait()
        if _state.handles:
            _join(request)
            _state.handles.append(handle)
        else:
            _apply(request, handle)
        traces.changed.notify_all()
    _watch()
    return handle


def _stall_bound(stall_after: float | None) -> float | None:
    where, value = "install(stall_after=...)", stall_after
    if stall_after is None:
        where, text = "FXSAFE_STALL_AFTER", os.environ.get("FXSAFE_STALL_AFTER", "").strip()
        if text.lower() in ("", *_OFF):
            return None
        try:
            value = float(text)
        except ValueError:
            raise FxsafeError(f"{where} is a number of seconds, not {text!r}") from None
    try:
        if isinstance(value, (int, float)) and value > 0:
            return float(value)
    except OverflowError:  # and repr may refuse so long an integer
        raise FxsafeError(f"{where} is a number of seconds above 0 that a float can hold") from None
    raise FxsafeError(f"{where} is a number of seconds above 0, not {value!r}")


def _watch() -> None:
    """Let the watchdog run with the smallest bound that an open installation asks for, or not at all."""
    with traces.lock:
        ended = watchdog.watch(min((h.stall_after for h in _state.handles if h.stall_after is not None), default=None))
    if ended is not None:
        ended.join()


def _modules_of(request: _Request) -> list[str]:
    return list(dict.fromkeys(m for p in CATALOGUE if request.wants(p) for m in p.modules))


def _torch_version() -> str | None:
    return getattr(imports.ready("torch"), "__version__", None)


def _refuse_by_metadata() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        doubt = release_doubt(version("torch"))
    except PackageNotFoundError:
        raise UnsupportedTorchError("strict: torch is not installed in this environment") from None
    if doubt is not None:
        raise UnsupportedTorchError(f"strict: {doubt[1]}")


def _join(request: _Request) -> None:
    there = _state.request
    assert there is not None
    pairs: tuple[tuple[str, object, object], ...] = (
        ("fix", there.fix, request.fix),
        ("patches", there.patches, request.patches),
    )
    for what, old, new in pairs:
        if old != new:
            if what == "patches":
                old, new = (names if names is not None else "all that go with the fix" for names in (old, new))
            raise FxsafeError(
                f"fxsafe is installed with {what}={old!r} already (by {_state.handles[0].origin}) and cannot be "
                f"installed with {what}={new!r} too; give that installation back before, or use the same"
            )


def _verdicts(request: _Request, patches: Iterable[Patch]) -> dict[str, Verdict]:
    """What the gate says of each patch; warns or raises for doubts. Changes nothing."""
    verdicts = {}
    trouble = _register_trouble()
    version = _torch_version()
    for patch in patches:
        modules: dict[str, ModuleType | None] = {name: imports.ready(name) for name in patch.modules}
        missing = [name for name, module in modules.items() if module is None]
        if not request.wants(patch):
            verdict = Verdict("disabled", request.disabled[patch.name])
        elif missing and trouble is not None and imports.ready(traces.FX) is not None:
            verdict = Verdict("unsupported", trouble, doubt=True)
        elif missing:
            verdict = Verdict("waiting", f"waits for the import of {', '.join(missing)}")
            if version is not None:
                verdict = predates(patch, version) or verdict
        else:
            verdict = ask(patch, modules, str(version))  # type: ignore[arg-type]
            if verdict.plan is not None and trouble is not None:
                verdict = Verdict("unsupported", trouble, doubt=True)
        verdicts[patch.name] = verdict
    doubts: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        if verdict.doubt:
            left_out = "left out: " if verdict.plan is None else ""
            doubts.setdefault(left_out + verdict.reason, []).append(name)
    for sentence, names in doubts.items():
        message = f"fxsafe: {', '.join(names)}: {sentence}"
        if request.strict:
            raise UnsupportedTorchError(f"strict: {message}")
        _warn(message, sentence)
    return verdicts


def _register_trouble() -> str | None:
    """Why no patch at all can be applied: nobody could tell when traces begin and end."""
    fx = imports.ready(traces.FX)
    if fx is None:
        return f"{traces.FX} is not imported"
    try:
        traces.register_edit(fx)
    except ShapeError as error:
        return str(error)
    return None


def _warn(message: str, about: str | None = None) -> None:
    """Warn, but only once of the same thing: patches whose modules are imported later would say it again."""
    about = message if about is None else about
    if about not in _warned:
        _warned.add(about)
        warnings.warn(message, FxsafeWarning, stacklevel=_stacklevel())


# Between a line of the user's and a warning: ourselves, and what calls us when a module is imported.
_MACHINERY = frozenset({"fxsafe", "importlib"})


def _stacklevel() -> int:
    level, frame = 0, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _MACHINERY:
        # The warnings module counts none of importlib's frozen frames.
        level += not frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return level


def _apply(request: _Request, handle: Installation) -> None:
    verdicts = _verdicts(request, CATALOGUE)
    _state.left = []
    try:
        _carry_out(verdicts)
        _state.request, _state.verdicts = request, verdicts
        _state.handles.append(handle)
    except BaseException:
        if handle not in _state.handles:  # Ctrl-C on the way: nobody else would undo it
            _undo()
            _reset_if_last()
        raise


def _carry_out(verdicts: dict[str, Verdict], *, importing: bool = False) -> None:
    """Apply what is active in ``verdicts``, all or nothing. ``_state.applied`` grows by it."""
    chosen = [(p, v.plan) for p in CATALOGUE if (v := verdicts.get(p.name)) is not None and v.plan is not None]
    if not chosen:
        return
    kept = len(_state.applied)
    try:
        _apply_registers()  # from here on new traces wait for us
        if importing and not any(p.quiet for p, _ in chosen):
            _apply_edits(chosen)
        else:
            traces.change_in_quiet(
                "fxsafe.install()", QUIET_TIMEOUT_S, lambda wanted: _apply_edits(chosen), compiles=not importing
            )
    except BaseException:
        _undo(kept)
        raise


def _apply_registers() -> None:
    there = [edit.target for edit in _state.registers]
    first = [] if there else [traces.register_edit(sys.modules[traces.FX])]
    for edit in (*first, *traces.gates(there)):
        _state.registers.append(edit)
        edit.apply()


def _apply_edits(chosen: list[tuple[Patch, Plan]]) -> None:
    for patch, plan in chosen:
        applied = _Applied(patch, plan, [])
        _state.applied.append(applied)
        for edit in plan.edits:
            # Before, so that Ctrl-C in between cannot lose it; undoing what was not applied is harmless.
            applied.edits.append(edit)
            edit.apply()


def _arrived() -> None:
    """A module that some patch waits for was imported; runs inside the user's import and so must not raise."""
    with traces.lock:
        request = _state.request
        if not _state.handles or request is None:
            return
        waiting = [p for p in CATALOGUE if _state.verdicts[p.name].status == "waiting"]
        try:
            verdicts = _verdicts(request._replace(strict=False), waiting)
            _carry_out(verdicts, importing=True)
        except Exception as error:  # whatever it is, the user's import must not fail by it
            verdicts = {
                p.name: Verdict("unsupported", f"failed when its module was imported: {error!r}") for p in waiting
            }
            _warn_without_raising(f"fxsafe: left out {', '.join(verdicts)}: {error!r}")
        _state.verdicts.update(verdicts)


def _warn_without_raising(message: str) -> None:
    try:
        _warn(message)
    except FxsafeWarning:
        print(message, file=sys.stderr)


def _undo(kept: int = 0) -> None:
    """Undo every edit, newest first, but those of the first ``kept`` patches; Ctrl-C is raised at the end."""
    interrupt: BaseException | None = None
    while len(_state.applied) > kept or (not kept and _state.registers):
        try:
            _undo_rest(kept)
        except Exception:
            raise
        except BaseException as error:  # half of our patches would stay; undoing may be repeated
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _undo_rest(kept: int) -> None:
    while len(_state.applied) > kept:
        edits = _state.applied[-1].edits
        while edits:
            if not edits[-1].undo():
                _state.left.append(edits[-1].target)
            edits.pop()
        _state.applied.pop()
    while not kept and _state.registers:
        if not _state.registers[-1].undo():
            _state.left.append(_state.registers[-1].target)
        _state.registers.pop()


def _reset_if_last() -> None:
    if not _state.handles:
        _state.request = None
        _state.verdicts = {}


def _warn_of_left() -> None:
    if _state.left and not _state.handles:
        _warn(
            "fxsafe: left in place, because somebody else has changed them since: "
            f"{', '.join(dict.fromkeys(_state.left))}. Undo their patch before fxsafe's."
        )


def uninstall(timeout: float = QUIET_TIMEOUT_S) -> None:
    """Give back the newest installation that is still open; see ``Installation.uninstall``.

    Raises:
        FxsafeError: nothing is installed, or see ``Installation.uninstall``.
    """
    with traces.lock:
        if not _state.handles:
            raise FxsafeError("fxsafe.uninstall(): nothing is installed")
        handle = _state.handles[-1]
    handle.uninstall(timeout)


def is_installed() -> bool:
    """Whether any installation is open."""
    return bool(_state.handles)


class installed:
    """``install`` for the length of a block or of each call of a function.

    ``with fxsafe.installed(): ...`` or ``@fxsafe.installed()``, also on generator and coroutine functions. Arguments
    and errors are those of ``install``.
    """

    def __init__(
        self,
        fix: Fix = "thread-local",
        *,
        patches: Iterable[str] | None = None,
        strict: bool | None = None,
        stall_after: float | None = None,
    ) -> None:
        if callable(fix):
            raise TypeError("write @fxsafe.installed(), with parentheses")
        names = None if patches is None else _names("installed(patches=...)", patches)
        _make_request(fix, names, strict)  # a mistake is told here, not at the first call
        self._install = functools.partial(install, fix, patches=names, strict=strict, stall_after=stall_after)
        self._handles: list[Installation] = []

    def __enter__(self) -> Installation:
        handle = self._install()
        self._handles.append(handle)
        return handle

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        handle = self._handles.pop()  # in one step: another thread may leave its block at the same moment
        try:
            handle.uninstall()
        except BaseException:
            self._handles.append(handle)
            raise

    def __call__(self, function: _F) -> _F:
        import inspect

        if not callable(function) or inspect.isclass(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                "@fxsafe.installed() decorates functions, generator functions and coroutine functions, not "
                f"{function!r}; use a with-block inside it"
            )
        wrapped: Any
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self._install():
                    return await function(*args, **kwargs)

        elif inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self._install():
                    return (yield from function(*args, **kwargs))

        else:

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self._install():
                    return function(*args, **kwargs)

        return wrapped  # type: ignore[no-any-return]


def info() -> list[PatchInfo]:
    """What fxsafe did to this process, one record a patch, in the order in which patches are applied."""
    with traces.lock:
        request = _state.request
        edits = {a.patch.name: (a.plan, [e.target for e in a.edits]) for a in _state.applied}
        records: list[PatchInfo] = []
        for patch in CATALOGUE:
            verdict = _state.verdicts.get(patch.name)
            if verdict is None:
                left = f"; left in place: {', '.join(_state.left)}" if _state.left else ""
                verdict = Verdict("disabled", f"nothing is installed{left}")
            plan, targets = edits.get(patch.name, (None, list(patch.modules)))
            counters: dict[str, Any] = {}
            if plan is not None:
                counters = {"traces": traces.state.total, "most_traces_at_once": traces.state.most_at_once}
                counters |= events.counters()
                counters |= plan.counters() if plan.counters is not None else {}
            own_fix = next(iter(patch.fixes)) if len(patch.fixes) == 1 else None
            records.append(
                PatchInfo(
                    name=patch.name,
                    status=verdict.status,
                    fix=own_fix or (request.fix if request is not None else None),
                    target=", ".join(dict.fromkeys(targets)),  # one place may have two edits
                    reason=verdict.reason,
                    upstream=" ".join(patch.upstream),
                    torch=_torch_version(),
                    counters=counters,
                )
            )
        return records


def _after_fork_in_child() -> None:
    try:
        traces.after_fork_in_child()
        thread_globals.after_fork_in_child()
        for applied in _state.applied:
            if applied.patch.after_fork_in_child is not None:
                applied.patch.after_fork_in_child()
    finally:
        traces.changed.release()
    watchdog.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    # The lock is taken around the fork, so that a child never starts in the middle of a change.
    os.register_at_fork(
        before=traces.changed.acquire,
        after_in_parent=traces.changed.release,
        after_in_child=_after_fork_in_child,
    )
