from __future__ import annotations

import copyreg
import threading
from typing import Any

import pytest
from locks_support import applied
from support import SOON_S, Task
from torch._export.serde import serialize


class Slow:
    """Keeps a save going, or makes it fail."""

    def __init__(self, inside: threading.Event, leave: threading.Event, error: type[Exception] | None = None) -> None:
        self.of = inside, leave, error

    def __reduce__(self) -> Any:
        inside, leave, error = self.of
        inside.set()
        leave.wait(SOON_S)
        if error is not None:
            raise error
        return (int, (3,))


def save(what: Any) -> bytes:
    return serialize.serialize_torch_artifact(what)


def entered() -> bool:
    return serialize.FakeTensor in copyreg.dispatch_table


@pytest.mark.parametrize("patches", [(), ("export-save",)])
def test_threads_save_at_the_same_time(patches: tuple[str, ...]) -> None:
    right = save({"a": 1})
    inside, leave = threading.Event(), threading.Event()
    with applied(*patches):
        task = Task(lambda: save(Slow(inside, leave)))
        assert inside.wait(SOON_S)
        try:
            if patches:
                assert save({"a": 1}) == right
                assert entered(), "the save that goes on still needs it"
            else:
                with pytest.raises(AssertionError, match="Refusing to stomp"):
                    save({"a": 1})
        finally:
            leave.set()
        assert task.result()
    assert not entered()


def test_a_save_that_fails_takes_its_reducer_out() -> None:
    done = threading.Event()
    done.set()
    with applied("export-save"):
        with pytest.raises(ArithmeticError):
            save(Slow(done, done, ArithmeticError))
        assert not entered()


def test_somebody_elses_reducer_is_refused_as_before() -> None:
    copyreg.pickle(serialize.FakeTensor, lambda tensor: "theirs")
    try:
        with applied("export-save"), pytest.raises(AssertionError, match="Refusing to stomp"):
            save({"a": 1})
        assert entered()
    finally:
        del copyreg.dispatch_table[serialize.FakeTensor]
