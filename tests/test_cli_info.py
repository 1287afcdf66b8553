"""``fxsafe info``: what fxsafe does to the installed torch, for people and for programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxsafe.patches import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
NAMES = [patch.name for patch in CATALOGUE]


def fxsafe(*words: str, path: Path | None = None, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line; ``path`` comes before everything that is installed."""
    start = ["-m", "fxsafe", *words] if code is None else ["-c", code]
    entries = [str(entry) for entry in (path, ROOT) if entry is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}
    return subprocess.run(
        [sys.executable, *start], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_json_is_the_list_of_records() -> None:
    done = fxsafe("info", "--json")
    records = json.loads(done.stdout)
    assert done.returncode == 0
    assert [record["name"] for record in records] == NAMES
    assert {record["torch"] for record in records} == {torch.__version__}
    keys = {"name", "status", "fix", "target", "reason", "upstream", "torch", "counters"}
    assert all(set(record) == keys for record in records)


def test_people_see_every_patch_with_its_status() -> None:
    done = fxsafe("info")
    assert done.returncode == 0
    assert torch.__version__ in done.stdout
    for patch in CATALOGUE:
        assert f"\n{patch.name} " in done.stdout
    assert "target:" not in done.stdout


def test_who_asks_for_more_sees_the_places_and_the_links() -> None:
    done = fxsafe("info", "--verbose")
    assert done.returncode == 0
    assert "target:     torch.fx._symbolic_trace" in done.stdout
    assert "upstream:   https://github.com/pytorch/pytorch/" in done.stdout


def test_who_asks_for_more_sees_the_counters_that_are_not_0() -> None:
    program = """
import torch, fxsafe
from fxsafe.cli import main
fxsafe.install()
torch.fx.symbolic_trace(torch.nn.ReLU())
main(["info"])
print("MORE")
main(["info", "--verbose"])
"""
    less, _, more = fxsafe(code=program).stdout.partition("MORE")
    assert "counters:" not in less
    active = more.count("active  ")
    assert more.count("counters:   traces 1, most_traces_at_once 1") == more.count("counters:") == active > 0
    assert ", waits " not in more


def test_the_fix_decides_what_is_active() -> None:
    status = {
        record["name"]: record["status"]
        for record in json.loads(fxsafe("info", "--json", "--fix", "always-false").stdout)
    }
    assert status["tracing-flag"] == "disabled"


@pytest.mark.parametrize("command", ["info", "doctor"])
def test_an_unknown_fix_is_one_line_and_status_2(command: str) -> None:
    done = fxsafe(command, "--fix", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"fxsafe {command}: ")
    assert "nonsense" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_torch_is_one_line_and_status_2() -> None:
    done = fxsafe(code="import sys; sys.modules['torch'] = None; from fxsafe.cli import main; sys.exit(main(['info']))")
    assert (done.returncode, done.stdout) == (2, "")
    assert "torch is not installed" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["info", "doctor"])
def test_a_torch_that_cannot_be_imported_is_one_line_and_status_2(command: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch.so: cannot open shared object file')")
    done = fxsafe(command, path=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "libtorch.so" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fxsafe", "info"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert done.returncode == 1
    assert re.fullmatch(r"fxsafe: .*No space left on device\n", done.stderr)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "fxsafe", "info"], stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
