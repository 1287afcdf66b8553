"""Counters, ``fxsafe.record`` and the watchdog."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx._symbolic_trace as st
from places import changed_places
from support import FLAG_IS_GLOBAL, GUARD_ASKS_SYMBOLIC, SOON_S, Task, X, double_plus_one, program, trace_elsewhere
from torch._dynamo import convert_frame

import fxsafe
from fxsafe import traces
from fxsafe.observe import events, recorder, watchdog

PREDICATE = "is_fx_symbolic_tracing" if GUARD_ASKS_SYMBOLIC else "is_fx_tracing"
WAIT = "wait for Dynamo's compile lock"


def counters(name: str) -> dict[str, Any]:
    return {record["name"]: record for record in fxsafe.info()}[name]["counters"]


def flag_patch(fix: str) -> str:
    return "tracing-flag" if fix == "thread-local" else "guard-override"


class Told:
    """Listens, and lets a test wait until something was told."""

    def __init__(self, wanted: str) -> None:
        self.wanted, self.happened = wanted, threading.Event()

    def __call__(self, phase: str, what: str, depth: int) -> None:
        if what == self.wanted:
            self.happened.set()

    def __enter__(self) -> Told:
        with traces.lock:
            events.listen(self)
        return self

    def __exit__(self, *_: object) -> None:
        with traces.lock:
            events.unlisten(self)


def spans(path: Path, name: str) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    return [event for event in content["traceEvents"] if event["name"] == name and event["ph"] != "M"]


def lanes(path: Path) -> dict[int, str]:
    content = json.loads(path.read_text())
    return {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}


# Counters.


def executed(function: Callable[[], Any]) -> list[str]:
    """Names of the opcodes that a call executes in the function's own frame."""
    import dis

    code, seen = function.__code__, []  # type: ignore[attr-defined]
    names = {i.offset: i.opname for i in dis.get_instructions(code)}

    def local(frame: Any, event: str, _: object) -> Any:
        if event == "opcode":
            seen.append(names[frame.f_lasti])
        return local

    def trace(frame: Any, event: str, _: object) -> Any:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return seen


@pytest.mark.skipif(not FLAG_IS_GLOBAL, reason="not needed")
def test_the_question_of_a_warm_call_executes_the_bytecode_that_torchs_own_does() -> None:
    def steps() -> list[str]:
        return [name for name in executed(getattr(st, PREDICATE)) if "JUMP" not in name]  # torch 2.5 to 2.8 has none

    before = steps()
    with fxsafe.install():
        assert steps() == before
    assert before


@pytest.mark.skipif(not FLAG_IS_GLOBAL, reason="a trace elsewhere refuses nobody")
@pytest.mark.parametrize("fix", ["thread-local", "always-false"])
def test_a_refusal_that_was_avoided_is_counted(fix: str, warm: Any) -> None:
    with fxsafe.install(fix):
        before = counters(flag_patch(fix))["refusals_avoided"]
        warm(X)
        assert counters(flag_patch(fix))["refusals_avoided"] == before
        with trace_elsewhere():
            warm(X)
            warm(X)
            getattr(st, PREDICATE)()  # not the guard
        assert counters(flag_patch(fix))["refusals_avoided"] == before + 2


@pytest.fixture
def held_lock() -> Iterator[None]:
    """Another thread holds Dynamo's lock for the length of the test; fxsafe is installed."""
    with fxsafe.install():
        held, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            with convert_frame.compile_lock:
                held.set()
                let_go.wait(SOON_S)

        task = Task(hold)
        assert held.wait(SOON_S)
        yield
        let_go.set()
        task.result()


def lock_and_release() -> None:
    with convert_frame.compile_lock:
        pass


def test_waits_for_the_compile_lock_are_counted_while_they_last(held_lock: None) -> None:
    before = counters("compile-lock")
    with Told(WAIT) as told:
        Task(lock_and_release)
        assert told.happened.wait(SOON_S)
    after = counters("compile-lock")
    assert (after["waits"], after["waited"]) == (before["waits"] + 1, before["waited"] + 1)
    assert after["longest_wait_s"] > 0


def test_a_trace_that_is_held_back_and_the_change_it_waits_for_are_waits() -> None:
    handle = fxsafe.install()
    before = events.waits.total
    with trace_elsewhere():
        with Told("wait in fxsafe.uninstall() for traces to end") as told:
            ending = Task(handle.uninstall)
            assert told.happened.wait(SOON_S)
        with Told("wait for fxsafe to be installed or undone") as told:
            tracing = Task(lambda: torch.fx.symbolic_trace(torch.nn.ReLU()))
            assert told.happened.wait(SOON_S)
        owners = {i for wait in events.waiting.copy().values() for i in wait.owners()}
        assert ending.thread.ident in owners
    ending.result()
    tracing.result()
    assert events.waits.total == before + 2
    assert not events.waiting


def test_counts_of_many_threads_are_not_lost() -> None:
    tally = events.Tally()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for task in [Task(lambda: [tally.add() for _ in range(2000)]) for _ in range(8)]:
            task.result()
    finally:
        sys.setswitchinterval(before)
    assert tally.total == 16000


# The recorder.


def test_a_recording_shows_traces_compiles_waits_and_refusals(tmp_path: Path, warm: Any) -> None:
    path = tmp_path / "race.json"
    with fxsafe.install(), fxsafe.record(path):
        with trace_elsewhere():
            warm(X)
        threading.current_thread().name = "MainThread"
        torch.compile(lambda x: x * 3, backend="aot_eager")(X)
    main = next(tid for tid, name in lanes(path).items() if name == "MainThread")
    assert {e["tid"] for e in spans(path, "compile")} == {main}
    assert {e["tid"] for e in spans(path, "trace")} == set(lanes(path))
    assert all(e["ph"] == "X" and e["dur"] > 0 and e["pid"] == os.getpid() for e in spans(path, "trace"))
    refused = spans(path, "refusal avoided")
    assert [(e["ph"], e["tid"]) for e in refused] == ([("i", main)] if FLAG_IS_GLOBAL else [])
    assert all("test_observe.py" in e["args"]["at"] for e in refused)
    compile_, trace = spans(path, "compile")[-1], spans(path, "trace")[-1]
    assert compile_["ts"] <= trace["ts"]
    assert trace["ts"] + trace["dur"] <= compile_["ts"] + compile_["dur"]
    most = max(e["args"]["n"] for e in spans(path, "threads that trace"))
    assert most == 1


def test_a_wait_that_is_not_over_is_recorded_as_unfinished(held_lock: None, tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    recording = fxsafe.record(path).start()
    with Told(WAIT) as told:
        Task(lock_and_release)
        assert told.happened.wait(SOON_S)
    recording.stop()
    (wait,) = spans(path, WAIT)
    assert wait["args"]["unfinished"]
    recording.stop()  # once more is harmless


def marks(span: dict[str, Any]) -> set[str]:
    return set(span["args"]) - {"at"}


def test_what_is_open_at_the_start_begins_with_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    recording = fxsafe.record(path)

    class Inner(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            recording.start()
            torch.fx.Tracer().trace(torch.nn.ReLU())
            return x

    class Outer(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            torch.fx.Tracer().trace(Inner())
            return x

    with fxsafe.install(), trace_elsewhere():  # from before the start to after the stop
        torch.fx.Tracer().trace(Outer())
        recording.stop()
    me = threading.get_native_id()
    outer, inner, nested = (span for span in spans(path, "trace") if span["tid"] == me)
    (elsewhere,) = (span for span in spans(path, "trace") if span["tid"] != me)
    assert outer["ts"] == inner["ts"] == elsewhere["ts"] == 0 < nested["ts"]
    assert elsewhere["dur"] > outer["dur"] > inner["dur"] > nested["ts"] + nested["dur"]
    assert marks(outer) == marks(inner) == {"begun_earlier"}
    assert marks(nested) == set()
    assert marks(elsewhere) == {"begun_earlier", "unfinished"}
    assert elsewhere["tid"] in lanes(path)
    counts = [(e["ts"], e["args"]["n"]) for e in spans(path, "threads that trace")]
    assert [n for _, n in counts] == [1, 2, 1, 0]
    assert counts[1][0] == 0


def test_a_compile_and_a_wait_that_are_open_at_the_start_are_recorded(held_lock: None, tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    with Told(WAIT) as told:
        waiter = Task(lock_and_release)
        assert told.happened.wait(SOON_S)
    with fxsafe.record(path):
        pass
    (compile_,), (wait,) = spans(path, "compile"), spans(path, WAIT)
    assert marks(compile_) == marks(wait) == {"begun_earlier", "unfinished"}
    assert compile_["tid"] != wait["tid"] == waiter.thread.native_id


def test_a_begin_that_is_told_after_the_start_is_one_span_and_an_end_without_a_begin_is_none() -> None:
    lane = recorder._Lane(1, 1, "a thread")

    def event(phase: Any, depth: int, ns: int) -> recorder._Event:
        return recorder._Event(phase, "trace", depth, lane, ns, None)

    late = [event("open", 0, 0), event("open", 1, 0), event("begin", 1, 2000), event("end", 1, 3000)]
    late += [event("end", 0, 5000), event("end", 0, 6000), event("begin", 0, 9000)]  # the last after the end
    out = recorder.chrome_events(late, 0, 8000, 1)
    assert [(e["ts"], e["dur"]) for e in out if e["name"] == "trace"] == [(0, 5), (0, 3)]
    assert [e["args"]["n"] for e in out if e["ph"] == "C"] == [1, 0]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_loses_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "race.json"
    with pytest.raises(error), fxsafe.install(), fxsafe.record(path):
        torch.fx.symbolic_trace(torch.nn.ReLU())
        raise error
    assert len(spans(path, "trace")) == 1


def test_ctrl_c_while_the_file_is_written_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "race.json"
    path.write_text("before")
    replace, calls = os.replace, []

    def interrupted(*arguments: Any) -> None:
        calls.append(path.read_text())
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        replace(*arguments)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), fxsafe.install(), fxsafe.record(path):
        torch.fx.symbolic_trace(torch.nn.ReLU())
    assert calls == ["before", "before"]
    assert len(spans(path, "trace")) == 1
    assert os.listdir(tmp_path) == ["race.json"]


def test_all_that_stop_a_recording_at_once_find_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "race.json"
    recording = fxsafe.record(path).start()
    replace, calls = os.replace, 0
    tasks: list[Task] = []

    def in_the_middle(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            tasks.extend(Task(lambda: (recording.stop(), path.read_text())) for _ in range(8))
            recording.stop()  # as a signal handler may
        replace(*arguments)

    monkeypatch.setattr(os, "replace", in_the_middle)
    recording.stop()
    for task in tasks:
        assert json.loads(task.result()[1])
    assert calls == 2
    assert os.listdir(tmp_path) == ["race.json"]
    path.unlink()
    recording.stop()
    assert not path.exists()


def test_a_path_is_meant_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with fxsafe.record("race.json"):
        monkeypatch.chdir("elsewhere")
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "race.json"]
    assert os.listdir() == []


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "race.json", tmp_path / "link.json"
    real.touch(0o600)
    link.symlink_to(real)
    with fxsafe.record(link):
        pass
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    assert spans(real, "trace") == []
    assert os.listdir(real.parent) == ["race.json"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = Task(pipe.read_text)
    with fxsafe.record(pipe):
        pass
    assert json.loads(reader.result())["traceEvents"]
    assert pipe.is_fifo()


class PathLike:
    def __init__(self, path: Any) -> None:
        self.path = path

    def __fspath__(self) -> Any:
        return self.path


@pytest.mark.parametrize("path", [b"race.json", 3, None, PathLike(b"race.json"), PathLike(3)])
def test_a_path_that_is_none_is_refused_at_once(path: Any) -> None:
    with pytest.raises(fxsafe.FxsafeError, match=f"not {type(path).__name__}"):
        fxsafe.record(path)


def test_a_path_like_object_will_do(tmp_path: Path) -> None:
    with fxsafe.record(PathLike(str(tmp_path / "race.json"))):
        pass
    assert spans(tmp_path / "race.json", "trace") == []


def test_a_directory_that_is_missing_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(fxsafe.FxsafeError, match="is no directory that can be written"):
        fxsafe.record(tmp_path / "no" / "race.json").start()
    assert events.listeners == ()


def test_a_recording_starts_once(tmp_path: Path) -> None:
    with fxsafe.record(tmp_path / "race.json") as recording:
        with pytest.raises(fxsafe.FxsafeError, match="started once"):
            recording.start()


def test_a_program_that_never_stops_its_recording_has_it_and_a_forked_child_does_not(tmp_path: Path) -> None:
    program(
        f"""
        import os, sys, torch, fxsafe
        from fxsafe.observe import events
        fxsafe.install()
        fxsafe.record({str(tmp_path / "race.json")!r}).start()
        torch.fx.symbolic_trace(torch.nn.ReLU())
        if os.fork() == 0:
            assert events.listeners == ()
            torch.fx.symbolic_trace(torch.nn.ReLU())
            sys.exit()
        os.wait()
        """
    )
    assert len(spans(tmp_path / "race.json", "trace")) == 1
    assert os.listdir(tmp_path) == ["race.json"]


def test_dynamo_does_not_compile_the_recorder(tmp_path: Path) -> None:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        torch.fx.symbolic_trace(torch.nn.ReLU())
        return y * 2

    with fxsafe.install(), fxsafe.record(tmp_path / "race.json") as recording:
        compiled = torch.compile(breaks, backend="eager")
        assert torch.equal(compiled(X), X * 2 + 2)
        assert torch.equal(compiled(X), X * 2 + 2)
    assert len(spans(tmp_path / "race.json", "trace")) == 2
    del recording
    assert all(not _debug_get_cache_entry_list(function.__code__) for function in events.frames)
    torch._dynamo.reset()


# The watchdog.


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Waits for the first report that holds all these words, and gives it.

    A report that tells where a thread is tells where it was then: the next one finds it where it waits.
    """
    reports: list[str] = []
    changed = threading.Condition()

    def say(text: str) -> None:
        with changed:
            reports.append(text)
            changed.notify_all()

    def wait(*words: str) -> str:
        def found() -> str | None:
            return next((text for text in reports if all(word in text for word in words)), None)

        with changed:
            text = changed.wait_for(found, SOON_S)
            assert text, reports
            return text

    monkeypatch.setattr(watchdog, "_say", say)
    return wait


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fxsafe-watchdog"]


def test_a_wait_for_the_compile_lock_is_reported_with_both_stacks(held_lock: None, said: Callable[..., str]) -> None:
    with fxsafe.install(stall_after=0.05):
        task = Task(lock_and_release)
        text = said(WAIT)
    waiter, holder = text.split("could end that and is at")
    assert f"(ident {task.thread.ident})" in waiter
    assert "in lock_and_release" in waiter
    assert "in hold" in holder


@pytest.mark.parametrize("begun", ["before", "after"])
def test_a_trace_that_does_not_end_is_reported(said: Callable[..., str], begun: str) -> None:
    with fxsafe.install(stall_after=0.05 if begun == "after" else None):
        with trace_elsewhere():
            if begun == "before":
                fxsafe.install(stall_after=0.05)
            said("has been inside one trace", "let_out.wait")
        if begun == "before":
            fxsafe.uninstall()


def test_an_uninstall_that_waits_is_reported_with_the_trace_it_waits_for(said: Callable[..., str]) -> None:
    handle = fxsafe.install(stall_after=0.05)
    with trace_elsewhere():
        task = Task(handle.uninstall)
        text = said("fxsafe.uninstall()", "let_out.wait")
    task.result()
    assert "let_out.wait" in text.split("could end that and is at")[1]
    assert not watchdogs()


def test_a_report_is_repeated_when_the_time_has_doubled_only() -> None:
    dog = watchdog._Watchdog(10)
    events.waiting[1] = events.Wait("wait for a test", 100.0, lambda: [2])
    try:
        reported = [bool(dog.look(100.0 + after)) for after in (9, 10, 15, 19, 20, 39, 40)]
    finally:
        del events.waiting[1]
    assert reported == [False, True, False, False, True, False, True]
    assert dog.look(200.0) == []


def test_a_stderr_that_raises_does_not_end_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises:
        calls, again = 0, threading.Event()

        def write(self, text: str) -> None:
            self.calls += 1
            if self.calls == 2:
                self.again.set()
            raise RuntimeError("a stream of the program's own")

    stream = Raises()
    monkeypatch.setattr(sys, "stderr", stream)
    with fxsafe.install(stall_after=0.05), trace_elsewhere():
        assert stream.again.wait(SOON_S)
        assert len(watchdogs()) == 1


def test_the_thread_exists_only_while_it_is_asked_for() -> None:
    with fxsafe.install():
        assert not watchdogs()
        with fxsafe.install(stall_after=50):
            (first,) = watchdogs()
            assert first.daemon
            with fxsafe.install(stall_after=40):
                (second,) = watchdogs()
                with fxsafe.install(stall_after=45):
                    assert watchdogs() == [second]
            assert second is not first
            assert len(watchdogs()) == 1
        assert not watchdogs()
        assert events.listeners == ()
    assert changed_places() == []


def test_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSAFE_STALL_AFTER", "30")
    with fxsafe.install():
        assert len(watchdogs()) == 1
    monkeypatch.setenv("FXSAFE_STALL_AFTER", "off")
    with fxsafe.install():
        assert not watchdogs()
    for text in ("soon", "-1", "nan"):
        monkeypatch.setenv("FXSAFE_STALL_AFTER", text)
        with pytest.raises(fxsafe.FxsafeError, match="FXSAFE_STALL_AFTER is a number of seconds"):
            fxsafe.install()
    assert not fxsafe.is_installed()


_HUGE = pytest.param(10**400, id="10**400")
_LONG = pytest.param(10**5000, id="10**5000")  # which repr refuses


@pytest.mark.parametrize("value", [0, -1, float("nan"), "60", _HUGE, _LONG])
def test_a_bound_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(fxsafe.FxsafeError, match=r"install\(stall_after=\.\.\.\) is a number of seconds above 0"):
        fxsafe.install(stall_after=value)
    assert not fxsafe.is_installed()


def test_a_forked_child_has_a_watchdog_of_its_own() -> None:
    program(
        """
        import os, threading, torch, torch._dynamo, fxsafe
        from fxsafe.observe import watchdog
        handle = fxsafe.install(stall_after=0.05)
        if os.fork() == 0:
            reported = threading.Event()
            watchdog._say = lambda text: reported.set()
            class Waits(torch.nn.Module):
                def forward(self, x):
                    assert reported.wait(60)
                    return x
            torch.fx.symbolic_trace(Waits())
            handle.uninstall()
            os._exit(0 if threading.active_count() == 1 else 7)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        """
    )


def test_results_are_the_same_bits_while_everything_watches(tmp_path: Path) -> None:
    alone = torch.compile(double_plus_one, backend="aot_eager")(X)
    with fxsafe.install(stall_after=50), fxsafe.record(tmp_path / "race.json"):
        watched = torch.compile(double_plus_one, backend="aot_eager")(X)
        code = torch.fx.symbolic_trace(double_plus_one).code
    assert torch.equal(alone, watched)
    assert code == torch.fx.symbolic_trace(double_plus_one).code


@pytest.mark.parametrize("path", ["", ".", "missing/"])
def test_a_path_that_is_no_file_is_refused_at_once(path: str) -> None:
    with pytest.raises(fxsafe.FxsafeError, match="names no file"):
        fxsafe.record(path).start()
