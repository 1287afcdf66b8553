"""The dispatcher for a class or an object that is called: it stands in for all of it, and not for its call only.

A function would do for the thread that traces, which torch gives one. All others go on using what they had:
``isinstance(value, Cfg)``, ``class Sub(Cfg)``, ``Cfg.make()``, ``cached.cache_info()``. Only what must be a type in the
eyes of C code (``except Cfg``, ``case Cfg()``, ``super(Cfg, self)``) cannot be stood in for.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Iterator
from types import FunctionType
from typing import Any

__all__ = ["INLINE", "LINK", "StandIn", "slot_of_stand_in"]

# Leads from a dispatcher to its slot.
LINK = "_fxsafe_slot"
# Where Dynamo finds what it goes on with in a dispatcher's place.
INLINE = "_torchdynamo_inline"
_OWN = frozenset({"__mro_entries__", "__reduce_ex__"})


class StandIn:
    """Is used as what the calling thread has in the place: its replacement, or else the original."""

    __slots__ = ("__weakref__", LINK)

    def __init__(self, slot: Any) -> None:
        object.__setattr__(self, LINK, slot)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _current(self)(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        return slot_of_stand_in(self).fallback if name == INLINE else getattr(_current(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_current(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_current(self), name)

    def __dir__(self) -> Any:
        return dir(_current(self))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        value = _current(self)
        bind = getattr(type(value), "__get__", None)
        return self if bind is None else bind(value, instance, owner)

    # What Python looks up in the type.

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, _current(self))

    def __subclasscheck__(self, other: Any) -> bool:
        return issubclass(_current(other) if type(other) is StandIn else other, _current(self))

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_current(self),)

    def __eq__(self, other: object) -> Any:
        return _current(self) == (_current(other) if type(other) is StandIn else other)

    def __hash__(self) -> int:
        return hash(_current(self))

    def __bool__(self) -> bool:
        return bool(_current(self))

    def __repr__(self) -> str:
        return repr(_current(self))

    def __str__(self) -> str:
        return str(_current(self))

    def __or__(self, other: Any) -> Any:
        return _current(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | _current(self)

    def __getitem__(self, key: Any) -> Any:
        return _current(self)[key]

    def __contains__(self, item: Any) -> bool:
        return item in _current(self)

    def __iter__(self) -> Iterator[Any]:
        return iter(_current(self))

    def __len__(self) -> int:
        return len(_current(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = _current(self)
        # By name, as Python pickles classes and functions.
        return value.__qualname__ if isinstance(value, (type, FunctionType)) else value.__reduce_ex__(protocol)


slot_of_stand_in: Any = vars(StandIn)[LINK].__get__


def _current(stand_in: Any) -> Any:
    slot = slot_of_stand_in(stand_in)
    return slot.tops.get(get_ident(), slot.fallback)
