"""Runs a program as ``python`` would run it, inside an interpreter in which fxsafe is already installed.

What is guaranteed, for Python 3.10 and later:

* ``sys.argv``, ``sys.path[0]`` (``-P`` and ``-I`` respected) and a fresh ``__main__`` module are what ``python``
  would have given the program, and ``__main__`` stays in ``sys.modules`` until the interpreter ends: pickling,
  ``multiprocessing`` and threads that outlive the main program find their definitions.
* The exit status, and what is printed about an exception that nobody caught, are python's: through the program's own
  ``sys.excepthook``, without a frame of ours.

What differs, because the program runs below frames of fxsafe: ``sys.orig_argv`` and ``inspect.stack()`` show them,
a warning whose ``stacklevel`` points above the program names this file, the modules that fxsafe uses are imported
already, and a source file that cannot be decoded is reported in the words of ``compile()``. Processes that are
started afresh (``multiprocessing``'s spawn and forkserver, ``subprocess``) do not inherit the patches: call
``fxsafe.install()`` in the module that they import.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import marshal
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType, TracebackType
from typing import Any

__all__ = ["run_module", "run_script"]


def run_script(path: str, args: Sequence[str]) -> int:
    """Run a source file, a compiled file, or a directory or zip file with a ``__main__.py``.

    Args:
        path: as the user spelt it; it becomes ``sys.argv[0]``.
        args: the rest of ``sys.argv``.

    Returns:
        The exit status, after the program has ended and a failure of it was printed.

    Raises:
        SystemExit: the program's own, untouched.
        KeyboardInterrupt: the program's own, already printed; it must reach the interpreter, which then dies by SIGINT.
    """
    sys.argv = [path, *args]
    filename = _absolute(path)
    _drop_launcher_path()
    if pkgutil.get_importer(filename) is not None:
        sys.path.insert(0, filename)
        _fresh_main()
        return _guarded(lambda: _run_as_main("__main__", False))
    try:
        with io.open_code(filename) as stream:
            source = stream.read()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.orig_argv[0]}: can't open file {filename!r}: {reason}", file=sys.stderr)
        return 2
    if not _safe_path():
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    return _run_file(filename, source)


def run_module(name: str, args: Sequence[str]) -> int:
    """Run a module or a package's ``__main__`` as ``python -m`` does. Returns and raises as run_script does."""
    sys.argv = ["-m", *args]
    _drop_launcher_path()
    if not _safe_path():
        with contextlib.suppress(OSError):  # the directory is gone: python goes on without it
            sys.path.insert(0, os.getcwd())
    _fresh_main()
    return _guarded(lambda: _run_as_main(name, True))


def _run_as_main(name: str, alter_argv: bool) -> None:
    # What the interpreter itself calls for -m and for directories. It is looked up when it is used, and its two
    # frames stay in the traceback because python shows them too.
    run: Callable[[str, bool], object] = getattr(runpy, "_run_module_as_main")  # noqa: B009
    run(name, alter_argv)


def _run_file(filename: str, source: bytes) -> int:
    main = _fresh_main()
    namespace = vars(main)
    namespace["__file__"] = filename
    if sys.version_info < (3, 15):
        namespace["__cached__"] = None
    compiled = filename.endswith(".pyc") or source[:2] == importlib.util.MAGIC_NUMBER[:2]
    loader = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
    namespace["__loader__"] = loader("__main__", filename)

    def body() -> None:
        code = _load_compiled(source) if compiled else compile(source, filename, "exec", dont_inherit=True)
        exec(code, namespace)

    status = _guarded(body, flush_first=True)
    # python takes these away again when the main program ends, before it waits for other threads.
    namespace.pop("__file__", None)
    namespace.pop("__cached__", None)
    return status


def _load_compiled(data: bytes) -> CodeType:
    if data[:4] != importlib.util.MAGIC_NUMBER:
        raise RuntimeError("Bad magic number in .pyc file")
    code = marshal.loads(data[16:])
    if not isinstance(code, CodeType):
        raise RuntimeError("Bad code object in .pyc file")  # noqa: TRY004  python's own
    return code


def _fresh_main() -> ModuleType:
    """Put a new ``__main__`` in place, with the attributes that the interpreter gives it at its start."""
    main = ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    vars(main)["__builtins__"] = builtins
    main.__loader__ = importlib.machinery.BuiltinImporter
    sys.modules["__main__"] = main
    return main


def _absolute(path: str) -> str:
    """The path as python puts it in ``__file__``: made absolute, not normalised."""
    if os.path.isabs(path):
        return path
    try:
        return os.path.join(os.getcwd(), path)
    except OSError:
        return path


def _safe_path() -> bool:
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))  # Python 3.10 has only -I


def _drop_launcher_path() -> None:
    """Take out the entry that the interpreter put in front of ``sys.path`` for fxsafe's own start."""
    if not sys.path:
        return
    launcher = sys.orig_argv[1] if len(sys.orig_argv) > 1 else ""
    entries = {launcher} if launcher else set()  # a zipped launcher is its own entry
    if not _safe_path():
        main = sys.modules.get("__main__")
        if getattr(main, "__spec__", None) is not None:
            with contextlib.suppress(OSError):
                entries.add(os.getcwd())
        else:
            started = getattr(main, "__file__", None)
            if started:
                entries.add(os.path.dirname(os.path.realpath(started)))
    if sys.path[0] in entries:
        del sys.path[0]


def _guarded(body: Callable[[], None], flush_first: bool = False) -> int:
    """Run ``body`` and print what it did not catch, as the interpreter does."""
    try:
        body()
    except SystemExit:
        raise
    except BaseException as error:
        failure = error
    else:
        return 0
    # Out of the except block: the hook must not see our handling as the context of what it raises.
    failure.__traceback__ = _without_our_frames(failure.__traceback__)
    if flush_first:
        _flush()
    _print_uncaught(failure)
    # Exactly this type, as in the interpreter: only the flag that it sets by itself makes it die by the signal.
    if type(failure) is KeyboardInterrupt:
        _raise_in_silence(failure)
    return 1


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def _flush() -> None:
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(Exception):  # the interpreter ignores it here too and meets it again when it ends
            stream.flush()


def _print_uncaught(error: BaseException) -> None:
    """What the interpreter does with an exception that reached the top.

    Raises:
        SystemExit: the hook's own.
    """
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    hook: Any = getattr(sys, "excepthook", None)
    if hook is None:
        _say("sys.excepthook is missing")
        sys.__excepthook__(type(error), error, error.__traceback__)
        return
    sys.audit("sys.excepthook", hook, type(error), error, error.__traceback__)
    try:
        hook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as raised:
        failed = raised
    else:
        return
    failed.__traceback__ = _without_our_frames(failed.__traceback__)
    _say("Error in sys.excepthook:")
    sys.__excepthook__(type(failed), failed, failed.__traceback__)
    _say("\nOriginal exception was:")
    sys.__excepthook__(type(error), error, error.__traceback__)
    _flush()


def _say(line: str) -> None:
    if sys.stderr is not None:
        print(line, file=sys.stderr)


def _raise_in_silence(error: BaseException) -> None:
    """Raise to the interpreter what was printed already."""
    hook, traceback = getattr(sys, "excepthook", None), error.__traceback__

    def silent(*_: object) -> None:
        if hook is None:
            del sys.excepthook
        else:
            sys.excepthook = hook
        error.__traceback__ = sys.last_traceback = traceback

    sys.excepthook = silent
    raise error
