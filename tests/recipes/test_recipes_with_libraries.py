from __future__ import annotations

import pytest
from support import ROOT, python


@pytest.mark.parametrize("name", ["serve_fastapi", "hf_trainer_threads"])
def test_a_recipe_works(name: str) -> None:
    done = python(str(ROOT / "examples" / f"{name}.py"), env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["serve_fastapi", "hf_trainer_threads"])
def test_an_unknown_argument_is_refused(name: str) -> None:
    done = python(str(ROOT / "examples" / f"{name}.py"), "--plian")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unrecognized arguments: --plian" in done.stderr
