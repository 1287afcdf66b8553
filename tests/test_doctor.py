"""``fxsafe doctor``: the fault programs, the processes that try them, and what is made of the answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fxsafe.cli import main
from fxsafe.doctor import examination, examine
from fxsafe.doctor.programs import Program, programs
from fxsafe.doctor.trial import Outcome, Trials
from fxsafe.doctor.verdict import Claim, judge
from fxsafe.patches import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
KNOWN = programs()
posix = pytest.mark.skipif(os.name != "posix", reason="process groups and signals of POSIX")


@pytest.fixture
def trials(tmp_path: Path) -> Iterator[Trials]:
    made = Trials(60, tmp_path)
    yield made
    made.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie has ended; in a container nobody may collect it.
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if not alive(pid):
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


# The programs


@pytest.mark.parametrize("patch", CATALOGUE, ids=lambda patch: patch.name)
def test_every_fault_that_a_patch_names_has_a_program(patch: Any) -> None:
    assert set(patch.faults) <= {program.name for program in KNOWN}


@pytest.mark.parametrize("program", KNOWN, ids=lambda program: program.name)
def test_a_program_tells_people_what_and_what_to_do(program: Program) -> None:
    assert 20 < len(program.title) < 120
    assert len(program.advice) > 20


def test_a_program_without_advice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fault.py").write_text('"""A title."""\nADVICE = 3\n')
    with pytest.raises(ValueError, match="ADVICE"):
        programs(tmp_path)


def test_the_doctor_itself_imports_no_torch() -> None:
    code = "import sys, fxsafe.doctor as d, fxsafe.doctor.programs as p; p.programs(); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0


@pytest.fixture(scope="module")
def active(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the patches that are active on this torch."""
    state = Trials(120, tmp_path_factory.mktemp("probe")).run(["-m", "fxsafe.doctor.probe", "thread-local"])
    assert state.kind == "ok", state
    return {record["name"] for record in state.facts["patches"] if record["status"] == "active"}


@pytest.mark.parametrize("program", KNOWN, ids=lambda program: program.name)
def test_a_program_answers_and_what_fxsafe_claims_is_cured(program: Program, active: set[str], tmp_path: Path) -> None:
    outcome = Trials(200, tmp_path).run(["-m", "fxsafe", "run", "-m", program.module])
    claimed = any(program.name in patch.faults for patch in CATALOGUE if patch.name in active)
    # Where nothing is claimed the process may even die of the fault: on torch 2.5 of a reset beside a compiled call.
    assert outcome.kind in (("ok", "cannot-try") if claimed else ("ok", "fault", "crashes", "cannot-try")), outcome


# The processes


@pytest.mark.parametrize(
    ("code", "kind", "detail"),
    [
        ("print('RESULT {\"bug\": false}')", "ok", ""),
        ("print('noise'); print('RESULT {\"bug\": true}'); sys.exit(1)", "fault", ""),
        ('print(\'RESULT {"bug": null, "why": "no device"}\'); sys.exit(2)', "cannot-try", "no device"),
        ("1/0", "broken", "exit status 1: ZeroDivisionError: division by zero"),
        ("pass", "broken", "exit status 0: no message"),
        ("print('RESULT {\"bug\": false}'); sys.exit(1)", "broken", "exit status 1: no message"),
        ("print('RESULT {\"bug\": true}')", "broken", "exit status 0: no message"),
        ("print('RESULT nonsense')", "broken", "exit status 0: no message"),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", "crashes", "SIGSEGV", marks=posix),
    ],
)
def test_an_ending_is_named(code: str, kind: str, detail: str, trials: Trials) -> None:
    outcome = trials.run(["-c", f"import os, signal, sys\n{code}"])
    assert (outcome.kind, outcome.detail) == (kind, detail)


@posix
def test_a_hang_is_a_result_and_its_children_are_killed(tmp_path: Path) -> None:
    code = """
    import os, sys, time
    child = os.fork()
    if child: open("child", "w").write(str(child))
    time.sleep(600)
    """
    outcome = Trials(2, tmp_path).run(["-c", textwrap.dedent(code)])
    assert outcome.kind == "hangs"
    assert gone(int((tmp_path / "child").read_text()))


@posix
def test_a_child_that_outlives_its_program_is_killed(trials: Trials, tmp_path: Path) -> None:
    code = """
    import os, sys, time
    child = os.fork()
    if not child:
        sys.stdout.close(); sys.stderr.close(); os.close(1); os.close(2)
        time.sleep(600)
    open("child", "w").write(str(child))
    print('RESULT {"bug": false}')
    """
    assert trials.run(["-c", textwrap.dedent(code)]).kind == "ok"
    assert gone(int((tmp_path / "child").read_text()))


def test_nothing_starts_after_the_end(trials: Trials) -> None:
    trials.close()
    with pytest.raises(RuntimeError):
        trials.run(["-c", ""])


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_doctor_and_all_its_processes(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    slow = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    (tmp_path / "torch" / "__init__.py").write_text(slow)
    doctor = subprocess.Popen(
        [sys.executable, "-m", "fxsafe", "doctor"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    doctor.send_signal(number)
    out, err = doctor.communicate(timeout=30)
    assert doctor.returncode != 0
    assert out == ""
    assert "Traceback" not in err
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_torch_that_hangs_at_its_import_is_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time\ntime.sleep(600)")
    done = subprocess.run(
        [sys.executable, "-m", "fxsafe", "doctor", "--timeout", "2"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fxsafe doctor: importing torch with fxsafe: no answer in 2 s\n"


# What is made of it

OK, FAULT, HANGS = (Outcome(kind, "", {}) for kind in ("ok", "fault", "hangs"))
CANNOT = Outcome("cannot-try", "no device", {})
FAULTY = Program("some_fault", "Something goes wrong", "avoid it")


@pytest.mark.parametrize(
    ("plain", "patched", "status", "failed", "advice"),
    [
        (FAULT, OK, "active", False, "nothing more: a-patch cures it"),
        (HANGS, OK, "active", False, "nothing more: a-patch cures it"),
        (OK, OK, "active", False, "nothing: this torch does not show it, and a-patch guards against it"),
        (CANNOT, CANNOT, "active", False, "cannot be tried here: no device"),
        (FAULT, FAULT, "active", True, "NOT CURED"),
        (FAULT, HANGS, "active", True, "NOT CURED"),
        (FAULT, CANNOT, "active", True, "NOT CURED"),
        (OK, FAULT, "active", True, "SHOWS ONLY WITH FXSAFE"),
        (OK, FAULT, None, True, "SHOWS ONLY WITH FXSAFE"),
        (OK, OK, "not-needed", False, "nothing: this torch does not have it (a-patch: not-needed)"),
        (OK, OK, None, False, "nothing: this torch does not have it"),
        (FAULT, FAULT, "unsupported", False, "a-patch is unsupported (because): avoid it"),
        (FAULT, FAULT, "disabled", False, "a-patch is disabled (because): avoid it"),
        (FAULT, FAULT, None, False, "not cured by fxsafe: avoid it"),
        (FAULT, OK, None, False, "`python -m fxsafe run` cures it; with install() alone: avoid it"),
    ],
)
def test_two_answers_become_a_verdict(
    plain: Outcome, patched: Outcome, status: str | None, failed: bool, advice: str
) -> None:
    claims = [] if status is None else [Claim("a-patch", status, "because")]
    finding = judge(FAULTY, plain, patched, claims)
    assert finding.claimed == (status == "active")
    assert finding.failed == failed
    assert finding.advice.startswith(advice)


class FakeTrials(Trials):
    """Answers at once; ``answers`` maps (module, with fxsafe) to a kind."""

    answers: dict[tuple[str, bool], str]
    records: list[dict[str, Any]]

    def run(self, words: Any) -> Outcome:
        if "fxsafe.doctor.probe" in words:
            return Outcome("ok", "", {"torch": "9.9", "patches": self.records, "warnings": ["untested"]})
        return Outcome(self.answers.get((words[-1].rpartition(".")[2], "run" in words), "ok"), "", {})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeTrials]:
    FakeTrials.answers = {
        ("flag_warm_call", False): "fault",
        ("rng_rewind", False): "fault",
        ("rng_rewind", True): "fault",
    }
    FakeTrials.records = [{"name": "tracing-flag", "status": "active", "reason": ""}]
    monkeypatch.setattr(examination, "Trials", FakeTrials)
    monkeypatch.setenv("COLUMNS", "120")
    return FakeTrials


def test_json_has_a_record_per_fault(fake: type[FakeTrials], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["torch"], report["fix"], report["ok"]) == ("9.9", "thread-local", True)
    faults = {fault["name"]: fault for fault in report["faults"]}
    assert set(faults) == {program.name for program in KNOWN}
    warm, rewind = faults["flag_warm_call"], faults["rng_rewind"]
    assert (warm["plain"], warm["with_fxsafe"], warm["claimed"]) == ("fault", "ok", True)
    assert "tracing-flag" in [patch["name"] for patch in warm["patches"]]
    assert (rewind["plain"], rewind["with_fxsafe"], rewind["claimed"], rewind["patches"]) == (
        "fault",
        "fault",
        False,
        [],
    )
    assert "torch.Generator" in rewind["advice"]


def test_the_table_has_a_row_per_fault(fake: type[FakeTrials], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr()
    for program in KNOWN:
        assert f"[{program.name}]" in printed.out
    assert "FAULT" in printed.out
    assert "OK: of " in printed.out
    assert printed.err == "warning: untested\n"


def test_a_claimed_fault_that_is_not_cured_fails(fake: type[FakeTrials], capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["flag_warm_call", True] = "hangs"
    assert main(["doctor"]) == 1
    assert "NOT OK: fxsafe claims to cure flag_warm_call, and does not." in capsys.readouterr().out


def test_a_patch_that_names_no_program_fails(
    fake: type[FakeTrials], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examination, "programs", lambda: [p for p in KNOWN if p.name != "flag_warm_call"])
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [fault["name"] for fault in report["faults"] if fault["failed"]] == ["flag_warm_call"]


def test_the_doctor_can_be_asked_for_from_python(fake: type[FakeTrials], capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(fix="thread-local", timeout=1, jobs=1, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


@pytest.mark.parametrize("words", [["--timeout", "0"], ["--timeout", "x"], ["--jobs", "0"], ["extra"]])
def test_a_mistake_in_the_options_is_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *words])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
