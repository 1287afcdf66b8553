"""Names and stacks of threads, for messages."""

from __future__ import annotations

import sys
import threading
import traceback

__all__ = ["name", "stack"]


def name(ident: int | None) -> str:
    """``thread 'its name' (ident N)``; a ``?`` where Python does not know it, as with C++'s own threads."""
    return f"thread {next((t.name for t in threading.enumerate() if t.ident == ident), '?')!r} (ident {ident})"


def stack(ident: int | None) -> str:
    """Where it is, as a traceback has it, each line ended."""
    frame = None if ident is None else sys._current_frames().get(ident)
    return "  (it has ended)\n" if frame is None else "".join(traceback.format_stack(frame))
