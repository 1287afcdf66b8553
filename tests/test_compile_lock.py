from __future__ import annotations

import logging
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch._dynamo
from locks_support import applied, fails, passes, plan_of
from torch._dynamo import convert_frame

from fxsafe.patches import compile_lock
from fxsafe.patches.base import ShapeError


@pytest.fixture
def lock() -> Iterator[Any]:
    with applied("compile-lock"):
        yield convert_frame.compile_lock


def in_thread(function: Callable[[], Any]) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def free(lock: Any) -> bool:
    """Whether another thread could have it now."""

    def attempt() -> bool:
        taken: bool = lock.acquire(False)
        if taken:
            lock.release()
        return taken

    return bool(in_thread(attempt))


def multithreading() -> bool:
    return torch._C._is_multithreading_enabled()


AUTOGRAD_STAYS = """
    seen = []
    def backend(gm, inputs):
        seen.append(torch._C._is_multithreading_enabled())
        return gm.forward
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert seen == [False], f"autograd may wait for a device's thread: {seen}"
    assert torch._C._is_multithreading_enabled()
"""


def test_without_the_patch_a_compile_lets_autograd_use_the_device_thread() -> None:
    fails(AUTOGRAD_STAYS, "may wait for a device's thread: [True]")


def test_a_compile_runs_autograd_in_its_own_thread() -> None:
    passes(AUTOGRAD_STAYS, "compile-lock")


FORK = """
    import os, torch._dynamo
    from torch._dynamo import convert_frame
    original = convert_frame.compile_lock
    held, done = threading.Event(), threading.Event()
    def backend(gm, inputs):
        held.set(); done.wait(); return gm.forward
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    thread = threading.Thread(target=compiled, args=(torch.ones(2),), daemon=True)
    thread.start(); held.wait()
    child = os.fork()
    if child == 0:
        for name in NAMES:
            patch(name).after_fork_in_child()
        free = convert_frame.compile_lock.acquire(timeout=2)
        if free:
            convert_frame.compile_lock.release()
            torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
            assert torch._C._is_multithreading_enabled()
        os._exit(0 if free else 7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done.set(); thread.join()
    assert status == 0, f"child: {status}"
    assert convert_frame.compile_lock.acquire(False)
    convert_frame.compile_lock.release()
"""


def test_without_the_patch_a_process_forked_during_a_compile_cannot_compile() -> None:
    fails(FORK.replace("NAMES", "()"), "child: 7")


def test_a_process_forked_during_a_compile_can_compile() -> None:
    passes(FORK.replace("NAMES", "('compile-lock',)"), "compile-lock")


def test_a_process_forked_by_the_holder_goes_on_holding() -> None:
    passes(
        """
        import os, torch._dynamo
        from torch._dynamo import convert_frame
        lock = convert_frame.compile_lock
        lock.acquire()
        child = os.fork()
        if child == 0:
            patch("compile-lock").after_fork_in_child()
            def other():
                taken.append(lock.acquire(False))
            taken = []
            thread = threading.Thread(target=other); thread.start(); thread.join()
            assert taken == [False] and not torch._C._is_multithreading_enabled()
            lock.release()
            assert torch._C._is_multithreading_enabled()
            thread = threading.Thread(target=other); thread.start(); thread.join()
            os._exit(0 if taken == [False, True] else 7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        lock.release()
        """,
        "compile-lock",
    )


def test_the_original_is_free_in_the_child_after_the_patch_has_gone() -> None:
    passes(
        """
        import os, torch._dynamo
        from torch._dynamo import convert_frame
        original = convert_frame.compile_lock
        held, done = threading.Event(), threading.Event()
        def hold():
            with convert_frame.compile_lock:
                held.set(); done.wait()
        with applied("compile-lock"):
            thread = threading.Thread(target=hold, daemon=True); thread.start(); held.wait()
            child = os.fork()
            if child == 0:
                patch("compile-lock").after_fork_in_child()
            done.set()
        if child == 0:
            os._exit(0 if convert_frame.compile_lock is original and original.acquire(False) else 7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        thread.join()
        """
    )


def test_the_former_setting_comes_back_at_the_outermost_release(lock: Any) -> None:
    with lock:
        with lock:
            assert not multithreading()
        assert not multithreading()
    assert multithreading()
    torch._C._set_multithreading_enabled(False)
    try:
        with lock:
            assert not multithreading()
        assert not multithreading()
    finally:
        torch._C._set_multithreading_enabled(True)


def test_an_exception_restores_and_releases(lock: Any) -> None:
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    assert multithreading()
    assert free(lock)


def test_other_threads_keep_their_own_setting(lock: Any) -> None:
    with lock:
        assert in_thread(multithreading)


def test_it_has_the_interface_of_the_lock(lock: Any) -> None:
    assert lock.acquire() is True
    assert lock.acquire(blocking=False) is True
    assert not free(lock)
    assert in_thread(lambda: lock.acquire(timeout=0)) is False
    assert in_thread(lambda: lock.acquire(True, 0.001)) is False
    lock.release()
    assert not multithreading()
    lock.release()
    with pytest.raises(RuntimeError, match="un-acquired"):
        lock.release()
    assert multithreading()
    with pytest.raises(ValueError, match="timeout"):
        lock.acquire(False, 1)
    assert multithreading()


def test_a_release_by_another_thread_is_refused_and_changes_nothing(lock: Any) -> None:
    def release() -> str:
        with pytest.raises(RuntimeError):
            lock.release()
        return "refused"

    with lock:
        assert in_thread(release) == "refused"
        assert not multithreading()
    assert multithreading()


def test_holders_from_before_and_after_exclude_each_other() -> None:
    original: Any = convert_frame.compile_lock
    with applied("compile-lock"):
        stand_in: Any = convert_frame.compile_lock
    with original:
        assert not free(stand_in)
    with stand_in:
        assert not free(original)


def test_it_may_come_and_go_while_the_lock_is_held() -> None:
    original: Any = convert_frame.compile_lock
    held, go_on = threading.Event(), threading.Event()
    settings = []

    def hold() -> None:
        with convert_frame.compile_lock:
            settings.append(multithreading())
            held.set()
            go_on.wait()
            with convert_frame.compile_lock:
                settings.append(multithreading())
        settings.append(multithreading())

    def step(change: Callable[[], object]) -> list[bool]:
        settings.clear()
        held.clear()
        go_on.clear()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        change()
        go_on.set()
        thread.join()
        return settings.copy()

    (edit,) = plan_of("compile-lock").edits  # install() waits for the lock, but not while its module is imported
    assert step(edit.apply) == [True, False, True]
    stand_in = convert_frame.compile_lock
    assert step(edit.undo) == [False, False, True]
    assert convert_frame.compile_lock is original is not stand_in
    assert free(original)


def test_names_in_other_modules_follow_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    original = convert_frame.compile_lock
    module: Any = types.ModuleType("somebodys_backend")
    module.their_name = original
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    with applied("compile-lock"):
        assert module.their_name is convert_frame.compile_lock is not original
    assert module.their_name is convert_frame.compile_lock is original


def test_another_kind_of_lock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_frame, "compile_lock", threading.Lock())
    with pytest.raises(ShapeError, match=r"compile_lock is a .*lock, no re-entrant lock"):
        plan_of("compile-lock")
    monkeypatch.delattr(convert_frame, "compile_lock")
    with pytest.raises(ShapeError, match="does not exist"):
        plan_of("compile-lock")


def test_a_long_wait_says_who_holds_the_lock_and_where(lock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_lock, "REPORT_AFTER_S", 0.001)
    held, reported = threading.Event(), threading.Event()
    messages = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            reported.set()

    def the_slow_compile() -> None:
        with lock:
            held.set()
            reported.wait()

    handler = Handler()
    logging.getLogger("fxsafe").addHandler(handler)
    try:
        holder = threading.Thread(target=the_slow_compile, name="trainer-3")
        holder.start()
        held.wait()
        with lock:
            pass
        holder.join()
    finally:
        logging.getLogger("fxsafe").removeHandler(handler)
    assert len(messages) == 1
    assert "trainer-3" in messages[0]
    assert "the_slow_compile" in messages[0]


def test_compiled_code_reads_the_setting_of_its_caller() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + int(torch._C._is_multithreading_enabled())

    with applied("compile-lock"):
        torch._dynamo.reset()
        assert torch.compile(f, backend="eager")(torch.zeros(1)).item() == 1
