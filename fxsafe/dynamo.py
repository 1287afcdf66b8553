"""Keeping Dynamo's frame evaluation out of fxsafe's own functions, without importing ``torch._dynamo``."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from fxsafe.shapes import ShapeError

__all__ = ["frame_hider"]


def frame_hider() -> Callable[..., None]:
    """A function that tells Dynamo to run the bodies of the functions passed to it as they are.

    Dynamo leaves torch's own files alone by their names. Ours may run under it when a compiled region calls a tracer.

    Raises:
        ShapeError: this torch has neither of the two interfaces for it (``skip_code`` up to 2.6,
            ``set_code_exec_strategy`` since).
    """
    import torch

    interface: Any = torch._C._dynamo.eval_frame
    skip: Callable[[CodeType], None]
    if hasattr(interface, "skip_code"):
        skip = interface.skip_code
    else:
        try:
            action = interface._FrameAction
            strategy = interface._FrameExecStrategy(action.SKIP, action.DEFAULT)
            set_strategy = interface.set_code_exec_strategy
        except AttributeError as error:
            raise ShapeError(f"torch._C._dynamo.eval_frame has no known way to skip a frame: {error}") from None

        def skip(code: CodeType) -> None:
            set_strategy(code, strategy)

    def hide(*functions: Any) -> None:
        for function in functions:
            skip(function.__code__)

    return hide
