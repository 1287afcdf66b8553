"""Speculative decoding for evaluation: acceptance lengths, speed, and equality with the target's own greedy text.

With greedy acceptance the output is the target's own, whatever the drafter says; a drafter only decides how fast.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsafe.dflash.head import Head
from fxsafe.dflash.model import Drafter
from fxsafe.dflash.sessions import DraftSession, TargetSession
from fxsafe.dflash.target import Target

__all__ = ["Decoded", "Evaluation", "Propose", "RequestReport", "decode", "evaluate"]

Propose = Callable[[Tensor, int], list[int]]
"""Features of new positions [1, L, F] and the token behind them, to the tokens that may follow; see DraftSession."""


@dataclasses.dataclass(frozen=True, slots=True)
class Decoded:
    """A greedy continuation."""

    tokens: tuple[int, ...]
    """new tokens, a stop token included"""
    taken: tuple[int, ...]
    """tokens gained by each forward of the target after the prompt's: accepted ones plus the target's own"""
    seconds: float
    """after the forward of the prompt"""

    @property
    def per_token(self) -> float:
        """Seconds for a token after the first one, which is the prompt's."""
        return self.seconds / max(1, len(self.tokens) - 1)


def decode(
    target: Target,
    prompt: Sequence[int],
    *,
    new_tokens: int,
    stop: Collection[int] = (),
    taps: Sequence[int] = (),
    propose: Propose | None = None,
    cached: bool = True,
) -> Decoded:
    """Continue a prompt greedily, with a drafter's proposals or without.

    Args:
        target: decides every token.
        prompt: at least one token.
        new_tokens: at most so many.
        stop: tokens that end the text.
        taps: layers whose outputs ``propose`` gets.
        propose: None for plain decoding, one token for each forward.
        cached: see :class:`TargetSession`.
    """
    session = TargetSession(target, taps, cached=cached)
    logits, feats = session.feed(torch.tensor([list(prompt)], device=target.device), last=True)
    session.keep(session.length)
    tokens = [int(logits[0, -1].argmax())]
    taken: list[int] = []
    started = _now(target)
    while len(tokens) < new_tokens and tokens[-1] not in stop:
        guess: list[int] = []
        if propose is not None:
            assert feats is not None
            guess = propose(feats, tokens[-1])[: new_tokens - len(tokens) - 1]
        before = session.length
        logits, feats = session.feed(torch.tensor([[tokens[-1], *guess]], device=target.device))
        own = logits[0].argmax(-1).tolist()
        right = 0
        while right < len(guess) and guess[right] == own[right]:
            right += 1
        gained = own[: right + 1]
        # A stop token among the accepted ones ends the text there.
        end = next((i + 1 for i, token in enumerate(gained) if token in stop), len(gained))
        tokens += gained[:end]
        taken.append(end)
        session.keep(before + right + 1)
        feats = None if feats is None else feats[:, : right + 1]
    return Decoded(tuple(tokens), tuple(taken), _now(target) - started)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestReport:
    """One prompt with the drafter and without."""

    name: str
    tokens: int
    acceptance: float
    """mean tokens gained by a forward of the target, from 1 to the block size"""
    speedup: float
    """seconds for a token without the drafter, divided by those with it"""
    difference: int | None
    """index of the first token that is not that of plain decoding; None if all are"""
    margin: float | None
    """there, how far the two best logits of a forward over the whole prefix lie apart: about 0 means a tie, which
    kernels for one token and for several may decide differently in low precision"""


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """All prompts. State with any figure how it was averaged; published ones differ by that."""

    requests: tuple[RequestReport, ...]
    acceptance_per_request: float
    """mean over requests of their means"""
    acceptance_pooled: float
    """mean over all forwards of the target"""
    histogram: dict[int, int]
    """forwards by tokens gained"""
    speedup: float
    """of all tokens together"""
    equal: int
    """requests whose text is that of plain decoding, token by token"""
    prompts_tokens: int
    new_tokens: int

    def to_json(self) -> dict[str, Any]:
        """For ``evaluation.json``."""
        out = dataclasses.asdict(self)
        out["requests"] = list(out["requests"])
        return out

    def lines(self) -> list[str]:
        """For people."""
        total = sum(self.histogram.values())
        bars = ", ".join(f"{n}: {count / total:.0%}" for n, count in sorted(self.histogram.items())) if total else "-"
        return [
            f"requests {len(self.requests)}, new tokens {self.new_tokens}, "
            f"greedy text equal to the target's own in {self.equal} of {len(self.requests)}",
            f"acceptance length {self.acceptance_per_request:.2f} (mean of requests), "
            f"{self.acceptance_pooled:.2f} (pooled)",
            f"speed-up {self.speedup:.2f} x against plain decoding in the same loop",
            f"tokens gained by a forward: {bars}",
        ]


def evaluate(
    target: Target,
    drafter: Drafter,
    head: Head,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    stop: Collection[int] = (),
    names: Sequence[str] | None = None,
    cached: bool = True,
) -> Evaluation:
    """Decode each prompt with the drafter and without, greedily, and compare.

    Args:
        target: of the drafter.
        drafter: any device; put into eval mode.
        head: of the target, on the drafter's device and in its dtype.
        prompts: tokens.
        new_tokens: at most so many for each.
        stop: tokens that end a text.
        names: of the prompts, for the report.
        cached: see :class:`TargetSession`.
    """
    drafter.eval()
    taps = drafter.config.target_layer_ids
    reports: list[RequestReport] = []
    taken: list[int] = []
    seconds, counts = [0.0, 0.0], [0, 0]
    for index, prompt in enumerate(prompts):
        plain = decode(target, prompt, new_tokens=new_tokens, stop=stop, cached=cached)
        propose = DraftSession(drafter, head).propose
        fast = decode(target, prompt, new_tokens=new_tokens, stop=stop, taps=taps, propose=propose, cached=cached)
        at = next((i for i, (a, b) in enumerate(zip(plain.tokens, fast.tokens, strict=False)) if a != b), None)
        if at is None and len(plain.tokens) != len(fast.tokens):
            at = min(len(plain.tokens), len(fast.tokens))
        reports.append(
            RequestReport(
                name=names[index] if names else str(index),
                tokens=len(fast.tokens),
                acceptance=sum(fast.taken) / len(fast.taken) if fast.taken else 1.0,
                speedup=plain.per_token / fast.per_token if fast.per_token else 1.0,
                difference=at,
                margin=None if at is None else _margin(target, [*prompt, *plain.tokens[:at]]),
            )
        )
        taken += fast.taken
        for i, one in enumerate((plain, fast)):
            seconds[i] += one.seconds
            counts[i] += max(1, len(one.tokens) - 1)
    return Evaluation(
        requests=tuple(reports),
        acceptance_per_request=sum(r.acceptance for r in reports) / len(reports) if reports else 0.0,
        acceptance_pooled=sum(taken) / len(taken) if taken else 0.0,
        histogram=dict(sorted(Counter(taken).items())),
        speedup=(seconds[0] / counts[0]) / (seconds[1] / counts[1]) if reports and seconds[1] else 0.0,
        equal=sum(r.difference is None for r in reports),
        prompts_tokens=sum(len(p) for p in prompts),
        new_tokens=sum(r.tokens for r in reports),
    )


def _margin(target: Target, prefix: Sequence[int]) -> float:
    logits, _ = target.forward(torch.tensor([list(prefix)], device=target.device), (), last=True)
    best = logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
