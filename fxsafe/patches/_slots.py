"""Patched places: one dispatcher per place, one stack of replacements per thread.

A *place* is a key of a dictionary or an attribute of a class. The first thread to replace it puts a dispatcher there;
the dispatcher calls the newest replacement of the calling thread, or else what was there before. The last replacement
to go takes the dispatcher away and puts back the identical object. Nothing in here knows of torch.

Invariants:

* a slot is registered before its dispatcher can be seen, and stays registered until the dispatcher is gone, so a
  forked child finds every place that its parent's other threads left patched;
* removing a replacement finds it by identity and is harmless if it is not there, so an interrupted change can be
  repeated;
* a place is restored only while it holds our dispatcher: what somebody else put over it stays;
* a dispatcher that somebody kept a reference to goes on calling the original, and in a tracing thread what that
  thread has in the place, as torch's own wrappers do.
"""

from __future__ import annotations

import builtins
import sys
import threading
from _thread import get_ident
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

from fxsafe.patches._stand_in import LINK, StandIn, slot_of_stand_in

__all__ = ["LINK", "MISSING", "Places", "StandIn", "is_dispatcher", "original_of", "places"]

MISSING: Any = object()
# What a plain function on a class can stand in for: these bind ``self`` as a function does.
_BINDS_LIKE_A_FUNCTION = (FunctionType, MethodDescriptorType, WrapperDescriptorType)
# Of these in a dictionary nothing is used but the call and what is in their ``__dict__``.
_CALLED_ONLY = (FunctionType, BuiltinFunctionType)


def _any_call(get: Any, get_ident: Any, fallback: Any) -> FunctionType:
    def dispatcher(*args: Any, **kwargs: Any) -> Any:
        return get(get_ident(), fallback)(*args, **kwargs)

    return dispatcher  # type: ignore[return-value]


def _getattr_call(get: Any, get_ident: Any, fallback: Any) -> FunctionType:
    def dispatcher(self: Any, name: Any) -> Any:
        return get(get_ident(), fallback)(self, name)

    return dispatcher  # type: ignore[return-value]


class _Attribute:
    """Dispatcher for a class attribute that does not bind as functions do: a staticmethod, a property, a constant."""

    __slots__ = ("slot",)

    def __init__(self, slot: _Slot) -> None:
        self.slot = slot

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        value = self.slot.tops.get(get_ident(), self.slot.fallback)
        bind = getattr(type(value), "__get__", None)
        return value if bind is None else bind(value, instance, owner)


class _Slot:
    """One patched place. ``tops`` is read without the lock, everything else is changed under it.

    Attributes:
        found: what the place held before, MISSING if nothing; this is what is put back.
        fallback: what a thread without replacements calls.
        stacks: thread ident -> its replacements, the newest last; never empty.
        tops: thread ident -> the last of its stack.
    """

    __slots__ = ("dispatcher", "fallback", "found", "live", "name", "owner", "stacks", "tops")

    def __init__(self, owner: Any, name: str, found: Any, fallback: Any) -> None:
        self.owner = owner
        self.name = name
        self.found = found
        self.fallback = fallback
        self.stacks: dict[int, list[Any]] = {}
        self.tops: dict[int, Any] = {}
        self.live = False
        self.dispatcher: Any = None

    def push(self, ident: int, new: Any) -> None:
        stack = self.stacks.get(ident)
        if stack is None:
            self.stacks[ident] = [new]
        else:
            stack.append(new)
        self.tops[ident] = new

    def drop(self, ident: int, new: Any) -> bool:
        """Take the newest ``new`` off the thread's stack. False if it is not on it."""
        stack = self.stacks.get(ident, [])
        if len(stack) == 1 and stack[0] is new:
            self.tops.pop(ident, None)
            del self.stacks[ident]
            return True
        for i in range(len(stack) - 1, -1, -1):
            if stack[i] is new:
                break
        else:
            return False
        if i == len(stack) - 1:
            self.tops[ident] = stack[-2]
        del stack[i]
        return True

    def forget(self, ident: int) -> None:
        self.tops.pop(ident, None)
        self.stacks.pop(ident, None)


# The types of dispatchers. A first look at the type spares nearly every value the second one.
_DISPATCHERS = (FunctionType, StandIn, _Attribute)


def _slot_of(value: Any) -> _Slot | None:
    """The slot whose dispatcher ``value`` is. ``functools.wraps`` copies the link, hence the second look."""
    slot: _Slot | None = None
    if type(value) is FunctionType:
        slot = value.__dict__.get(LINK)
        if slot is not None and slot.dispatcher is not value:
            slot = None
    elif type(value) is StandIn:
        slot = slot_of_stand_in(value)
    elif type(value) is _Attribute:
        slot = value.slot
    return slot


def is_dispatcher(value: Any) -> bool:
    return _slot_of(value) is not None


def original_of(value: Any) -> Any:
    """What a dispatcher stands for, at any depth; any other value as it is."""
    while (slot := _slot_of(value)) is not None:
        value = slot.fallback
    return value


def _healed(value: Any) -> Any:
    """``value``, or what stood below it if it is a dispatcher whose slot is closed."""
    while (slot := _slot_of(value)) is not None and not slot.live:
        value = slot.found
    return value


def _held(owner: Any) -> Any:
    return owner if type(owner) is dict or isinstance(owner, dict) else getattr(owner, "__dict__", {})


class Places:
    """All patched places of the process."""

    def __init__(self) -> None:
        # Re-entrant, for a signal handler that traces while its thread is in here.
        self.lock = threading.RLock()
        self.opened = 0
        self._slots: dict[tuple[int, str], list[_Slot]] = {}
        # Closed slots of places that live as long as the process. Their dispatchers come back, so that compiled code
        # in other threads, which guards on what it finds in a place, meets two objects there and not ever new ones.
        self._closed: dict[tuple[int, str], _Slot] = {}
        self._makers: tuple[Any, ...] = (_any_call, _getattr_call)
        self._templates: tuple[Any, ...] = (*(make(None, None, None) for make in self._makers), StandIn.__call__)

    def dress(self, like: CodeType) -> tuple[FunctionType, ...]:
        """Let the frames of dispatchers made from now on count as frames of the file of ``like``.

        Returns:
            The functions whose code they run, and those of what has no code of its own.
        """
        for template in self._templates:
            template.__code__ = template.__code__.replace(
                co_filename=like.co_filename, co_firstlineno=like.co_firstlineno
            )
        return *self._templates, *(value for value in vars(StandIn).values() if type(value) is FunctionType)

    def __len__(self) -> int:
        """How many dispatchers stand in their places."""
        slots = [slot for stack in list(self._slots.values()) for slot in list(stack)]
        return sum(_held(slot.owner).get(slot.name) is slot.dispatcher for slot in slots)

    # What a thread would see if it were alone.

    def seen(self, owner: Any, name: str) -> Any:
        """What ``owner`` itself holds as ``name`` in the eyes of the calling thread; MISSING if nothing."""
        value = (owner if type(owner) is dict else _held(owner)).get(name, MISSING)
        return self._seen(value, owner, name) if type(value) in _DISPATCHERS else value

    def _seen(self, value: Any, owner: Any, name: str) -> Any:
        ident = get_ident()
        while (slot := _slot_of(value)) is not None:
            if slot.owner is owner and slot.name == name:
                if (top := slot.tops.get(ident, MISSING)) is not MISSING:
                    return top
                value = slot.found
            else:
                value = slot.fallback  # read from another place while that was patched
        return value

    def seen_attribute(self, owner: Any, name: str) -> Any:
        """``getattr(owner, name)`` in the eyes of the calling thread, inherited attributes included.

        Raises:
            AttributeError: as ``getattr`` does.
        """
        return self.seen_value(getattr(owner, name))

    def seen_value(self, value: Any) -> Any:
        """The calling thread's replacement if ``value`` is the dispatcher of a patched place, or the original."""
        while (slot := _slot_of(value)) is not None:
            top = slot.tops.get(get_ident(), MISSING)
            value = slot.fallback if top is MISSING else top
        return value

    def snapshot(self, namespace: dict[str, Any]) -> dict[str, Any]:
        """A copy of a dictionary as the calling thread would see it alone."""
        # A copy in one step: another thread may patch a builtin into it, or take it out, at any time.
        copy = namespace.copy()
        # Loops, and no comprehension: that is a frame, which Dynamo would compile.
        found = []
        for name, value in copy.items():
            if (type(value) is FunctionType and LINK in value.__dict__) or type(value) is StandIn:
                found.append(name)
        for name in found:
            seen = self._seen(copy[name], namespace, name)
            if seen is MISSING:
                del copy[name]
            else:
                copy[name] = seen
        return copy

    def dispatchers_of(self, original: Any) -> list[Any]:
        """The dispatchers that stand for ``original`` at present."""
        with self.lock:
            slots = [slot for stack in self._slots.values() for slot in stack]
        return [slot.dispatcher for slot in slots if original_of(slot.fallback) is original]

    # Changes.

    def put(self, owner: Any, name: str, new: Any, fallback: Any) -> None:
        """Make ``new`` what the calling thread, and no other, calls at the place.

        Args:
            fallback: what is called there now, for the case that the owner itself holds nothing: a builtin, or an
                inherited attribute.
        """
        ident, key = get_ident(), (id(owner), name)
        with self.lock:
            found = (owner if type(owner) is dict else _held(owner)).get(name, MISSING)
            slot = self._closed.get(key)
            if slot is not None and slot.found is found and slot.owner is owner and found is not MISSING:
                # The way that math's fifty functions go in every trace, hence written out.
                self._reopen(key, slot)
                slot.stacks[ident] = [new]
                slot.tops[ident] = new
                if type(owner) is dict:
                    owner[name] = slot.dispatcher
                    return
            else:
                slot = _slot_of(found) if type(found) in _DISPATCHERS else None
                if slot is not None and slot.live and slot.owner is owner and slot.name == name:
                    slot.push(ident, new)
                    return
                slot = self._open(owner, name, _healed(found), fallback)
                slot.push(ident, new)
            _store(owner, name, slot.dispatcher)

    def put_again(self, owner: Any, name: str, new: Any, fallback: Any) -> None:
        """As ``put``, and nothing if the calling thread has ``new`` in the place already."""
        with self.lock:
            stacks = [slot.stacks.get(get_ident(), ()) for slot in self._slots.get((id(owner), name), ())]
            if not any(there is new for stack in stacks for there in stack):
                self.put(owner, name, new, fallback)

    def take(self, owner: Any, name: str, new: Any) -> bool:
        """Undo one ``put`` of ``new``, also one that was interrupted half-way.

        Returns:
            False if ``new`` is not in the place, as far as we put it there.
        """
        ident, key = get_ident(), (id(owner), name)
        with self.lock:
            slots = self._slots.get(key, [])
            if len(slots) == 1 and slots[0].drop(ident, new):
                if not slots[0].stacks:
                    self._close(slots[0], key)
                return True
            # Another thread than the one that put it undoes it when a patcher was handed over, or the GC closes it.
            idents = [ident, *(other for slot in slots for other in slot.stacks)]
            dropped = any(slot.drop(other, new) for other in idents for slot in reversed(slots))
            for slot in slots.copy():
                if not slot.stacks:
                    self._close(slot, key)
            return dropped

    @contextmanager
    def standing(self, names: Sequence[str]) -> Iterator[None]:
        """Nothing is patched or put back in the block, and what has been patched under one of these names seems so.

        Args:
            names: texts in which the names of places occur.
        """
        with self.lock:
            shown = [slot for slot in self._closed.values() if any(slot.name in text for text in names)]
            try:
                for slot in shown:
                    if self.holds(slot.owner, slot.name, slot.found):
                        _store(slot.owner, slot.name, slot.dispatcher)
                yield
            finally:
                for slot in shown:
                    self._hide(slot)

    @contextmanager
    def changing_again(self) -> Iterator[None]:
        """Inside ``standing``: others may patch and put back while the block runs. For code that may wait for them."""
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()

    def _hide(self, slot: _Slot) -> None:
        if not slot.live and self.holds(slot.owner, slot.name, slot.dispatcher):
            _store(slot.owner, slot.name, slot.found)

    def holds(self, owner: Any, name: str, value: Any) -> bool:
        """Whether the place holds this very object, without a dispatcher."""
        return _held(owner).get(name, MISSING) is value

    def keep_only_this_thread(self) -> None:
        """Drop all replacements of other threads, and the lock: for a forked child."""
        self.lock = threading.RLock()
        me = get_ident()
        for slot in self._closed.values():
            self._hide(slot)
        for key, slots in list(self._slots.items()):
            for slot in list(reversed(slots)):
                for ident in list(slot.stacks):
                    if ident != me:
                        slot.forget(ident)
                for ident in list(slot.tops):
                    if ident not in slot.stacks:
                        slot.forget(ident)
                if not slot.stacks:
                    self._close(slot, key)

    def _reopen(self, key: tuple[int, str], slot: _Slot) -> None:
        slot.live = True
        if key in self._slots:
            self._slots[key].append(slot)
        else:
            self._slots[key] = [slot]
        self._closed.pop(key, None)
        self.opened += 1

    def _open(self, owner: Any, name: str, found: Any, fallback: Any) -> _Slot:
        is_class, key = isinstance(owner, type), (id(owner), name)
        if found is not MISSING:
            fallback = found
        elif is_class:
            # Not the argument: it is what the calling thread sees, which may be its own.
            fallback = _healed(next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), fallback))
        elif isinstance(owner, dict):
            fallback = getattr(builtins, name, fallback)
        slot = self._closed.get(key)
        if slot is None or slot.owner is not owner or slot.found is not found or slot.fallback is not fallback:
            slot = _Slot(owner, name, found, fallback)
            # A module that was imported when it was patched may have been taken out of sys.modules since.
            for gone in [k for k, closed in self._closed.items() if not _is_permanent(closed.owner)]:
                del self._closed[gone]
            if is_class and not isinstance(fallback, _BINDS_LIKE_A_FUNCTION):
                slot.dispatcher = _Attribute(slot)
            elif not is_class and not isinstance(fallback, _CALLED_ONLY):
                slot.dispatcher = StandIn(slot)
            else:
                slot.dispatcher = self._dispatcher(slot, one_name=is_class and name == "__getattr__")
        self._reopen(key, slot)
        return slot

    def _dispatcher(self, slot: _Slot, one_name: bool) -> FunctionType:
        fallback = slot.fallback
        make = self._makers[one_name](slot.tops.get, get_ident, fallback)
        plain = type(fallback) is FunctionType
        dispatcher = FunctionType(
            self._templates[one_name].__code__,
            # Tracers look for names to wrap in the globals of what they trace.
            fallback.__globals__ if plain else globals(),
            slot.name,
            None,
            make.__closure__,
        )
        if plain or isinstance(fallback, BuiltinFunctionType):
            dispatcher.__name__ = fallback.__name__
        dispatcher.__qualname__ = getattr(fallback, "__qualname__", slot.name)
        dispatcher.__module__ = getattr(fallback, "__module__", None)  # type: ignore[assignment]
        dispatcher.__doc__ = getattr(fallback, "__doc__", None)
        if plain:
            dispatcher.__dict__.update(fallback.__dict__)
        dispatcher.__dict__["__wrapped__"] = fallback
        # Dynamo, compiling in another thread, goes on with this one in the dispatcher's place.
        dispatcher.__dict__["_torchdynamo_inline"] = fallback
        dispatcher.__dict__[LINK] = slot
        return dispatcher

    def _close(self, slot: _Slot, key: tuple[int, str]) -> None:
        owner, name, found = slot.owner, slot.name, slot.found
        if (owner if type(owner) is dict else _held(owner)).get(name, MISSING) is slot.dispatcher:
            value = _healed(found) if type(found) in _DISPATCHERS else found
            if type(owner) is dict and value is not MISSING:
                owner[name] = value
            else:
                _store(owner, name, value)
        slot.live = False
        slots = self._slots.get(key, [])
        if len(slots) > 1:
            slots.remove(slot)
        else:
            self._slots.pop(key, None)
            if _is_permanent(owner):
                self._closed[key] = slot


def _is_permanent(owner: Any) -> bool:
    """Whether the owner is an imported module's dictionary or a class found in one; others we must not keep alive."""
    if isinstance(owner, dict):
        name = owner.get("__name__")
        return type(name) is str and getattr(sys.modules.get(name), "__dict__", None) is owner
    if isinstance(owner, type):
        return _held(sys.modules.get(owner.__module__)).get(owner.__name__) is owner
    return False


def _store(owner: Any, name: str, value: Any) -> None:
    """Store; MISSING deletes. A class is written past its metaclass, whose code must not run under the lock."""
    if isinstance(owner, dict):
        if value is MISSING:
            del owner[name]
        else:
            owner[name] = value
    elif isinstance(owner, type):
        if value is MISSING:
            type.__delattr__(owner, name)
        else:
            type.__setattr__(owner, name, value)
    elif value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


places = Places()
