"""What of CUDA graph trees does not need a GPU; the graphs themselves are in ``tests/gpu``."""

from __future__ import annotations

import _thread
import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch._dynamo.mutation_guard as guard
import torch._inductor.cudagraph_trees as trees
from locks_support import applied, passes
from support import Task, double_plus_one

from fxsafe.patches import cudagraph_threads

NAME = "cudagraph-threads"
BOX, TRACKER = trees.MarkStepBox, guard.GenerationTracker


@pytest.fixture(autouse=True)
def as_if_nobody_had_trees() -> Any:
    """Trees of the main thread last, and while there are some every compiled call counts for its thread."""
    yield
    cudagraph_threads._threads = None


def steps() -> tuple[int, int]:
    return guard.GenerationTracker.generation, trees.MarkStepBox.mark_step_counter


def compiled_call() -> Any:
    return torch.compile(double_plus_one, backend="eager")(torch.ones(2))


def tree_here() -> Any:
    return trees.get_container(0)


def test_a_thread_gets_trees_of_its_own() -> None:
    with pytest.raises(AssertionError):
        Task(tree_here).result()
    here = tree_here()
    with applied(NAME):
        there = Task(lambda: (tree_here(), tree_here())).result()
        assert there[0] is there[1] is not here
        assert tree_here() is here


def test_a_step_is_the_threads_own() -> None:
    before = steps()
    Task(lambda: (compiled_call(), trees.mark_step_begin())).result()
    assert steps() != before
    with applied(NAME):
        tree_here()
        before = steps()
        count = Task(lambda: (tree_here(), compiled_call(), compiled_call(), trees.mark_step_begin(), steps())).result()
        assert count[-1] == (before[0] + 2, before[1] - 1)
        assert steps() == before
        compiled_call()
        assert steps() == (before[0] + 1, before[1])
    assert (guard.GenerationTracker, trees.GenerationTracker, trees.MarkStepBox) == (TRACKER, TRACKER, BOX)
    assert steps() == (before[0] + 1, before[1])


def test_one_thread_counts_as_on_plain_torch() -> None:
    with applied(NAME):
        before = guard.GenerationTracker.generation
        compiled_call()
        tree_here()
        compiled_call()
        assert guard.GenerationTracker.generation == before + 2
    assert guard.GenerationTracker is TRACKER
    assert guard.GenerationTracker.generation == before + 2


def test_a_backward_in_autograds_thread_finds_the_trees_of_its_caller() -> None:
    """The C++ state that travels with a backward is what a checkpoint of the thread's state carries, on a CPU too."""
    with applied(NAME):

        def of_a_thread() -> tuple[Any, Any]:
            mine = tree_here()
            x = torch.ones(2, requires_grad=True)
            found: list[Any] = []
            y = x * 2
            y.register_hook(lambda grad: found.append(tree_here()))
            y.sum().backward()
            return mine, found[0]

        mine, in_backward = Task(of_a_thread).result()
        assert mine is in_backward


def test_the_first_use_inside_of_a_backward_lasts() -> None:
    with applied(NAME):

        def of_a_thread() -> tuple[Any, Any, bool]:
            found: list[Any] = []
            y = torch.ones(2, requires_grad=True) * 2
            y.register_hook(lambda grad: found.append(tree_here()))
            y.sum().backward()
            return found[0], tree_here(), torch._C._is_key_in_tls("tree_manager_containers")

        inside, after, travels = Task(of_a_thread).result()
        assert inside is after
        assert travels


def test_a_thread_that_ends_leaves_nothing() -> None:
    with applied(NAME):
        tree_here()
        threads = _threads()
        before = len(threads._owners)
        for _ in range(3):
            Task(tree_here).result()
        gc.collect()
        assert len(threads._owners) == before
        assert threads._left == []


IMPORTED_BY_A_THREAD = """
import os, sys
import fxsafe
if INSTALL:
    fxsafe.install(patches=["cudagraph-threads"])
held = []

def first():
    import torch._inductor.cudagraph_trees as trees
    held.extend([trees.local.tree_manager_containers] * 5)

thread = threading.Thread(target=first)
thread.start()
thread.join()
while os.path.exists(f"/proc/self/task/{thread.native_id}"):
    os.sched_yield()  # C++ takes its thread-local state down after Python has let go of the thread
assert sys.getrefcount(held[0]) == EXPECTED, sys.getrefcount(held[0])
held.append(held[0])  # one more than the thread's end has taken too many
"""


@pytest.mark.parametrize("install", [False, True])
def test_the_end_of_the_thread_that_imported_the_trees_frees_what_is_its_own(install: bool) -> None:
    """Its C++ state drops a reference that it never took: the trees were freed while somebody held them."""
    program = IMPORTED_BY_A_THREAD.replace("INSTALL", str(install)).replace("EXPECTED", "6" if install else "5")
    passes(program)


IMPORTED_USED_AND_ENDED = """
import os, sys
import fxsafe
held, imported, use = [], threading.Event(), threading.Event()

def first():
    import torch._inductor.cudagraph_trees as trees
    held.extend([trees.local.tree_manager_containers] * 5)
    imported.set()
    use.wait()
    assert trees.get_container(0) is trees.get_container(0)

if not LATE:
    fxsafe.install(patches=["cudagraph-threads"])
thread = threading.Thread(target=first)
thread.start()
imported.wait()
if LATE:
    fxsafe.install(patches=["cudagraph-threads"])
use.set()
thread.join()
while os.path.exists(f"/proc/self/task/{thread.native_id}"):
    os.sched_yield()
assert sys.getrefcount(held[0]) == 6, sys.getrefcount(held[0])
"""


@pytest.mark.parametrize("late", [False, True])
def test_the_thread_that_imported_the_trees_uses_them_and_ends(late: bool) -> None:
    """``late``: another thread installs, after the import. What it used was freed at once."""
    passes(IMPORTED_USED_AND_ENDED.replace("LATE", str(late)))


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_thread_that_python_did_not_make_an_object_for(in_backward: bool) -> None:
    def use(_: Any = None) -> None:
        tree_here()

    def run(done: Any) -> None:
        try:
            if in_backward:
                y = torch.ones(2, requires_grad=True) * 2
                y.register_hook(use)
                y.sum().backward()
            else:
                use()
        finally:
            done.release()

    with applied(NAME):
        tree_here()
        known, before = threading.enumerate(), len(_threads()._owners)
        for _ in range(3):
            done = threading.Semaphore(0)
            _thread.start_new_thread(run, (done,))
            assert done.acquire(timeout=60)
        for _ in range(600):
            if len(_threads()._owners) == before:
                break
            time.sleep(0.1)
        assert len(_threads()._owners) == before
        assert threading.enumerate() == known


class Manager:
    """In place of a ``CUDAGraphTreeManager``, which needs a GPU."""

    def __init__(self, looked_at: Any = gc.collect) -> None:
        self.looked_at = looked_at
        self.ends = 0

    def live_cudagraph_pool_storages_in_curr_execution(self) -> list[int]:
        self.looked_at()
        return []

    def shutdown(self) -> None:
        self.ends += 1


def test_a_finalizer_that_uses_the_trees_while_those_of_an_ended_thread_go() -> None:
    passes(
        """
        import faulthandler, gc
        import torch._inductor.cudagraph_trees as trees
        from fxsafe.patches import cudagraph_threads
        from test_cudagraph_threads import Manager

        faulthandler.dump_traceback_later(60, exit=True)
        used, manager = [], Manager()

        class Finalizer:
            def __init__(self):
                self.me = self

            def __del__(self):
                used.append(trees.get_container(0))

        def work():
            trees.get_container(0).tree_manager = manager
            Finalizer()

        trees.get_container(0)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert used
        assert manager.ends == 1
        assert cudagraph_threads._threads._left == []
        """,
        NAME,
    )


def test_the_interpreter_ends_right_after_threads_that_had_trees() -> None:
    """Their C++ state goes later than ``join`` returns: a third of such programs died by SIGABRT."""
    passes(
        """
        import os, sys
        import torch._inductor.cudagraph_trees as trees
        import fxsafe
        fxsafe.install(patches=["cudagraph-threads"])
        trees.get_container(0)
        sys.setswitchinterval(1)
        leave = threading.Event()

        def work():
            trees.get_container(0)
            leave.wait()

        for _ in range(25):
            child = os.fork()
            if child == 0:
                threads = [threading.Thread(target=work) for _ in range(60)]
                for thread in threads:
                    thread.start()
                leave.set()
                for thread in threads:
                    thread.join()
                sys.exit()
            assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_threads_that_end_at_once_are_all_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one looks which of the others are gone, another ends."""
    with applied(NAME):
        looked, ended = threading.Event(), threading.Event()

        def exists(_: int) -> bool:
            looked.set()
            return ended.wait(60)

        monkeypatch.setattr(cudagraph_threads, "_exists", exists)
        _threads()._ending.add(0)
        first = threading.Thread(target=tree_here)
        first.start()
        assert looked.wait(60)
        monkeypatch.setattr(cudagraph_threads, "_exists", lambda _: True)
        second = threading.Thread(target=tree_here)
        second.start()
        second.join()
        ended.set()
        first.join()
        assert {first.native_id, second.native_id} <= _threads()._ending


def test_a_thread_that_only_installs_gets_no_state_that_could_outlive_it() -> None:
    def install() -> bool:
        with applied(NAME):
            return bool(torch._C._is_key_in_tls("fxsafe_cudagraph_owner"))

    assert Task(install).result() is False


def test_a_fork_while_other_threads_have_trees_and_record() -> None:
    """A fork takes the Python state of all other threads down in the child: nothing of CUDA's may be touched there."""
    passes(
        """
        import os, signal, threading
        import torch._inductor.cudagraph_trees as trees
        from fxsafe.patches import cudagraph_threads
        from test_cudagraph_threads import Manager

        manager, ready, leave = Manager(), threading.Semaphore(0), threading.Event()

        def has_trees():
            trees.get_container(0).tree_manager = manager
            ready.release()
            leave.wait()

        def records():
            with cudagraph_threads._threads.capturing:
                ready.release()
                leave.wait()

        threads = [threading.Thread(target=work) for work in (has_trees, records)]
        for thread in threads:
            thread.start()
            ready.acquire()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            trees.get_container(0)
            os._exit(manager.ends)
        assert os.waitpid(child, 0)[1] == 0
        leave.set()
        for thread in threads:
            thread.join()
        assert manager.ends == 1
        """,
        NAME,
    )


def test_a_reset_leaves_on_what_the_trees_of_other_threads_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording with it off fails: "cached_tensorimpls_enabled INTERNAL ASSERT FAILED"."""
    switched: list[bool] = []
    monkeypatch.setattr(trees, "_set_cached_tensors_enabled", switched.append)
    ready, leave = threading.Event(), threading.Event()

    def work() -> None:
        tree_here()
        ready.set()
        leave.wait(60)

    with applied(NAME):
        tree_here()
        task = Task(work)
        assert ready.wait(60)
        trees.reset_cudagraph_trees()
        assert switched == []
        leave.set()
        task.result()
        trees.reset_cudagraph_trees()
        assert switched == [False]


def test_a_reset_holds_after_uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRACKER, "generation", 7)
    monkeypatch.setattr(BOX, "mark_step_counter", -1)
    with applied(NAME):
        tree_here()
        compiled_call()
        trees.reset_cudagraph_trees()
        guard.GenerationTracker.clear()
        assert steps() == (0, 0)
    assert steps() == (0, 0)


LAZY = """
import importlib.util, pathlib, sys, tempfile
import torch._inductor.cudagraph_trees as trees  # which loads all such modules
folder = tempfile.mkdtemp()
pathlib.Path(folder, "lazy_one.py").write_text("raise ImportError('loaded')")
sys.path.insert(0, folder)
spec = importlib.util.find_spec("lazy_one")
spec.loader = importlib.util.LazyLoader(spec.loader)
sys.modules["lazy_one"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
with applied("cudagraph-threads"):
    trees.get_container(0)
"""


def test_a_module_that_is_to_be_loaded_at_its_first_use_is_not_loaded() -> None:
    passes(LAZY)


def test_uninstall_while_a_thread_gets_the_first_trees() -> None:
    passes(
        """
        import sys, types
        import fxsafe
        import torch._dynamo.mutation_guard as guard
        import torch._inductor.cudagraph_trees as trees
        original, inside, leave = guard.GenerationTracker, threading.Event(), threading.Event()

        class Slow(types.ModuleType):
            def __setattr__(self, name, value):
                super().__setattr__(name, value)
                inside.set()
                leave.wait()

        slow = Slow("slow")
        vars(slow)["GenerationTracker"] = original
        there = dict(sys.modules)
        sys.modules.clear()  # the first to be looked at
        sys.modules.update({"slow": slow, **there})
        handle = fxsafe.install(patches=["cudagraph-threads"])
        threads = [threading.Thread(target=trees.get_container, args=(0,)), threading.Thread(target=handle.uninstall)]
        threads[0].start()
        inside.wait()
        threads[1].start()
        threads[1].join(1)
        leave.set()
        for thread in threads:
            thread.join()
        for module in (slow, guard, trees):
            assert module.GenerationTracker is original, module
        """
    )


@pytest.mark.skipif(
    not hasattr(torch._inductor.config.triton, "cudagraph_capture_sizes"), reason="a setting of later releases"
)
def test_each_thread_records_for_itself() -> None:
    """With no size to be captured for, what would record a graph calls the model: how it is kept can be seen here."""
    with applied(NAME), torch._inductor.config.patch({"triton.cudagraph_capture_sizes": ()}):
        threads = _threads()
        compiled = [trees.cudagraphify_impl(lambda inputs: inputs[0] + 1, [torch.ones(1)], ())]

        def recorded() -> list[Any]:
            """What each thread that lives has kept of it."""
            return [call for owner in threads._owners for number, call in owner.recorded.items() if number not in old]

        old = {number for owner in threads._owners for number in owner.recorded}
        leave, called = threading.Event(), threading.Semaphore(0)

        def of_a_thread() -> None:
            with torch._inductor.config.patch({"triton.cudagraph_capture_sizes": ()}):
                assert [compiled[0]([torch.ones(1)]).item() for _ in range(2)] == [2, 2]
            called.release()
            leave.wait(60)

        tasks = [Task(of_a_thread) for _ in range(2)]
        assert all(called.acquire(timeout=60) for _ in tasks)
        first, second = recorded()
        assert first is not second
        del first, second
        leave.set()
        for task in tasks:
            task.result()
        assert recorded() == []
        compiled[0]([torch.ones(1)])
        assert len(recorded()) == 1
        compiled.clear()
        gc.collect()
        assert recorded() == []


def test_install_and_uninstall_with_threads_that_have_trees() -> None:
    leave, ready = threading.Event(), threading.Event()
    with applied(NAME):
        tree_here()

        def of_a_thread() -> tuple[Any, Any]:
            mine = tree_here()
            ready.set()
            leave.wait(60)
            return mine, tree_here()

        task = Task(of_a_thread)
        assert ready.wait(60)
        assert guard.GenerationTracker is not TRACKER
    assert guard.GenerationTracker is TRACKER
    with applied(NAME):
        assert guard.GenerationTracker is not TRACKER
    leave.set()
    mine, after = task.result()
    assert mine is after


def _threads() -> Any:
    return cudagraph_threads._threads
