from __future__ import annotations

import tiny
import torch

from fxsafe.dflash.convolution import DynamicConvolution
from fxsafe.dflash.masks import dense_masks


def convolution(taps: int = 2) -> DynamicConvolution:
    made = DynamicConvolution(12, taps, 3, block=4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def test_each_channel_of_each_slot_by_hand() -> None:
    for taps in (1, 2, 3):
        made = convolution(taps)
        x = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(1))
        before, delta = made.before(x)
        behind = made.behind(x, delta)
        made_of = (x @ made.kernel_projection.weight.T).view(2, 8, 2, taps, 4)
        for side, got in ((0, before), (1, behind)):
            expected = torch.zeros_like(x)
            for slot in range(8):
                for channel in range(12):
                    for tap in range(min(taps, slot % 4 + 1)):
                        kernel = made.base_kernel[side, tap, channel] + made_of[:, slot, side, tap, channel // 3]
                        expected[:, slot, channel] += kernel * x[:, slot - tap, channel]
            torch.testing.assert_close(got, expected)


def test_a_new_one_is_the_identity() -> None:
    made = DynamicConvolution(12, 2, 3, block=4)
    x = torch.randn(2, 8, 12)
    before, delta = made.before(x)
    assert torch.equal(before, x)
    assert torch.equal(made.behind(x, delta), x)


def test_nothing_goes_from_one_block_to_another() -> None:
    shape = tiny.second()
    model, head = tiny.drafter(shape), tiny.head()
    ids, feats, blocks = tiny.inputs(shape, [3, 7, 11])
    masks = dense_masks(shape, blocks.anchors_BN, blocks.keep_BN, ids.shape[1])

    def hidden(shown: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(feats, head.embed(shown.flatten(1)), blocks.positions_BNK.flatten(1), masks).view(2, 3, 4, -1)

    plain = hidden(blocks.ids_BNK)
    for block in range(3):
        changed = blocks.ids_BNK.clone()
        changed[:, block] = (changed[:, block] + 7) % 60
        now = hidden(changed)
        others = [b for b in range(3) if b != block]
        assert torch.equal(now[:, others], plain[:, others])
        assert (now[:, block] - plain[:, block]).abs().amax(-1).min() > 1e-3


def test_the_first_slot_does_not_hear_of_the_others_through_a_convolution() -> None:
    made = convolution()
    x = torch.randn(1, 8, 12, generator=torch.Generator().manual_seed(1))
    changed = x.clone()
    changed[:, 1] += 1
    before, after = made.before(x)[0], made.before(changed)[0]
    assert [slot for slot in range(8) if not torch.equal(before[:, slot], after[:, slot])] == [1, 2]
