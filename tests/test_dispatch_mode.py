from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from locks_support import applied
from support import RELEASE, Task, compiled_graphs, inside_elsewhere, thread_of_its_own
from torch.utils import _python_dispatch as dispatch
from torch.utils.flop_counter import FlopCounterMode

NAMES = [name for name in vars(dispatch) if name.startswith("_is_in_")]


def mode_elsewhere() -> AbstractContextManager[threading.Event]:
    return inside_elsewhere(lambda: FlopCounterMode(display=False))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("patches", [(), ("dispatch-mode",)])
def test_a_function_compiles_beside_another_threads_mode(patches: tuple[str, ...]) -> None:
    with applied(*patches), mode_elsewhere():
        assert dispatch.is_in_torch_dispatch_mode() is (not patches)
        assert compiled_graphs() == (0 if not patches and RELEASE <= (2, 10) else 1)


@pytest.mark.parametrize("patches", [(), ("dispatch-mode",)])
def test_modes_that_overlap_leave_nothing(patches: tuple[str, ...]) -> None:
    with applied(*patches):
        with mode_elsewhere() as leave:
            with mode_elsewhere():
                leave.set()
        with mode_elsewhere() as leave_first:
            second = mode_elsewhere()
            leave_second = second.__enter__()
            leave_first.set()
        leave_second.set()
        second.__exit__(None, None, None)
        assert dispatch.is_in_torch_dispatch_mode() is (not patches)
        assert compiled_graphs() == (0 if not patches and RELEASE <= (2, 10) else 1)
    assert not patches or not any(vars(dispatch)[name] for name in NAMES)


def test_the_modes_of_one_thread_are_as_ever() -> None:
    with applied("dispatch-mode"), pytest.raises(ArithmeticError):
        with FlopCounterMode(display=False) as counter:
            assert dispatch.is_in_torch_dispatch_mode()
            assert dispatch.is_in_torch_dispatch_mode(include_infra_modes=False)
            with FlopCounterMode(display=False):
                torch.ones(2, 2) @ torch.ones(2, 2)
            assert dispatch.is_in_torch_dispatch_mode()
            assert counter.get_total_flops() > 0
            raise ArithmeticError
    assert not dispatch.is_in_torch_dispatch_mode()


def test_who_installs_inside_a_mode_stays_inside() -> None:
    with FlopCounterMode(display=False):
        with applied("dispatch-mode"):
            assert dispatch.is_in_torch_dispatch_mode()
        assert dispatch.is_in_torch_dispatch_mode()
    assert not dispatch.is_in_torch_dispatch_mode()


def test_who_installs_inside_a_mode_may_leave_it_before_fxsafe_goes() -> None:
    mode = FlopCounterMode(display=False)
    mode.__enter__()
    with applied("dispatch-mode"):
        assert dispatch.is_in_torch_dispatch_mode()
        mode.__exit__(None, None, None)
        assert not dispatch.is_in_torch_dispatch_mode()
    assert not any(vars(dispatch)[name] for name in NAMES)


def test_what_blocks_have_left_before_the_installation_is_not_believed() -> None:
    vars(dispatch).update(dict.fromkeys(NAMES, True))
    with applied("dispatch-mode"):
        assert not dispatch.is_in_torch_dispatch_mode()
        assert compiled_graphs() == 1
        assert not Task(dispatch.is_in_torch_dispatch_mode).result()
    assert not any(vars(dispatch)[name] for name in NAMES)


def test_a_thread_that_was_inside_a_mode_before_knows_it() -> None:
    with thread_of_its_own() as does:
        mode = FlopCounterMode(display=False)
        does(mode.__enter__)
        with applied("dispatch-mode"):
            assert does(dispatch.is_in_torch_dispatch_mode)
            does(lambda: mode.__exit__(None, None, None))
            assert not does(dispatch.is_in_torch_dispatch_mode)


def test_a_mode_that_outlives_an_installation_is_over_in_the_next() -> None:
    with thread_of_its_own() as does:
        mode = FlopCounterMode(display=False)
        with applied("dispatch-mode"):
            does(mode.__enter__)
        does(lambda: mode.__exit__(None, None, None))
        with applied("dispatch-mode"):
            assert not does(dispatch.is_in_torch_dispatch_mode)
