"""F1, thread-local: recomputation in ``torch.utils.checkpoint`` sees the flag of its forward.

The race: with the flag per thread, a recomputation that autograd runs on one of its own threads would ask a thread that
never traced. Before, it asked the process-wide flag, and got whatever any thread was doing at that moment.

Upstream: 2.14 enters the forward's flag around the recomputation (pytorch#168999). Releases: 2.5 to 2.13.

Why this place is enough: every recomputation without reentry goes through the function that ``_CheckpointFrame`` is
given. Reentrant checkpointing runs its forward again in its backward and carries nothing, upstream too.

This file can be deleted when torch 2.14 is the oldest release supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fxsafe.dynamo import frame_hider
from fxsafe.edits import CodeWrap, Edit
from fxsafe.patches.base import NotNeeded, Patch, Plan
from fxsafe.patches.tracing_flag import UPSTREAM, flag, is_fixed_upstream, set_flag
from fxsafe.shapes import ShapeError, own_function
from fxsafe.traces import FX

CHECKPOINT = "torch.utils.checkpoint"


def _frame_template(self: Any, recompute_fn: Any, early_stop: Any, unpack_error_cb: Any, metadata_fn: Any) -> None:
    replacement: Any = "<replacement>"
    replacement(self, recompute_fn, early_stop, unpack_error_cb, metadata_fn)


def _checkpoint_edit(checkpoint: ModuleType) -> Edit:
    where = f"{CHECKPOINT}._CheckpointFrame.__init__"
    function = own_function(checkpoint._CheckpointFrame, "__init__")
    hide = frame_hider()

    def wrap(original: FunctionType) -> Callable[..., Any]:
        def init(self: Any, recompute_fn: Any, *rest: Any) -> None:
            in_forward = flag.tracing

            def recompute_as_in_forward(*args: Any) -> None:
                previous = flag.tracing
                try:
                    set_flag(in_forward)
                    recompute_fn(*args)
                finally:
                    set_flag(previous)

            original(self, recompute_as_in_forward, *rest)

        hide(init)
        return init

    try:
        return CodeWrap(where, function, _frame_template, wrap)  # type: ignore[arg-type]
    except ValueError as error:
        raise ShapeError(str(error)) from None


def _plan(modules: Mapping[str, ModuleType]) -> Plan | NotNeeded:
    if is_fixed_upstream(modules[FX]):
        return NotNeeded(f"torch carries the flag into recomputation since 2.14.0 ({UPSTREAM})")
    return Plan([_checkpoint_edit(modules[CHECKPOINT])])


PATCH = Patch(
    name="checkpoint-flag",
    summary="recomputation of a checkpointed forward sees that forward's tracing flag, on autograd's threads too",
    upstream=("https://github.com/pytorch/pytorch/issues/179614", UPSTREAM),
    modules=("torch", FX, CHECKPOINT),
    plan=_plan,
    fixes=frozenset({"thread-local"}),
    quiet=False,  # torch.utils.checkpoint may be imported first inside a trace
)
