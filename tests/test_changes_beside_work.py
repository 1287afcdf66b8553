"""fxsafe comes or goes while another thread traces, exports or compiles, or while a thread is inside some block."""

from __future__ import annotations

import ast
import contextlib
import gc
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.utils
import torch.export._trace
import torch.fx.traceback as tb
from support import RELEASE, SOON_S, Task, X, compiled_graphs, inside_elsewhere, program
from torch import nn
from torch._higher_order_ops import flex_attention  # noqa: F401  the patches of node metadata wait for it
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _python_dispatch as dispatch
from torch.utils.flop_counter import FlopCounterMode

import fxsafe
from fxsafe import thread_globals, traces
from fxsafe.observe import threads

STEPS = 50  # nodes to make after the change has begun to wait: there is work left for a change that did not wait


class Pause:
    """Called in the middle of a thread's work: the work goes on when a change waits for it."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        with traces.lock:
            while not traces.state.changing:
                traces.changed.wait(0.001)


def exports(pause: Callable[[], None], strict: bool) -> Any:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_dynamo_compiling():
                pause()
            for _ in range(STEPS):
                x = x + 1
            return x

    return torch.export.export(Model(), (X,), strict=strict).module()(X).tolist()


def makes_fx(pause: Callable[[], None], **how: Any) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        pause()
        for _ in range(STEPS):
            x = x + 1
        return x

    return make_fx(function, **how)(X)(X).tolist()


def compiles(pause: Callable[[], None]) -> Any:
    def backend(gm: Any, inputs: Any) -> Any:
        pause()
        return gm.forward

    return torch.compile(lambda x: x + STEPS, backend=backend, fullgraph=True)(X).tolist()


WORK: dict[str, Callable[[Callable[[], None]], Any]] = {
    "export": lambda pause: exports(pause, False),
    "make_fx": makes_fx,
    "pre-dispatch": lambda pause: makes_fx(pause, pre_dispatch=True),
    "symbolic": lambda pause: makes_fx(pause, tracing_mode="symbolic"),
    "compile": compiles,
}


def state() -> list[Any]:
    return [
        torch.compiler.is_compiling(),
        torch._C._is_multithreading_enabled(),
        proxy_tensor._CURRENT_MAKE_FX_TRACER,
        torch.export._trace._EXPORT_MODULE_HIERARCHY,
        dispatch.is_in_torch_dispatch_mode(),
    ]


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    WORK["export"](lambda: None)  # what is imported by the first one
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", WORK)
def test_install_waits_for_what_another_thread_is_in_the_middle_of(kind: str) -> None:
    before, pause = state(), Pause()
    task = Task(lambda: WORK[kind](pause))
    assert pause.reached.wait(SOON_S)
    with fxsafe.install():
        assert state() == before
        assert task.result() == (X + STEPS).tolist()
        assert Task(state).result() == before
    assert state() == before


@pytest.mark.parametrize("kind", WORK)
def test_uninstall_waits_for_what_another_thread_is_in_the_middle_of(kind: str) -> None:
    before, pause = state(), Pause()
    handle = fxsafe.install()
    task = Task(lambda: WORK[kind](pause))
    assert pause.reached.wait(SOON_S)
    handle.uninstall()
    assert state() == before
    assert task.result() == (X + STEPS).tolist()
    assert state() == Task(state).result() == before


@pytest.mark.parametrize("kind", WORK)
def test_who_gives_up_the_wait_changes_nothing_and_names_the_thread(kind: str) -> None:
    handle = fxsafe.install()
    leave, reached = threading.Event(), threading.Event()

    def pause() -> None:
        reached.set()
        leave.wait(SOON_S)

    task = Task(lambda: WORK[kind](pause))
    assert reached.wait(SOON_S)
    with pytest.raises(
        fxsafe.FxsafeError, match=r"waited 0 s for traces and compiles.*nothing was changed[\s\S]*pause"
    ):
        handle.uninstall(timeout=0)
    leave.set()
    assert task.result() == (X + STEPS).tolist()
    assert fxsafe.is_installed()
    handle.uninstall()


def test_a_change_comes_through_while_threads_never_stop_working() -> None:
    """What begins while a change waits is held back: otherwise some thread would always be in the middle."""
    stop = threading.Event()
    right = (X + STEPS).tolist()
    seen: list[Any] = []

    def work(kind: str) -> None:
        while not stop.is_set():
            assert WORK[kind](lambda: None) == right

    with fxsafe.install():
        tasks = [Task(lambda kind=kind: work(kind)) for kind in [*WORK, "export", "make_fx", "pre-dispatch"]]
        try:
            for _ in range(5):
                traces.change_in_quiet("a change", SOON_S, lambda wanted: seen.append(state()))
        finally:
            stop.set()
        for task in tasks:
            task.result()
    assert seen == [[False, True, None, None, False]] * 5


@pytest.mark.parametrize("change", ["install", "uninstall"])
def test_inside_ones_own_compile_a_change_is_an_error_at_once(change: str) -> None:
    """The compile's thread holds Dynamo's lock, for which an export that would be waited for may wait."""
    refused: list[Any] = []
    handle = fxsafe.install() if change == "uninstall" else None

    def backend(gm: Any, inputs: Any) -> Any:
        with pytest.raises(fxsafe.FxsafeError, match="was called inside a compile on this thread") as error:
            handle.uninstall() if handle else fxsafe.install()
        refused.append(error)
        if handle:
            with fxsafe.install():  # who joins changes nothing
                pass
        return gm.forward

    assert torch.equal(torch.compile(lambda x: x + 1, backend=backend)(X), X + 1)
    assert len(refused) == 1
    assert fxsafe.is_installed() is bool(handle)
    if handle:
        handle.uninstall()


@pytest.mark.parametrize("change", ["install", "uninstall"])
def test_a_change_waits_for_another_threads_load(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._export.serde import serialize

    saved = io.BytesIO()
    torch.export.save(torch.export.export(nn.Linear(3, 2), (X,), strict=False), saved)
    pause, original = Pause(), serialize.GraphModuleDeserializer.deserialize_graph

    def slow(*arguments: Any) -> Any:
        pause()
        return original(*arguments)

    monkeypatch.setattr(serialize.GraphModuleDeserializer, "deserialize_graph", slow)
    handle = fxsafe.install() if change == "uninstall" else None
    task = Task(lambda: torch.export.load(io.BytesIO(saved.getvalue())))
    assert pause.reached.wait(SOON_S)
    if handle:
        handle.uninstall()
    else:
        handle = fxsafe.install()
    assert serialize._CURRENT_DESERIALIZER is None
    assert task.result().module()(X).shape == (2,)
    handle.uninstall()
    assert serialize._CURRENT_DESERIALIZER is None


def test_who_gives_up_names_also_the_threads_that_it_held_back() -> None:
    """A backend that waits for a thread which traces: the change waits for the compile, the thread for the change."""
    handle = fxsafe.install()
    pause = Pause()

    def traced_by_the_pool() -> Any:
        return torch.fx.symbolic_trace(nn.ReLU())

    def backend(gm: Any, inputs: Any) -> Any:
        pause()
        Task(traced_by_the_pool).result()
        return gm.forward

    task = Task(lambda: torch.compile(lambda x: x + 1, backend=backend)(X))
    assert pause.reached.wait(SOON_S)
    with pytest.raises(fxsafe.FxsafeError, match=r"held back meanwhile[\s\S]*traced_by_the_pool"):
        handle.uninstall(timeout=2)
    assert torch.equal(task.result(), X + 1)
    handle.uninstall()


def test_the_frames_of_a_thread_are_of_one_moment() -> None:
    """A walk along ``f_back`` meets a generator that has given control back meanwhile, and ends there."""
    stop = threading.Event()

    def numbers() -> Iterator[int]:
        yield from range(50)

    def work() -> None:
        while not stop.is_set():
            for _ in numbers():
                pass

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    task = Task(work)
    try:
        ends = {threads.frames(task.thread.ident)[-1].f_code.co_name for _ in range(20_000)}  # type: ignore[arg-type]
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        task.result()
    assert ends == {"_bootstrap"}
    assert threads.frames(task.thread.ident) == []  # type: ignore[arg-type]
    assert threads.frames(threading.get_ident())[1] is sys._getframe()


def parse_two_at_a_time(parse: Callable[[], Any]) -> Any:
    """Another thread's parse begins in the middle of this one, in a garbage collection, and this one ends first."""
    first, second, over = threading.get_ident(), threading.Event(), threading.Event()
    other: list[Task] = []

    def collecting(phase: str, _: Any) -> None:
        if phase == "start" and threading.get_ident() == first and not other:
            other.append(Task(lambda: ast.parse("[" * 20 + "]" * 20)))
            second.wait(1)
        elif phase == "start" and other and threading.get_ident() == other[0].thread.ident and not second.is_set():
            second.set()
            over.wait(SOON_S)

    thresholds = gc.get_threshold()
    gc.callbacks.append(collecting)
    gc.set_threshold(1)
    try:
        return parse()
    finally:
        over.set()
        gc.callbacks.remove(collecting)
        gc.set_threshold(*thresholds)
        for task in other:
            with contextlib.suppress(SystemError):
                task.result()


def test_source_is_parsed_beside_other_threads_parsers() -> None:
    if sys.version_info < (3, 12):  # since then nothing is collected in the middle
        with pytest.raises(SystemError, match="recursion depth mismatch"):
            parse_two_at_a_time(lambda: ast.parse("[" * 20 + "]" * 20))
    assert gc.isenabled()
    parse_two_at_a_time(lambda: thread_globals._tree("[" * 20 + "]" * 20))
    assert gc.isenabled()


# --- blocks -------------------------------------------------------------------------------------------------------

needs_annotate = pytest.mark.skipif(not hasattr(tb, "annotate"), reason="torch has had annotate since 2.9")


@contextmanager
def changes(when: str) -> Iterator[Callable[[str], None]]:
    """Installs or undoes at one of the places of a block, named by the string, and undoes at the end."""
    handles: list[Any] = []

    def here(place: str) -> None:
        if place in when.split():
            if handles:
                handles.pop().uninstall()
            else:
                handles.append(fxsafe.install())

    yield here
    while handles:
        handles.pop().uninstall()


def walk(outer: Any, inner: Any, here: Callable[[str], None], look: Callable[[], Any]) -> list[Any]:
    """What ``look`` gives in two nested blocks, at the end of each, and outside; ``here`` is told each place."""
    here("before")
    with outer():
        here("inside")
        seen = [look()]
        here("between")
        with inner():
            here("inner")
            seen.append(look())
        seen.append(look())
        here("after")
        seen.append(look())
    return [*seen, look()]


WHEN = ("inside", "before", "before inside", "inside inner", "inner after", "before inner", "inside between inner")


@pytest.mark.parametrize("when", WHEN)
def test_one_threads_blocks_are_the_same_whenever_fxsafe_comes_and_goes(when: str) -> None:
    def look() -> Any:
        return tb.has_preserved_node_meta(), dict(tb.get_current_meta()), dict(tb.current_meta)

    def blocks(here: Callable[[str], None]) -> list[Any]:
        entered: list[Any] = []

        @contextmanager
        def preserving(name: str) -> Iterator[None]:
            with tb.preserve_node_meta():
                entered.append(look())
                tb.current_meta[name] = 1
                yield

        seen = walk(lambda: preserving("mine"), lambda: preserving("inner"), here, look)
        return [*entered, *seen]

    plain = blocks(lambda place: None)
    assert plain[0][0]
    assert not plain[-1][0]
    with changes(when) as here:
        assert blocks(here) == plain
    assert (tb.has_preserved_node_meta(), tb.current_meta) == (False, plain[-1][2])


@needs_annotate
@pytest.mark.parametrize("when", WHEN)
def test_one_threads_annotations_survive_fxsafes_coming_and_going(when: str) -> None:
    def blocks(here: Callable[[str], None]) -> list[Any]:
        def look() -> Any:
            return dict(tb.current_meta.get("custom", {}))

        return walk(lambda: tb.annotate({"a": 1}), lambda: tb.annotate({"b": 2}), here, look)

    plain = blocks(lambda place: None)
    assert plain == [{"a": 1}, {"a": 1, "b": 2}, {"a": 1}, {"a": 1}, {}]
    with changes(when) as here:
        assert blocks(here) == plain


@pytest.mark.skipif(RELEASE < (2, 9), reason="torch has had error_on_graph_break since 2.9")
@pytest.mark.parametrize("when", WHEN)
def test_one_threads_graph_break_setting_survives_fxsafes_coming_and_going(when: str) -> None:
    block = torch._dynamo.error_on_graph_break
    look = torch._dynamo.utils._get_error_on_graph_break
    with changes(when) as here:
        assert walk(lambda: block(True), lambda: block(False), here, look) == [True, False, True, True, False]


class Mode(dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("manager", [tb.preserve_node_meta, Mode])
@pytest.mark.parametrize("question", ["preserved", "meta", "mode"])
def test_compiled_code_that_asks_where_it_is_called_gets_one_threads_plain_answers(manager: Any, question: str) -> None:
    ask = {
        "preserved": lambda x: x + 1 if tb.has_preserved_node_meta() else x + 2,
        "meta": lambda x: x + len(tb.get_current_meta()),
        "mode": lambda x: x + 1 if dispatch.is_in_torch_dispatch_mode() else x + 2,
    }[question]

    def answers() -> list[Any]:
        torch._dynamo.reset()
        graphs: list[int] = []

        def backend(gm: Any, inputs: Any) -> Any:
            graphs.append(len(gm.graph.nodes))
            return gm.forward

        compiled = torch.compile(ask, backend=backend)
        seen = [compiled(X).tolist()]
        with manager():
            seen.append(compiled(X).tolist())
        return [*seen, compiled(X).tolist(), graphs]

    plain = answers()
    with fxsafe.install():
        assert answers() == plain


# --- blocks of other threads ----------------------------------------------------------------------------------------


def test_a_mode_that_another_thread_was_inside_leaves_nothing() -> None:
    with inside_elsewhere(lambda: FlopCounterMode(display=False)) as leave:
        handle = fxsafe.install()
        assert not dispatch.is_in_torch_dispatch_mode()
        leave.set()
    handle.uninstall()
    assert not dispatch.is_in_torch_dispatch_mode()
    assert compiled_graphs() == 1


@pytest.mark.skipif(RELEASE < (2, 7), reason="not by this name before 2.7")
def test_a_compiling_context_that_another_thread_was_inside_leaves_nothing() -> None:
    from torch._export.utils import _compiling_state_context

    with inside_elsewhere(_compiling_state_context) as leave:
        handle = fxsafe.install()
        leave.set()
    assert not torch.compiler.is_compiling()
    handle.uninstall()
    assert not torch.compiler.is_compiling()
    assert not Task(torch.compiler.is_compiling).result()


@pytest.mark.skipif(RELEASE < (2, 7), reason="not by this name before 2.7")
def test_an_installation_knows_nothing_of_who_compiled_during_the_one_before() -> None:
    from torch._export.utils import _compiling_state_context

    flags, plain = vars(torch.compiler), type(torch.compiler)
    with fxsafe.install() as handle, inside_elsewhere(_compiling_state_context):
        assert flags["_is_compiling_flag"]
        assert type(torch.compiler) is not plain
        handle.uninstall()
        assert not flags["_is_compiling_flag"]
        with fxsafe.install():
            assert not flags["_is_compiling_flag"]
            assert type(torch.compiler) is plain


@pytest.mark.skipif(RELEASE < (2, 7), reason="not by this name before 2.7")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_forked_beside_the_installing_threads_block_is_outside_of_it() -> None:
    program(
        """
        import os, threading
        import torch, torch._dynamo, torch.fx.traceback as tb
        from torch._higher_order_ops import flex_attention
        import fxsafe

        handle = fxsafe.install()
        export = torch._export.utils._compiling_state_context()
        export.__enter__()
        block = tb.preserve_node_meta()
        block.__enter__()

        def fork():
            global child
            child = os.fork()
            if not child:
                state = lambda: (tb.has_preserved_node_meta(), torch.compiler.is_compiling())
                before = state()
                handle.uninstall()
                os._exit(0 if before == state() == (False, False) else 7)

        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        block.__exit__(None, None, None)
        """
    )
