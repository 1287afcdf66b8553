"""Names, stacks and frames of threads."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, chain, repeat, starmap
from operator import methodcaller
from types import FrameType

__all__ = ["frames", "name", "stack", "without_collection"]


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage is collected in the block: up to Python 3.11 that lets other threads run in the middle of C code."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def frames(ident: int) -> list[FrameType]:
    """The frames of a thread, innermost first, all of one moment.

    A loop over ``f_back`` may lose the GIL on its way, and if the thread is inside a generator then that gives control
    back meanwhile, its frame leads nowhere any more. This is one call of C code: what the first iterator gives, and
    ``getattr(..., "f_back")`` of that, until there is none.
    """
    innermost = map(methodcaller("get", ident), starmap(sys._current_frames, [()]))
    found: list[FrameType] = []
    with without_collection():
        try:
            found.extend(accumulate(chain(innermost, repeat("f_back")), getattr))
        except AttributeError:
            found.pop()  # the None after the last frame
    return found


def name(ident: int | None) -> str:
    """``thread 'its name' (ident N)``; a ``?`` where Python does not know it, as with C++'s own threads."""
    return f"thread {next((t.name for t in threading.enumerate() if t.ident == ident), '?')!r} (ident {ident})"


def stack(ident: int | None) -> str:
    """Where it is, as a traceback has it, each line ended."""
    frame = None if ident is None else sys._current_frames().get(ident)
    return "  (it has ended)\n" if frame is None else "".join(traceback.format_stack(frame))
