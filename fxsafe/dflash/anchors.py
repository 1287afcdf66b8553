"""Anchors of a sequence, and the blocks that start at them.

Slot 0 of a block holds the real token at the anchor, the others the mask token. Slot k predicts the token at
``anchor + k``: there is no shift of labels, and slot 0 has no loss.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

__all__ = ["Blocks", "candidates", "make_blocks", "sample_anchors"]


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a micro-batch; see the package for the suffixes."""

    anchors_BN: Tensor
    """int64, ascending; unused ones are 0."""
    keep_BN: Tensor
    """bool, false for blocks that only fill up the fixed number."""
    ids_BNK: Tensor
    """int64, what the drafter is shown."""
    positions_BNK: Tensor
    """int64"""
    labels_BNK: Tensor
    """int64, the token that each slot has to predict."""
    valid_BNK: Tensor
    """bool, slots that have a loss."""


def candidates(loss_mask_BS: Tensor) -> Tensor:
    """bool [B, S]: positions that may be anchors, those whose own and next token are both to be learnt."""
    mask = loss_mask_BS.bool()
    return mask & torch.nn.functional.pad(mask[:, 1:], (0, 1))


def sample_anchors(loss_mask_BS: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw ``count`` anchors of each sequence without replacement.

    The number is fixed, so that shapes are: sequences with fewer candidates get unused anchors at the end.

    Args:
        loss_mask_BS: nonzero on tokens to learn; on the CPU, as the generator is, for the same draw on every device.
        count: N.
        generator: its state alone decides.

    Returns:
        Anchors [B, N] int64 ascending (0 where unused) and keep [B, N] bool.
    """
    may_BS = candidates(loss_mask_BS)
    draw_BS = torch.rand(may_BS.shape, generator=generator).masked_fill(~may_BS, 2.0)
    length = draw_BS.shape[1]
    if count > length:
        draw_BS = torch.nn.functional.pad(draw_BS, (0, count - length), value=2.0)
    value_BN, index_BN = draw_BS.topk(count, dim=1, largest=False)
    keep_BN = value_BN < 1.5
    # Unused ones behind all others, then to 0.
    ordered, order = index_BN.masked_fill(~keep_BN, draw_BS.shape[1]).sort(dim=1)
    keep_BN = keep_BN.gather(1, order)
    return ordered.masked_fill(~keep_BN, 0), keep_BN


def make_blocks(
    ids_BS: Tensor, loss_mask_BS: Tensor, anchors_BN: Tensor, keep_BN: Tensor, block: int, mask_token: int
) -> Blocks:
    """Cut the blocks at the anchors. Blocks may run past the end; their slots there have no loss."""
    batch, length = ids_BS.shape
    slot_K = torch.arange(block, device=ids_BS.device)
    positions_BNK = anchors_BN[..., None] + slot_K
    flat = positions_BNK.clamp(max=length - 1).flatten(1)
    labels_BNK = ids_BS.gather(1, flat).view_as(positions_BNK)
    learn_BNK = loss_mask_BS.bool().gather(1, flat).view_as(positions_BNK)
    valid_BNK = keep_BN[..., None] & (slot_K > 0) & (positions_BNK < length) & learn_BNK
    shown_BNK = torch.where((slot_K == 0) & keep_BN[..., None], labels_BNK, mask_token)
    assert shown_BNK.shape[0] == batch
    return Blocks(anchors_BN, keep_BN, shown_BNK, positions_BNK, labels_BNK, valid_BNK)
