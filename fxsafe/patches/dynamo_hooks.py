"""F2 beside Dynamo: a compile in one thread takes modules for patched while another thread traces.

The race: Dynamo keeps ``nn.Module.__call__`` and ``__getattr__`` as it saw them at its import, and asks of every
module whether it still has these very objects. While another thread traces, ``module_hooks`` has dispatchers there;
Dynamo would go through the bodies of the originals instead of its short cuts, and the same operations would come out
with other names (a strict export's ``p_lin_weight`` as ``p___dict_____modules______lin_weight``) and in another order
of inputs.

The other race: Dynamo writes its guards at the end of a compile, for what it has found at the beginning. Of a
dispatcher it has found ``_torchdynamo_inline``; if the trace is over by then, the place holds a function without it
and the compile fails ("'function' object has no attribute '_torchdynamo_inline'"). Then it tries the guards once: a
dispatcher that comes in between makes them fail.

And it takes the dispatcher of a class for a function: ``isinstance(x, Cfg)`` fails to compile.

Upstream: pytorch#112775. Releases: 2.5 to 2.15.

Why this place is enough: each function of Dynamo's that compares with one of the two gets its own body again with the
comparison made by ``_Comparison``, which takes both sides for what the calling thread would see alone. What stands in
the place when each side is read does not matter then: a trace may begin or end between the two. Guards are written
while nothing is patched or put back, with the dispatchers that the compile has found in their places; these call the
originals. The builder of Dynamo's variables is shown the original of a stand-in (``_stand_in``).

This file can be deleted together with ``module_hooks``.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import AttributeSwap, CodeSwap, CodeWrap, Edit
from fxsafe.patches._slots import places
from fxsafe.patches._stand_in import INLINE, StandIn
from fxsafe.patches.base import Patch, Plan, ShapeError
from fxsafe.shapes import own_function, shape_of
from fxsafe.thread_globals import PLACEHOLDER, functions_of, nested, rewritten

__all__ = ["PATCH"]

_UTILS = "torch._dynamo.utils"
_GUARDS = "torch._dynamo.guards"
_BUILDER = "torch._dynamo.variables.builder"
_SOURCE = "torch._dynamo.source"
_NAMES = {"unpatched_nn_module_call": "__call__", "unpatched_nn_module_getattr": "__getattr__"}
_MODULES = (
    _UTILS,
    _GUARDS,
    "torch._dynamo.convert_frame",
    "torch._dynamo.variables.nn_module",
    "torch._dynamo.variables.user_defined",
)


class _Comparison:
    @staticmethod
    def same(left: Any, right: Any) -> bool:
        return places.seen_value(left) is places.seen_value(right)


def _is_hook(node: ast.expr) -> bool:
    """``unpatched_nn_module_call`` and the like, or ``torch.nn.Module.__call__`` and the like."""
    if isinstance(node, ast.Name):
        return node.id in _NAMES
    return (
        isinstance(node, ast.Attribute)
        and node.attr in _NAMES.values()
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "Module"
    )


class _Compare(ast.NodeTransformer):
    def __init__(self) -> None:
        self.changed = 0

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        if len(sides) != 2 or not isinstance(node.ops[0], (ast.Is, ast.Eq)) or not any(map(_is_hook, sides)):
            return node
        self.changed += 1
        same = ast.Attribute(ast.Constant(PLACEHOLDER), "same", ast.Load())
        return ast.fix_missing_locations(ast.copy_location(ast.Call(same, sides, []), node))


def _may_compare(function: FunctionType) -> bool:
    for code in nested(function.__code__):
        names = set(code.co_names)
        if not names.isdisjoint(_NAMES) or ("Module" in names and not names.isdisjoint(_NAMES.values())):
            return True
    return False


def _edits(module: ModuleType) -> Iterator[Edit]:
    for function in functions_of(module):
        if _may_compare(function):
            where = f"{module.__name__}.{function.__qualname__}"
            change = _Compare()
            code = rewritten(where, function, change, _Comparison)
            if change.changed:
                yield CodeSwap(where, function, code)


class _Filter:
    """The user's ``guard_filter_fn``, which may wait for a thread that traces: called without the lock of the places.

    torch builds the guards a first time for the filter's sake and once more behind it, so that they may change there.
    """

    __slots__ = ("building", "chosen")

    def __init__(self, chosen: Any) -> None:
        self.chosen, self.building = chosen, True

    def __call__(self, entries: Any) -> Any:
        if not self.building:  # torch has kept it
            return self.chosen(entries)
        with places.changing_again():
            return self.chosen(entries)


def _guards_edit(guards: ModuleType) -> tuple[Edit, Any]:
    where = f"{_GUARDS}.CheckFunctionManager.__init__"
    manager = vars(guards).get("CheckFunctionManager")
    if not isinstance(manager, type):
        raise ShapeError(f"{_GUARDS}.CheckFunctionManager does not exist")
    original = own_function(manager, "__init__")
    if "output_graph" not in shape_of(original.__code__).parameters:
        raise ShapeError(f"{where} takes no output_graph")
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        graph = given.arguments.get("output_graph")
        guarded = (guard.name for guard in getattr(graph, "guards", None) or ())
        with places.standing([name for name in guarded if "_torchdynamo_inline" in name]):
            chosen = given.arguments.get("guard_filter_fn")
            if chosen is None:
                original(self, *args, **kwargs)
                return
            filter_fn = given.arguments["guard_filter_fn"] = _Filter(chosen)
            try:
                original(*given.args, **given.kwargs)
            finally:
                filter_fn.building = False

    return AttributeSwap(where, manager, "__init__", init), init


def _build_template(self: Any, value: Any) -> Any:
    replacement: Any = "<replacement>"
    return replacement(self, value)


def _builder_edit(modules: Mapping[str, ModuleType]) -> Edit:
    """Of a stand-in Dynamo goes on with the original, as it does of a dispatcher that is a function."""
    builder, attribute_of = modules[_BUILDER], modules[_SOURCE].AttrSource
    hide = frame_hider()

    def wrap(original: FunctionType) -> Callable[[Any, Any], Any]:
        def build(self: Any, value: Any) -> Any:
            while type(value) is StandIn:
                self.source, value = attribute_of(self.source, INLINE), getattr(value, INLINE)
            return original(self, value)

        hide(build)
        return build

    kind = vars(builder).get("VariableBuilder")
    if not isinstance(kind, type):
        raise ShapeError(f"{_BUILDER}.VariableBuilder does not exist")
    call = own_function(kind, "__call__")
    try:
        return CodeWrap(f"{_BUILDER}.VariableBuilder.__call__", call, _build_template, wrap)  # type: ignore[arg-type]
    except ValueError as error:
        raise ShapeError(str(error)) from None


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    utils = modules[_UTILS]
    if not any(name in vars(utils) for name in _NAMES):
        raise ShapeError(f"{_UTILS} has neither of {sorted(_NAMES)}")
    edits = [edit for name in _MODULES for edit in _edits(modules[name])]
    if not any(edit.target.startswith(f"{_UTILS}.") for edit in edits):
        raise ShapeError(f"{_UTILS} compares with no __getattr__ of torch.nn.Module")
    guards_edit, init = _guards_edit(modules[_GUARDS])
    frame_hider()(_Comparison.same, type(places).seen_value, init, _Filter.__call__)
    return Plan([*edits, guards_edit, _builder_edit(modules)])


PATCH = Patch(
    name="dynamo-hooks",
    summary="a compile beside a trace gives the graph that it gives alone, names and order of inputs included",
    upstream=("https://github.com/pytorch/pytorch/issues/112775",),
    modules=("torch", "torch.nn", _SOURCE, _BUILDER, *_MODULES),
    plan=_plan,
    # Dynamo is imported by the first compile, which may run beside a trace and must not wait for its end.
    quiet=False,
)
