"""Frames of fxsafe's own that may run while Dynamo watches for frames to compile."""

from __future__ import annotations

from typing import Any

__all__ = ["run_as_is"]


def run_as_is(*functions: Any) -> None:
    """Tells Dynamo's frame evaluation to run the bodies of these functions as they are.

    Dynamo leaves torch's own files alone by their names; where a body of ours runs in their place it must be left
    alone too. Functions that these call are judged for themselves.
    """
    import torch

    core: Any = torch._C._dynamo.eval_frame
    for function in functions:
        if hasattr(core, "skip_code"):  # to 2.6
            core.skip_code(function.__code__)
        else:
            skip = core._FrameExecStrategy(core._FrameAction.SKIP, core._FrameAction.DEFAULT)
            core.set_code_exec_strategy(function.__code__, skip)
