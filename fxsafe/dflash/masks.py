"""What a slot of a block may attend to: one predicate, as a dense mask and as a block mask of flex_attention.

Keys are the S context positions followed by all N * K block slots. A slot sees the context strictly before its
anchor (at inference the target has not produced the anchor's hidden state yet) and its own block; nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from fxsafe.dflash.compiling import compile_here
from fxsafe.dflash.config import DrafterConfig

__all__ = ["LayerView", "block_masks", "dense_masks", "layer_views", "visible"]

Mask = Tensor | BlockMask

_TILE = 128
"""Inductor refuses smaller ones (pytorch #133562)."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerView:
    """What distinguishes the sight of one layer from that of another."""

    window: int | None
    causal: bool


def layer_views(config: DrafterConfig) -> tuple[LayerView, ...]:
    """The view of each layer of a drafter."""
    return tuple(LayerView(config.layer_window(i), config.layer_is_causal(i)) for i in range(config.num_hidden_layers))


def visible(
    window: int | None,
    causal: bool,
    block: int,
    context: int,
    anchors_BN: Tensor,
    keep_BN: Tensor,
    b: Tensor,
    query: Tensor,
    key: Tensor,
) -> Tensor:
    """The predicate, of index tensors that are broadcast against each other (0-dimensional under flex_attention).

    Args:
        window: tokens of a sliding layer's window, None for a full layer.
        causal: slots see only earlier slots of their block.
        block: K, slots of a block.
        context: S, context positions.
        anchors_BN: int64, position of each block's anchor.
        keep_BN: bool, false for blocks that only fill up the fixed number.
        b: sequence of the micro-batch.
        query: slot indices in [0, N * K); flex_attention also evaluates indices beyond, which see nothing.
        key: key indices in [0, S + N * K).

    Returns:
        bool, of the broadcast shape.

    An unused block sees itself all the same: a row that sees nothing is 0/0 in a softmax, and the loss masks it anyway.
    """
    blocks = anchors_BN.shape[1]
    index = query // block
    inside = index < blocks
    index = index.clamp(max=blocks - 1)
    # One index operation with both indices: flex cannot read a row first and index it then.
    anchor = anchors_BN[b, index]
    in_context = (key < context) & (key < anchor) & keep_BN[b, index]
    if window is not None:
        in_context = in_context & (anchor + query % block - key < window)
    in_block = (key >= context) & ((key - context) // block == index)
    if causal:
        in_block = in_block & ((key - context) % block <= query % block)
    return (in_context | in_block) & inside


def dense_masks(config: DrafterConfig, anchors_BN: Tensor, keep_BN: Tensor, context: int) -> tuple[Tensor, ...]:
    """For each layer a bool mask [B, 1, Q, S + Q], true where a slot may look; layers with one view share a tensor."""
    slots = anchors_BN.shape[1] * config.block_size
    device = anchors_BN.device
    b_B11 = torch.arange(anchors_BN.shape[0], device=device)[:, None, None]
    query_Q1 = torch.arange(slots, device=device)[:, None]
    key_1T = torch.arange(context + slots, device=device)[None, :]
    made: dict[LayerView, Tensor] = {}
    for view in layer_views(config):
        if view not in made:
            made[view] = visible(
                view.window, view.causal, config.block_size, context, anchors_BN, keep_BN, b_B11, query_Q1, key_1T
            )[:, None]
    return tuple(made[view] for view in layer_views(config))


def block_masks(config: DrafterConfig, anchors_BN: Tensor, keep_BN: Tensor, context: int) -> tuple[BlockMask, ...]:
    """The same masks for flex_attention, found by a compiled function on CUDA: uncompiled, the grid exists whole."""
    find = _finder(anchors_BN.device.type)
    slots = anchors_BN.shape[1] * config.block_size
    made: dict[LayerView, BlockMask] = {}
    for view in layer_views(config):
        if view not in made:
            tiles = find(view.window, view.causal, config.block_size, context, anchors_BN, keep_BN)
            made[view] = BlockMask(
                (slots, context + slots),
                **tiles,
                BLOCK_SIZE=(_TILE, _TILE),
                mask_mod=mask_mod(view.window, view.causal, config.block_size, context, anchors_BN, keep_BN),
            )
    return tuple(made[view] for view in layer_views(config))


def mask_mod(
    window: int | None, causal: bool, block: int, context: int, anchors_BN: Tensor, keep_BN: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The predicate in flex_attention's form; compiled code takes the tensors in its closure as inputs."""

    def predicate(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(window, causal, block, context, anchors_BN, keep_BN, b, query, key)

    return predicate


def find_tiles(
    window: int | None, causal: bool, block: int, context: int, anchors_BN: Tensor, keep_BN: Tensor
) -> dict[str, Tensor | None]:
    """Which tiles of 128 x 128 cells hold visible ones, in part and in whole, by row and by column; BlockMask's words.

    Only tensors and plain values go in and only tensors come out, so that new anchors are not a new function to compile
    for: a predicate made outside would be one each time.
    """
    slots = anchors_BN.shape[1] * block

    predicate = mask_mod(window, causal, block, context, anchors_BN, keep_BN)
    # H None: a mask for each head costs memory and tells nothing new (SpecForge #452).
    mask = create_block_mask(
        predicate, anchors_BN.shape[0], None, slots, context + slots, device=anchors_BN.device, BLOCK_SIZE=_TILE
    )
    names = (
        "kv_num_blocks",
        "kv_indices",
        "full_kv_num_blocks",
        "full_kv_indices",
        "q_num_blocks",
        "q_indices",
        "full_q_num_blocks",
        "full_q_indices",
    )
    return {name: getattr(mask, name) for name in names}


@functools.cache
def _finder(device_type: str) -> Callable[..., Any]:
    return compile_here(find_tiles) if device_type == "cuda" else find_tiles
