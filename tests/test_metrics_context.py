from __future__ import annotations

import threading
from typing import Any

import pytest
import torch._dynamo.utils as utils
from locks_support import applied
from support import SOON_S, Task

SHARED = "_METRICS_CONTEXT" in vars(utils)
pytestmark = pytest.mark.skipif(not hasattr(utils, "get_metrics_context"), reason="metrics contexts since torch 2.6")


def overlapping() -> Any:
    """Two threads collect, and the one that has begun ends first."""
    begun, entered, left = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with utils.get_metrics_context() as context:
            context.update({"co_name": "first"})
            begun.set()
            entered.wait(SOON_S)
        left.set()

    def second() -> Any:
        with utils.get_metrics_context() as context:
            entered.set()
            left.wait(SOON_S)
            try:
                context.update_outer({"co_name": "second"})
            except RuntimeError as error:
                return str(error)
            return dict(context._metrics)["co_name"]

    task = Task(first)
    assert begun.wait(SOON_S)
    found = Task(second).result()
    task.result()
    return found


@pytest.mark.parametrize("patches", [(), ("metrics-context",)])
def test_two_threads_collect_what_is_theirs(patches: tuple[str, ...]) -> None:
    with applied(*patches):
        found = overlapping()
    if patches or not SHARED:
        assert found == "second"
    else:
        assert "have already been set in the current context" in found


def test_one_thread_has_one_context_and_torch_has_its_own_afterwards() -> None:
    before = utils.get_metrics_context()
    with applied("metrics-context"):
        assert utils.get_metrics_context() is before
        other = Task(utils.get_metrics_context).result()
        assert (other is before) is False
        assert type(other) is type(before)
        assert other._on_exit is before._on_exit
    assert utils.get_metrics_context() is before
