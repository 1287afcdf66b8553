"""Runs programs in fresh interpreters, with some patches of the catalogue or with none."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fxsafe

_HERE = Path(__file__).parent
# Long enough for cold imports on a loaded machine; a program that hangs is the failure itself.
_LIMIT_S = 120


def patch(name: str) -> Any:
    return importlib.import_module(f"fxsafe.patches.{name.replace('-', '_')}").PATCH


def plan_of(name: str) -> Any:
    found = patch(name)
    return found.plan({module: importlib.import_module(module) for module in found.modules})


@contextlib.contextmanager
def applied(*names: str) -> Iterator[None]:
    """These patches and no other while the block runs."""
    for name in names:
        for module in patch(name).modules:
            importlib.import_module(module)
    with fxsafe.install(patches=names) if names else contextlib.nullcontext():
        yield


def run(program: str, *names: str) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in an interpreter of its own, inside ``applied(*names)``."""
    source = (
        "import threading, torch\nfrom locks_support import applied, patch\n"
        f"with applied(*{names!r}):\n" + textwrap.indent(textwrap.dedent(program), "    ")
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(_HERE.parent), str(_HERE)]), PYTHONWARNINGS="ignore")
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", source],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        env=environment,
    )


def passes(program: str, *names: str) -> None:
    done = run(program, *names)
    assert done.returncode == 0, done.stdout + done.stderr


def fails(program: str, symptom: str, *names: str) -> None:
    """The canary: without the patch the fault shows, and by this symptom."""
    done = run(program, *names)
    assert done.returncode != 0, f"no fault without the patch:\n{done.stdout}{done.stderr}"
    assert symptom in done.stderr, done.stdout + done.stderr
