"""The loss of block slots: weighted cross entropy or distillation, and what is measured beside it.

Logits of all slots at once would be N * K * V numbers (4.6 GiB in fp32 for 512 blocks of 16 and Qwen3's vocabulary).
They exist for a chunk of blocks at a time: as the head is frozen, only the gradient with respect to the hidden states
is wanted, and it is computed chunk by chunk in the forward already. This needs the memory of checkpointing without
its second pass through the head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fxsafe.dflash.anchors import Blocks
from fxsafe.dflash.head import Head

__all__ = ["ChunkLoss", "LossSettings", "Tally", "chunk_loss", "decay_weights", "dpace_weights", "objective"]


@dataclasses.dataclass(frozen=True, slots=True)
class LossSettings:
    """What is minimised.

    Attributes:
        kind: "ce" for the data's tokens as labels; "distill" for the target's distribution at the position before.
        weighting: "decay" for exp(-(k - 1) / gamma), "dpace" for D-PACE (arXiv 2605.18810), "none" for equal weights.
        gamma: of the decay; None takes 7, 5 or 4 for blocks of 16, 10 or 8, and in between what lies between.
        alpha: of D-PACE, 0 to 1.
        chunk_blocks: blocks whose logits exist at one time; fewer take less memory, and longer below 500 slots.
    """

    kind: Literal["ce", "distill"] = "ce"
    weighting: Literal["decay", "dpace", "none"] = "decay"
    gamma: float | None = None
    alpha: float = 0.5
    chunk_blocks: int = 64

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


ChunkLoss = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


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
    return (weight_NK * term_NK).sum(), weight_NK.sum(), ce_NK.detach(), right_NK


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


def objective(
    hidden_BQH: Tensor,
    blocks: Blocks,
    head: Head,
    settings: LossSettings,
    teacher_BNKH: Tensor | None = None,
    function: ChunkLoss = chunk_loss,
) -> tuple[Tensor, Tensor]:
    """The loss of a micro-batch, not yet divided by its weights.

    Sums, so that a global batch may be split at will: divide gradients and losses by the sum of all weights.

    Args:
        hidden_BQH: what the drafter returned.
        blocks: of the micro-batch.
        head: of the target.
        settings: what is minimised.
        teacher_BNKH: for "distill", the target's last hidden states (after its final norm) at ``anchor + k - 1``.
        function: ``chunk_loss``, maybe compiled.

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
    valid_NK = blocks.valid_BNK.flatten(0, 1)
    total, weight, ce_NK, right_NK = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_BQH.view(batch * count, block, -1),
        blocks.labels_BNK.flatten(0, 1),
        valid_NK,
        teacher,
        head,
        settings,
        function,
    )
    run_N = (right_NK | ~valid_NK).cumprod(-1).mul(valid_NK).sum(-1)
    any_N = valid_NK.any(-1)
    tally = torch.cat(
        (
            torch.stack((total.detach(), weight)).double(),
            torch.stack((((run_N + 1) * any_N).sum(), any_N.sum())).double(),
            ce_NK.double().sum(0),
            right_NK.double().sum(0),
            valid_NK.double().sum(0),
        )
    )
    return total, tally


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """Sums over blocks, which add up over micro-batches, drafters and processes."""

    loss: float
    weight: float
    accepted: float
    """leading right slots plus 1, over blocks with any valid slot; slots without a loss neither break nor count"""
    blocks: float
    ce_K: tuple[float, ...]
    right_K: tuple[float, ...]
    valid_K: tuple[float, ...]

    @classmethod
    def of(cls, vector: Tensor) -> Tally:
        """Read the vector of :func:`objective`; waits for the device."""
        numbers = vector.tolist()
        block = (len(numbers) - 4) // 3
        rest = [tuple(numbers[4 + i * block : 4 + (i + 1) * block]) for i in range(3)]
        return cls(numbers[0], numbers[1], numbers[2], numbers[3], *rest)

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
        for k, slots in enumerate(self.valid_K):
            if slots:
                out[f"accuracy_{k}"] = self.right_K[k] / slots
                out[f"ce_{k}"] = self.ce_K[k] / slots
        return {prefix + name: value for name, value in out.items()}
