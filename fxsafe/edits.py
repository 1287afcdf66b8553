"""Reversible edits: the only ways in which fxsafe changes an object of torch's.

Each edit remembers the exact object it replaced and gives that object back. None of them ever overwrites a
change that somebody else made after it: ``undo`` then leaves the place alone and says so.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

__all__ = [
    "AttributeSwap",
    "CodeSwap",
    "CodeWrap",
    "Edit",
    "ModuleProperties",
    "body_below",
    "code_with_constants",
    "copy_function",
]

_MISSING: Any = object()
# A wrap's code -> the code it was put over.
_below: weakref.WeakKeyDictionary[CodeType, CodeType] = weakref.WeakKeyDictionary()


class Edit(Protocol):
    """One change to one object.

    ``target`` names the place for people, e.g. ``"torch.fx._symbolic_trace.is_fx_tracing"``.
    """

    target: str

    def apply(self) -> None:
        """Make the change. Raises only if nothing was changed."""

    def undo(self) -> bool:
        """Put the original object back; harmless where it is back already, or was never taken away.

        Returns:
            False if somebody else has changed the place since: it is then left as they made it.
        """


def _on_one_line(size: int) -> bytes:
    """A table that has ``size`` bytes of code on the first line of its function.

    The lines of our body are not lines of torch's file, where a traceback would look for them. Formats: Python's
    ``Objects/locations.md`` and, for 3.10, ``Objects/lnotab_notes.txt``.
    """
    if sys.version_info < (3, 11):
        return b"".join(bytes([min(size - at, 254), 0]) for at in range(0, size, 254))
    units = size // 2
    # 13: a line and no column; then the difference of the line, which is 0.
    return b"".join(bytes([0x80 | 13 << 3 | min(units - at, 8) - 1, 0]) for at in range(0, units, 8))


def code_with_constants(
    function: FunctionType, constants: dict[str, Any], like: CodeType, *, keep: bool = True
) -> CodeType:
    """The code of ``function`` with string constants replaced by objects.

    Args:
        function: a function whose body binds placeholders, e.g. ``flags = "<flags>"``.
        constants: placeholder -> object. An object that travels inside the code, rather than in the globals of
            the function that receives it, is still there for a frame that outlives the undoing of the edit.
        like: the code that is replaced. Name, file and line are taken from it, so that whoever decides by the
            file of a frame (Dynamo's skip rules do) decides as before.
        keep: see ``one_of_equals``; the objects then live as long as the process.

    Raises:
        ValueError: a placeholder does not occur in the body.
    """
    code = function.__code__
    missing = [name for name in constants if name not in code.co_consts]
    if missing:
        raise ValueError(f"{function.__qualname__} has no placeholder {missing}")
    consts = tuple(constants.get(c, c) if isinstance(c, str) else c for c in code.co_consts)
    fields: dict[str, Any] = {
        "co_consts": consts,
        "co_name": like.co_name,
        "co_filename": like.co_filename,
        "co_firstlineno": like.co_firstlineno,
        "co_linetable": _on_one_line(len(code.co_code)),
    }
    if hasattr(code, "co_qualname"):  # Python 3.11
        fields["co_qualname"] = like.co_qualname
    code = code.replace(**fields)
    return one_of_equals(code) if keep else code


_codes: dict[tuple[CodeType, str], CodeType] = {}  # the file does not count where code objects are compared


def one_of_equals(code: CodeType) -> CodeType:
    """The first code object of the process that equals this one, constants included.

    Dynamo guards on the identity of the code that it went through: an installation that follows another one must bring
    the same objects, or everything that was compiled is compiled again.
    """
    try:
        return _codes.setdefault((code, code.co_filename), code)
    except TypeError:  # a constant that cannot be hashed
        return code


def copy_function(function: FunctionType) -> FunctionType:
    """A function of its own with the present code, globals, defaults and closure of ``function``."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    copy.__module__ = function.__module__
    return copy


class CodeSwap:
    """Gives a function another body in place, so that every alias of it follows.

    Functions compiled earlier hold torch's predicates in a closure, other modules import them by name, and
    Dynamo's rule tables are keyed by the function object: replacing the attribute would miss all of these.
    """

    def __init__(self, target: str, function: FunctionType, code: CodeType) -> None:
        """
        Raises:
            ValueError: the code needs other free variables than the function has (Python would refuse it).
        """
        if len(code.co_freevars) != len(function.__code__.co_freevars):
            raise ValueError(f"{target}: the new code has other free variables than the function")
        self.target = target
        self._function = function
        self._original = function.__code__
        self._code = code

    def apply(self) -> None:
        self._function.__code__ = self._code

    def undo(self) -> bool:
        return _give_back(self._function, self._code, self._original)


def _give_back(function: FunctionType, ours: CodeType | None, original: CodeType) -> bool:
    if function.__code__ is ours:
        function.__code__ = original
    return function.__code__ is original


class CodeWrap:
    """Gives a function a body that uses what it had; several wraps of one function nest, the last one outermost."""

    def __init__(
        self,
        target: str,
        function: FunctionType,
        template: FunctionType,
        wrap: Callable[[FunctionType], object],
    ) -> None:
        """
        Args:
            function: takes the same parameters as ``template``.
            template: the new body. It binds the placeholder ``"<replacement>"``, mostly to call it with its
                parameters.
            wrap: called when the edit is applied with a function that has the body of that moment; returns what
                takes the placeholder's place.

        Raises:
            ValueError: ``function`` closes over other variables or takes other parameters than ``template``.
        """
        code, new = function.__code__, template.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        parameters = new.co_varnames[: new.co_argcount + new.co_kwonlyargcount]
        if code.co_freevars != new.co_freevars or names != parameters:
            raise ValueError(
                f"{target} closes over other variables or takes other parameters than {template.__qualname__}"
            )
        self.target = target
        self._function = function
        self._template = template
        self._wrap = wrap
        self._original = code
        self._code: CodeType | None = None

    def apply(self) -> None:
        self._original = self._function.__code__
        replacement = self._wrap(copy_function(self._function))
        # Not kept for the next installation, which makes another replacement.
        constants = {"<replacement>": replacement}
        self._code = code_with_constants(self._template, constants, self._original, keep=False)
        _below[self._code] = self._original
        self._function.__code__ = self._code

    def undo(self) -> bool:
        return _give_back(self._function, self._code, self._original)


def body_below(function: FunctionType) -> CodeType:
    """The code of ``function`` below all of our wraps: torch's own body, or what somebody else put there."""
    code = function.__code__
    while code in _below:
        code = _below[code]
    return code


class AttributeSwap:
    """Replaces one attribute of a module or a class, found in ``vars(owner)`` and never through ``getattr``."""

    def __init__(self, target: str, owner: Any, name: str, new: object) -> None:
        """
        Raises:
            KeyError: the owner itself has no such attribute.
        """
        self.target = target
        self._owner = owner
        self._name = name
        self._original = vars(owner)[name]
        self._new = new

    def apply(self) -> None:
        setattr(self._owner, self._name, self._new)

    def undo(self) -> bool:
        if vars(self._owner).get(self._name, _MISSING) is self._new:
            setattr(self._owner, self._name, self._original)
        return vars(self._owner).get(self._name, _MISSING) is self._original


def _import_by_name(name: str) -> ModuleType:
    import importlib

    return importlib.import_module(name)


class _SeenAsModuleType(type):
    """Dynamo up to 2.12 takes for a module what has ``type(value) in (ModuleType, ...)``; so must ours be taken."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is ModuleType

    def __hash__(cls) -> int:
        return hash(ModuleType)


class ModuleProperties:
    """Sends reads and writes of module attributes through properties.

    The module object gets a ``ModuleType`` subclass that carries the properties. Code outside the module reaches
    them by attribute and by ``from module import name``; ``global`` statements inside the module keep using the
    module's dictionary, which the properties leave alone.
    """

    def __init__(self, target: str, module: ModuleType, properties: dict[str, property]) -> None:
        self.target = target
        self._module = module
        self._properties = properties
        self._original: type = type(module)
        self._class: Any = None

    def apply(self) -> None:
        self._original = type(self._module)  # another edit's by now, perhaps; that one's properties are inherited
        namespace: dict[str, Any] = {
            # Pickling by type (cloudpickle's dispatch table) knows ModuleType only.
            "__reduce__": lambda module: (_import_by_name, (module.__name__,)),
            "__module__": __name__,
        }
        self._class = _SeenAsModuleType(self._original.__name__, (self._original,), namespace | self._properties)
        self._module.__class__ = self._class

    def undo(self) -> bool:
        if type(self._module) is self._class:
            self._module.__class__ = self._original
        return type(self._module) is self._original
