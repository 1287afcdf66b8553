"""Counting, all-or-nothing, foreign patches, waiting for traces, forks."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import re
import signal
import threading
from typing import get_args

import pytest
import torch
import torch.fx._symbolic_trace as st
from places import changed_places
from support import FLAG_IS_GLOBAL, RELEASE, Task, program, python, trace_elsewhere
from torch import nn

import fxsafe
from fxsafe import edits, installer, traces
from fxsafe.patches import CATALOGUE, guard_override

# A fix that changes something on every release.
FIX = "always-false"


def test_the_last_one_out_restores_the_identical_objects():
    first = fxsafe.install()
    second = fxsafe.install()
    assert fxsafe.is_installed()
    first.uninstall()
    first.uninstall()  # giving back twice does nothing
    assert fxsafe.is_installed()
    second.uninstall()
    assert not fxsafe.is_installed()
    assert changed_places() == []


def test_uninstall_gives_back_the_newest_and_says_so_when_there_is_none():
    outer, inner = fxsafe.install(), fxsafe.install()
    fxsafe.uninstall()
    assert ("given back" in repr(inner), "open" in repr(outer)) == (True, True)
    fxsafe.uninstall()
    with pytest.raises(fxsafe.FxsafeError, match="nothing is installed"):
        fxsafe.uninstall()
    with fxsafe.install():
        fxsafe.uninstall()  # inside its own block: the end of the block then has nothing to do
    assert not fxsafe.is_installed()


def test_the_context_manager_undoes_when_the_block_raises():
    with pytest.raises(KeyError), fxsafe.install() as handle:
        assert isinstance(handle, fxsafe.Installation)
        raise KeyError
    assert changed_places() == []


def test_installed_decorates_functions_generators_and_coroutines():
    @fxsafe.installed()
    def function(x, *, y=1):
        """Says it."""
        return x + y, fxsafe.is_installed()

    @fxsafe.installed()
    def generator():
        got = yield fxsafe.is_installed()
        yield got, fxsafe.is_installed()

    @fxsafe.installed()
    async def coroutine():
        await asyncio.sleep(0)
        return fxsafe.is_installed()

    assert (function.__name__, function.__doc__) == ("function", "Says it.")
    assert function(1, y=2) == (3, True)
    run = generator()
    assert next(run) is True
    assert run.send("sent") == ("sent", True)
    assert list(run) == []
    assert not fxsafe.is_installed()
    assert asyncio.run(coroutine()) is True
    assert not fxsafe.is_installed()
    with pytest.raises(TypeError, match="decorates functions"):
        fxsafe.installed()(nn.Linear)
    with pytest.raises(TypeError, match="decorates functions"):
        fxsafe.installed()(classmethod(lambda cls: cls))
    with pytest.raises(TypeError, match="with parentheses"):
        fxsafe.installed(nn.Linear)


def test_one_installed_object_serves_nested_and_concurrent_blocks():
    both = fxsafe.installed()
    barrier = threading.Barrier(4)

    def block():
        with both:
            barrier.wait(60)
            with both:
                return fxsafe.is_installed()

    assert [t.result() for t in [Task(block) for _ in range(4)]] == [True] * 4
    assert not fxsafe.is_installed()


def test_another_fix_or_other_patches_are_refused_and_both_are_named():
    with fxsafe.install():
        with pytest.raises(fxsafe.FxsafeError, match=r"fix='thread-local' already .* fix='always-false'"):
            fxsafe.install("always-false")
        with pytest.raises(
            fxsafe.FxsafeError, match=r"patches='all that go with the fix' already .* patches=\('tracing-flag',\)"
        ):
            fxsafe.install(patches=["tracing-flag"])
        assert fxsafe.is_installed()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"fix": "alway-false"}, "; did you mean 'always-false'[?] known: 'thread-local', 'always-false'$"),
        ({"fix": None}, "; known: 'thread-local', 'always-false'$"),
        ({"patches": ["Tracing_Flag"]}, "patch 'Tracing_Flag'; did you mean 'tracing-flag'[?] known: tracing-flag, "),
        ({"patches": ["make_fx", 1, "exprt"]}, "'make_fx', 1, 'exprt'; did you mean 'make-fx', 'export'[?] known: "),
        ({"patches": ["nonsense"]}, "names the unknown patch 'nonsense'; known: tracing-flag, "),
        ({"patches": "tracing-flag"}, "not the string"),
        ({"patches": 1}, "takes a list of patch names, not 1"),
        ({"patches": ["guard-override"]}, "goes with fix='always-false'"),
    ],
)
def test_a_wrong_argument_says_what_is_right_and_changes_nothing(arguments, says):
    with pytest.raises(fxsafe.FxsafeError, match=says):
        fxsafe.install(**arguments)
    assert not fxsafe.is_installed()


def _status():
    return {r["name"]: (r["status"], r["reason"]) for r in fxsafe.info()}


def test_fxsafe_disable_turns_patches_off_by_name_or_altogether(monkeypatch):
    monkeypatch.setenv("FXSAFE_DISABLE", "guard-override")
    with fxsafe.install(FIX):
        assert _status()["guard-override"] == ("disabled", "FXSAFE_DISABLE=guard-override")
    monkeypatch.setenv("FXSAFE_DISABLE", "1")
    with fxsafe.install(FIX):
        assert {status for status, _ in _status().values()} == {"disabled"}
        assert changed_places() == []
    monkeypatch.setenv("FXSAFE_DISABLE", "gard-override")
    with pytest.raises(fxsafe.FxsafeError, match=r"FXSAFE_DISABLE names .*'gard-override'; did you mean 'guard-"):
        fxsafe.install(FIX)
    monkeypatch.setenv("FXSAFE_DISABLE", "0")
    with fxsafe.install(FIX):
        assert _status()["guard-override"] == ("active", "")


def test_info_has_a_complete_record_for_every_patch_at_any_time():
    keys = {"name", "status", "fix", "target", "reason", "upstream", "torch", "counters"}
    for install in (None, "thread-local", "always-false"):
        if install is not None:
            fxsafe.install(install)
        records = fxsafe.info()
        assert [r["name"] for r in records] == [p.name for p in CATALOGUE]
        for record in records:
            assert set(record) == keys
            assert record["status"] in get_args(fxsafe.Status)
            assert record["torch"] == torch.__version__
            for link in record["upstream"].split():
                assert link.startswith(("https://github.com/pytorch/", "https://github.com/sympy/sympy/"))
            assert record["reason"] or record["status"] == "active"
        if install is not None:
            fxsafe.uninstall()


def test_a_place_with_two_edits_is_named_once():
    with fxsafe.install():
        for record in fxsafe.info():
            targets = record["target"].split(", ")
            assert len(set(targets)) == len(targets), record["name"]


def test_a_reason_that_names_a_release_is_true_of_this_one():
    for module in (name for patch in CATALOGUE for name in patch.modules):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with fxsafe.install():
        reasons = {r["name"]: r["reason"] for r in fxsafe.info() if r["status"] == "not-needed"}
    for name, reason in reasons.items():
        for word, release in re.findall(r"(before|since) (\d+\.\d+)", reason):
            number = tuple(map(int, release.split(".")))
            assert (number > RELEASE) if word == "before" else (number <= RELEASE), f"{name}: {reason}"


def test_thread_local_is_not_needed_where_upstream_has_it():
    with fxsafe.install():
        record = fxsafe.info()[0]
    assert record["name"] == "tracing-flag"
    if FLAG_IS_GLOBAL:
        assert record["status"] == "active"
        assert "torch.fx._symbolic_trace.is_fx_tracing" in record["target"]
    else:
        assert record["status"] == "not-needed"
        assert "168999" in record["reason"]
        assert "168999" in record["upstream"]


def test_traces_are_counted():
    with fxsafe.install(FIX):
        before = {r["name"]: r for r in fxsafe.info()}["guard-override"]["counters"]
        with trace_elsewhere():
            pass
        after = {r["name"]: r for r in fxsafe.info()}["guard-override"]["counters"]
    assert after["traces"] == before["traces"] + 1
    assert after["most_traces_at_once"] >= 1


class _Breaks:
    target = "nothing"
    interrupted = False

    def __init__(self, error):
        self.error = error

    def apply(self):
        raise self.error

    def undo(self):
        if isinstance(self.error, KeyboardInterrupt) and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt("once more")
        return True


@pytest.mark.parametrize("error", [ValueError("half-way"), KeyboardInterrupt()])
def test_a_failure_half_way_rolls_everything_back(monkeypatch, error):
    plan = guard_override.PATCH.plan

    def breaking(modules):
        planned = plan(modules)
        planned.edits.append(_Breaks(error))
        return planned

    catalogue = tuple(
        type(p)(**{f: getattr(p, f) for f in p.__dataclass_fields__} | {"plan": breaking})
        if p.name == "guard-override"
        else p
        for p in CATALOGUE
    )
    monkeypatch.setattr(installer, "CATALOGUE", catalogue)
    with pytest.raises(type(error)):
        fxsafe.install(FIX)
    assert not fxsafe.is_installed()
    assert changed_places() == []
    monkeypatch.setattr(installer, "CATALOGUE", CATALOGUE)
    with fxsafe.install(FIX):
        assert _status()["guard-override"][0] == "active"


def test_somebody_elses_replacement_is_left_alone_and_reported(monkeypatch):
    name = "is_fx_symbolic_tracing" if hasattr(st, "is_fx_symbolic_tracing") else "is_fx_tracing"

    def theirs():
        return False

    monkeypatch.setattr(st, name, theirs)
    with pytest.warns(fxsafe.FxsafeWarning, match="theirs, which is left in place"), fxsafe.install(FIX):
        assert _status()["guard-override"][0] == "unsupported"
        assert getattr(st, name) is theirs
    assert getattr(st, name) is theirs
    with pytest.raises(fxsafe.UnsupportedTorchError, match="theirs"):
        fxsafe.install(FIX, strict=True)
    monkeypatch.setenv("FXSAFE_STRICT", "1")
    with pytest.raises(fxsafe.UnsupportedTorchError, match="theirs"):
        fxsafe.install(FIX)


def test_a_patch_put_over_ours_stays_and_is_reported():
    name = "is_fx_symbolic_tracing" if hasattr(st, "is_fx_symbolic_tracing") else "is_fx_tracing"
    predicate = getattr(st, name)
    original = predicate.__code__
    handle = fxsafe.install(FIX)
    theirs = (lambda: False).__code__
    predicate.__code__ = theirs
    try:
        with pytest.warns(fxsafe.FxsafeWarning, match=f"left in place.*{name}"):
            handle.uninstall()
        assert predicate.__code__ is theirs
        assert f"left in place: torch.fx._symbolic_trace.{name}" in fxsafe.info()[0]["reason"]
    finally:
        predicate.__code__ = original


def test_a_wrapper_put_over_tracer_trace_stays_and_keeps_working(monkeypatch):
    function = vars(st.Tracer)["trace"]
    calls = []

    def theirs(self, *args, **kwargs):
        calls.append(1)
        return function(self, *args, **kwargs)

    with fxsafe.install(FIX):
        monkeypatch.setattr(st.Tracer, "trace", theirs)
    assert vars(st.Tracer)["trace"] is theirs
    torch.fx.symbolic_trace(nn.ReLU())
    assert calls == [1]
    # A wrapper that hides what it wraps hides the traces from us: nothing is changed then, and it is said.
    with pytest.warns(fxsafe.FxsafeWarning, match="theirs, which is left in place"):
        handle = fxsafe.install(FIX)
    assert _status()["guard-override"][0] == "unsupported"
    handle.uninstall()
    theirs.__wrapped__ = function
    with fxsafe.install(FIX):
        assert _status()["guard-override"][0] == "active"
        with trace_elsewhere():
            assert len(traces.state.depth) == 1


def test_uninstall_waits_for_a_trace_on_another_thread_and_then_succeeds():
    handle = fxsafe.install(FIX)
    with trace_elsewhere() as gate:
        leaving = Task(handle.uninstall)
        while not traces.state.changing:
            assert leaving.thread.is_alive()
        assert fxsafe.is_installed()
        gate.let_out.set()
        leaving.result()
    assert not fxsafe.is_installed()


def test_two_threads_leave_blocks_of_one_installed_object_at_the_same_moment():
    both = fxsafe.installed(FIX)
    entered = threading.Barrier(2)
    undone = []
    original = installer.Installation.uninstall

    def meets(handle):
        # Both are inside __exit__ now, between taking their handle and having given it back.
        entered.wait(60)
        original(handle)
        undone.append(handle)

    def block():
        with both:
            entered.wait(60)

    installer.Installation.uninstall = meets
    try:
        for task in [Task(block), Task(block)]:
            task.result()
    finally:
        installer.Installation.uninstall = original
    assert len(set(map(id, undone))) == 2
    assert not fxsafe.is_installed()


def test_ctrl_c_at_any_function_of_ours_leaves_all_of_an_installation_or_nothing():
    """CPython delivers signals at the entry of a Python function; so does this."""
    import sys

    ours = os.path.dirname(installer.__file__)
    point = calls = 0

    def interrupt(frame, event, arg):
        nonlocal calls
        code = frame.f_code
        # A generator that is closed by an interrupt has nobody to tell.
        if (
            event == "call"
            # Not importlib, which would leave its own lock taken.
            and code.co_filename.startswith((ours, contextlib.__file__, threading.__file__))
            and not code.co_flags & inspect.CO_GENERATOR
        ):
            calls += 1
            if calls == point:
                raise KeyboardInterrupt

    with fxsafe.install(FIX):
        pass  # what is imported at the first time is not what this is about
    while calls >= point:
        point += 7
        calls = 0
        kept: BaseException | None = None
        sys.setprofile(interrupt)
        try:
            fxsafe.install(FIX)
        except KeyboardInterrupt as error:
            kept = error  # as an interactive session keeps it, with all frames
        finally:
            sys.setprofile(None)
        assert Task(lambda: traces.lock.acquire(timeout=60) and traces.lock.release() is None).result()
        del kept
        if fxsafe.is_installed():
            assert _status()["guard-override"][0] == "active"
            fxsafe.uninstall()
        assert changed_places() == [], point
        assert not traces.state.changing
    assert point > 200


@pytest.mark.parametrize("point", range(1, 40))
def test_ctrl_c_at_any_function_of_ours_leaves_a_trace_nothing_behind(point):
    """CPython delivers signals at the entry of a Python function; so does this."""
    import sys

    ours = os.path.dirname(installer.__file__)
    count = 0

    def interrupt(frame, event, arg):
        nonlocal count
        if event == "call" and (
            frame.f_code.co_filename.startswith(ours) or frame.f_code.co_name in ("__enter__", "__exit__")
        ):
            count += 1
            if count == point:
                sys.setprofile(None)
                raise KeyboardInterrupt
        return

    with fxsafe.install():
        torch.fx.symbolic_trace(nn.ReLU())
        sys.setprofile(interrupt)
        try:
            torch.fx.symbolic_trace(nn.ReLU())
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert traces.state.depth == {}
        assert not st.is_fx_tracing()
        assert Task(lambda: torch.fx.symbolic_trace(nn.ReLU()).code).result()
    assert not fxsafe.is_installed()


def test_uninstall_gives_up_in_time_names_the_trace_and_undoes_nothing():
    handle = fxsafe.install(FIX)
    applied = inspect.unwrap(st.Tracer.trace).__code__
    with trace_elsewhere():
        with pytest.raises(fxsafe.FxsafeError, match=r"(?s)waited 0 s .* is tracing at:.*support\.py") as raised:
            handle.uninstall(timeout=0)
        assert "nothing was changed" in str(raised.value)
        assert inspect.unwrap(st.Tracer.trace).__code__ is applied
        assert fxsafe.is_installed()
    handle.uninstall()


def test_install_waits_for_a_trace_that_began_before_it():
    with trace_elsewhere() as gate:
        arriving = Task(lambda: fxsafe.install(FIX))
        while not traces.state.changing:
            assert arriving.thread.is_alive()
        assert not fxsafe.is_installed()
        gate.let_out.set()
        arriving.result().uninstall()


def test_a_new_trace_waits_while_patches_change_and_a_nested_one_does_not():
    """Otherwise a stream of traces could keep uninstall waiting for ever, or a nested one dead-lock it."""
    handle = fxsafe.install(FIX)
    nested = torch.nn.ReLU()
    done = threading.Event()
    with trace_elsewhere(inside=lambda: torch.fx.symbolic_trace(nested).code) as gate:
        leaving = Task(handle.uninstall)
        while not traces.state.changing:
            assert leaving.thread.is_alive()
        late = Task(lambda: (torch.fx.symbolic_trace(nested), done.set()))
        assert not done.wait(0.05)
        gate.let_out.set()
        leaving.result()
        late.result()
    assert "relu" in gate.inside_gave


def test_inside_ones_own_trace_a_change_is_an_error_at_once_and_a_join_is_not():
    outcome = {}

    class Module(nn.Module):
        def forward(self, x):
            for name, call in (("install", lambda: fxsafe.install(FIX)), ("uninstall", fxsafe.uninstall)):
                try:
                    outcome[name] = call()
                except fxsafe.FxsafeError as error:
                    outcome[name] = str(error)
            return x

    torch.fx.symbolic_trace(Module())
    assert "inside a trace on this thread" in outcome["install"]
    assert "nothing is installed" in outcome["uninstall"]
    with fxsafe.install(FIX):
        torch.fx.symbolic_trace(Module())
        assert isinstance(outcome["install"], fxsafe.Installation)
        assert outcome["uninstall"] is None
        with fxsafe.installed(FIX):
            pass

    class Leaves(nn.Module):
        def forward(self, x):
            fxsafe.uninstall()
            return x

    handle = fxsafe.install(FIX)
    with pytest.raises(fxsafe.FxsafeError, match="inside a trace on this thread"):
        torch.fx.symbolic_trace(Leaves())
    handle.uninstall()


def test_an_install_while_another_thread_uninstalls_keeps_everything_in_place():
    handle = fxsafe.install(FIX)
    with trace_elsewhere() as gate:
        leaving = Task(handle.uninstall)
        while not traces.state.changing:
            assert leaving.thread.is_alive()
        other = fxsafe.install(FIX)
        leaving.result()
        assert fxsafe.is_installed()
        gate.let_out.set()
    other.uninstall()


def test_many_threads_install_trace_and_uninstall():
    barrier = threading.Barrier(8)

    def work():
        barrier.wait(60)
        for _ in range(25):
            with fxsafe.install(FIX):
                assert fxsafe.is_installed()
        return True

    assert all(t.result() for t in [Task(work) for _ in range(8)])
    assert not fxsafe.is_installed()
    assert changed_places() == []


@pytest.mark.parametrize("fix", ["thread-local", "always-false"])
def test_a_child_forked_during_anothers_trace_can_do_everything(fix):
    out = program(
        f"""
        import os, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import torch, fxsafe
        from support import *
        from places import changed_places
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        compiled(torch.ones(2))
        handle = fxsafe.install({fix!r})
        with trace_elsewhere():
            pid = os.fork()
            if pid == 0:
                try:
                    assert compiled(torch.ones(2)).sum() == 4
                    handle.uninstall(timeout=10)
                    assert not fxsafe.is_installed()
                    with fxsafe.install({fix!r}):
                        torch.compile(lambda x: x * 3, backend="eager")(torch.ones(2))
                    print("child", [p for p in changed_places() if "Module" not in p and "PATCHER" not in p])
                    sys.stdout.flush()
                    os._exit(0)
                except BaseException:
                    import traceback; traceback.print_exc(); os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        handle.uninstall()
        print("parent", changed_places())
        """
    )
    assert out.splitlines() == ["child []", "parent []"]


def test_a_child_forked_inside_its_own_trace_goes_on_with_it():
    out = program(
        """
        import os, torch, fxsafe
        class M(torch.nn.Module):
            def forward(self, x):
                global pid
                pid = os.fork()
                return x + 1
        with fxsafe.install():
            code = torch.fx.symbolic_trace(M()).code
        assert not fxsafe.is_installed()
        if pid == 0:
            os._exit(0 if "x + 1" in code else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print("x + 1" in code)
        """
    )
    assert out == "True\n"


def test_ctrl_c_while_uninstall_waits_leaves_the_installation_whole():
    out = program(
        f"""
        import os, signal, sys, threading
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import torch, fxsafe
        from fxsafe import traces
        from support import *
        handle = fxsafe.install("always-false")
        with trace_elsewhere():
            def interrupt():
                while not traces.state.changing: pass
                os.kill(os.getpid(), signal.SIGINT)
            t = threading.Thread(target=interrupt); t.start()
            try:
                handle.uninstall()
            except KeyboardInterrupt:
                print("interrupted", fxsafe.is_installed(), traces.state.changing)
            t.join()
        handle.uninstall()
        print(fxsafe.is_installed())
        """
    )
    assert out.splitlines() == ["interrupted True False", "False"]


def test_a_handle_that_was_given_back_is_no_context_manager():
    handle = fxsafe.install()
    with handle:
        assert fxsafe.is_installed()
    with pytest.raises(fxsafe.FxsafeError, match="was given back"):
        with handle:
            raise AssertionError("the block ran")


def test_a_refused_installation_names_the_line_of_the_one_that_is_there():
    with fxsafe.install("always-false"):
        with pytest.raises(
            fxsafe.FxsafeError, match=r"fix='always-false' already \(by \S+test_installer\.py:\d+\) and"
        ):
            fxsafe.install()


@pytest.mark.parametrize("timeout", [-3, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout):
    with fxsafe.install() as handle:
        with pytest.raises(fxsafe.FxsafeError, match="is a number of seconds"):
            handle.uninstall(timeout)
        assert fxsafe.is_installed()


def test_a_variable_that_says_neither_yes_nor_no_is_refused(monkeypatch):
    monkeypatch.setenv("FXSAFE_STRICT", "banana")
    with pytest.raises(fxsafe.FxsafeError, match="FXSAFE_STRICT='banana' is neither"):
        fxsafe.install()
    assert not fxsafe.is_installed()


def test_a_mistake_is_told_where_the_decorator_is_written():
    with pytest.raises(fxsafe.FxsafeError, match="fix='no' is unknown"):
        fxsafe.installed(fix="no")


def test_settings_are_at_hand():
    assert python("-c", "import fxsafe; print(fxsafe.settings.everywhere.__name__)").stdout == "everywhere\n"


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs pthread_kill")
@pytest.mark.parametrize("handler_does", ["trace", "install", "uninstall"])
def test_a_signal_handler_does_not_wait_for_the_change_that_it_interrupts(handler_does):
    handle = fxsafe.install(FIX)
    said = []

    def handler(*_):
        if said:
            return
        if handler_does == "trace":
            said.append(len(torch.fx.symbolic_trace(nn.ReLU()).graph.nodes))
        else:
            with pytest.raises(fxsafe.FxsafeError, match="while this thread installs or uninstalls"):
                handle.uninstall() if handler_does == "uninstall" else fxsafe.install("always-false")
            said.append(3)
        gate.let_out.set()

    def send():
        while not traces.state.changing:
            pass
        # A signal that comes in the instant before a lock is waited for is seen after the wait only: send another.
        while not gate.let_out.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with trace_elsewhere() as gate:
            task = Task(send)
            handle.uninstall()
            task.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert said == [3]
    assert not fxsafe.is_installed()


def test_another_installation_keeps_no_code_more() -> None:
    with fxsafe.install():
        pass
    before = len(edits._codes)
    for _ in range(3):
        with fxsafe.install():
            pass
    assert len(edits._codes) == before


@pytest.mark.parametrize("none", [[], ()])
def test_an_empty_choice_of_patches_applies_none(none):
    with fxsafe.install(patches=none):
        assert {r["status"] for r in fxsafe.info()} == {"disabled"}
        assert [r["reason"] for r in fxsafe.info() if r["name"] == "module-hooks"] == ["not among install(patches=[])"]
