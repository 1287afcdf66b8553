from __future__ import annotations

import math

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxsafe.dflash.anchors import candidates, make_blocks, sample_anchors
from fxsafe.dflash.head import Head
from fxsafe.dflash.losses import LossSettings, Tally, chunk_loss, decay_weights, dpace_weights, objective


def one_hot_head() -> Head:
    """Hidden states are the logits."""
    return Head(torch.eye(tiny.VOCAB), torch.eye(tiny.VOCAB))


def hot(ids: torch.Tensor) -> torch.Tensor:
    return 100.0 * torch.nn.functional.one_hot(ids, tiny.VOCAB).float()


@pytest.mark.parametrize(("shift", "right"), [(0, True), (1, False), (-1, False)])
def test_slot_k_is_to_predict_the_token_at_anchor_plus_k(shift: int, right: bool) -> None:
    shape = tiny.config()
    ids = torch.arange(24).repeat(2, 1)
    blocks = make_blocks(ids, torch.ones_like(ids), torch.tensor([[1, 9]] * 2), torch.ones(2, 2).bool(), 4, 63)
    told = ids.gather(1, (blocks.positions_BNK - shift).flatten(1).clamp(0, 23))
    total, vector = objective(hot(told), blocks, one_hot_head(), LossSettings())
    metrics = Tally.of(vector).metrics()
    assert (total.item() < 1e-6) == right
    assert metrics["accuracy"] == (1.0 if right else 0.0)
    assert metrics["accept_length"] == (shape.block_size if right else 1)
    assert "accuracy_0" not in metrics, "slot 0 has no loss"


def test_decay_weights_by_hand() -> None:
    valid = torch.tensor([[False, True, True, True]])
    expected = torch.tensor([[0, 1, math.exp(-0.25), math.exp(-0.5)]])
    torch.testing.assert_close(decay_weights(valid, 4.0), expected)


@pytest.mark.parametrize(("block", "gamma"), [(16, 7), (10, 5), (8, 4)])
def test_the_decay_follows_the_block_size(block: int, gamma: float) -> None:
    assert LossSettings().gamma_for(block) == gamma


def test_the_loss_is_divided_by_the_weights_of_valid_slots() -> None:
    ids = torch.arange(8)[None]
    mask = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1]])
    blocks = make_blocks(ids, mask, torch.tensor([[2]]), torch.tensor([[True]]), 4, 63)
    assert blocks.valid_BNK.tolist() == [[[False, True, False, True]]]
    _, vector = objective(torch.zeros(1, 4, tiny.VOCAB), blocks, one_hot_head(), LossSettings(gamma=4.0))
    tally = Tally.of(vector)
    assert tally.weight == pytest.approx(1 + math.exp(-0.5))
    assert tally.metrics()["loss"] == pytest.approx(math.log(tiny.VOCAB), rel=1e-5)


def test_dpace_weights_by_hand() -> None:
    ce = -torch.tensor([[1.0, 0.5, 0.25]]).log()
    valid = torch.tensor([[False, True, True]])
    torch.testing.assert_close(dpace_weights(ce, valid, 0.5), torch.tensor([[0, 1.21875, 0.46875]]))


def test_a_slot_without_a_loss_does_not_break_dpace() -> None:
    ce = -torch.tensor([[1.0, 0.5, 0.001, 0.25]]).log()
    valid = torch.tensor([[False, True, False, True]])
    torch.testing.assert_close(dpace_weights(ce, valid, 0.5), torch.tensor([[0, 1.21875, 0, 0.46875]]))


@pytest.mark.parametrize("kind", ["ce", "distill"])
@pytest.mark.parametrize("weighting", ["decay", "dpace", "none"])
def test_chunks_give_the_loss_and_gradient_of_the_whole(kind: str, weighting: str) -> None:
    shape = tiny.config()
    _, _, blocks = tiny.inputs(shape, [2, 9, 21])
    head, generator = tiny.head(), torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 12, 32, generator=generator, requires_grad=True)
    teacher = torch.randn(2, 3, 4, 32, generator=generator) if kind == "distill" else None
    whole = LossSettings(kind, weighting, chunk_blocks=100)  # type: ignore[arg-type]
    parts = LossSettings(kind, weighting, chunk_blocks=4)  # type: ignore[arg-type]
    plain, *_ = chunk_loss(
        hidden.view(6, 4, 32), blocks.labels_BNK.flatten(0, 1), blocks.valid_BNK.flatten(0, 1),
        None if teacher is None else teacher.flatten(0, 1), head, whole,
    )  # fmt: skip
    (expected,) = torch.autograd.grad(3 * plain, hidden)
    for settings in (whole, parts):
        total, _ = objective(hidden, blocks, head, settings, teacher)
        (grad,) = torch.autograd.grad(3 * total, hidden)
        torch.testing.assert_close(total, plain)
        torch.testing.assert_close(grad, expected)


def test_distillation_is_least_where_the_drafter_is_the_teacher() -> None:
    _, _, blocks = tiny.inputs(tiny.config(), [2, 9])
    head = tiny.head()
    teacher = 0.1 * torch.randn(2, 2, 4, 32, generator=torch.Generator().manual_seed(0))
    hidden = teacher.view(2, 8, 32).clone().requires_grad_()
    total, _ = objective(hidden, blocks, head, LossSettings("distill"), teacher)
    (grad,) = torch.autograd.grad(total, hidden)
    assert grad.abs().max() < 1e-4


def test_no_valid_slot_gives_no_loss_and_finite_zero_gradients() -> None:
    shape = tiny.config()
    ids = torch.zeros(2, 24, dtype=torch.int64)
    anchors, keep = sample_anchors(torch.zeros(2, 24), 3, torch.Generator())
    assert not keep.any()
    blocks = make_blocks(ids, torch.zeros_like(ids), anchors, keep, shape.block_size, shape.mask_token_id)
    for weighting in ("decay", "dpace", "none"):
        hidden = torch.randn(2, 12, 32, requires_grad=True)
        total, vector = objective(hidden, blocks, tiny.head(), LossSettings(weighting=weighting))  # type: ignore[arg-type]
        total.backward()
        assert total.item() == 0
        assert hidden.grad is not None
        assert not hidden.grad.any()
        assert Tally.of(vector).metrics() == {}


def test_acceptance_counts_leading_right_slots_and_one() -> None:
    ids = torch.arange(24)[None]
    mask = torch.ones_like(ids)
    mask[0, 12] = 0
    blocks = make_blocks(ids, mask, torch.tensor([[1, 5, 10]]), torch.ones(1, 3).bool(), 4, 63)
    said = blocks.labels_BNK.clone()
    said[0, 0, 2] = 60  # right, wrong, right: 1
    said[0, 1, 1] = 60  # wrong at once: 0
    said[0, 2, 2] = 60  # right, no loss, right: 2
    _, vector = objective(hot(said.flatten(1)), blocks, one_hot_head(), LossSettings())
    assert Tally.of(vector).metrics()["accept_length"] == pytest.approx((2 + 1 + 3) / 3)


@given(
    st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=3),
    st.integers(1, 20),
    st.integers(0, 100),
)
def test_anchors_are_candidates_without_repetition(rows: list[list[bool]], count: int, seed: int) -> None:
    mask = torch.tensor(rows)
    anchors, keep = sample_anchors(mask, count, torch.Generator().manual_seed(seed))
    assert anchors.shape == keep.shape == (len(rows), count)
    for row, may in enumerate(candidates(mask)):
        chosen = anchors[row][keep[row]].tolist()
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(count, int(may.sum()))
        assert all(may[a] for a in chosen)
        assert not anchors[row][~keep[row]].any()


def test_every_candidate_is_drawn_now_and_then() -> None:
    mask = torch.zeros(1, 10)
    mask[0, 3:8] = 1
    generator = torch.Generator().manual_seed(0)
    drawn = {int(sample_anchors(mask, 1, generator)[0]) for _ in range(200)}
    assert drawn == {3, 4, 5, 6}
