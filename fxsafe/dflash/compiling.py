"""torch.compile for the threads of the trainer, with a limit on recompilations that really holds there.

From torch 2.12 assignments to ``torch._dynamo.config`` belong to the thread that makes them: a limit raised in the
main thread is not seen by drafter threads, nor by the autograd threads in which CUDA backwards run (pytorch #186537).
So the limit goes into the entry's default, which all threads see.

torch 2.13's ``isolate_recompiles`` would give each drafter cache entries of its own, but two threads that call two
isolated functions at a time disturb each other: shapes that were compiled are compiled again (14 graphs and more where
10 are needed, seen on 2.13.0, whatever the order below). Without it, drafters on one device share what either has
compiled.

Dynamo looks through the shared variants of a function from the front, letting go of the GIL at each of them, and moves
the one that fits to the front. A thread that is on its way goes on behind the place which that one has left, never
meets it, and compiles it once more, however long after the warm-up. So the order is kept, as torch 2.10 and later can
be told; where lengths vary, the variant in front is seldom the one that is wanted, and nothing is lost.

On a GPU Inductor times several ways of splitting a reduction and keeps the fastest: of two processes each may take
another one, and a run that is resumed, or repeated from cold caches, computes other bits. ``deterministic`` (torch 2.10
and later) has it take the same one always. It goes in as an option of each function: as a setting it is lost with the
first compile, at whose end Dynamo calls ``torch.use_deterministic_algorithms(False)``, which sets it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._dynamo.utils

__all__ = ["RECOMPILE_LIMIT", "compile_here", "graph_count", "promise_recompile_limit", "recompile_limit_here"]

RECOMPILE_LIMIT = 256
"""Variants of one function: buckets of lengths, times devices, times train and eval, with room to spare."""

F = TypeVar("F", bound=Callable[..., Any])


def compile_here(function: F, backend: str = "inductor") -> F:
    """``torch.compile`` with static shapes; see :func:`promise_recompile_limit` for how many.

    From here on Dynamo keeps the variants of every function of the process in the order in which they were compiled.
    """
    keep_order: Any = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)
    if keep_order is not None:
        keep_order(False)
    compile_any: Any = torch.compile  # its overloads differ between releases
    options = {"deterministic": True} if backend == "inductor" and _can_be_deterministic() else None
    compiled: F = compile_any(function, dynamic=False, backend=backend, options=options)
    return compiled


def _can_be_deterministic() -> bool:
    import torch._inductor.config

    return hasattr(torch._inductor.config, "deterministic")


def promise_recompile_limit(limit: int = RECOMPILE_LIMIT) -> None:
    """Make ``limit`` the recompile limit of every thread of the process, those of the autograd engine included."""
    config: Any = torch._dynamo.config
    name = _limit_name()
    for key, value in ((name, limit), (f"accumulated_{name}", max(256, 4 * limit))):
        setattr(config, key, value)
        config._config[key].default = value


def recompile_limit_here() -> int:
    """The recompile limit as the calling thread sees it."""
    limit: int = getattr(torch._dynamo.config, _limit_name())
    return limit


def _limit_name() -> str:
    # Torch 2.6 knows the older name alone; to later releases that is an alias, without a default of its own.
    return "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"


def graph_count() -> int:
    """How many graphs Dynamo has compiled in this process; from torch 2.10 on constant once every shape was seen."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count
