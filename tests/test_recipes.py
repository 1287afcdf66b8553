"""The scripts of docs/recipes.md do with fxsafe what they say."""

from __future__ import annotations

import os

import pytest
from support import ROOT, python

SCRIPTS = ("data_parallel", "agents")
WITH_LIBRARIES = ("serve_fastapi", "hf_trainer_threads")  # run by tests/recipes


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipe_works(name: str) -> None:
    done = python(str(ROOT / "examples" / f"{name}.py"), env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_pytest_with_threads() -> None:
    words = ("-m", "pytest", "--parallel-threads=4", "-q", "-p", "no:cacheprovider", "examples/pytest_threads")
    done = python(*words, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_every_recipe_is_described() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    names = [f"examples/{name}.py" for name in (*SCRIPTS, *WITH_LIBRARIES)] + ["examples/pytest_threads"]
    assert all(name in text and os.path.exists(ROOT / name) for name in names)
