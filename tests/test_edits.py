from __future__ import annotations

import copy
import pickle
import sys
from types import FunctionType, ModuleType

import pytest

from fxsafe.edits import AttributeSwap, CodeSwap, CodeWrap, ModuleProperties, body_below, code_with_constants


def answer() -> str:
    return "original"


def add(a: int, b: int = 2) -> int:
    return a + b


def add_template(a, b=0):
    replacement = "<replacement>"
    return replacement(a, b)


def body_with_constant():
    said = "<said>"
    return said


def test_a_code_swap_reaches_every_alias_and_gives_the_identical_code_back():
    alias, before = answer, answer.__code__
    edit = CodeSwap("answer", answer, code_with_constants(body_with_constant, {"<said>": ["a list"]}, answer.__code__))
    edit.apply()
    assert alias() == ["a list"]
    assert (alias.__code__.co_name, alias.__code__.co_filename) == (before.co_name, before.co_filename)
    assert edit.undo()
    assert alias.__code__ is before
    assert edit.undo(), "undoing twice is harmless"


def test_a_code_swap_leaves_a_later_change_by_somebody_else_alone():
    before = answer.__code__
    edit = CodeSwap("answer", answer, code_with_constants(body_with_constant, {"<said>": 1}, before))
    edit.apply()
    theirs = (lambda: "theirs").__code__
    answer.__code__ = theirs
    try:
        assert not edit.undo()
        assert answer.__code__ is theirs
    finally:
        answer.__code__ = before


def test_constants_must_have_their_placeholders():
    with pytest.raises(ValueError, match="<nowhere>"):
        code_with_constants(body_with_constant, {"<nowhere>": 1}, answer.__code__)


def test_wraps_nest_with_the_last_one_outermost_and_keep_defaults():
    before, calls = add.__code__, []

    def wrap(name):
        def make(original):
            def replacement(a, b):
                calls.append(name)
                return original(a, b)

            return replacement

        return make

    edits = [CodeWrap("add", add, add_template, wrap(n)) for n in ("inner", "outer")]
    for edit in edits:
        edit.apply()
    assert add(1) == 3
    assert add(b=5, a=1) == 6
    assert calls == ["outer", "inner"] * 2
    assert body_below(add) is before
    assert [edit.undo() for edit in reversed(edits)] == [True, True]
    assert add.__code__ is before


def test_a_wrap_refuses_a_function_with_other_parameters_or_a_closure():
    with pytest.raises(ValueError, match="other parameters"):
        CodeWrap("answer", answer, add_template, lambda original: original)
    a = 1

    def closes(a_, b=a):
        return a

    with pytest.raises(ValueError, match="closes over"):
        CodeWrap("closes", closes, add_template, lambda original: original)


def test_an_attribute_swap_restores_what_the_owner_itself_held():
    class Owner:
        @staticmethod
        def f():
            return 1

    before = vars(Owner)["f"]
    edit = AttributeSwap("Owner.f", Owner, "f", staticmethod(lambda: 2))
    edit.apply()
    assert Owner.f() == 2
    assert edit.undo()
    assert vars(Owner)["f"] is before
    with pytest.raises(KeyError):
        AttributeSwap("Owner.g", Owner, "g", None)


def test_an_attribute_swap_leaves_somebody_elses_attribute_alone():
    class Owner:
        x = 1

    edit = AttributeSwap("Owner.x", Owner, "x", 2)
    edit.apply()
    Owner.x = 3
    assert not edit.undo()
    assert Owner.x == 3


def test_module_properties_serve_reads_writes_and_from_imports_but_not_the_modules_own_code():
    module = ModuleType("fxsafe_test_module")
    exec("value = 'global'\ndef read():\n    return value", vars(module))
    sys.modules[module.__name__] = module
    try:
        held = ["property"]
        edit = ModuleProperties(
            "value", module, {"value": property(lambda self: held[0], lambda self, new: held.__setitem__(0, new))}
        )
        edit.apply()
        module.value = "written"
        from fxsafe_test_module import value

        assert (value, module.value, held, module.read()) == ("written", "written", ["written"], "global")
        assert pickle.loads(pickle.dumps(module)) is module
        assert copy.copy(module) is module
        assert isinstance(module, ModuleType)
        assert edit.undo()
        assert type(module) is ModuleType
        assert module.value == "global"
    finally:
        del sys.modules[module.__name__]


def one_line(x):
    return x


def test_a_body_put_in_anothers_place_is_on_the_first_line_of_that_one():
    def long_one(x):
        y = x
        for _ in range(3):
            y = y + (lambda z: z * 2)(y) if y else [y, y, y, {1: y, 2: y, 3: y}, (y, y), y + 1, y + 2, y + 3]
        raise ValueError(y)

    code = code_with_constants(
        long_one, {}, test_a_body_put_in_anothers_place_is_on_the_first_line_of_that_one.__code__
    )
    assert {line for _, _, line in code.co_lines() if line is not None} == {code.co_firstlineno}
    assert list(code.co_lines())[-1][1] == len(code.co_code)
    with pytest.raises(ValueError, match="27") as caught:
        FunctionType(code, globals())(1)
    assert caught.value.__traceback__.tb_next.tb_lineno == code.co_firstlineno
