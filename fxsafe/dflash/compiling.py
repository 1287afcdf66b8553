"""torch.compile for the threads of the trainer, with a limit on recompilations that really holds there.

From torch 2.12 assignments to ``torch._dynamo.config`` belong to the thread that makes them: a limit raised in the
main thread is not seen by drafter threads, nor by the autograd threads in which CUDA backwards run (pytorch #186537).
So the limit goes into the entry's default, which all threads see.

torch 2.13's ``isolate_recompiles`` would give each drafter cache entries of its own, but two threads that call two
isolated functions at a time disturb each other: shapes that were compiled are compiled again (14 graphs where 10 are
needed, seen on 2.13.0). Without it, drafters on one device share what either has compiled.
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


def compile_here(function: F, **options: Any) -> F:
    """``torch.compile`` with static shapes; see :func:`promise_recompile_limit` for how many."""
    compile_any: Any = torch.compile  # its overloads differ between releases
    compiled: F = compile_any(function, dynamic=False, **options)
    return compiled


def promise_recompile_limit(limit: int = RECOMPILE_LIMIT) -> None:
    """Make ``limit`` the recompile limit of every thread of the process, those of the autograd engine included."""
    config: Any = torch._dynamo.config
    for name, value in (("recompile_limit", limit), ("accumulated_recompile_limit", max(256, 4 * limit))):
        setattr(config, name, value)
        config._config[name].default = value


def recompile_limit_here() -> int:
    """The recompile limit as the calling thread sees it."""
    limit: int = torch._dynamo.config.recompile_limit
    return limit


def graph_count() -> int:
    """How many graphs Dynamo has compiled in this process; constant once every shape has been seen."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count
