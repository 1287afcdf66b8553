"""What a type checker says of programs that use fxsafe."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from support import python

import fxsafe
from fxsafe.patches import FIXES

# Each line that must be refused says so; mypy also refuses an ignore for which there is no reason.
PROGRAM = """
from typing import assert_type

import fxsafe
from fxsafe import settings


def work(x: int, *, y: str = "") -> float:
    return float(x)


carried = settings.carried(work)
assert_type(carried(1, y="a"), float)
carried("1")  # type: ignore[arg-type]

fix: fxsafe.Fix = "always-false"
fxsafe.install(fix)
fxsafe.install(fix="alway-false")  # type: ignore[arg-type]
fxsafe.installed("thread-local")
fxsafe.installed("thread_local")  # type: ignore[arg-type]

for record in fxsafe.info():
    status: fxsafe.Status = record["status"]
    if status == "activ":  # type: ignore[comparison-overlap]
        pass
"""
# Torch is left out: reading it takes ten seconds, and nothing above depends on it.
CONFIG = """
[mypy]
strict = true
python_version = 3.11
[mypy-torch.*,wrapt.*]
follow_imports = skip
"""


def test_names_that_do_not_exist_are_refused_and_a_carried_function_keeps_its_signature(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    words = ("--config-file", "mypy.ini", "--cache-dir", str(tmp_path / "cache"), "program.py")
    done = python("-m", "mypy", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_types_are_what_is_accepted_and_said() -> None:
    assert get_args(fxsafe.Fix) == FIXES
    assert {record["status"] for record in fxsafe.info()} <= set(get_args(fxsafe.Status))
