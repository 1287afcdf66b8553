from __future__ import annotations

import io
import threading
from typing import Any

import pytest
import torch
from locks_support import applied
from support import SOON_S, Task
from torch import nn
from torch._export.serde import serialize

X = torch.ones(2)


def saved() -> bytes:
    file = io.BytesIO()
    torch.export.save(torch.export.export(nn.Linear(2, 2), (X,), strict=False), file)
    return file.getvalue()


def load(file: bytes) -> Any:
    return torch.export.load(io.BytesIO(file)).graph_module.code


@pytest.mark.parametrize("patches", [(), ("export-load",)])
def test_threads_load_at_the_same_time(patches: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved()
    right = load(file)
    inside, leave, first = threading.Event(), threading.Event(), threading.Lock()
    plain = serialize.GraphModuleDeserializer.deserialize_graph

    def held(*args: Any, **kwargs: Any) -> Any:
        if first.acquire(False):
            inside.set()
            leave.wait(SOON_S)
        return plain(*args, **kwargs)

    monkeypatch.setattr(serialize.GraphModuleDeserializer, "deserialize_graph", held)
    with applied(*patches):
        task = Task(lambda: load(file))
        assert inside.wait(SOON_S)
        try:
            if patches:
                assert load(file) == right
            else:
                with pytest.raises(AssertionError):  # it finds the other's deserializer
                    load(file)
        finally:
            leave.set()
        if patches:
            assert task.result() == right
        task.thread.join(SOON_S)
    assert serialize._CURRENT_DESERIALIZER is None


def test_a_load_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved()

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError

    with applied("export-load"):
        with monkeypatch.context() as patched:
            patched.setattr(serialize.GraphModuleDeserializer, "deserialize_graph", fails)
            with pytest.raises(ArithmeticError):
                load(file)
        assert load(file)
    assert serialize._CURRENT_DESERIALIZER is None
