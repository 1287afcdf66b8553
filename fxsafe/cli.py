"""The command line: ``fxsafe run``, ``fxsafe info``, ``fxsafe doctor`` and ``fxsafe dflash``.

A mistake of the user's is answered with one line on stderr and status 2, never with a traceback.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import fxsafe
from fxsafe import Fix, FxsafeError

__all__ = ["main"]

_HELP = "Make PyTorch's FX tracing, and all that stands on it, safe to use from several threads of one process."
_RUN_HELP = """\
Run a Python program with fxsafe installed before its first line, and otherwise as python would run it.

Threads begin with the settings of torch (torch._dynamo.config and its like) that the thread which starts them has
made; in plain torch 2.12 and later they begin with the defaults. Inductor's own threads still do.

Options of fxsafe stand before the program; everything after it belongs to the program.

Processes that the program starts afresh do not inherit fxsafe: workers of multiprocessing's "spawn" and
"forkserver" methods, and anything started with subprocess, run on plain torch. Call fxsafe.install() in a
module that they import. Forked processes keep it.
"""
_DOCTOR_HELP = """\
Try each known fault on the installed torch, in processes of their own, without fxsafe and with it.

The exit status is 0 if every fault that fxsafe claims to cure on this torch is cured and nothing works only
without it, and 1 otherwise.
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command line.

    Args:
        argv: without the program's name; ``sys.argv[1:]`` if None.

    Returns:
        The exit status.

    Raises:
        SystemExit: after ``--help``, ``--version`` and mistakes in the arguments, and whatever the program of
            ``run`` ends with.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not words:
        parser.print_help()
        return 0
    if words[0] == "dflash":
        # Split by hand, like the program of run: the trainer has a parser of its own.
        return _interruptible(lambda: _dflash(words[1:]))
    program: list[str] = []
    if words[0] == "run":
        # Split by hand: argparse would look for our options among the arguments of the program.
        words, program = _split_run(words)
    options, unknown = parser.parse_known_args(words)
    command = f"fxsafe {options.command}"
    if unknown:
        parser.exit(2, f"{command}: unrecognized arguments: {' '.join(unknown)} (see {command} --help)\n")
    try:
        if options.command == "info":
            return _interruptible(lambda: _info(options.fix, options.json, options.verbose))
        if options.command == "doctor":
            from fxsafe.doctor import examine

            return _interruptible(
                lambda: examine(fix=options.fix, timeout=options.timeout, jobs=options.jobs, as_json=options.json)
            )
        if not program:
            parser.exit(2, f"{command}: name a script, or a module with -m (see {command} --help)\n")
        # None leaves the decision to FXSAFE_STRICT.
        strict = options.strict or None
        fxsafe.install(options.fix, patches=options.patches, strict=strict, stall_after=options.stall_after)
        if options.record is not None:
            fxsafe.record(options.record).start()  # written when the interpreter ends, behind the last thread
        if not options.no_inherit:
            from fxsafe import settings

            settings.inherit()
    except FxsafeError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    # Not under the try: an FxsafeError of the program's is the program's.
    from fxsafe.run import run_module, run_script

    if program[0] == "-m":
        return run_module(program[1], program[2:])
    return run_script(program[0], program[1:])


def _dflash(words: Sequence[str]) -> int:
    try:
        from fxsafe.dflash.cli import main as dflash
    except ModuleNotFoundError as error:
        if (error.name or "fxsafe").partition(".")[0] == "fxsafe":
            raise
        print(
            "fxsafe dflash: trains drafters, small models that draft blocks of tokens for a large one; the package "
            f"{error.name} is missing: pip install 'fxsafe[dflash]'",
            file=sys.stderr,
        )
        return 2
    return dflash(words)


def _interruptible(command: Callable[[], int]) -> int:
    """Ctrl-C is an answer of the user's, not a fault to trace back, and so is a reader that has seen enough."""
    try:
        status = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        # What is left in the buffer would be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"fxsafe: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fxsafe", description=_HELP, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fxsafe {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    def add(name: str, summary: str, description: str, usage: str | None = None) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            usage=usage,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--fix", default="thread-local", help="as for fxsafe.install(); default: %(default)s")
        return command

    run = add(
        "run",
        "run a program with fxsafe installed",
        _RUN_HELP,
        "fxsafe run [--fix FIX] [--patches A,B] [--strict] [--no-inherit] [--record FILE] [--stall-after S] "
        "(SCRIPT | -m MODULE) [ARGUMENT ...]",
    )
    run.add_argument(
        "--patches", type=_patches, metavar="A,B", help="only these patches; default: all that go with the fix"
    )
    run.add_argument("--no-inherit", action="store_true", help="threads begin with torch's own settings")
    run.add_argument("--record", metavar="FILE", help="write a timeline of the threads for Perfetto")
    run.add_argument(
        "--stall-after", type=_positive, metavar="S", help="print who waits for whom after so many seconds of waiting"
    )
    run.add_argument("--strict", action="store_true", help="refuse to run on a torch that a patch does not know")
    info = add("info", "show what fxsafe does to the installed torch", "Show each patch and its status on this torch.")
    info.add_argument(
        "--verbose", action="store_true", help="with the places it changes, upstream's links and its counters"
    )
    doctor = add("doctor", "try the known faults on the installed torch", _DOCTOR_HELP)
    doctor.add_argument(
        "--timeout", type=_positive, default=120.0, metavar="S", help="seconds for one try; default: 120"
    )
    doctor.add_argument("--jobs", type=_count, default=2, metavar="N", help="tries at one time; default: 2")
    commands.add_parser("dflash", help="train DFlash drafters; needs fxsafe[dflash]", add_help=False)
    for command in (info, doctor):
        command.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def _patches(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        # A shell variable that is not set, most likely; the program would run unprotected and nobody would know.
        raise argparse.ArgumentTypeError(
            f"{text!r} names no patch; leave --patches out for all of them, or set FXSAFE_DISABLE=1 for none"
        )
    return names


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _version() -> str:
    try:
        return importlib.metadata.version("fxsafe")
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(fxsafe, "__version__", "(not installed)"))


def _split_run(words: list[str]) -> tuple[list[str], list[str]]:
    """Part ``run``'s own words from the program: ``["-m", module, ...]`` or ``[script, ...]``, empty if none."""
    at = 1
    while at < len(words):
        word = words[at]
        if word == "--":
            return words[:at], words[at + 1 :]
        if word == "-m":
            return (words[:at], words[at:]) if at + 1 < len(words) else (words[:at], [])
        if word.startswith("-m"):
            return words[:at], ["-m", word[2:], *words[at + 1 :]]
        if not word.startswith("-") or word == "-":
            return words[:at], words[at:]
        at += 2 if word in ("--fix", "--patches", "--record", "--stall-after") else 1
    return words, []


def _info(fix: Fix, as_json: bool, verbose: bool) -> int:
    fxsafe.install(fix)
    if importlib.util.find_spec("torch") is None:
        raise FxsafeError(f"torch is not installed for {sys.executable}")
    try:
        import torch
    except (ImportError, OSError) as error:
        raise FxsafeError(f"torch cannot be imported: {error}") from error
    from fxsafe.patches import CATALOGUE

    # A patch that waits for a module would say nothing of this torch. Other libraries take seconds, and may be broken.
    for name in dict.fromkeys(m for patch in CATALOGUE for m in patch.modules if m.partition(".")[0] == "torch"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    records = fxsafe.info()
    if as_json:
        print(json.dumps(records, indent=2, default=str))
        return 0
    print(f"fxsafe {_version()} on torch {torch.__version__}, fix {fix}")
    counts = collections.Counter(record["status"] for record in records)
    print(", ".join(f"{number} {status}" for status, number in counts.most_common()))
    summaries = {patch.name: patch.summary for patch in CATALOGUE}
    print()
    for record in records:
        print(_block(record, summaries[record["name"]], verbose))
    return 0


def _block(record: Mapping[str, Any], summary: str, verbose: bool) -> str:
    """One patch for people: its name and status, what it does or why it does not, and more where it is asked for."""
    width = shutil.get_terminal_size((110, 24)).columns
    head = f"{record['name']:<21}{record['status']:<12}"
    lines = _wrapped(head, _plain(record["reason"]) or summary, width)
    if verbose:
        counters = {name: count for name, count in record["counters"].items() if count}
        for key, value in (("target", record["target"]), ("upstream", record["upstream"]), ("counters", counters)):
            if text := _plain(value):
                lines += _wrapped(" " * 21 + f"{key + ':':<12}", text, width)
    return "\n".join(lines)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        head + text,
        max(width, 60),
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(value: object) -> str:
    if not value:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(str(part) for part in value)
    return str(value)
