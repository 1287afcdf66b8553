"""SymPy's registry of singletons, asked by two threads at once."""

from __future__ import annotations

from typing import Any

import pytest
from locks_support import applied, fails, passes, plan_of
from sympy import S
from sympy.core.basic import Basic
from sympy.core.singleton import Singleton, SingletonRegistry

from fxsafe.patches.base import ShapeError

# Both threads find the class waiting before either makes it; then one goes first.
BOTH_FIRST = """
    from sympy import S
    from sympy.core.basic import Basic
    from sympy.core.singleton import Singleton
    both = threading.Barrier(2)
    class Number(Basic, metaclass=Singleton):
        def __init__(self):
            both.wait(60)
    found = []
    def ask():
        try:
            found.append(S.Number)
        except BaseException as error:
            found.append(error)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert all(f is Number._instance for f in found), found
    assert S.Number is Number._instance and "Number" not in S._classes_to_install
"""

# The attribute is not there when Python looks, and is there, no longer waiting, when ``__getattr__`` runs.
BETWEEN = """
    from sympy import S
    S.NegativeInfinity
    assert S.__getattr__("NegativeInfinity") is S.NegativeInfinity
"""


@pytest.mark.parametrize(("program", "symptom"), [(BOTH_FIRST, "KeyError"), (BETWEEN, "AttributeError")])
def test_threads_may_ask_for_a_singleton_first_at_the_same_moment(program: str, symptom: str) -> None:
    fails(program, symptom)
    passes(program, "sympy-singletons")


def test_the_registry_answers_as_before_and_is_given_back() -> None:
    code = SingletonRegistry.__getattr__.__code__
    with applied("sympy-singletons"):
        assert SingletonRegistry.__getattr__.__code__ is not code

        class Late(Basic, metaclass=Singleton):
            pass

        waiting: Any = S
        assert [waiting.Late, waiting.Late] == [Late()] * 2
        with pytest.raises(AttributeError, match="'Absent' was not installed on SymPy registry S"):
            _ = waiting.Absent
        assert not hasattr(S, "Absent")
    assert SingletonRegistry.__getattr__.__code__ is code
    assert waiting.Late is Late()


def test_another_registry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SingletonRegistry.__getattr__, "__code__", (lambda self, name: sorted(name)).__code__)
    with pytest.raises(ShapeError, match="__getattr__"):
        plan_of("sympy-singletons")
