"""F2, ``MetaTracer``: what it replaces in ``torch``, it replaces for its own thread only.

The race: for its length ``MetaTracer.trace`` replaces ``torch.zeros``, ``ones``, ``arange``, ``full_like`` and ``eye``
by functions of its own for the whole process. When two traces overlap, the second takes the first one's functions for
the originals and leaves them there for good. Whatever asks for identity meets them in other threads meanwhile: if the
first compile of the process does, Dynamo keeps them in its table of what torch has and takes ``torch.zeros`` for
unknown from then on ("Attempted to call function marked as skipped"); pickling and ``torch.jit.script`` fail.

Upstream: none known. Releases: 2.5 to 2.15, the same body in all of them.

Why this place is enough: the body writes with ``setattr`` and reads with ``getattr``, and so does everybody who calls
``torch.zeros``. While any thread is inside such a trace these attributes of ``torch`` are properties, which give that
thread its own functions and all others what the module's dictionary holds. A dispatcher in the place, as
``module_hooks`` has it, would not do: others would find the dispatcher there, and Dynamo would keep that.

This file can be deleted when the oldest supported torch replaces nothing there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.edits import CodeWrap
from fxsafe.patches._torch_view import TorchView, after_fork_in_child, hide_frames, torch_view
from fxsafe.patches.base import Patch, Plan
from fxsafe.shapes import ShapeError, own_function, shape_of
from fxsafe.traces import FX

__all__ = ["PATCH"]

META_TRACER = "torch.fx.experimental.meta_tracer"
_WHERE = f"{META_TRACER}.MetaTracer"
_NAMES = "_TORCH_METHODS_TO_PATCH"


class _Session:
    """What the body of ``_trace`` works with."""

    def __init__(self, view: TorchView, trace: FunctionType) -> None:
        self.trace = trace
        self.own, self.begin, self.end = view.own, view.begin, view.end


class _Template:
    def trace(self, root: Any, meta_args: Any, concrete_args: Any = None) -> Any:
        """The body that ``MetaTracer.trace`` gets."""
        # torch's body closes over it, by its super().
        __class__  # type: ignore[name-defined]  # noqa: B018
        session: Any = "<replacement>"
        before = session.own()
        try:
            session.begin(self._TORCH_METHODS_TO_PATCH)  # type: ignore[attr-defined]
            return session.trace(self, root, meta_args, concrete_args)
        finally:
            try:
                session.end(before)
            except BaseException:
                session.end(before)  # Ctrl-C on the way: nobody else would
                raise


def _plan(modules: Mapping[str, ModuleType]) -> Plan:
    tracer = vars(modules[META_TRACER]).get("MetaTracer")
    if not isinstance(tracer, type):
        raise ShapeError(f"{_WHERE} does not exist")
    if not isinstance(vars(tracer).get(_NAMES), (list, tuple)):
        raise ShapeError(f"{_WHERE}.{_NAMES} is no list")
    function = own_function(tracer, "trace")
    used = {*function.__code__.co_names, *shape_of(function.__code__).reads}
    if not {"setattr", "torch", _NAMES} <= used:
        raise ShapeError(f"{_WHERE}.trace has an unknown shape: {shape_of(function.__code__)}")
    view = torch_view(modules["torch"])
    hide_frames()
    try:
        edit = CodeWrap(f"{_WHERE}.trace", function, _Template.trace, functools.partial(_Session, view))  # type: ignore[arg-type]
    except ValueError as error:
        raise ShapeError(str(error)) from None
    return Plan([edit])


PATCH = Patch(
    name="meta-tracer",
    summary="what MetaTracer replaces in torch (zeros, ones, arange), it replaces for its own thread only",
    upstream=(),
    modules=("torch", FX, META_TRACER),
    plan=_plan,
    faults=("meta_tracer_overlap",),
    quiet=False,  # imported by those who use it, perhaps inside a trace
    after_fork_in_child=after_fork_in_child,
)
