"""The loss of block slots: weighted cross entropy or distillation, and what is measured beside it.

Logits of all slots at once would be N * K * V numbers (4.6 GiB in fp32 for 512 blocks of 16 and Qwen3's vocabulary).
They exist for a chunk of blocks at a time: as the head is frozen, only the gradient with respect to the hidden states
is wanted, and it is computed chunk by chunk in the forward already. This needs the memory of checkpointing without
its second pass through the head.

DFlash 2 has a second term: the cross entropy of its selector's scores over a slot's candidates, behind the true token
of the slot before, where the slot's own true token is among them (https://inco.ai/blog/dflash2/). A slot has one weight
for both terms, and the gradient of both goes on into the drafter, as in NeMo Automodel. Both sums are divided by the
sum of all weights, so that the loss of a batch does not depend on how it is split; one that divides the second term by
the weights of its own slots gives it more of a say, by the inverse of their share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fxsafe.dflash.anchors import Blocks
from fxsafe.dflash.head import Head
from fxsafe.dflash.selector import CandidateSelector, path_scores

__all__ = [
    "ChunkLoss",
    "LossSettings",
    "Tally",
    "candidate_loss",
    "chunk_loss",
    "decay_weights",
    "dpace_weights",
    "objective",
    "path_loss",
]


@dataclasses.dataclass(frozen=True, slots=True)
class LossSettings:
    """What is minimised.

    Attributes:
        kind: "ce" for the data's tokens as labels; "distill" for the target's distribution at the position before.
        weighting: "decay" for exp(-(k - 1) / gamma), "dpace" for D-PACE (arXiv 2605.18810), "none" for equal weights.
        gamma: of the decay; None takes 7, 5 or 4 for blocks of 16, 10 or 8, and in between what lies between.
        alpha: of D-PACE, 0 to 1.
        chunk_blocks: blocks whose logits exist at one time; fewer take less memory, and longer below 500 slots.
        selector_weight: of the selector's cross entropy, which DFlash 2 adds.
    """

    kind: Literal["ce", "distill"] = "ce"
    weighting: Literal["decay", "dpace", "none"] = "decay"
    gamma: float | None = None
    alpha: float = 0.5
    chunk_blocks: int = 64
    selector_weight: float = 1.0

    def gamma_for(self, block: int) -> float:
        """The decay constant for a block size: 7 for 16, 5 for 10, 4 for 8, never below 1."""
        if self.gamma is not None:
            return self.gamma
        return 5 + (block - 10) / 3 if block > 10 else max(1.0, 5 - (10 - block) / 2)


def decay_weights(valid_NK: Tensor, gamma: float) -> Tensor:
    """fp32 [..., K]: exp(-(k - 1) / gamma) on valid slots, 0 elsewhere."""
    slot_K = torch.arange(valid_NK.shape[-1], device=valid_NK.device)
    return torch.exp(-(slot_K - 1).float() / gamma) * valid_NK


def dpace_weights(ce_NK: Tensor, valid_NK: Tensor, alpha: float) -> Tensor:
    """D-PACE: how much the expected number of accepted tokens hangs on a slot.

    With ``s = (1 - alpha) * exp(-ce) + alpha`` (1 on slots without a loss) and ``C`` its running product, the weight of
    a slot is the sum of ``C`` over the valid slots from it on.

    Returns:
        fp32 [..., K] without a gradient, 0 on slots that are not valid.
    """
    with torch.no_grad():
        chance = (1 - alpha) * torch.exp(-ce_NK.detach().float()) + alpha
        reach = torch.where(valid_NK, chance, 1.0).cumprod(-1) * valid_NK
        return reach.flip(-1).cumsum(-1).flip(-1) * valid_NK


ChunkLoss = Callable[..., tuple[Tensor, ...]]


def chunk_loss(
    hidden_NKH: Tensor,
    labels_NK: Tensor,
    valid_NK: Tensor,
    teacher_NKH: Tensor | None,
    head: Head,
    settings: LossSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of some blocks; a pure function, to be compiled.

    Returns:
        The weighted sum of the losses (fp32 scalar, with a gradient), the sum of the weights, the cross entropy
        [N, K] to the labels (0 where not valid) and whether the likeliest token is the label [N, K].
    """
    _, total, weight_NK, ce_NK, right_NK = _chunk(hidden_NKH, labels_NK, valid_NK, teacher_NKH, head, settings)
    return total, weight_NK.sum(), ce_NK, right_NK


def candidate_loss(
    hidden_NKH: Tensor,
    labels_NK: Tensor,
    valid_NK: Tensor,
    teacher_NKH: Tensor | None,
    head: Head,
    settings: LossSettings,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`chunk_loss` with what a selector needs beside it; to be compiled as well.

    Returns:
        The weighted sum, the weights [N, K] fp32 without a gradient, cross entropy and hits as above; logits
        [N, K, top_k] fp32, with a gradient, and ids of each slot's likeliest tokens.
    """
    logits_NKV, total, weight_NK, ce_NK, right_NK = _chunk(hidden_NKH, labels_NK, valid_NK, teacher_NKH, head, settings)
    unary_NKC, candidates_NKC = logits_NKV.topk(top_k, dim=-1)
    return total, weight_NK, ce_NK, right_NK, unary_NKC, candidates_NKC


def path_loss(
    unary_NKC: Tensor,
    candidates_NKC: Tensor,
    gates_NKR: Tensor,
    successors_VR: Tensor,
    labels_NK: Tensor,
    weight_NK: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The selector's term of some blocks.

    Returns:
        The weighted sum of its cross entropies (fp32 scalar, with a gradient), over slots whose label is among their
        candidates; which slots these are, [N, K], whatever their weight; and the token that the selector takes [N, K].
    """
    scores_NKC = path_scores(unary_NKC, gates_NKR, F.embedding(candidates_NKC, successors_VR))
    is_label_NKC = candidates_NKC == labels_NK[..., None]
    found_NK = is_label_NKC.any(-1)
    ce_NK = scores_NKC.logsumexp(-1) - torch.where(is_label_NKC, scores_NKC, 0.0).sum(-1)
    total = (weight_NK * torch.where(found_NK, ce_NK, 0.0)).sum()
    taken_NK = candidates_NKC.gather(-1, scores_NKC.argmax(-1, keepdim=True))[..., 0]
    return total, found_NK, taken_NK


def _chunk(
    hidden_NKH: Tensor,
    labels_NK: Tensor,
    valid_NK: Tensor,
    teacher_NKH: Tensor | None,
    head: Head,
    settings: LossSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    logits_NKV = head.logits(hidden_NKH).float()
    raw_NK = F.cross_entropy(logits_NKV.flatten(0, 1), labels_NK.flatten(), reduction="none").view(labels_NK.shape)
    ce_NK = torch.where(valid_NK, raw_NK, 0.0)
    right_NK = (logits_NKV.argmax(-1) == labels_NK) & valid_NK
    if settings.weighting == "dpace":
        weight_NK = dpace_weights(ce_NK, valid_NK, settings.alpha)
    elif settings.weighting == "decay":
        weight_NK = decay_weights(valid_NK, settings.gamma_for(labels_NK.shape[-1]))
    else:
        weight_NK = valid_NK.float()
    if teacher_NKH is None:
        term_NK = ce_NK
    else:
        wish_NKV = head.logits(teacher_NKH).float().softmax(-1)
        soft_NK = -(wish_NKV * logits_NKV.log_softmax(-1)).sum(-1)
        term_NK = torch.where(valid_NK, soft_NK, 0.0)
    return logits_NKV, (weight_NK * term_NK).sum(), weight_NK, ce_NK.detach(), right_NK


class _HeadLoss(torch.autograd.Function):
    """Sum of ``chunk_loss`` over chunks, whose gradient is made on the way forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NKH: Tensor,
        labels_NK: Tensor,
        valid_NK: Tensor,
        teacher_NKH: Tensor | None,
        head: Head,
        settings: LossSettings,
        function: ChunkLoss,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        totals, weights, ces, rights, grads = [], [], [], [], []
        for start in range(0, hidden_NKH.shape[0], settings.chunk_blocks):
            part = slice(start, start + settings.chunk_blocks)
            hidden = hidden_NKH[part].detach()
            teacher = None if teacher_NKH is None else teacher_NKH[part]
            with torch.set_grad_enabled(wanted):
                hidden = hidden.requires_grad_(wanted)
                total, weight, ce, right = function(hidden, labels_NK[part], valid_NK[part], teacher, head, settings)
                if wanted:
                    grads.append(torch.autograd.grad(total, hidden)[0])
            totals.append(total.detach())
            weights.append(weight.detach())
            ces.append(ce)
            rights.append(right)
        if wanted:
            ctx.save_for_backward(torch.cat(grads))
        out = torch.stack(totals).sum(), torch.stack(weights).sum(), torch.cat(ces), torch.cat(rights)
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        (saved,) = ctx.saved_tensors
        return (saved * grad.to(saved.dtype), *([None] * 6))


class _PathLoss(torch.autograd.Function):
    """The sum of both of DFlash 2's terms over chunks, with gradients made on the way forward.

    What is done to the codebook stays outside the compiled function: the gradient of its rows would be added up there
    by atomics, in an order that differs from run to run.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NKH: Tensor,
        gates_NKR: Tensor,
        successors_VR: Tensor,
        labels_NK: Tensor,
        valid_NK: Tensor,
        teacher_NKH: Tensor | None,
        head: Head,
        settings: LossSettings,
        function: ChunkLoss,
        top_k: int,
    ) -> tuple[Tensor, ...]:
        wanted = ctx.needs_input_grad[0]
        sums: list[Tensor] = []
        parts: list[tuple[Tensor, ...]] = []
        grads: list[tuple[Tensor, Tensor]] = []
        table_VR = torch.zeros_like(successors_VR, dtype=torch.float32) if wanted else None
        successors_VR = successors_VR.detach().requires_grad_(wanted)
        for start in range(0, hidden_NKH.shape[0], settings.chunk_blocks):
            part = slice(start, start + settings.chunk_blocks)
            labels, valid = labels_NK[part], valid_NK[part]
            teacher = None if teacher_NKH is None else teacher_NKH[part]
            with torch.set_grad_enabled(wanted):
                hidden, gates = (t[part].detach().requires_grad_(wanted) for t in (hidden_NKH, gates_NKR))
                total, weight, ce, right, unary, candidates = function(
                    hidden, labels, valid, teacher, head, settings, top_k
                )
                scored = unary.detach().requires_grad_(wanted)
                second, found, taken = path_loss(scored, candidates, gates, successors_VR, labels, weight)
                if table_VR is not None:
                    by_unary, by_gates, by_table = torch.autograd.grad(
                        settings.selector_weight * second, (scored, gates, successors_VR)
                    )
                    (by_hidden,) = torch.autograd.grad((total, unary), hidden, (torch.ones_like(total), by_unary))
                    grads.append((by_hidden, by_gates))
                    table_VR += by_table
            found = found & valid
            sums.append(torch.stack((total.detach(), second.detach(), weight.sum(), (weight * found).sum())))
            parts.append((ce, right, found, (taken == labels) & valid))
        if table_VR is not None:
            ctx.save_for_backward(*map(torch.cat, zip(*grads, strict=True)), table_VR)
            ctx.table_dtype = successors_VR.dtype
        total, second, *rest = torch.stack(sums).sum(0)
        out = total + settings.selector_weight * second, total, second, *rest, *map(torch.cat, zip(*parts, strict=True))
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        by_hidden, by_gates, table_VR = ctx.saved_tensors
        mine = (by_hidden * grad.to(by_hidden.dtype), by_gates * grad.to(by_gates.dtype))
        return (*mine, (table_VR * grad).to(ctx.table_dtype), *([None] * 7))


def objective(
    hidden_BQH: Tensor,
    blocks: Blocks,
    head: Head,
    settings: LossSettings,
    teacher_BNKH: Tensor | None = None,
    function: ChunkLoss | None = None,
    selector: CandidateSelector | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of a micro-batch, not yet divided by its weights.

    Sums, so that a global batch may be split at will: divide gradients and losses by the sum of all weights.

    Args:
        hidden_BQH: what the drafter returned.
        blocks: of the micro-batch.
        head: of the target.
        settings: what is minimised.
        teacher_BNKH: for "distill", the target's last hidden states (after its final norm) at ``anchor + k - 1``.
        function: a compiled :func:`chunk_loss`, or with a selector :func:`candidate_loss`; None takes them as they are.
        selector: of a DFlash 2 drafter.

    Returns:
        The weighted sum of losses, fp32, whose gradient is 0 and finite if no slot is valid; and the tally, fp64 in
        the order of :class:`Tally`, without a gradient.
    """
    batch, count, block = blocks.labels_BNK.shape
    teacher = None
    if settings.kind == "distill":
        if teacher_BNKH is None:
            raise ValueError("distillation needs the target's last hidden states")
        teacher = teacher_BNKH.flatten(0, 1)
    hidden_NKH = hidden_BQH.view(batch * count, block, -1)
    labels_NK, valid_NK = blocks.labels_BNK.flatten(0, 1), blocks.valid_BNK.flatten(0, 1)
    if selector is None:
        total, weight, ce_NK, right_NK = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden_NKH, labels_NK, valid_NK, teacher, head, settings, function or chunk_loss
        )
        extra = torch.zeros(6, dtype=torch.float64, device=total.device)
    else:
        # Slot k stands behind the token at k - 1; slot 0 is the anchor and has no loss.
        predecessors_NK = F.pad(labels_NK[:, :-1], (1, 0))
        total, _, second, weight, second_weight, ce_NK, base_NK, found_NK, right_NK = _PathLoss.apply(  # type: ignore[no-untyped-call]
            hidden_NKH,
            selector.gates(hidden_NKH, predecessors_NK),
            selector.successor_codebook,
            labels_NK,
            valid_NK,
            teacher,
            head,
            settings,
            function or candidate_loss,
            selector.top_k,
        )
        counts = (_accepted(base_NK, valid_NK), base_NK.sum(), found_NK.sum(), valid_NK.sum())
        extra = torch.stack([n.double() for n in (second, second_weight, *counts)])
    tally = torch.cat(
        (
            torch.stack((total.detach(), weight)).double(),
            torch.stack((_accepted(right_NK, valid_NK), valid_NK.any(-1).sum())).double(),
            extra,
            ce_NK.double().sum(0),
            right_NK.double().sum(0),
            valid_NK.double().sum(0),
        )
    )
    return total, tally


def _accepted(right_NK: Tensor, valid_NK: Tensor) -> Tensor:
    """Leading right slots plus 1, over blocks with any valid slot; slots without a loss neither break nor count."""
    run_N = (right_NK | ~valid_NK).cumprod(-1).mul(valid_NK).sum(-1)
    return ((run_N + 1) * valid_NK.any(-1)).sum()


SCALARS = 10
"""of a tally, in front of its sums by slot"""


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """Sums over blocks, which add up over micro-batches, drafters and processes.

    ``accepted`` and ``right_K`` are about the tokens that are drafted: with a selector those that it takes behind the
    true token. As far as a path is right that is the walk of decoding. ``base_...`` are about the likeliest tokens.
    The six sums of a selector are 0 in a plain drafter.
    """

    loss: float
    """what is minimised: both terms"""
    weight: float
    accepted: float
    """leading right slots plus 1, over blocks with any valid slot; slots without a loss neither break nor count"""
    blocks: float
    selector_loss: float
    """the selector's term, before ``selector_weight``"""
    selector_weight: float
    """weights of the slots that it has"""
    base_accepted: float
    base_right: float
    found: float
    """slots with a loss whose true token is among their candidates"""
    scored: float
    """slots with a loss that have candidates"""
    ce_K: tuple[float, ...]
    right_K: tuple[float, ...]
    valid_K: tuple[float, ...]

    @classmethod
    def of(cls, vector: Tensor) -> Tally:
        """Read the vector of :func:`objective`; waits for the device."""
        numbers = vector.tolist()
        block = (len(numbers) - SCALARS) // 3
        rest = [tuple(numbers[SCALARS + i * block : SCALARS + (i + 1) * block]) for i in range(3)]
        return cls(*numbers[:SCALARS], *rest)

    @classmethod
    def total(cls, tallies: Iterable[Tally]) -> Tally:
        """The sum of some, of drafters of one block size."""
        columns: list[Any] = list(zip(*map(dataclasses.astuple, tallies), strict=True))
        sums: list[Any] = [sum(column) for column in columns[:SCALARS]]
        sums += [tuple(map(sum, zip(*column, strict=True))) for column in columns[SCALARS:]]
        return cls(*sums)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Means; a quantity without a single slot is left out."""
        out: dict[str, float] = {}
        if self.weight:
            out["loss"] = self.loss / self.weight
        if self.blocks:
            out["accept_length"] = self.accepted / self.blocks
        if valid := sum(self.valid_K):
            out["accuracy"] = sum(self.right_K) / valid
            out["ce"] = sum(self.ce_K) / valid
        if self.scored:
            out["base_accept_length"] = self.base_accepted / self.blocks
            out["base_accuracy"] = self.base_right / self.scored
            out["candidate_recall"] = self.found / self.scored
        if self.selector_weight:
            out["selector_loss"] = self.selector_loss / self.selector_weight
        for k, slots in enumerate(self.valid_K):
            if slots:
                out[f"accuracy_{k}"] = self.right_K[k] / slots
                out[f"ce_{k}"] = self.ce_K[k] / slots
        return {prefix + name: value for name, value in out.items()}
