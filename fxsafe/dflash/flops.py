"""FLOPs of a step, counted by multiplications of matrices, two for each multiply-add."""

from __future__ import annotations

from typing import Any

import torch

from fxsafe.dflash.config import DrafterConfig

__all__ = ["drafter_flops", "peak_flops", "target_flops"]

_PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "L40": 181e12, "4090": 165e12}
"""dense, from the vendor's data sheets, by a word of the device's name"""


def drafter_flops(config: DrafterConfig, length: int, anchors: int, rows: int) -> float:
    """FLOPs to learn from one sequence: three times the trainable forward and twice the frozen head.

    Args:
        config: of the drafter.
        length: S, context tokens.
        anchors: N.
        rows: V, of the head.
    """
    hidden, d = config.hidden_size, config.head_dim
    heads, groups = config.num_attention_heads * d, config.num_key_value_heads * d
    slots = anchors * config.block_size
    layer = 2 * hidden * heads + 2 * hidden * groups + 3 * hidden * config.intermediate_size
    forward = 2.0 * length * len(config.target_layer_ids) * hidden * hidden
    for i in range(config.num_hidden_layers):
        # The mean anchor stands in the middle.
        seen = min(length / 2, config.layer_window(i) or length) + config.block_size
        forward += 2 * length * hidden * 2 * groups + 2 * slots * layer + 4 * slots * seen * heads
    if (parts := config.dflash2) is not None:
        kernels = 2 * parts.conv_kernel_size * (hidden // parts.conv_group_size)
        forward += 2 * slots * hidden * 2 * kernels * config.num_hidden_layers
        forward += 2 * slots * parts.selector_rank * (hidden + parts.selector_top_k)
    return 3 * forward + 2 * 2 * slots * hidden * rows


def target_flops(text_config: Any, layers: int, length: int) -> float:
    """FLOPs of a target's forward over one sequence through ``layers`` decoder layers, without the head.

    For a mixture of experts those of a token's own experts. From the usual names in the config; a family with other
    parts is counted roughly.
    """
    hidden = text_config.hidden_size
    heads = text_config.num_attention_heads
    groups = getattr(text_config, "num_key_value_heads", None) or heads
    d = getattr(text_config, "head_dim", None) or hidden // heads
    inner = getattr(text_config, "intermediate_size", None) or 4 * hidden
    experts = getattr(text_config, "num_experts_per_tok", None)
    if experts:
        inner = (getattr(text_config, "moe_intermediate_size", None) or inner) * experts
    gated = 2 if getattr(text_config, "model_type", "") in ("gpt2", "gpt_neox", "bloom", "opt", "phi") else 3
    layer = 2 * hidden * heads * d + 2 * hidden * groups * d + gated * hidden * inner
    return float(layers * (2 * length * layer + 4 * length * (length / 2) * heads * d))


def peak_flops(device: torch.device, named_tflops: float | None) -> float | None:
    """FLOP/s that a device can do in bf16 at best; None where that is not known."""
    if named_tflops:
        return named_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in _PEAK_BF16.items() if word in name), None)
