from __future__ import annotations

import pytest
import tiny
import torch
from torch.nn import functional as F

from fxsafe.dflash.losses import LossSettings, Tally, candidate_loss, objective, path_loss
from fxsafe.dflash.selector import CandidateSelector


def selector(rank: int = 6, top_k: int = 5) -> CandidateSelector:
    made = CandidateSelector(tiny.VOCAB, 32, rank, top_k)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def test_the_walk_by_hand() -> None:
    made, generator = selector(), torch.Generator().manual_seed(0)
    hidden, logits = torch.randn(7, 32, generator=generator), 3 * torch.randn(7, tiny.VOCAB, generator=generator)
    expected, before = [], 11
    with torch.no_grad():
        for h, u in zip(hidden, logits, strict=True):
            gate = made.predecessor_codebook[before] * (made.hidden_projection.weight @ h)
            scores = {int(b): float(u[b] + gate @ made.successor_codebook[b]) for b in u.topk(5).indices}
            before = max(scores, key=lambda b: scores[b])
            expected.append(before)
        assert made.walk(hidden, logits, 11) == expected
    assert expected != logits.argmax(-1).tolist()


def test_a_new_one_takes_the_likeliest_tokens() -> None:
    made = CandidateSelector(tiny.VOCAB, 32, 6, 5)
    made.initialize(0.02, torch.Generator().manual_seed(0))
    hidden, logits = torch.randn(7, 32), torch.randn(7, tiny.VOCAB)
    with torch.no_grad():
        assert made.walk(hidden, logits, 3) == logits.argmax(-1).tolist()


def test_the_loss_by_hand() -> None:
    made, head, generator = selector(), tiny.head(), torch.Generator().manual_seed(3)
    shape = tiny.second()
    _, _, blocks = tiny.inputs(shape, [2, 9, 21])
    hidden = 0.3 * torch.randn(2, 12, 32, generator=generator)
    settings = LossSettings(gamma=4.0, selector_weight=0.5)
    with torch.no_grad():
        total, vector = objective(hidden, blocks, head, settings, selector=made)
        plain, base = objective(hidden, blocks, head, settings)
        logits = head.logits(hidden).view(2, 3, 4, -1)
        second = weight = found = 0.0
        for b, n, k in blocks.valid_BNK.nonzero().tolist():
            label, before = int(blocks.labels_BNK[b, n, k]), int(blocks.labels_BNK[b, n, k - 1])
            unary, candidates = logits[b, n, k].topk(5)
            if label not in candidates.tolist():
                continue
            gate = made.predecessor_codebook[before] * made.hidden_projection(hidden.view(2, 3, 4, -1)[b, n, k])
            scores = unary + made.successor_codebook[candidates] @ gate
            slot_weight = float(torch.exp(torch.tensor(-(k - 1) / 4.0)))
            second += slot_weight * float(F.cross_entropy(scores, torch.tensor(candidates.tolist().index(label))))
            weight += slot_weight
            found += 1
    tally = Tally.of(vector)
    assert 0 < found < tally.scored == blocks.valid_BNK.sum()
    assert tally.found == found
    assert tally.selector_loss == pytest.approx(second, rel=1e-5)
    assert tally.selector_weight == pytest.approx(weight, rel=1e-5)
    assert float(total) == pytest.approx(float(plain) + 0.5 * second, rel=1e-5)
    assert tally.base_accepted == Tally.of(base).accepted
    assert tally.metrics()["selector_loss"] == pytest.approx(second / weight, rel=1e-5)
    assert tally.metrics()["candidate_recall"] == found / tally.scored
    assert not {"selector_loss", "candidate_recall", "base_accuracy"} & Tally.of(base).metrics().keys()


@pytest.mark.parametrize("kind", ["ce", "distill"])
@pytest.mark.parametrize("weighting", ["decay", "dpace", "none"])
def test_chunks_give_the_loss_and_gradients_of_autograd(kind: str, weighting: str) -> None:
    _, _, blocks = tiny.inputs(tiny.second(), [2, 9, 21])
    made, head, generator = selector(), tiny.head(), torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 12, 32, generator=generator, requires_grad=True)
    teacher = torch.randn(2, 3, 4, 32, generator=generator) if kind == "distill" else None
    wanted = [hidden, *made.parameters()]
    labels, valid = blocks.labels_BNK.flatten(0, 1), blocks.valid_BNK.flatten(0, 1)
    whole = LossSettings(kind, weighting, chunk_blocks=100, selector_weight=0.7)  # type: ignore[arg-type]
    parts = LossSettings(kind, weighting, chunk_blocks=4, selector_weight=0.7)  # type: ignore[arg-type]
    hidden_NKH = hidden.view(6, 4, 32)
    first, weight, _, _, unary, candidates = candidate_loss(
        hidden_NKH, labels, valid, None if teacher is None else teacher.flatten(0, 1), head, whole, made.top_k
    )
    gates = made.gates(hidden_NKH, labels.roll(1, dims=-1))
    second, _, _ = path_loss(unary, candidates, gates, made.successor_codebook, labels, weight)
    plain = first + 0.7 * second
    expected = torch.autograd.grad(3 * plain, wanted)
    for settings in (whole, parts):
        total, _ = objective(hidden, blocks, head, settings, teacher, selector=made)
        torch.testing.assert_close(total, plain)
        for got, wish in zip(torch.autograd.grad(3 * total, wanted), expected, strict=True):
            torch.testing.assert_close(got, wish)
            assert wish.any()


def test_no_valid_slot_gives_no_loss_and_finite_zero_gradients() -> None:
    _, _, blocks = tiny.inputs(tiny.second(), [2, 9])
    blocks.valid_BNK.zero_()
    made = selector()
    hidden = torch.randn(2, 8, 32, requires_grad=True)
    total, vector = objective(hidden, blocks, tiny.head(), LossSettings(), selector=made)
    for grad in torch.autograd.grad(total, [hidden, *made.parameters()]):
        assert not grad.any()
    assert total.item() == 0
    assert Tally.of(vector).metrics() == {}


def test_the_simulated_acceptance_is_that_of_the_walk() -> None:
    """Behind right tokens the true predecessor is the one that the walk has taken."""
    shape = tiny.second()
    model, head = tiny.drafter(shape, std=0.05), tiny.head()
    _, feats, blocks = tiny.inputs(shape, [1, 3, 10, 11, 20])
    assert model.candidate_selector is not None
    with torch.no_grad():
        hidden = tiny.hidden_states(model, feats, blocks, head).flatten(1, 2)
        hidden += 0.6 * head.output_VH[blocks.labels_BNK.flatten(1)]  # sometimes right, sometimes not
        _, vector = objective(hidden, blocks, head, LossSettings(), selector=model.candidate_selector)
        lengths = []
        for block, labels in zip(hidden.view(10, 4, -1), blocks.labels_BNK.flatten(0, 1).tolist(), strict=True):
            path = model.candidate_selector.walk(block[1:], head.logits(block[1:]), labels[0])
            lengths.append(next((i for i in range(3) if path[i] != labels[i + 1]), 3) + 1)
    valid = blocks.valid_BNK.flatten(0, 1)[:, 1:]
    assert valid.all()
    assert Tally.of(vector).accepted == sum(lengths)
    assert len(set(lengths)) > 2
