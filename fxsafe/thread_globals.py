"""Gives every thread a value of its own for module globals that torch keeps once per process.

The functions of the module that name such a global get their own bodies again, compiled from torch's source with the
global replaced by an attribute of a thread-local object; ``from module import name`` and ``module.name`` of other
modules go through properties.

A device's autograd thread has values of its own too, where it saw the global of the thread that called ``backward``.
Whoever needs that keeps autograd in the calling thread meanwhile. The storage that torch carries into autograd's
threads (``torch._C._stash_obj_in_tls``) is no way out: nothing can be taken out of it again, and a thread that ends
with something in it while the interpreter shuts down aborts the process (seen on 2.5.1, 2.13.0 and 2.15.0).
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import inspect
import linecache
import re
import threading
from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeSwap, Edit, ModuleProperties, copy_function, one_of_equals
from fxsafe.observe import threads
from fxsafe.shapes import ShapeError, uses_of_globals

__all__ = [
    "PLACEHOLDER",
    "Gated",
    "Inline",
    "Marked",
    "Rewrite",
    "Session",
    "ThreadGlobals",
    "after_fork_in_child",
    "functions_of",
    "isolate",
    "kept_state",
    "lines_of",
    "nested",
    "properties_of",
    "require_complete",
    "rewritten",
    "uses_global",
]

PLACEHOLDER = "<fxsafe state>"
# Names that torch has nowhere: they mark what is ours in a rewritten body.
_OURS = "_fxsafe_"
_NOW, _VALUES, _BEGUN, _GATE = (_OURS + name for name in ("now", "values", "begun", "gate"))
# Before the try nothing is changed yet. The store is no call: Ctrl-C may come in front of a function's first line.
_SESSION = f"""
{_OURS}session = {PLACEHOLDER!r}.{_NOW}.{_OURS}session()
try:
    {_OURS}session.{_OURS}begin()
finally:
    {_OURS}session.{_VALUES}.{_OURS}flags = {_OURS}session.{_OURS}before
    {_OURS}session.{_OURS}end()
"""
_CLOSING_LINES = 20
_FUTURE = 0
for _feature in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _feature).compiler_flag


class ThreadGlobals(threading.local):
    """Values of some globals, by their names; each thread has a dictionary of its own."""

    def __init__(self, initial: Mapping[str, Callable[[], Any]]) -> None:
        """
        Args:
            initial: global -> what makes the value that a thread begins with. Called in each thread.
        """
        self._fxsafe_values: dict[str, Any] = {name: make() for name, make in initial.items()}

    def _fxsafe_move_in(self, here: dict[str, Any], *, known: bool) -> None:
        """Makes the module's globals ``here`` the calling thread's values.

        Args:
            known: whether they first get the values that the thread has.
        """
        if known and self._fxsafe_values is not here:
            here.update(self._fxsafe_values)
        self._fxsafe_values = here


class Kept:
    """Where changed code finds the values of some globals: one object for the length of the process.

    Code that Dynamo has compiled is guarded by the code objects of the functions that it went through, and these hold
    this object: with another one for each installation, each would compile everything again, up to Dynamo's limit.
    The values are each installation's own. A thread that is inside a block while fxsafe goes leaves the block in
    torch's way, and would be found inside by the next installation for good.

    It is an edit that comes before all that use it.
    """

    __slots__ = ("_fxsafe_now", "_make", "target")
    _fxsafe_now: ThreadGlobals

    def __init__(self, target: str, make: Callable[[], ThreadGlobals]) -> None:
        self.target = target
        self._make = make
        self.apply()

    @property
    def now(self) -> Any:
        return self._fxsafe_now

    def _fxsafe_begun(self) -> _Begun:
        return _Begun(self._fxsafe_now)

    def apply(self) -> None:
        self._fxsafe_now = self._make()

    def undo(self) -> bool:
        return True  # blocks that end later go on with the values they began with


class _Begun:
    """The values that a block began with, whichever thread it goes on in: a generator may be left in another one."""

    __slots__ = ("_ident", "_now", "_values")

    def __init__(self, now: ThreadGlobals) -> None:
        self._ident = get_ident()
        self._now = now
        self._values = now._fxsafe_values

    @property
    def _fxsafe_values(self) -> dict[str, Any]:
        # A child that is forked inside the block has other ones in this thread.
        return self._now._fxsafe_values if self._ident == get_ident() else self._values


_kept: dict[str, Kept] = {}


def kept_state(module: ModuleType, names: Iterable[str], make: Callable[[], ThreadGlobals]) -> Kept:
    """The one place for the values of these globals of a module.

    Args:
        make: what holds values of all the names, other ones in other threads. Called once for each
            installation.
    """
    target = f"{module.__name__}.{'/'.join(sorted(names))}"
    if target not in _kept:
        _kept[target] = Kept(target, make)
    return _kept[target]


def _property_of(state: Kept, name: str) -> property:
    def read(module: Any) -> Any:
        return state._fxsafe_now._fxsafe_values[name]

    def write(module: Any, value: Any) -> None:
        state._fxsafe_now._fxsafe_values[name] = value

    frame_hider()(read, write)
    return property(read, write)


def properties_of(state: Kept, names: Iterable[str]) -> dict[str, property]:
    """Properties of a module that read and write the values of the calling thread."""
    return {name: _property_of(state, name) for name in names}


def functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """The functions that the module defines: its own globals and class attributes, below decorators."""

    here = vars(module)

    def below(value: Any) -> Iterator[FunctionType]:
        while value is not None:
            if type(value) is FunctionType:
                if value.__globals__ is here:
                    yield value
                value = value.__dict__.get("__wrapped__")
            elif isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            elif isinstance(value, property):
                for part in (value.fget, value.fset, value.fdel):
                    yield from below(part)
                return
            elif isinstance(value, type) or not callable(value):
                return
            else:
                value = getattr(value, "__wrapped__", None)

    seen: set[int] = set()
    for owner in [module, *(v for v in vars(module).copy().values() if isinstance(v, type))]:
        if isinstance(owner, type) and owner.__module__ != module.__name__:
            continue
        for value in list(vars(owner).values()):
            for function in below(value):
                if id(function) not in seen:
                    seen.add(id(function))
                    yield function


def uses_global(code: CodeType, names: frozenset[str]) -> bool:
    if names.isdisjoint(code.co_names):  # attributes are among these too, so this only sorts out the most
        return False
    return any(name in names for _, name in uses_of_globals(code))


def nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from nested(const)


class Marked(ast.NodeTransformer):
    """A change of which ``_gist`` sees nothing, so that the changed body is compared with the function's."""


class Rewrite(Marked):
    """Puts an attribute of the state in the place of each of the names, as a global."""

    def __init__(
        self,
        names: frozenset[str],
        *,
        kept: bool = False,
        block: bool = False,
        marks: frozenset[str] = frozenset(),
        session: bool = False,
    ) -> None:
        """
        Args:
            kept: the state is a ``Kept``, and the names are keys of its values.
            marks: see ``isolate``.
            block: the function is a generator that may go on in another thread; it then keeps the first one's values.
            session: see ``Session``.
        """
        self._names = names
        self._kept = kept
        self._block = block
        self._marks = marks
        self._session = session

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if self._session:
            Session().visit_FunctionDef(node)
        if self._block:
            begun = ast.Call(ast.Attribute(ast.Constant(PLACEHOLDER), _BEGUN, ast.Load()), [], [])
            statement = ast.Assign([ast.Name(_NOW, ast.Store())], begun)
            for part in ast.walk(statement):
                ast.copy_location(part, node)
            node.body.insert(ast.get_docstring(node, clean=False) is not None, statement)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._names:
            return node
        state: ast.expr = ast.Constant(PLACEHOLDER)
        if self._kept:
            now: ast.expr = ast.Name(_NOW, ast.Load()) if self._block else ast.Attribute(state, _NOW, ast.Load())
            values = ast.Attribute(now, _VALUES, ast.Load())
            place: ast.expr = ast.Subscript(values, ast.Constant(node.id), node.ctx)
        else:
            place = ast.Attribute(state, node.id, node.ctx)
        if node.id in self._marks and isinstance(node.ctx, ast.Load):
            place = ast.IfExp(node, place, node)
        for part in ast.walk(place):
            ast.copy_location(part, node)
        return place

    def visit_Global(self, node: ast.Global) -> ast.AST:
        kept = [name for name in node.names if name not in self._names]
        return ast.copy_location(ast.Global(kept) if kept else ast.Pass(), node)


class Gated(Marked):
    """Puts a call of the state's gate before the first statement of the function."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        first, at = node.body[0], _after_docstring(node)
        call = ast.Expr(ast.Call(ast.Attribute(ast.Constant(PLACEHOLDER), _GATE, ast.Load()), [], []))
        for part in ast.walk(call):
            ast.copy_location(part, first)
        node.body.insert(at, call)
        return node


class Session(Marked):
    """Puts a session of the state's around the body of a context manager, at whose end the thread has again the flags
    that it had before, wherever in the body Ctrl-C came.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        first, at = node.body[0], _after_docstring(node)
        session = _tree(_SESSION)
        for part in ast.walk(session):
            ast.copy_location(part, first)
        assign, block = session.body
        assert isinstance(block, ast.Try)
        block.body += node.body[at:]
        node.body[at:] = [assign, block]
        return node


def _after_docstring(node: ast.FunctionDef) -> int:
    first = node.body[0]
    return int(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant))


def lines_of(code: CodeType) -> range:
    """The lines from the first decorator to the last one that an instruction comes from."""
    last = max(line for part in nested(code) for _, _, line in part.co_lines() if line is not None)
    return range(code.co_firstlineno, last + 1)


def _parse(function: FunctionType) -> ast.AST:
    """The syntax tree of a function on its lines of its file; much faster than ``inspect`` finds the end of a block.

    Raises:
        OSError: there is no source.
        SyntaxError: what is there is not the source of a function.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    span = lines_of(code)
    if len(lines) < span[-1]:
        raise OSError(f"{code.co_filename} has no line {span[-1]}")
    indented = lines[span[0] - 1][:1].isspace()
    # A method goes into a class of its own class's name, for the names that Python mangles.
    head = f"class {function.__qualname__.split('.')[-2]}:\n" if indented else ""
    above = "\n" * (span[0] - 1 - indented) + head
    for end in range(span[-1], len(lines) + 1):
        try:
            return _tree(above + "".join(lines[span[0] - 1 : end]))
        except SyntaxError:
            # The last statement may go on: closing brackets have no instruction.
            if end == len(lines) or end == span[-1] + _CLOSING_LINES:
                raise
    raise AssertionError("unreachable")


def _tree(text: str) -> ast.Module:
    """``ast.parse``, in one step for other threads.

    Up to Python 3.11 a garbage collection, in the middle of making the tree, may let another thread run, and if that
    one parses too, one of them fails: "AST constructor recursion depth mismatch". They count in one place.
    """
    with threads.without_collection():
        return ast.parse(text)


def _compile(function: FunctionType, change: ast.NodeTransformer | None) -> CodeType:
    """The code of a function, compiled again from its source, with the lines and the file that it has."""
    code = function.__code__
    tree = _parse(function)
    if change is not None:
        tree = change.visit(tree)
    flags = code.co_flags & _FUTURE
    whole = compile(tree, code.co_filename, "exec", flags=flags, dont_inherit=True)  # type: ignore[call-overload]
    for candidate in nested(whole):
        if candidate.co_name == code.co_name:
            return candidate
    raise ShapeError(f"{function.__module__}.{function.__qualname__} is not in its own source")


def _bound(code: CodeType, state: object) -> CodeType:
    consts = tuple(
        _bound(const, state)
        if isinstance(const, CodeType)
        else state
        if isinstance(const, str) and const == PLACEHOLDER
        else const
        for const in code.co_consts
    )
    return code.replace(co_consts=consts)


def _gist(code: CodeType) -> tuple[object, ...]:
    """What identifies a body, whether or not its globals are ``Rewrite``-n: an attribute's name or a key stands where
    the global's did. Not its instructions: how a method is called depends on the imports around it.
    """
    texts = {const for const in code.co_consts if isinstance(const, str)}
    return (
        frozenset(name for name in {*code.co_names, *texts} - {PLACEHOLDER} if not name.startswith(_OURS)),
        tuple(name for name in code.co_varnames if not name.startswith(_OURS)),
        code.co_freevars,
        code.co_cellvars,
        tuple(
            _gist(const) if isinstance(const, CodeType) else repr(const)
            for const in code.co_consts
            if not isinstance(const, str)
        ),
    )


def rewritten(
    where: str, function: FunctionType, change: ast.NodeTransformer, state: object = None, *, keep: bool = True
) -> CodeType:
    """The body of ``function`` after a change of its syntax tree, otherwise equal to the body it has.

    Args:
        where: the function's full name, for messages.
        state: takes the place of the state placeholder wherever the change has put it.
        keep: see ``one_of_equals``; not for a state that each installation makes.

    Raises:
        ShapeError: there is no source, or it is not the source of the body that the function has now.
    """
    try:
        changed = _compile(function, change)
        plain = changed if isinstance(change, Marked) else _compile(function, None)
    except (OSError, SyntaxError, IndexError) as error:
        raise ShapeError(f"the source of {where} cannot be read ({error})") from None
    if _gist(plain) != _gist(function.__code__):
        raise ShapeError(f"{where} does not have the body that its source says")
    code = _bound(changed, state)
    if hasattr(code, "co_qualname"):  # Python 3.11
        code = code.replace(co_qualname=function.__code__.co_qualname)
    if code.co_freevars != function.__code__.co_freevars:
        raise ShapeError(f"{where} closes over other variables after the change")
    return one_of_equals(code) if keep else code


_inlined: dict[tuple[FunctionType, CodeType], Any] = {}


class Inline:
    """While a function has another body, Dynamo inlines the one it had: compiled code stays as it was."""

    def __init__(self, target: str, function: FunctionType, seen: Any = None) -> None:
        """
        Args:
            seen: what Dynamo meets instead of the function, if that is a context manager made of it.
        """
        self.target = f"{target}._torchdynamo_inline"
        self._function: Any = function if seen is None else seen
        key = function, function.__code__
        if key not in _inlined:  # one for the process: Dynamo guards on it
            copy = copy_function(function)
            _inlined[key] = copy if seen is None else contextlib.contextmanager(copy)
        self._original = _inlined[key]

    def apply(self) -> None:
        self._function._torchdynamo_inline = self._original

    def undo(self) -> bool:
        if vars(self._function).get("_torchdynamo_inline") is not self._original:
            return False
        del self._function._torchdynamo_inline
        return True


def isolate(
    module: ModuleType,
    state: Kept,
    names: frozenset[str],
    users: frozenset[str],
    *,
    known_to_dynamo: frozenset[str] = frozenset(),
    by_attribute: bool = True,
    home: bool = True,
    known: bool = False,
    blocks: frozenset[str] = frozenset(),
    sessions: frozenset[str] = frozenset(),
    properties: Edit | None = None,
    marks: frozenset[str] = frozenset(),
) -> list[Edit]:
    """Edits that give every thread its own value of some globals of ``module``.

    Args:
        state: the place for these names.
        users: functions of the module that are known to use one of these globals.
        known_to_dynamo: functions for which Dynamo has rules of its own, by their identity; it does not inline them.
        by_attribute: whether other modules use the globals as well. The module object then gets a class of its own.
        home: whether the thread that installs goes on with the globals themselves.
        known: whether they first get the values that the state makes for this thread, because what they hold may be
            another thread's.
        blocks: context managers for users, whose block may be left in another thread.
        sessions: context managers that get a ``Session``.
        properties: for other modules, in place of properties that are always there.
        marks: flags whose global is true while any thread's flag is. While it is not, a reader reads it as before.

    Raises:
        ShapeError: the module does not have these globals or functions, or uses the globals in a place that cannot
            be changed.
    """
    missing = names - vars(module).keys()
    if missing:
        raise ShapeError(f"{module.__name__} has no global {sorted(missing)}")
    frame_hider()(Kept._fxsafe_begun, _Begun.__init__, vars(_Begun)[_VALUES].fget)
    edits: list[Edit] = [state]
    found: dict[str, range] = {}
    for function in functions_of(module):
        codes = list(nested(function.__code__))
        if not any(uses_global(code, names) for code in codes):
            continue
        where = f"{module.__name__}.{function.__qualname__}"
        shadowed = names & {name for c in codes for name in (*c.co_varnames, *c.co_cellvars, *c.co_freevars)}
        if shadowed:
            raise ShapeError(f"{where} has local variables {sorted(shadowed)}")
        name = function.__name__
        change = Rewrite(names, kept=True, block=name in blocks, marks=marks, session=name in sessions)
        edits.append(CodeSwap(where, function, rewritten(where, function, change, state)))
        if name not in known_to_dynamo:
            seen = vars(module).get(name)
            manager = inspect.isgeneratorfunction(function) and getattr(seen, "__wrapped__", None) is function
            edits.append(Inline(where, function, seen if manager else None))
        found[function.__qualname__] = lines_of(function.__code__)
    if not users <= found.keys():
        raise ShapeError(f"{module.__name__}: {sorted(users - found.keys())} no longer use {sorted(names)}")
    require_complete(module, names, found)
    if properties is not None:
        edits.append(properties)
    elif by_attribute:
        edits.append(ModuleProperties(module.__name__, module, properties_of(state, names)))
    if home:
        edits.append(_Home(state, module, known=known))
    return edits


class _Home:
    """The values of the thread that installs are the module's own globals.

    A program with one thread is thereby in the same state as without fxsafe, whatever blocks it is inside while fxsafe
    comes and goes, and so is code that Dynamo has compiled from the original bodies, which reads the globals.
    """

    def __init__(self, state: Kept, module: ModuleType, *, known: bool) -> None:
        self.target = state.target
        self._state = state
        self._globals = vars(module)
        self._known = known

    def apply(self) -> None:
        self._state.now._fxsafe_move_in(self._globals, known=self._known)
        _homes.add(self)

    def undo(self) -> bool:
        _homes.discard(self)
        return True

    def move_in(self) -> None:
        self._state.now._fxsafe_move_in(self._globals, known=True)


_homes: set[_Home] = set()


def after_fork_in_child() -> None:
    """The globals are the forking thread's from now on, and not those of whoever installed."""
    for home in _homes:
        home.move_in()


def require_complete(module: ModuleType, names: frozenset[str], found: Mapping[str, range]) -> None:
    """Every ``global`` statement for one of the names must be in a function that was found.

    Raises:
        ShapeError: one is elsewhere, and would go on writing the process-wide value.
    """
    for number, line in enumerate(linecache.getlines(str(module.__file__)), 1):
        writes = (
            "global " in line and line.lstrip().startswith("global ") and names.intersection(re.findall(r"\w+", line))
        )
        if writes and not any(number in span for span in found.values()):
            raise ShapeError(f"{module.__name__}, line {number}: {line.strip()!r} is in no known function")
