from __future__ import annotations

import subprocess

import pytest
from support import ROOT, python

RIGHT = """fxsafe in the worker: True
 100 graph right
 100 load right
 100 predict right
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return python(str(ROOT / "examples" / "ray_actor_threads.py"), *arguments, env=environment)


@pytest.mark.parametrize("arguments", [(), ("--hook",)], ids=["init", "hook"])
def test_every_call_is_right(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (0, RIGHT), done.stdout + done.stderr


def test_plain_torch_fails() -> None:
    # Of 300 calls two thirds trace, four at a time.
    done = run("--plain")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("fxsafe in the worker: False\n")


def test_an_unknown_argument_is_refused() -> None:
    done = run("--plian")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unrecognized arguments: --plian" in done.stderr
