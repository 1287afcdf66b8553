from __future__ import annotations

import argparse
import dis
import typing
from types import CodeType

import pytest
import torch._dynamo.variables.builtin

from fxsafe.shapes import shape_of, uses_of_globals
from fxsafe.thread_globals import nested

KINDS = {"LOAD": "read", "STORE": "write", "DELETE": "delete"}


def by_dis(code: CodeType) -> list[tuple[str, str]]:
    uses = []
    for instruction in dis.get_instructions(code):
        kind, _, rest = instruction.opname.partition("_")
        if kind in KINDS and rest in ("GLOBAL", "NAME"):
            uses.append((KINDS[kind], instruction.argval))
    return uses


def source(module: typing.Any) -> CodeType:
    with open(module.__file__, encoding="utf-8") as file:
        return compile(file.read(), module.__file__, "exec")


MANY = "def f():\n global n7, n600\n " + "\n ".join(f"n{i}" for i in range(700)) + "\n n600 = n699; del n7"


@pytest.mark.parametrize(
    "code", [source(argparse), source(typing), source(torch._dynamo.variables.builtin), compile(MANY, "many", "exec")]
)
def test_uses_of_globals_are_those_that_dis_shows(code: CodeType) -> None:
    for part in nested(code):
        assert list(uses_of_globals(part)) == by_dis(part)


def test_a_name_beyond_the_first_256_is_seen() -> None:
    shape = shape_of(next(c for c in compile(MANY, "many", "exec").co_consts if isinstance(c, CodeType)))
    assert shape.reads == {f"n{i}" for i in range(700)}
    assert shape.writes == {"n600"}
