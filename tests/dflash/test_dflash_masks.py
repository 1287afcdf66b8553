from __future__ import annotations

import pytest
import tiny
import torch
from torch.nn.attention.flex_attention import create_mask

from fxsafe.dflash import masks
from fxsafe.dflash.anchors import make_blocks
from fxsafe.dflash.compiling import compile_here, graph_count
from fxsafe.dflash.config import DrafterConfig
from fxsafe.dflash.masks import block_masks, dense_masks, visible

SHAPES = {"full": tiny.config(), "sliding": tiny.sliding(), "sliding causal": tiny.sliding(causal=True)}


def by_words(shape: DrafterConfig, layer: int, anchors: list[int], keep: list[bool], context: int) -> torch.Tensor:
    """The predicate once more, cell by cell."""
    block, window = shape.block_size, shape.layer_window(layer)
    slots = len(anchors) * block
    out = torch.zeros(slots, context + slots, dtype=torch.bool)
    for q in range(slots):
        j, o = divmod(q, block)
        for c in range(context + slots):
            if c < context:
                near = window is None or anchors[j] + o - c < window
                out[q, c] = c < anchors[j] and near and keep[j]
            else:
                own, p = divmod(c - context, block)
                out[q, c] = own == j and (p <= o or not shape.layer_is_causal(layer))
    return out


@pytest.mark.parametrize("name", SHAPES)
def test_dense_masks_are_the_predicate(name: str) -> None:
    shape = SHAPES[name]
    anchors, keep = [0, 3, 9, 0], [True, True, True, False]
    made = dense_masks(shape, torch.tensor([anchors]), torch.tensor([keep]), 12)
    for layer, mask in enumerate(made):
        assert torch.equal(mask[0, 0], by_words(shape, layer, anchors, keep, 12))


@pytest.mark.parametrize("name", SHAPES)
def test_block_masks_have_the_same_cells(name: str) -> None:
    shape = SHAPES[name]
    anchors = torch.tensor([[0, 3, 40, 0], [7, 8, 100, 120]])
    keep = torch.tensor([[True, True, True, False], [True] * 4])
    dense = dense_masks(shape, anchors, keep, 128)
    for layer, mask in enumerate(block_masks(shape, anchors, keep, 128)):
        assert torch.equal(create_mask(mask.mask_mod, 2, 1, 16, 144, device="cpu"), dense[layer])


def test_queries_beyond_the_last_block_see_nothing() -> None:
    query = torch.arange(8, 200)[:, None]
    keep = torch.ones(1, 2, dtype=torch.bool)
    seen = visible(None, False, 4, 8, torch.tensor([[1, 5]]), keep, torch.tensor(0), query, torch.arange(16)[None])
    assert not seen.any()


@pytest.mark.parametrize("name", SHAPES)
def test_only_what_is_visible_matters(name: str) -> None:
    shape = SHAPES[name]
    model = tiny.drafter(shape)
    anchors = [2, 9, 20]
    ids, feats, blocks = tiny.inputs(shape, anchors)
    head = tiny.head()
    seen = dense_masks(shape, blocks.anchors_BN, blocks.keep_BN, ids.shape[1])

    def run(feats: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
        out = model(feats, head.embed(shown.flatten(1)), blocks.positions_BNK.flatten(1), seen)
        return out.view(2, 3, 4, -1).detach()

    before = run(feats, blocks.ids_BNK)
    late = feats.clone()
    late[:, 9:] += 1
    other = blocks.ids_BNK.clone()
    other[:, 0] = 7
    last = feats.clone()
    last[:, 8] += 1
    own = blocks.ids_BNK.clone()
    own[:, 1, 0] = 7
    assert torch.equal(run(late, blocks.ids_BNK)[:, 1], before[:, 1])
    assert torch.equal(run(feats, other)[:, 1], before[:, 1])
    assert not torch.allclose(run(last, blocks.ids_BNK)[:, 1], before[:, 1], atol=1e-3)
    assert not torch.allclose(run(feats, own)[:, 1], before[:, 1], atol=1e-3)


def test_unused_blocks_give_finite_rows() -> None:
    shape = tiny.config()
    ids, feats, _ = tiny.inputs(shape, [0])
    anchors, keep = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.bool)
    blocks = make_blocks(ids, torch.zeros_like(ids), anchors, keep, shape.block_size, shape.mask_token_id)
    seen = dense_masks(shape, anchors, keep, ids.shape[1])
    out = tiny.drafter(shape)(
        feats, tiny.head().embed(blocks.ids_BNK.flatten(1)), blocks.positions_BNK.flatten(1), seen
    )
    assert out.isfinite().all()


def test_new_anchors_compile_neither_the_tiles_nor_the_drafter_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with flex_attention's forward, which exists on the CPU too; one full and one sliding layer."""
    shape = tiny.config(head_dim=16, layer_types=("full_attention", "sliding_attention"), sliding_window=20)
    model, head, compiled = tiny.drafter(shape), tiny.head(), []
    forward = compile_here(model.forward, backend="aot_eager")
    find = compile_here(masks.find_tiles, backend="aot_eager")
    monkeypatch.setattr(masks, "_finder", lambda device: find)
    for i, length in enumerate((128, 256, 128, 256, 128)):
        _, feats, blocks = tiny.inputs(shape, [3 + i, 40, 60, 90 + i] * 8, length=length, seed=i)
        noise, positions = head.embed(blocks.ids_BNK.flatten(1)), blocks.positions_BNK.flatten(1)
        before = graph_count()
        with torch.no_grad():
            flexed = forward(feats, noise, positions, block_masks(shape, blocks.anchors_BN, blocks.keep_BN, length))
            compiled.append(graph_count() - before)
            dense = model(feats, noise, positions, dense_masks(shape, blocks.anchors_BN, blocks.keep_BN, length))
        torch.testing.assert_close(flexed, dense, atol=1e-5, rtol=1e-4)
    assert compiled[0] > 0
    assert compiled[2:] == [0, 0, 0]
