"""DFlash 2's dynamic depthwise convolution, which runs before and after each sublayer, along the slots of a block.

It does the short-range work within a block, where attention had to, and is part of the drafter: the loss of its tokens
trains it. Source: https://inco.ai/blog/dflash2/; names, shapes and order are those of z-lab's package, the start as the
identity is that of NeMo Automodel.

Shape suffixes: see the package, and

==  =====================================  ==  =========================================
E   taps (the kernel size): 2 published    P   groups of channels that share a correction
2   before and behind a sublayer           W   channels of a group: 16 published
==  =====================================  ==  =========================================
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["DynamicConvolution"]


class DynamicConvolution(nn.Module):
    """``out_t = sum over e < E of (base_e + delta_te) * x_(t - e)``, each channel by itself.

    The slots before a block's first one count as zero: nothing crosses from one block to the next, however many lie in
    a row. One projection of what goes into the sublayer makes the corrections of both sides, of the convolution before
    the sublayer and of the one behind it.

    Args:
        hidden: H.
        taps: E.
        group: channels that share a correction, a divisor of H.
        block: K, slots of a block.

    Attributes:
        base_kernel: [2, E, H], of both sides.
        kernel_projection: H to 2 * E * P, in this order.
    """

    def __init__(self, hidden: int, taps: int, group: int, block: int) -> None:
        super().__init__()
        self.taps, self.group, self.block = taps, group, block
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)
        self.initialize()

    def initialize(self) -> None:
        """Make it the identity: a drafter with it starts as one without it."""
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def before(self, x_BQH: Tensor) -> tuple[Tensor, Tensor]:
        """What goes into the sublayer [B, Q, H], and the corrections [B, Q, E, P] that :meth:`behind` needs."""
        batch, slots, hidden = x_BQH.shape
        delta_BQ2EP = self.kernel_projection(x_BQH).view(batch, slots, 2, self.taps, hidden // self.group)
        return self._convolve(x_BQH, delta_BQ2EP[:, :, 0], 0), delta_BQ2EP[:, :, 1]

    def behind(self, x_BQH: Tensor, delta_BQEP: Tensor) -> Tensor:
        """The sublayer's output [B, Q, H], convolved."""
        return self._convolve(x_BQH, delta_BQEP, 1)

    def _convolve(self, x_BQH: Tensor, delta_BQEP: Tensor, side: int) -> Tensor:
        batch, slots, hidden = x_BQH.shape
        groups = hidden // self.group
        base_EPW = self.base_kernel[side].view(self.taps, groups, self.group)
        x_BNKPW = x_BQH.reshape(batch, slots // self.block, self.block, groups, self.group)
        delta_BNKEP1 = delta_BQEP.reshape(batch, slots // self.block, self.block, self.taps, groups, 1)
        out_BNKPW = x_BNKPW * base_EPW[0] + x_BNKPW * delta_BNKEP1[:, :, :, 0]
        for e in range(1, self.taps):
            past_BNKPW = F.pad(x_BNKPW[:, :, :-e], (0, 0, 0, 0, e, 0))
            out_BNKPW = out_BNKPW + past_BNKPW * base_EPW[e] + past_BNKPW * delta_BNKEP1[:, :, :, e]
        return out_BNKPW.reshape(batch, slots, hidden)
