"""The shape of a target: what a function takes, and which globals it reads and writes.

A patch is written against certain bodies of certain functions. Source text may be absent and bytecode differs between
Python versions, but the names in it do not, so these are what a patch compares before it touches anything.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

__all__ = ["Shape", "ShapeError", "own_function", "require", "shape_of", "uses_of_globals"]

# Instructions that name a global, by number: the kind of use, and by how many bits the name's index is shifted.
_USES: dict[int, tuple[str, int]] = {}
for _name, _use in (("LOAD", "read"), ("STORE", "write"), ("DELETE", "delete")):
    _USES[dis.opmap[f"{_name}_NAME"]] = _USES[dis.opmap[f"{_name}_GLOBAL"]] = (_use, 0)
if sys.version_info >= (3, 11):  # its lowest bit says whether a call follows
    _USES[dis.opmap["LOAD_GLOBAL"]] = ("read", 1)
_EXTENDED = dis.opmap["EXTENDED_ARG"]


class ShapeError(Exception):
    """A target does not look like any version of it that the patch knows; the message says which and how."""


class Shape(NamedTuple):
    """Names only, the same on every Python: parameters in order, globals read, globals written."""

    parameters: tuple[str, ...]
    reads: frozenset[str]
    writes: frozenset[str]

    def __str__(self) -> str:
        return (
            f"({', '.join(self.parameters)}) reading {sorted(self.reads) or 'no globals'}"
            f" and writing {sorted(self.writes) or 'none'}"
        )


def uses_of_globals(code: CodeType) -> Iterator[tuple[str, str]]:
    """("read" or "write" or "delete", name) for each instruction that uses a global; many times faster than ``dis``."""
    raw, extended = code.co_code, 0
    for at in range(0, len(raw), 2):
        number = raw[at]
        if number == _EXTENDED:
            extended = (extended | raw[at + 1]) << 8
            continue
        if number in _USES:
            kind, shift = _USES[number]
            yield kind, code.co_names[(extended | raw[at + 1]) >> shift]
        extended = 0


@functools.lru_cache(maxsize=64)
def shape_of(code: CodeType) -> Shape:
    """The shape of one code object; functions nested in it are not looked into."""
    uses = list(uses_of_globals(code))
    reads, writes = ({name for how, name in uses if how == kind} for kind in ("read", "write"))
    count = code.co_argcount + code.co_kwonlyargcount
    return Shape(code.co_varnames[:count], frozenset(reads), frozenset(writes))


def _named(found: Any) -> str:
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    return f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else repr(found)


def own_function(owner: ModuleType | type, name: str) -> FunctionType:
    """The function that torch itself defined as ``owner.name``, also below well-behaved wrappers of other people.

    Raises:
        ShapeError: there is none, or somebody put something else there.
    """
    module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    qualname = name if isinstance(owner, ModuleType) else f"{owner.__qualname__}.{name}"
    where = f"{module}.{qualname}"
    try:
        found: Any = vars(owner)[name]
    except KeyError:
        raise ShapeError(f"{where} does not exist") from None
    function, seen = found, {id(found)}
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
        if id(function) in seen:
            break
        seen.add(id(function))
    if not (type(function) is FunctionType and function.__module__ == module and function.__code__.co_name == name):
        raise ShapeError(
            f"{where} was replaced by {_named(found)}, which is left in place; if it wraps torch's own, give it "
            "__wrapped__ (functools.wraps does)"
        )
    return function


def require(where: str, function: FunctionType, *known: Shape) -> Shape:
    """The known shape that ``function`` has.

    Raises:
        ShapeError: it has none of them, or it has free variables.
    """
    shape = shape_of(function.__code__)
    if function.__code__.co_freevars:
        raise ShapeError(f"{where} closes over {list(function.__code__.co_freevars)}")
    for candidate in known:
        if shape == candidate:
            return candidate
    raise ShapeError(f"{where} has an unknown shape: {shape}")
