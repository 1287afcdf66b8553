"""The drafter: a small Qwen3-shaped decoder whose keys and values include projections of the target's hidden states.

Module names are those of z-lab's package, so that the state dict is the checkpoint. Shape suffixes: see the package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fxsafe.dflash.config import DrafterConfig
from fxsafe.dflash.convolution import DynamicConvolution
from fxsafe.dflash.selector import CandidateSelector

__all__ = ["ContextKV", "Drafter", "is_dflash2", "parameter_count"]

_DFLASH2 = {"attention_conv", "mlp_conv", "candidate_selector"}

ContextKV = tuple[Tensor, Tensor]
"""Keys and values of a context, [B, G, S, D] each, after norm and rotary embedding."""


class RMSNorm(nn.Module):
    """Qwen3's: in fp32 inside, the weight multiplied in the dtype of the input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rotary(position_BL: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, [B, 1, L, D] in ``dtype``, of the half-rotation form over the full head."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_BL.device) / head_dim
    angle = position_BL[..., None].float() * (1.0 / theta**exponent)
    angle = torch.cat((angle, angle), dim=-1)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x_BLH: Tensor, cos: Tensor, sin: Tensor) -> ContextKV:
        k_BGLD = self.k_norm(self.k_proj(x_BLH).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        v_BGLD = self.v_proj(x_BLH).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return rotate(k_BGLD, cos, sin), v_BGLD

    def forward(
        self, x_BQH: Tensor, context: ContextKV, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None
    ) -> Tensor:
        q_BAQD = self.q_norm(self.q_proj(x_BQH).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        q_BAQD = rotate(q_BAQD, cos, sin)
        k_BGQD, v_BGQD = self.keys_values(x_BQH, cos, sin)
        k_BGTD = torch.cat((context[0], k_BGQD), dim=2)
        v_BGTD = torch.cat((context[1], v_BGQD), dim=2)
        if isinstance(mask, BlockMask):
            flexed = flex_attention(q_BAQD, k_BGTD, v_BGTD, block_mask=mask, enable_gqa=self.groups > 1)
            assert isinstance(flexed, Tensor)
            a_BAQD = flexed
        else:
            # Expanded by hand: with enable_gqa and a mask, SDPA's CPU kernel gives way to one that stores the scores.
            if self.groups > 1:
                k_BGTD = k_BGTD.repeat_interleave(self.groups, dim=1)
                v_BGTD = v_BGTD.repeat_interleave(self.groups, dim=1)
            a_BAQD = F.scaled_dot_product_attention(q_BAQD, k_BGTD, v_BGTD, attn_mask=mask)
        out: Tensor = self.o_proj(a_BAQD.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = _convolution(config)
        self.mlp_conv = _convolution(config)

    def forward(
        self, x_BQH: Tensor, context: ContextKV, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None
    ) -> Tensor:
        y: Tensor = self.input_layernorm(x_BQH)
        if self.attention_conv is None:
            x_BQH = x_BQH + self.self_attn(y, context, cos, sin, mask)
        else:
            y, delta = self.attention_conv.before(y)
            x_BQH = x_BQH + self.attention_conv.behind(self.self_attn(y, context, cos, sin, mask), delta)
        y = self.post_attention_layernorm(x_BQH)
        if self.mlp_conv is None:
            out: Tensor = x_BQH + self.mlp(y)
        else:
            y, delta = self.mlp_conv.before(y)
            out = x_BQH + self.mlp_conv.behind(self.mlp(y), delta)
        return out


def _convolution(config: DrafterConfig) -> DynamicConvolution | None:
    if config.dflash2 is None:
        return None
    parts = config.dflash2
    return DynamicConvolution(config.hidden_size, parts.conv_kernel_size, parts.conv_group_size, config.block_size)


class Drafter(nn.Module):
    """The trainable part; embedding and head are the target's and stay outside.

    ``candidate_selector`` is None in a plain drafter. No forward here uses it: it stands behind the head.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector: CandidateSelector | None = None
        if (parts := config.dflash2) is not None:
            self.candidate_selector = CandidateSelector(
                config.vocab_size, config.hidden_size, parts.selector_rank, parts.selector_top_k
            )

    def initialize(self, generator: torch.Generator) -> None:
        """Draw the weights afresh: normal with ``initializer_range``, norms 1. The numbers depend on nothing else.

        The parts of DFlash 2 come last and change nothing yet, so that a drafter computes what the plain one of the
        same generator does.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if is_dflash2(name):
                    continue
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, self.config.initializer_range, generator=generator)
        for module in self.modules():
            if isinstance(module, DynamicConvolution):
                module.initialize()
        if self.candidate_selector is not None:
            self.candidate_selector.initialize(self.config.initializer_range, generator)

    def context(self, feats_BSF: Tensor, position_BS: Tensor) -> list[ContextKV]:
        """Keys and values of the context for each layer.

        No residual updates the context, so that a position is projected once for good; a decoder appends to it.

        Args:
            feats_BSF: outputs of the tapped layers, concatenated in the order of ``target_layer_ids``.
            position_BS: int64 positions.
        """
        ctx_BSH = self.hidden_norm(self.fc(feats_BSF))
        cos, sin = rotary(position_BS, self.config.head_dim, self.config.rope_theta, ctx_BSH.dtype)
        return [layer.self_attn.keys_values(ctx_BSH, cos, sin) for layer in self._layers()]

    def blocks(
        self,
        noise_BQH: Tensor,
        position_BQ: Tensor,
        context: Sequence[ContextKV],
        masks: Sequence[Tensor | BlockMask | None],
    ) -> Tensor:
        """Hidden states [B, Q, H] of block slots, given the context of :meth:`context` and a mask for each layer.

        The target's head on them gives logits: slot ``k`` predicts the token at ``anchor + k``.
        """
        cos, sin = rotary(position_BQ, self.config.head_dim, self.config.rope_theta, noise_BQH.dtype)
        x_BQH = noise_BQH
        for layer, kv, mask in zip(self._layers(), context, masks, strict=True):
            x_BQH = layer(x_BQH, kv, cos, sin, mask)
        out: Tensor = self.norm(x_BQH)
        return out

    def forward(
        self,
        feats_BSF: Tensor,
        noise_BQH: Tensor,
        position_BQ: Tensor,
        masks: Sequence[Tensor | BlockMask | None],
    ) -> Tensor:
        """The forward of training: context positions are 0 to S - 1. See :meth:`context` and :meth:`blocks`."""
        batch, length = feats_BSF.shape[:2]
        position_BS = torch.arange(length, device=feats_BSF.device).expand(batch, length)
        return self.blocks(noise_BQH, position_BQ, self.context(feats_BSF, position_BS), masks)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]


def parameter_count(config: DrafterConfig) -> int:
    """Number of parameters of a drafter, without building it."""
    hidden, d = config.hidden_size, config.head_dim
    attention = 2 * hidden * d * (config.num_attention_heads + config.num_key_value_heads) + 2 * d
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    plain = config.num_hidden_layers * layer + len(config.target_layer_ids) * hidden * hidden + 2 * hidden
    if (parts := config.dflash2) is None:
        return plain
    convolution = 2 * parts.conv_kernel_size * hidden * (1 + hidden // parts.conv_group_size)
    selector = parts.selector_rank * (2 * config.vocab_size + hidden)
    return plain + 2 * config.num_hidden_layers * convolution + selector


def is_dflash2(name: str) -> bool:
    """Whether a tensor of this name belongs to what DFlash 2 adds."""
    return any(part in _DFLASH2 for part in name.split("."))
