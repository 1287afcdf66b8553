"""F4, dispatch caches: two threads may fill an operator's cache at the same moment.

The race: on a miss the dispatcher asks ``OpOverload._get_dispatch``, which asserts that the key is still missing; a
thread that was second in the same miss fails with "already in dispatch cache". And entering a pre-dispatch mode walks
over the set of operators with a cache while other threads add to it ("Set changed size during iteration").

Upstream: pytorch#168042. Releases: 2.5 to 2.15.

Why this place is enough: an entry is the same whoever computes it, so the second thread returns the first one's, and
whoever walks over the set gets a copy of it. Storing an entry and adding an operator are single steps already.

This file can be deleted when the oldest supported torch returns the entry that is there.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import ModuleType

from fxsafe.edits import CodeSwap, Edit
from fxsafe.patches.base import Patch, Plan, ShapeError
from fxsafe.shapes import own_function
from fxsafe.thread_globals import Inline, rewritten

__all__ = ["PATCH"]

OPS = "torch._ops"
_MISSES = {
    "assert key not in self._dispatch_cache, f'{self} {key}'",  # to 2.10
    "if key in self._dispatch_cache:\n    raise AssertionError(f'{self} {key} already in dispatch cache')",
}
_TAKE_IT = "_fxsafe_entry = self._dispatch_cache.get(key)\nif _fxsafe_entry is not None:\n    return _fxsafe_entry"
_LIVE_SET = "return cached_ops"
_COPY = "return cached_ops.copy()"


class _Statement(ast.NodeTransformer):
    """Replaces the one statement that reads as one of ``old``."""

    def __init__(self, old: set[str], new: str) -> None:
        # Dumps, since how a tree is written out as text differs between releases of Python.
        self._old = {ast.dump(ast.parse(text).body[0]) for text in old}
        self._new = new
        self.count = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.stmt) and ast.dump(node) in self._old:
            self.count += 1
            statements = ast.parse(self._new).body
            for statement in statements:
                for part in ast.walk(statement):
                    if isinstance(part, (ast.stmt, ast.expr)):
                        ast.copy_location(part, node)
            return statements  # type: ignore[return-value]
        return super().generic_visit(node)


def _edits(owner: ModuleType | type, name: str, old: set[str], new: str) -> list[Edit]:
    function = own_function(owner, name)
    where = f"{OPS}.{function.__qualname__}"
    change = _Statement(old, new)
    code = rewritten(where, function, change)
    if change.count != 1:
        raise ShapeError(f"{where} no longer says {sorted(old)[0]!r}")
    return [CodeSwap(where, function, code), Inline(where, function)]


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    module = modules[OPS]
    return Plan(
        [
            *_edits(module.OpOverload, "_get_dispatch", _MISSES, _TAKE_IT),
            *_edits(module, "get_cached_ops", {_LIVE_SET}, _COPY),
        ]
    )


PATCH = Patch(
    name="dispatch-cache",
    summary="threads may fill the dispatch cache of one operator at the same moment",
    upstream=("https://github.com/pytorch/pytorch/issues/168042",),
    # torch itself, so as to wait for the end of its import: the others come in the middle of it.
    modules=("torch", OPS),
    plan=_plan,
    faults=("dispatch-cache",),
    quiet=False,
)
