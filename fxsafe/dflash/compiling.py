"""torch.compile for a thread of the trainer, with a limit on recompilations that really holds there.

From torch 2.12 assignments to ``torch._dynamo.config`` belong to the thread that makes them: a limit raised in the
main thread is not seen by drafter threads, nor by the autograd threads in which CUDA backwards run (pytorch #186537).
The limit goes with the compiled function where torch.compile takes one, and else into the entry's default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._dynamo.utils

__all__ = ["RECOMPILE_LIMIT", "compile_here", "graph_count", "promise_recompile_limit", "recompile_limit_here"]

RECOMPILE_LIMIT = 64
"""Variants of one function: buckets of lengths, times train and eval, with room to spare."""

F = TypeVar("F", bound=Callable[..., Any])


def compile_here(function: F, **options: Any) -> F:
    """``torch.compile`` with static shapes, own cache entries (so that drafters do not use up each other's limit).

    The arguments that this torch does not know are left out: ``isolate_recompiles`` and ``recompile_limit`` exist from
    2.13 on. :func:`promise_recompile_limit` stands in for them before.
    """
    known = inspect.signature(torch.compile).parameters
    wanted = {"isolate_recompiles": True, "recompile_limit": RECOMPILE_LIMIT}
    extra = {name: value for name, value in wanted.items() if name in known}
    compile_any: Any = torch.compile  # its overloads differ between releases
    compiled: F = compile_any(function, dynamic=False, **extra, **options)
    return compiled


def promise_recompile_limit(limit: int = RECOMPILE_LIMIT) -> None:
    """Make ``limit`` the recompile limit of every thread of the process, those of the autograd engine included."""
    config: Any = torch._dynamo.config
    config.recompile_limit = limit
    entry = config._config["recompile_limit"]
    entry.default = limit


def recompile_limit_here() -> int:
    """The recompile limit as the calling thread sees it."""
    limit: int = torch._dynamo.config.recompile_limit
    return limit


def graph_count() -> int:
    """How many graphs Dynamo has compiled in this process; constant once every shape has been seen."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count
