from __future__ import annotations

import subprocess

from support import ROOT, python


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python(str(ROOT / "examples" / "lightning_threads.py"), *arguments, env={"OMP_NUM_THREADS": "1"})


def test_the_losses_are_those_of_a_serial_run() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("40 of 40 steps, the losses of the serial run") == 4


def test_plain_torch_fails() -> None:
    # Each of 160 steps has an eager module and a compiled call, either of which fails while a module is loaded, and
    # modules are loaded all the time.
    done = run("--plain")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count(" of 40 steps, ") == 4
    assert done.stdout.count("40 of 40 steps, the losses of the serial run") < 4


def test_an_unknown_argument_is_refused() -> None:
    done = run("--plian")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unrecognized arguments: --plian" in done.stderr
