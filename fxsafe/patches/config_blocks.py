"""F5, settings: blocks that change torch's settings for a while and overlap in threads leave none of them changed.

The race: up to 2.11 a setting (``torch._dynamo.config`` and its like) is one value of the process, which
``config.patch``, each call of a function compiled with ``dynamic=True`` or ``False``, eager ``torch.cond`` and its
like, and exports save, set and restore. Of two blocks that overlap the one that ends last restores what the other one
had set, for good (``assume_static_by_default=False``, ``recompile_limit=2**63-1``), so that all that is compiled later
is compiled with other settings, without a word; and the one that ends first takes the other's setting away. One
``config.patch`` object, as a decorator is, refuses a second thread.

Upstream: pytorch#186537 tells of the cure, values per thread. Releases: 2.5 to 2.11.

Why this place is enough: the blocks keep being seen by every thread, as in torch (what one thread sets for its workers
reaches them); only the order is kept. For each setting there is a stack of the blocks that are inside. One that ends in
the middle hands the value that it would have restored to the next above it; the last one to end thus brings back what
was there before the first. What a thread that is in no block assigns in between becomes what was there before. All
blocks go through ``ConfigModule``: the bodies of ``patch``'s two methods and of ``_make_closure_patcher``'s two
functions change in place, those of objects that were made before the installation too; and the few functions of torch's
that save and restore by assignment are known to ``__setattr__`` by their names. Blocks of one thread do what they did.

This file can be deleted when torch 2.12 is the oldest release supported.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import threading
from _thread import get_ident
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from fxsafe.dynamo import frame_hider
from fxsafe.edits import AttributeSwap, CodeSwap, code_with_constants, one_of_equals
from fxsafe.patches.base import NotNeeded, Patch, Plan, ShapeError
from fxsafe.shapes import own_function
from fxsafe.thread_globals import nested

__all__ = ["PATCH"]

CONFIG = "torch.utils._config_module"
_BLOCKS = "<fxsafe blocks>"
_MADE = f"{CONFIG}.ConfigModule.patch.<locals>"
# Functions of torch's that set by assignment, and assign what was there when they end: name -> module, what they set.
_BY_ASSIGNMENT = {
    "disable_cache_limit": ("torch._dynamo.utils", sys.maxsize),
    "_set_compilation_env": ("torch._higher_order_ops.utils", True),
    "_disable_custom_triton_op_functional_decomposition": ("torch.export._trace", False),
}


class _Layer:
    """One block's part in one setting: what was there before it, and the stack that it is in."""

    __slots__ = ("frame", "prior", "stack", "thread", "where")
    prior: Any

    def __init__(self, where: tuple[int, str], thread: int, frame: FrameType | None = None) -> None:
        self.where = where
        self.thread = thread
        self.frame = frame  # the block's own, where it is one by assignment
        self.stack: list[_Layer] | None = None  # None: fxsafe keeps no order of it


class _Entered(NamedTuple):
    """A ``config.patch`` object that a thread is inside of."""

    thread: int
    prior: dict[str, Any]  # the object's own
    layers: dict[str, _Layer]


def _place(config: Any, key: str) -> tuple[int, str]:
    """Which setting that is, aliases followed.

    This may import; not to be called under the lock, which a thread that imports may want.
    """
    entry = config._config.get(key)
    alias = getattr(entry, "alias", None)
    if alias is None:
        return id(config._config), key
    name, _, target = alias.rpartition(".")
    try:
        return _place(importlib.import_module(name), target)
    except ImportError:  # torch says so itself
        return id(config._config), key


class _Blocks:
    """The blocks that are inside, for the length of the process one object: Dynamo guards on code that holds it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finalizer may end a generator's block anywhere
        self.live = False
        self.stacks: dict[tuple[int, str], list[_Layer]] = {}  # an empty one stays: warm calls come again
        self.entered: dict[int, list[_Entered]] = {}  # by the ``prior`` of the object
        self.overlaps = 0
        self.assign: Callable[[Any, str, Any], None] = setattr
        self.entries = True  # whether settings are kept in an object each; values in one dictionary before 2.6

    # Stacks.

    def push(self, layer: _Layer, prior: Any) -> None:
        layer.prior = prior
        if self.live:
            layer.stack = self.stacks.setdefault(layer.where, [])
            layer.stack.append(layer)

    def drop(self, layer: _Layer) -> None:
        stack, layer.stack = layer.stack, None
        if stack is not None:
            stack.remove(layer)

    def pop(self, layer: _Layer) -> bool:
        """Whether the block shall bring back what was there before it; else the next above it will."""
        stack = layer.stack
        if stack is None:
            return not self.below(layer.where, layer.prior)
        if stack[-1] is layer:
            stack.pop()
            layer.stack = None
            return True
        at = stack.index(layer)
        above = stack[at + 1 :]
        self.drop(layer)
        if all(other.thread == layer.thread for other in above):  # one thread's own disorder is torch's
            return True
        above[0].prior = layer.prior
        self.overlaps += 1
        return False

    def below(self, where: tuple[int, str], value: Any) -> bool:
        """Makes ``value`` what was there before all blocks. False if there is none."""
        stack = self.stacks.get(where)
        if not stack:
            return False
        stack[0].prior = value
        return True

    # The bodies of torch's functions.

    def enter(self, config: Any, changes: dict[str, Any], prior: dict[str, Any], message: tuple[str, ...]) -> None:
        thread = get_ident()
        layers = {key: _Layer(_place(config, key), thread) for key in changes}
        with self.lock:
            others = self.entered.get(id(prior), [])
            if prior and (not others or any(other.thread == thread for other in others)):
                raise AssertionError(*message)
            own = {} if prior else prior
            for key in changes:
                own[key] = self.read(config, key)
            entered = _Entered(thread, prior, layers)
            if self.live:
                self.entered.setdefault(id(prior), []).append(entered)
            for key, layer in layers.items():
                self.push(layer, own[key])
            try:
                for key, value in changes.items():
                    self.assign(config, key, value)
            except BaseException:
                for layer in layers.values():
                    self.drop(layer)
                self.forget(entered)
                raise

    def leave(self, config: Any, prior: dict[str, Any]) -> None:
        thread = get_ident()
        with self.lock:
            entered = self.of(prior, thread)
            if entered is None:  # entered without fxsafe
                for key, value in prior.items():
                    if not self.below(_place(config, key), value):
                        self.assign(config, key, value)
                prior.clear()
                return
            for key, layer in entered.layers.items():
                if self.pop(layer):
                    self.assign(config, key, layer.prior)
            self.forget(entered)
            left = self.entered.get(id(prior))
            prior.clear()
            if left:  # for torch's own body, should it end that one
                prior.update({key: layer.prior for key, layer in left[0].layers.items()})

    def change(self, config: dict[str, Any], changes: dict[str, Any]) -> Callable[[], None]:
        """Around each call of a function compiled with ``dynamic=True`` or ``False``."""
        lock, stacks, identity, thread, entries = self.lock, self.stacks, id(config), get_ident(), self.entries
        layers = []
        with lock:
            for key in changes:
                config[key]  # before anything is changed
            for key, value in changes.items():
                layer = _Layer((identity, key), thread)
                layer.prior = config[key].user_override if entries else config[key]
                if self.live:
                    stack = stacks.get(layer.where)
                    if stack is None:
                        stack = stacks[layer.where] = []
                    stack.append(layer)
                    layer.stack = stack
                layers.append(layer)
                if entries:
                    config[key].user_override = value
                else:
                    config[key] = value

        def revert() -> None:
            with lock:
                for layer in layers:
                    stack = layer.stack
                    if stack is not None and stack[-1] is layer:
                        stack.pop()
                        layer.stack = None
                    elif not self.pop(layer):
                        continue
                    if entries:
                        config[layer.where[1]].user_override = layer.prior
                    else:
                        config[layer.where[1]] = layer.prior

        return revert

    def reverted(self, config: dict[str, Any], prior: dict[str, Any]) -> None:
        """Ends what was changed without fxsafe."""
        with self.lock:
            for key, value in prior.items():
                if not self.below((id(config), key), value):
                    if self.entries:
                        config[key].user_override = value
                    else:
                        config[key] = value

    def assigned(self, config: Any, key: str, value: Any, frame: FrameType) -> None:
        """``config.key = value`` in ``frame``."""
        module, block_value = _BY_ASSIGNMENT.get(frame.f_code.co_name, ("", None))
        by_block = frame.f_globals.get("__name__") == module
        if key not in config._config or not (by_block or self.stacks):
            self.assign(config, key, value)
            return
        where, thread = _place(config, key), get_ident()
        with self.lock:
            stack = self.stacks.get(where, [])
            if by_block:
                began = next((layer for layer in stack if layer.frame is frame), None)
                if began is None and value != block_value:  # it began without fxsafe
                    if not self.below(where, value):
                        self.assign(config, key, value)
                elif began is None:
                    before = self.read(config, key)
                    self.assign(config, key, value)
                    self.push(_Layer(where, thread, frame), before)
                elif self.pop(began):
                    self.assign(config, key, began.prior)
                return
            self.assign(config, key, value)
            own = [at for at, layer in enumerate(stack) if layer.thread == thread]
            above = own[-1] + 1 if own else 0
            if above < len(stack):
                stack[above].prior = value

    # Parts.

    def read(self, config: Any, key: str) -> Any:
        return config.__getattr__(key) if self.entries else config._config[key]

    def of(self, prior: dict[str, Any], thread: int) -> _Entered | None:
        entered = self.entered.get(id(prior), [])
        own = [one for one in entered if one.thread == thread]
        return own[-1] if own else entered[0] if entered else None  # a generator may end in another thread

    def forget(self, entered: _Entered) -> None:
        left = [one for one in self.entered.get(id(entered.prior), []) if one is not entered]
        if left:
            self.entered[id(entered.prior)] = left
        else:
            self.entered.pop(id(entered.prior), None)

    def begin(self) -> None:
        with self.lock:
            self.live = True

    def end(self) -> None:
        """From now on torch's own bodies end the blocks that are inside, each with what its own thread had before it,
        the first of each thread with what was there before all of them.
        """
        with self.lock:
            self.live = False
            for stack in self.stacks.values():
                before = [layer.prior for layer in stack]
                for at, layer in enumerate(stack):
                    own = [lower for lower in range(at) if stack[lower].thread == layer.thread]
                    layer.prior = before[own[-1] + 1] if own else before[0]
                for layer in stack:
                    layer.stack = None
            self.stacks.clear()
            for entered in self.entered.values():
                entered[0].prior.update({key: layer.prior for key, layer in entered[0].layers.items()})
            self.entered.clear()

    def after_fork_in_child(self) -> None:
        """Of the blocks only this thread's will end here."""
        self.lock = threading.RLock()
        thread = get_ident()
        for stack in list(self.stacks.values()):
            for layer in [layer for layer in stack if layer.thread != thread]:
                self.drop(layer)
        for identity, entered in list(self.entered.items()):
            left = [one for one in entered if one.thread == thread]
            if left:
                self.entered[identity] = left
            else:
                del self.entered[identity]
                entered[0].prior.clear()


_blocks = _Blocks()


def _templates() -> list[FunctionType]:
    """Our bodies, told apart by their names and free variables, which are those of torch's."""
    changes: Any = None
    config: Any = None
    dirty: Any = None
    prior: Any = None
    self: Any = None

    def own_changes() -> Any:  # 2.8 and later
        def __enter__(self: Any) -> None:
            blocks = "<fxsafe blocks>"
            message = "<message>"
            blocks.enter(config, self.changes, prior, message)  # type: ignore[attr-defined]

        return __enter__

    def shared_changes() -> Any:  # 2.6, 2.7
        def __enter__(self: Any) -> None:
            blocks = "<fxsafe blocks>"
            message = "<message>"
            blocks.enter(config, changes, prior, message)  # type: ignore[attr-defined]

        return __enter__

    def with_dirt() -> Any:  # 2.5
        def __enter__(self: Any) -> None:
            nonlocal dirty
            blocks = "<fxsafe blocks>"
            message = "<message>"
            blocks.enter(config, changes, prior, message)  # type: ignore[attr-defined]
            for key in changes:
                dirty = key not in config._compile_ignored_keys
            config._is_dirty = dirty

        def __exit__(self: Any, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
            blocks = "<fxsafe blocks>"
            blocks.leave(config, prior)  # type: ignore[attr-defined]
            config._is_dirty = dirty

        def change() -> Any:
            blocks = "<fxsafe blocks>"
            return blocks.change(config, changes)  # type: ignore[attr-defined]

        def revert() -> None:
            blocks = "<fxsafe blocks>"
            blocks.reverted(config, prior)  # type: ignore[attr-defined]

        return __enter__, __exit__, change, revert

    def __exit__(self: Any, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        blocks = "<fxsafe blocks>"
        blocks.leave(config, prior)  # type: ignore[attr-defined]

    def change() -> Any:
        blocks = "<fxsafe blocks>"
        self  # noqa: B018 -- a free variable of torch's
        return blocks.change(config, changes)  # type: ignore[attr-defined]

    def revert() -> None:
        blocks = "<fxsafe blocks>"
        blocks.reverted(self._config, prior)  # type: ignore[attr-defined]

    return [own_changes(), shared_changes(), *with_dirt(), __exit__, change, revert]


def _instead_of(where: str, code: CodeType) -> CodeType:
    for template in _templates():
        new = template.__code__
        names = new.co_varnames[: new.co_argcount], code.co_varnames[: code.co_argcount]
        if (new.co_name, new.co_freevars, names[0]) == (code.co_name, code.co_freevars, names[1]):
            constants: dict[str, Any] = {_BLOCKS: _blocks}
            if "<message>" in new.co_consts:
                constants["<message>"] = tuple(
                    text for text in code.co_consts if isinstance(text, str) and text.startswith("prior should be")
                )
            return code_with_constants(template, constants, code)
    raise ShapeError(f"{where}: {code.co_name} closes over {list(code.co_freevars)}")


def _with_inner(code: CodeType, news: Mapping[CodeType, CodeType]) -> CodeType:
    """``code`` with other code objects among its constants and theirs."""
    if code in news:
        return news[code]
    consts = tuple(_with_inner(const, news) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_consts=consts)


def _swap_made(base: Any, news: Mapping[CodeType, CodeType]) -> None:
    """Gives what torch's methods have made other bodies, in place.

    Args:
        base: of the classes that ``patch`` makes.
    """
    made: list[Any] = [value for kind in base.__subclasses__() for value in vars(kind).values()]
    if "torch._dynamo.eval_frame" in sys.modules:  # the only one that makes closures
        made += gc.get_referrers(*news)
    for function in made:
        if type(function) is FunctionType and any(function.__code__ is old for old in news):
            function.__code__ = news[function.__code__]


class _Made:
    """The functions that ``patch`` and ``_make_closure_patcher`` make get their own bodies again, when these have."""

    target = _MADE

    def __init__(self, base: type, olds: dict[CodeType, CodeType]) -> None:
        self._base = base
        self._olds = olds

    def apply(self) -> None:
        pass

    def undo(self) -> bool:
        _swap_made(self._base, self._olds)
        return True


class _MadeBefore:
    """What they have made before the installation gets the other bodies, in place."""

    target = _MADE

    def __init__(self, base: type, news: dict[CodeType, CodeType]) -> None:
        self._base = base
        self._news = news

    def apply(self) -> None:
        _swap_made(self._base, self._news)
        _blocks.begin()

    def undo(self) -> bool:
        _blocks.end()
        return True


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    torchs = modules[CONFIG]
    kind: Any = vars(torchs).get("ConfigModule")
    base: Any = vars(torchs).get("ContextDecorator")
    if not (isinstance(kind, type) and isinstance(base, type)):
        raise ShapeError(f"{CONFIG} has no class ConfigModule or ContextDecorator")
    if "ContextVar" in vars(torchs):
        return NotNeeded("torch keeps settings per thread since 2.12")
    where = f"{CONFIG}.ConfigModule"
    makers = {
        "patch": ("__enter__", "__exit__"),
        "_make_closure_patcher": ("change", "revert"),
    }
    news: dict[CodeType, CodeType] = {}
    swaps = []
    for name, inner in makers.items():
        maker = own_function(kind, name)
        found = {code.co_name: code for code in nested(maker.__code__) if code.co_name in inner}
        if set(found) != set(inner):
            raise ShapeError(f"{where}.{name} makes {sorted(found)}")
        ours = {code: _instead_of(f"{where}.{name}", code) for code in found.values()}
        news |= ours
        swaps.append(CodeSwap(f"{where}.{name}", maker, one_of_equals(_with_inner(maker.__code__, ours))))
    if own_function(kind, "__setattr__").__code__.co_varnames[:3] != ("self", "name", "value"):
        raise ShapeError(f"{where}.__setattr__ has an unknown shape")
    assign = vars(kind)["__setattr__"]
    _blocks.assign = assign
    _blocks.entries = "_ConfigEntry" in vars(torchs)

    @functools.wraps(assign)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        frame = sys._getframe(1)
        if frame.f_code is proxy:
            frame = frame.f_back  # type: ignore[assignment]
        if _blocks.stacks or frame.f_code.co_name in _BY_ASSIGNMENT:
            _blocks.assigned(self, name, value, frame)
        else:
            assign(self, name, value)

    proxy = own_function(vars(torchs)["SubConfigProxy"], "__setattr__").__code__
    frame_hider()(
        __setattr__,
        _place,
        *(SimpleNamespace(__code__=code) for code in nested(_Blocks.change.__code__)),
        *(value for owner in (_Blocks, _Layer) for value in vars(owner).values() if isinstance(value, FunctionType)),
    )
    return Plan(
        [
            _Made(base, {new: old for old, new in news.items()}),
            *swaps,
            AttributeSwap(f"{where}.__setattr__", kind, "__setattr__", __setattr__),
            _MadeBefore(base, news),
        ],
        lambda: {"overlaps": _blocks.overlaps},
    )


PATCH = Patch(
    name="config-blocks",
    summary="blocks that change torch's settings may overlap in threads: the last one to end restores them",
    upstream=("https://github.com/pytorch/pytorch/issues/186537",),
    modules=("torch", CONFIG),
    plan=_plan,
    faults=("config_blocks_overlap",),
    quiet=False,
    after_fork_in_child=_blocks.after_fork_in_child,
)
