"""``fxsafe dflash stress``: its modes, what counts as a hang or an eager step, and its table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx._symbolic_trace as symbolic

import fxsafe
from fxsafe.dflash.cli import main
from fxsafe.dflash.compiling import promise_recompile_limit, recompile_limit_here
from fxsafe.dflash.errors import DFlashError, SettingsError
from fxsafe.dflash.stress import load, runner
from fxsafe.dflash.stress.command import plan_of
from fxsafe.dflash.stress.plan import MODES, Plan, modes_of
from fxsafe.dflash.stress.report import draw, summary, table
from fxsafe.dflash.stress.start import run_start

PLAN = Plan(
    threads=2,
    devices=("cpu",),
    backend="eager",
    seconds=600.0,
    steps=10,
    starts=1,
    stall_after=100.0,
    shapes=2,
    trace_every=1,
    hidden=32,
    layers=1,
    length=32,
    anchors=4,
    block=4,
    batch=1,
)
BY_NAME = {mode.name: mode for mode in MODES}


def options(**changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {"seconds": 80.0, "starts": 2, "threads": 2, "devices": "cpu", "backend": "auto"}
    values |= {
        "shapes": None,
        "trace_every": 1,
        "stall_after": None,
        "steps": 0,
        "at_most": None,
        "spawn": False,
        "jobs": 1,
    }
    values |= dict.fromkeys(("hidden", "layers", "length", "anchors", "block", "batch", "record"))
    return argparse.Namespace(**(values | changes))


def test_the_time_is_divided_over_modes_and_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert plan_of(options()).seconds == 80 / 2 / len(MODES)
    assert plan_of(options(), modes_of(["plain", "fxsafe"])).seconds == 20
    assert plan_of(options(jobs=2), modes_of(["plain", "fxsafe"])).seconds == 40
    assert plan_of(options(devices="cuda:0,cuda:1")).devices == ("cuda:0", "cuda:1")


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any]
    for changes in (
        {"threads": 0},
        {"hidden": 0},
        {"seconds": 0.0},
        {"trace_every": -1},
        {"devices": ""},
        {"stall_after": 0.0},
        {"devices": "cpu,foo"},
        {"devices": "meta"},
        {"devices": "cuda:99"},
        {"backend": "nope"},
    ):
        with pytest.raises(SettingsError):
            plan_of(options(**changes))
    for words, says in (
        (["--modes", "plain,plane"], "--modes plane is unknown"),
        (["--modes", " , "], "--modes ' , ' names no mode"),
        (["--json", "/no/such/place/x.json"], "--json /no/such/place/x.json cannot be written"),
        (["--png", "picture.xyz"], "--png picture.xyz: a picture's name ends in one of"),
    ):
        assert main(["stress", *words]) == 2
        assert says in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FXSAFE_DISABLE", "1")
        assert main(["stress", "--modes", "fxsafe"]) == 2
        assert "FXSAFE_DISABLE is set" in capsys.readouterr().err


def test_more_jobs_than_starts_give_no_more_time() -> None:
    assert plan_of(options(jobs=8, starts=1), modes_of(["fxsafe"])).seconds == 80


SHORT = ["--steps=2", "--seconds=9", "--backend=eager", "--threads=1", "--hidden=32", "--length=32", "--anchors=4"]


def test_what_cannot_be_written_at_the_end_costs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "b.png"
    words = ["stress", "--modes", "fxsafe", *SHORT, "--json", "/dev/full", "--png", str(picture)]
    assert main(words) == 1
    told = capsys.readouterr()
    assert "--json /dev/full cannot be written: [Errno 28]" in told.err
    assert "all of fxsafe  2 of 2 (100.0%)" in told.out
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_an_interrupted_run_shows_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner.run_at_once

    def interrupted(plans: Any, modes: Any) -> Any:
        if modes[0].name == "fxsafe":
            raise KeyboardInterrupt
        return run(plans, modes)

    monkeypatch.setattr(runner, "run_at_once", interrupted)
    numbers = tmp_path / "a.json"
    assert main(["stress", "--modes", "cleared,fxsafe", *SHORT, "--json", str(numbers)]) == 130
    assert re.search(r"flag cleared before each call +2 of 2 \(100.0%\)", capsys.readouterr().out)
    assert [len(row["starts"]) for row in json.loads(numbers.read_text())["modes"]] == [1, 0]


def test_a_start_that_dies_at_once_is_a_row_if_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any) -> None:
        signal.raise_signal(signal.SIGKILL)

    rows: list[dict[str, Any]] = []
    plan = dataclasses.replace(PLAN, threads=1, steps=2)
    kept = load.Drafter.run
    monkeypatch.setattr(load.Drafter, "run", lambda self, *a: dies() if fxsafe.is_installed() else kept(self, *a))
    runner.run_modes(plan, modes_of(["cleared", "fxsafe"]), lambda _: None, rows)
    (dead,) = rows[1]["starts"]
    assert (dead["tried"], dead["died"], dead["residue"]) == (0, ["status -9: it said nothing"], None)
    assert "0 of 1, 1 died" in table(rows)
    assert rows[0]["starts"][0]["ok"] == 2


@pytest.mark.parametrize("jobs", [1, 4])
def test_the_first_start_of_fxsafe_is_recorded_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    seen = []
    monkeypatch.setattr(
        runner,
        "run_at_once",
        lambda plans, modes: [
            seen.append((mode.name, plan.record))
            or {"tried": 1, "ok": 1, "hung": 0, "eager": 0, "residue": [], "died": []}
            for plan, mode in zip(plans, modes, strict=True)
        ],
    )
    plan = dataclasses.replace(PLAN, starts=2, jobs=jobs, record="here")
    runner.run_modes(plan, modes_of(["plain", "fxsafe"]), lambda _: None)
    assert seen == [("plain", None), ("fxsafe", "here"), ("plain", None), ("fxsafe", None)]


def test_errors_of_one_kind_are_one_kind() -> None:
    assert load.kind_of(RuntimeError("at 0x7f00 and 12\nmore")) == "RuntimeError: at N and N"
    assert load.kind_of(KeyError()) == "KeyError"
    assert (
        load.kind_of(ValueError("backend raised:\nNameError: x\n\nmore")) == "ValueError: backend raised: NameError: x"
    )


def test_traces_are_compared_with_those_of_a_quiet_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for job in load.trace_jobs():
        job()
    monkeypatch.setattr(load, "_made", [(lambda: "this graph", "that graph")])
    with pytest.raises(load.WrongAnswer):
        load.trace_jobs()[0]()


@pytest.fixture
def limit() -> Any:
    before = recompile_limit_here()
    promise_recompile_limit()
    yield
    promise_recompile_limit(before)
    torch._dynamo.reset()


@pytest.mark.usefixtures("limit")
def test_a_step_that_runs_eager_in_silence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dataclasses.replace(PLAN, steps=3, trace_every=0)
    drafter = load.Drafter(plan, BY_NAME["plain"], 0, load.make_target(plan, torch.device("cpu")))
    drafter.run(time.perf_counter() + 1e9, lambda: False)
    assert (drafter.record.ok, drafter.record.eager, drafter.record.done) == (3, 0, True)
    if not hasattr(symbolic, "_is_fx_tracing_flag"):
        pytest.skip("the flag is per thread: nothing can set it for others")
    monkeypatch.setattr(symbolic, "_is_fx_tracing_flag", True)
    # Not monkeypatch, which deletes the setting at the end: torch 2.6 compiles nothing without it.
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        drafter.run(time.perf_counter() + 1e9, lambda: False)
    assert (drafter.record.ok, drafter.record.eager) == (6, 3)


@pytest.mark.parametrize("name", ["fxsafe", "processes"])
def test_a_start_in_processes_of_its_own(name: str) -> None:
    outcome = runner.run_mode(PLAN, BY_NAME[name])
    assert outcome["ok"] == outcome["tried"] == 2 * PLAN.steps
    assert (outcome["errors"], outcome["hung"], outcome["died"], outcome["eager"]) == ({}, 0, [], 0)
    assert outcome["residue"] == []
    assert outcome["steady_tokens_per_second"] > 0
    assert ("traces" in outcome["counters"]) == (name == "fxsafe")
    assert not fxsafe.is_installed()


def test_starts_in_turns_several_at_a_time() -> None:
    said: list[str] = []
    plan = dataclasses.replace(PLAN, threads=1, starts=2, jobs=3, steps=2)
    rows = runner.run_modes(plan, modes_of(["cleared", "fxsafe"]), said.append)
    assert [(row["mode"], [start["ok"] for start in row["starts"]]) for row in rows] == [
        ("cleared", [2, 2]),
        ("fxsafe", [2, 2]),
    ]
    assert [line.partition(":")[0] for line in said] == [
        "flag cleared before each call, start 1 of 2",
        "all of fxsafe, start 1 of 2",
        "flag cleared before each call, start 2 of 2",
        "all of fxsafe, start 2 of 2",
    ]
    rows = runner.run_modes(dataclasses.replace(plan, jobs=1, at_most=0.0), modes_of(["fxsafe"]), said.append)
    assert rows[0]["starts"] == []
    assert said[-1] == "the time is over: 2 starts are left out"


def test_a_process_that_is_started_afresh() -> None:
    outcome = runner.run_mode(dataclasses.replace(PLAN, spawn=True, threads=1), BY_NAME["plain"])
    assert outcome["ok"] == outcome["tried"] == PLAN.steps


@pytest.mark.parametrize("blocked", [(), (signal.SIGUSR1,)])  # a mask is inherited from whoever started us
def test_a_hang_is_noticed_from_outside_and_its_stacks_are_kept(
    monkeypatch: pytest.MonkeyPatch, blocked: tuple[signal.Signals, ...]
) -> None:
    def hangs_here(self: load.Drafter, *_: Any) -> None:
        if self.number == 1:
            threading.Event().wait()
        self.record.ok, self.record.done = 7, True

    monkeypatch.setattr(load.Drafter, "run", hangs_here)  # the forked child inherits it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        outcome = runner.run_mode(dataclasses.replace(PLAN, stall_after=4.0), BY_NAME["plain"])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (outcome["hung"], outcome["ok"], outcome["died"]) == (1, 7, [])
    assert "in hangs_here" in outcome["stacks"][0]
    assert outcome["steady_tokens_per_second"] is None


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_of_a_process_that_writes_no_stacks_the_kernel_says_where_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(flush=True); signal.pause()"
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setattr(runner, "_DUMP_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        runner._dump_and_kill(runner._Child(process.pid, process.stdout, log, []))
    assert process.returncode == -signal.SIGKILL
    assert re.search(rf"no stacks within 0.1 s[^\n]*\n.*\({process.pid}\), State:\t[A-Z] ", log.read_text())


@pytest.mark.usefixtures("limit")
def test_what_is_compiled_while_warming_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()

    def warms(self: load.Drafter) -> None:
        assert told.wait(60), "nobody was told anything during the warm-up: a long one would pass for a hang"

    monkeypatch.setattr(load.Drafter, "warm", warms)
    states: list[dict[str, Any]] = []
    plan = dataclasses.replace(PLAN, threads=1, steps=1)
    run_start(plan, BY_NAME["warmed"], [0], lambda state: (states.append(state), told.set())[0])
    assert ("graphs" in states[0], states[0]["drafters"][0]["tried"]) == (True, 0)
    assert (states[-1]["ended"], states[-1]["drafters"][0]["ok"]) == (True, 1)


def test_a_start_that_fails_before_its_first_step_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no such target")

    monkeypatch.setattr("fxsafe.dflash.stress.start.make_target", broken)
    with pytest.raises(
        DFlashError, match="the starts end before their first step: status 1: ValueError: no such target"
    ):
        runner.run_modes(PLAN, [BY_NAME["plain"]], lambda _: None)


def test_a_drafter_is_stuck_when_neither_it_nor_any_compile_moves(tmp_path: Path) -> None:
    child = runner._Child(0, None, tmp_path / "log", [0, 1])  # type: ignore[arg-type]

    def hear(now: float, tried: tuple[int, int], graphs: int, ended: bool = False) -> None:
        rows = [{"number": n, "tried": t, "done": t == 9} for n, t in enumerate(tried)]
        child.hear(json.dumps({"drafters": rows, "graphs": graphs, "ended": ended}).encode() + b"\n", now)

    hear(0, (0, 0), 0)
    hear(8, (1, 0), 1)  # one compiles, the other may be waiting for it
    assert not child.stuck(17, 10)
    hear(17, (5, 0), 1)
    assert child.stuck(19, 10)  # one steps, the other does not
    hear(19, (9, 1), 1)
    hear(40, (9, 9), 1)
    assert not child.stuck(45, 10)  # both are done
    assert child.stuck(51, 10)  # and the process says nothing more
    hear(52, (9, 9), 1, ended=True)
    assert not child.stuck(99, 10)


def outcome(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"ok": 8, "tried": 10, "errors": {"NameError: x": 2}, "eager": 1, "hung": 0, "died": []}
    values |= {"stacks": [], "tokens": 100, "first_s": 2.0, "first_tokens_per_second": 5.0, "residue": []}
    values |= {"steady_tokens_per_second": 50.0, "peak_rss_mb": 300.0, "peak_device_mb": None, "graphs": 3}
    return values | changes


def test_the_table_adds_starts_up(tmp_path: Path) -> None:
    hung = outcome(ok=0, tried=0, errors={}, hung=1, first_s=None, steady_tokens_per_second=None, residue=["flag"])
    rows = [{"mode": "plain", "label": "plain torch", "starts": [outcome(), hung, outcome(errors={"OSError": 3})]}]
    found = summary(rows[0])
    assert (found["ok"], found["tried"], found["hung"], found["first_s"]) == (16, 20, 1, 2.0)
    text = table(rows)
    assert "16 of 20 (80.0%)" in text
    assert "1 of 3" in text
    assert text.splitlines()[-2:] == ["plain torch: 3 x OSError", "plain torch: 2 x NameError: x"]
    assert table(rows, markdown=True).splitlines()[1].startswith("|---|")
    draw(rows, tmp_path / "x.png", "title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
