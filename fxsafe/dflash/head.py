"""The target's embedding and head, frozen, as a drafter uses them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from fxsafe.dflash.config import DrafterConfig

__all__ = ["Head"]


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """Tables [V, H] and what the target does to them; tied tables are one tensor. Nothing here has a gradient."""

    embedding_VH: Tensor
    output_VH: Tensor
    bias_V: Tensor | None = None
    input_scale: float = 1.0
    multiplier: float = 1.0
    softcap: float | None = None

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H] of int64 ids [...]; without the target's position embeddings, if it has such."""
        rows = F.embedding(ids, self.embedding_VH)
        return rows if self.input_scale == 1.0 else rows * self.input_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H], without the target's final norm."""
        logits = F.linear(hidden, self.output_VH, self.bias_V)
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def to(self, device: torch.device, dtype: torch.dtype) -> Head:
        """A copy on a device; tensors that are there already are shared."""
        output = self.output_VH.to(device, dtype)
        tied = self.embedding_VH.data_ptr() == self.output_VH.data_ptr()
        return dataclasses.replace(
            self,
            embedding_VH=output if tied else self.embedding_VH.to(device, dtype),
            output_VH=output,
            bias_V=None if self.bias_V is None else self.bias_V.to(device, dtype),
        )

    def fits(self, config: DrafterConfig) -> bool:
        """Whether a drafter of this config belongs to these tables."""
        return (
            self.embedding_VH.shape[1] == config.hidden_size
            and config.mask_token_id < self.embedding_VH.shape[0]
            and (config.dflash2 is None or config.vocab_size >= self.output_VH.shape[0])  # codebooks have its rows
            and self.input_scale == config.input_embedding_scale
            and self.multiplier == config.output_multiplier
            and self.softcap == config.final_logit_softcapping
        )
