"""Models that the benchmarks share."""

from __future__ import annotations

import math

import torch
from torch import nn


class Layer(nn.Module):
    """A pre-norm transformer layer written so that ``symbolic_trace`` goes through all of it.

    Args:
        width: of the residual stream.
        heads: attention heads; ``width`` is a multiple of it.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, length, width]
        batch, length, width = x.size(0), x.size(1), x.size(2)
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.size), -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """Twelve layers, small ones: what is measured is tracing."""

    def __init__(self, layers: int = 12, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
