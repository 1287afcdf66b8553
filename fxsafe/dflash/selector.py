"""DFlash 2's path selector: which of a slot's likeliest tokens follows the one that was chosen before.

A drafter fills all slots at once, so that neighbours may not fit; the right token is mostly among the first few of a
slot all the same. The selector scores candidate ``b`` behind predecessor ``a`` with ``U(b) + <A[a] * (W h), B[b]>``,
where ``U`` is the logit and ``h`` the slot's hidden state, and a walk from the anchor's token takes the best ones.
Source: https://inco.ai/blog/dflash2/; names and shapes are those of z-lab's package.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CandidateSelector", "path_scores"]


class CandidateSelector(nn.Module):
    """The tables of the selector; they are parameters, not embeddings, so that their names on disk are the layout's.

    Args:
        rows: V, of the target's head.
        hidden: H.
        rank: R.
        top_k: C.

    Attributes:
        predecessor_codebook: A, [V, R].
        successor_codebook: B, [V, R].
        hidden_projection: W, H to R.
    """

    def __init__(self, rows: int, hidden: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(rows, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(rows, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def initialize(self, std: float, generator: torch.Generator) -> None:
        """Leave every score the logit alone: B is zero. A and W are drawn; they learn once B is no longer zero."""
        with torch.no_grad():
            self.predecessor_codebook.normal_(0.0, std, generator=generator)
            self.hidden_projection.weight.normal_(0.0, std, generator=generator)
            self.successor_codebook.zero_()

    def gates(self, hidden: Tensor, predecessors: Tensor) -> Tensor:
        """``A[a] * (W h)``, [..., R], of hidden states [..., H] and int64 tokens [...] before them."""
        gates: Tensor = F.embedding(predecessors, self.predecessor_codebook) * self.hidden_projection(hidden)
        return gates

    def walk(self, hidden_LH: Tensor, logits_LV: Tensor, anchor: int) -> list[int]:
        """The greedy path through the candidates of L slots, which begins behind the token ``anchor``."""
        unary_LC, candidates_LC = logits_LV.float().topk(self.top_k, dim=-1)
        projected_LR = self.hidden_projection(hidden_LH)
        rows_LCR = F.embedding(candidates_LC, self.successor_codebook)
        chosen = torch.tensor(anchor, device=hidden_LH.device)
        path = []
        for unary_C, candidates_C, projected_R, rows_CR in zip(
            unary_LC, candidates_LC, projected_LR, rows_LCR, strict=True
        ):
            gate_R = self.predecessor_codebook[chosen] * projected_R
            chosen = candidates_C[path_scores(unary_C, gate_R, rows_CR).argmax()]
            path.append(chosen)
        tokens: list[int] = torch.stack(path).tolist()
        return tokens


def path_scores(unary: Tensor, gates: Tensor, rows: Tensor) -> Tensor:
    """fp32 scores [..., C] of candidates.

    Args:
        unary: [..., C], their logits.
        gates: [..., R], of the predecessor; see :meth:`CandidateSelector.gates`.
        rows: [..., C, R], of the candidates in B.
    """
    return unary.float() + (rows.float() @ gates.float()[..., None])[..., 0]
