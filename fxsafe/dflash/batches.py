"""What travels between the threads, and the seeds that make every number independent of who computes it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsafe.dflash.anchors import sample_anchors

__all__ = ["Example", "Features", "MicroBatch", "collate", "seed_for"]


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A tokenized sequence."""

    ids: Sequence[int]
    learn: Sequence[bool]
    """which tokens are to be learnt: those that the target would have written"""
    origin: str = ""
    """where it came from, for messages"""


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one drafter learns from in one backward; all tensors on the CPU."""

    index: int
    """place in the run, from 0; decides who computes it and the draw of anchors"""
    ids_BS: Tensor
    learn_BS: Tensor
    anchors_BN: Tensor
    keep_BN: Tensor
    tokens: int
    """without padding"""
    origins: tuple[str, ...] = ()
    position: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """where the data stands behind this micro-batch, as JSON"""


@dataclasses.dataclass(frozen=True, slots=True)
class Features:
    """A micro-batch and what the target made of it, on the target's device."""

    batch: MicroBatch
    feats_BSF: Tensor
    last_BSH: Tensor | None


def seed_for(seed: int, *words: object) -> int:
    """A 63-bit seed of its own for each purpose and index."""
    text = "/".join(map(str, (seed, *words)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def collate(
    examples: Sequence[Example],
    *,
    index: int,
    seed: int,
    anchors: int,
    bucket: int,
    limit: int | None = None,
    position: Mapping[str, Any] | None = None,
) -> MicroBatch:
    """Pad on the right to a multiple of ``bucket`` tokens, but not beyond ``limit``, and draw the anchors.

    Few different lengths are few compiled variants. The draw depends on ``seed`` and ``index`` alone. Padding is never
    visible: no block looks beyond its anchor.
    """
    longest = max(len(e.ids) for e in examples)
    length = -(-longest // bucket) * bucket
    if limit is not None:
        length = max(longest, min(length, limit))
    ids = torch.zeros(len(examples), length, dtype=torch.int64)
    learn = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.as_tensor(example.ids)
        learn[row, : len(example.learn)] = torch.as_tensor(example.learn, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed_for(seed, "anchors", index))
    at, keep = sample_anchors(learn, anchors, generator)
    tokens = sum(len(e.ids) for e in examples)
    return MicroBatch(index, ids, learn, at, keep, tokens, tuple(e.origin for e in examples), dict(position or {}))
