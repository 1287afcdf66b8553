from __future__ import annotations

import pytest
import tiny
import torch

from fxsafe.dflash.config import DrafterConfig
from fxsafe.dflash.export import tensor_shapes
from fxsafe.dflash.masks import block_masks, dense_masks
from fxsafe.dflash.model import Drafter, parameter_count

SHAPES = {
    "full": tiny.config(),
    "no groups": tiny.config(num_key_value_heads=4),
    "full, causal": tiny.config(is_causal=True),
    "sliding": tiny.sliding(),
    "sliding, causal": tiny.sliding(causal=None),
    "DFlash 2": tiny.second(),
}


@pytest.mark.parametrize("path", ["dense", "flex"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_block_in_training_is_the_block_of_inference(name: str, path: str) -> None:
    shape = SHAPES[name]
    model, head = tiny.drafter(shape), tiny.head()
    length = 24
    anchors = [0, 3, length - 4, length - 1]
    _ids, feats, blocks = tiny.inputs(shape, anchors, length)
    make = dense_masks if path == "dense" else block_masks
    with torch.no_grad():
        together = model(
            feats,
            head.embed(blocks.ids_BNK.flatten(1)),
            blocks.positions_BNK.flatten(1),
            make(shape, blocks.anchors_BN, blocks.keep_BN, length),
        ).view(2, 4, 4, -1)
        for j, anchor in enumerate(anchors):
            alone = inference(shape, model, feats[:, :anchor], head.embed(blocks.ids_BNK[:, j]), anchor)
            torch.testing.assert_close(together[:, j], alone, atol=1e-5, rtol=1e-5)


def inference(
    shape: DrafterConfig, model: Drafter, feats: torch.Tensor, noise: torch.Tensor, anchor: int
) -> torch.Tensor:
    """One block behind its context, with masks made of positions only where a layer needs one."""
    positions = torch.arange(anchor + shape.block_size).expand(feats.shape[0], -1)
    query, key = positions[0, anchor:, None], positions[0, None, :]
    masks: list[torch.Tensor | None] = []
    for layer in range(shape.num_hidden_layers):
        mask = torch.ones(shape.block_size, anchor + shape.block_size, dtype=torch.bool)
        if (window := shape.layer_window(layer)) is not None:
            mask &= query - key < window
        if shape.layer_is_causal(layer):
            mask &= key <= query
        masks.append(None if mask.all() else mask)
    context = model.context(feats, positions[:, :anchor])
    return model.blocks(noise, positions[:, anchor:], context, masks)


def test_tensors_are_those_of_the_layout() -> None:
    for shape, count in ((tiny.config(num_hidden_layers=3), 3 + 11 * 3), (tiny.second(), 6 + 15 * 2)):
        state = Drafter(shape).state_dict()
        assert {name: tuple(t.shape) for name, t in state.items()} == tensor_shapes(shape)
        assert len(state) == count


def test_parameters_are_counted_without_the_model() -> None:
    for shape in SHAPES.values():
        assert parameter_count(shape) == sum(p.numel() for p in Drafter(shape).parameters())
    qwen3_8b = tiny.config(
        hidden_size=4096, num_hidden_layers=5, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288, num_target_layers=36, target_layer_ids=(1, 9, 17, 25, 33),
    )  # fmt: skip
    assert round(parameter_count(qwen3_8b) / 1e9, 3) == 1.049


def test_the_same_seed_draws_the_same_weights() -> None:
    first, second, third = (Drafter(tiny.config()) for _ in range(3))
    for model, seed in ((first, 5), (second, 5), (third, 6)):
        model.initialize(torch.Generator().manual_seed(seed))
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert not torch.equal(first.fc.weight, third.fc.weight)
    assert first.fc.weight.std().item() == pytest.approx(0.02, rel=0.1)
