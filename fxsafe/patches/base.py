"""What a patch is: its name, its reason, where it applies, and how it plans its edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

from fxsafe.edits import Edit
from fxsafe.shapes import ShapeError

__all__ = ["Fix", "NotNeeded", "Patch", "Plan", "ShapeError"]

# The fixes of ``install(fix=...)``.
Fix = Literal["thread-local", "always-false"]


class NotNeeded(NamedTuple):
    """A plan that has nothing to do on this torch, and why."""

    reason: str


class Plan(NamedTuple):
    """Edits in the order in which they are applied; they are undone in the reverse order.

    Attributes:
        edits: every target was found and has a known shape; none was changed yet.
        counters: read for ``info()``.
    """

    edits: list[Edit]
    counters: Callable[[], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One entry of the catalogue.

    Attributes:
        name: as ``install(patches=...)`` and ``FXSAFE_DISABLE`` spell it.
        summary: one line for people.
        upstream: links to the reports and pull requests it answers; empty if none is known.
        modules: what must be imported before it can be planned; fxsafe never imports them itself.
        plan: called with these modules, ``{name: module}``, changes nothing and raises ShapeError if a target
            has an unknown shape.
        fixes: the fixes of ``install(fix=...)`` with which it goes.
        faults: names of the programs in ``fxsafe.doctor.faults`` that it cures.
        quiet: whether it may be applied and undone only while no thread traces.
        after_fork_in_child: brings its state in order in a forked child, where only this thread lives on.
        since: the first release, major and minor, that has all of ``modules``.
    """

    name: str
    summary: str
    upstream: tuple[str, ...]
    modules: tuple[str, ...]
    plan: Callable[[Mapping[str, ModuleType]], Plan | NotNeeded]
    fixes: frozenset[Fix] = frozenset({"thread-local", "always-false"})
    faults: tuple[str, ...] = ()
    quiet: bool = True
    after_fork_in_child: Callable[[], None] | None = None
    since: tuple[int, int] = (0, 0)
