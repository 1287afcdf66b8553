from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny
import torch

from fxsafe.dflash.config import DrafterConfig
from fxsafe.dflash.sessions import DraftSession, TargetSession
from fxsafe.dflash.speculate import decode, evaluate
from fxsafe.dflash.target import Target

PROMPT = [5, 9, 22, 41, 7, 30]
NEW = 30

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name in ("qwen3", "llama", "gemma", "gpt_neox", "gpt2", "mixtral")
}
FAMILIES["gemma2, window 8"] = ("gemma2", {"sliding_window": 8})
FAMILIES["mixtral, window 8"] = ("mixtral", {"sliding_window": 8})


def greedy(target: Target, new: int, stop: tuple[int, ...] = ()) -> list[int]:
    """One forward over the whole prefix for each token."""
    ids = list(PROMPT)
    for _ in range(new):
        ids.append(int(target.forward(torch.tensor([ids]), ())[0][0, -1].argmax()))
        if ids[-1] in stop:
            break
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_random_drafter_gives_the_targets_own_text(name: str, cached: bool) -> None:
    family, changes = FAMILIES[name]
    target = Target(tiny.target_model(family, **changes))
    model = tiny.drafter(target.drafter_config(layers=2, block_size=4, mask_token_id=63, taps=(0, 2)))
    propose = DraftSession(model, target.head).propose
    fast = decode(target, PROMPT, new_tokens=NEW, taps=(0, 2), propose=propose, cached=cached)
    assert list(fast.tokens) == greedy(target, NEW)
    assert list(decode(target, PROMPT, new_tokens=NEW, cached=cached).tokens) == list(fast.tokens)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_proposals_that_are_right_now_and_then_are_taken_exactly_so_far(every: int) -> None:
    target = Target(tiny.target_model("qwen3"))
    text = greedy(target, NEW + 8)
    calls = 0

    def propose(feats: torch.Tensor, token: int) -> list[int]:
        nonlocal calls
        calls += 1
        session_feats.append(feats)
        at = sum(f.shape[1] for f in session_feats) - len(PROMPT)
        assert text[at] == token
        right = calls % every
        return [*text[at + 1 : at + 1 + right], (text[at + 1 + right] + 1) % 60, *text[at + 2 + right : at + 8]][:7]

    session_feats: list[torch.Tensor] = []
    fast = decode(target, PROMPT, new_tokens=NEW, taps=(0, 2), propose=propose)
    assert list(fast.tokens) == text[:NEW]
    assert fast.taken[:-1] == tuple(i % every + 1 for i in range(1, len(fast.taken)))


@pytest.mark.parametrize("block", [2, 4, 7])
def test_an_oracle_gains_a_whole_block_each_time(block: int) -> None:
    target = Target(tiny.target_model("llama"))
    new = 1 + 6 * block
    text = greedy(target, new + block)
    seen = -len(PROMPT)

    def oracle(feats: torch.Tensor, token: int) -> list[int]:
        nonlocal seen
        seen += feats.shape[1]
        return text[seen + 1 : seen + block]

    fast = decode(target, PROMPT, new_tokens=new, taps=(0,), propose=oracle)
    assert list(fast.tokens) == text[:new]
    assert fast.taken == (block,) * 6


def test_features_given_to_the_drafter_are_those_of_the_text_so_far() -> None:
    target = Target(tiny.target_model("qwen3"))
    text = greedy(target, NEW)
    parts: list[torch.Tensor] = []

    def propose(feats: torch.Tensor, token: int) -> list[int]:
        parts.append(feats)
        at = sum(f.shape[1] for f in parts) - len(PROMPT)
        return [text[at + 1] if at % 2 and at + 1 < NEW else 0, 1, 2]

    decode(target, PROMPT, new_tokens=NEW, taps=(0, 2), propose=propose)
    seen = torch.cat(parts, dim=1)
    ids = torch.tensor([[*PROMPT, *text][: seen.shape[1]]])
    torch.testing.assert_close(seen, target.features(ids, (0, 2)), atol=1e-4, rtol=1e-4)


def test_a_stop_token_ends_the_text_also_inside_a_block() -> None:
    target = Target(tiny.target_model("qwen3"))
    text = greedy(target, NEW + 8)
    stop = next(t for i, t in enumerate(text) if i > 4 and t not in text[:i])
    expected = text[: text.index(stop) + 1]
    seen = -len(PROMPT)

    def oracle(feats: torch.Tensor, token: int) -> list[int]:
        nonlocal seen
        seen += feats.shape[1]
        return text[seen + 1 : seen + 8]

    fast = decode(target, PROMPT, new_tokens=NEW, stop=(stop,), taps=(0,), propose=oracle)
    assert list(fast.tokens) == expected == list(decode(target, PROMPT, new_tokens=NEW, stop=(stop,)).tokens)
    assert sum(fast.taken) == len(expected) - 1


@pytest.mark.parametrize(
    "shape", [tiny.config(), tiny.sliding(), tiny.sliding(causal=None)], ids=["full", "w", "w causal"]
)
def test_a_session_proposes_what_training_would(shape: DrafterConfig) -> None:
    model, head = tiny.drafter(shape), tiny.head()
    ids, feats, blocks = tiny.inputs(shape, [3, 10, 11, 20], batch=1)
    with torch.no_grad():
        hidden = tiny.hidden_states(model, feats, blocks, head)
    expected = head.logits(hidden).argmax(-1).view(4, 4)[:, 1:].tolist()
    session = DraftSession(model, head)
    starts = [0, 3, 10, 11, 20]
    got = [session.propose(feats[:, a:b], int(ids[0, b])) for a, b in itertools.pairwise(starts)]
    assert got == expected


def test_taking_back_tokens_leaves_no_trace() -> None:
    target = Target(tiny.target_model("qwen3"))
    ids = torch.tensor([PROMPT])
    session = TargetSession(target, (1,))
    session.feed(ids[:, :3])
    session.keep(3)
    session.feed(torch.tensor([[50, 51]]))
    session.keep(3)
    logits, feats = session.feed(ids[:, 3:])
    expected, all_feats = target.forward(ids, (1,))
    torch.testing.assert_close(logits, expected[:, 3:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(feats, all_feats[:, 3:], atol=1e-5, rtol=1e-4)


def test_an_evaluation_reports_both_means_and_equality() -> None:
    target = Target(tiny.target_model("qwen3"))
    model = tiny.drafter(target.drafter_config(layers=2, block_size=4, mask_token_id=63, taps=(0, 2)))
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:2]]
    report = evaluate(target, model, target.head, prompts, new_tokens=12, names=["a", "b", "c"])
    assert report.equal == 3
    assert [r.difference for r in report.requests] == [None] * 3
    assert 1 <= report.acceptance_pooled <= 4
    assert sum(n * count for n, count in report.histogram.items()) == 3 * 11
    assert report.acceptance_pooled == pytest.approx(33 / sum(report.histogram.values()))
    assert report.new_tokens == 36
    assert any("equal to the target's own in 3 of 3" in line for line in report.lines())


def test_a_text_that_differs_is_told_with_its_place() -> None:
    target = Target(tiny.target_model("qwen3"))
    model = tiny.drafter(target.drafter_config(layers=1, block_size=4, mask_token_id=63, taps=(0,)))
    forward = target.forward
    calls = 0

    def corrupt(ids: torch.Tensor, taps: Any, cache: Any = None, *, last: bool = False) -> Any:
        nonlocal calls
        logits, feats = forward(ids, taps, cache, last=last)
        if taps and not last:
            calls += 1
            if calls == 3:
                logits = -logits
        return logits, feats

    target.forward = corrupt  # type: ignore[method-assign]
    report = evaluate(target, model, target.head, [PROMPT], new_tokens=12)
    assert report.equal == 0
    (request,) = report.requests
    assert request.difference is not None
    assert request.difference >= 3
    assert request.margin is not None
    assert request.margin > 0
