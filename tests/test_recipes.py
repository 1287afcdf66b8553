"""The scripts of docs/recipes.md do with fxsafe what they say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support import FLAG_IS_GLOBAL, ROOT, python

SCRIPTS = ("data_parallel", "agents")
# Run by tests/recipes; with what they need.
WITH_LIBRARIES = {
    "serve_fastapi": ("fastapi", "httpx"),
    "hf_trainer_threads": ("transformers", "accelerate"),
    "lightning_threads": ("lightning",),
    "ray_actor_threads": ("ray",),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipe_works(name: str) -> None:
    done = python(str(ROOT / "examples" / f"{name}.py"), env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_demo_shows_the_fault_and_its_absence_with_each_fix() -> None:
    done = python(str(ROOT / "examples" / "demo.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    plain, *fixed = done.stdout.splitlines()[1:]
    assert ("the warm call FAILS" in plain) == FLAG_IS_GLOBAL
    assert [line.partition("the warm call ")[2] for line in fixed] == ["gives the right result"] * 2


def test_the_timeline_of_the_picture(tmp_path: Path) -> None:
    file = tmp_path / "race.json"
    done = python(str(ROOT / "examples" / "timeline.py"), str(file), env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    events = json.loads(file.read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    refused = {"server"} if FLAG_IS_GLOBAL else set()  # its lane is of calls that torch would have refused
    assert lanes >= {"symbolic_trace", "make_fx", "compile aot_eager", "compile eager"} | refused
    assert {"trace", "compile"} <= {event["name"] for event in events}


@pytest.mark.parametrize("name", [*SCRIPTS, "demo", "timeline"])
def test_an_unknown_argument_is_refused(name: str) -> None:
    done = python(str(ROOT / "examples" / f"{name}.py"), "--plian")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unrecognized arguments: --plian" in done.stderr


@pytest.mark.parametrize("name", WITH_LIBRARIES)
def test_a_recipe_without_its_libraries_says_what_to_install(name: str) -> None:
    missing = WITH_LIBRARIES[name]
    path = str(ROOT / "examples" / f"{name}.py")
    # None in sys.modules: as if it were not installed, whether or not it is.
    done = python("-c", f"import runpy, sys; sys.modules.update(dict.fromkeys({missing})); runpy.run_path({path!r})")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"this example needs {' and '.join(missing)}: pip install {' '.join(missing)}\n"


def test_pytest_with_threads() -> None:
    words = ("-m", "pytest", "--parallel-threads=4", "-q", "-p", "no:cacheprovider", "examples/pytest_threads")
    done = python(*words, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_every_recipe_is_described() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    names = [f"examples/{name}.py" for name in (*SCRIPTS, *WITH_LIBRARIES)] + ["examples/pytest_threads"]
    assert all(name in text and os.path.exists(ROOT / name) for name in names)
