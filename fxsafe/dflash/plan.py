"""What a run will need, before it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fxsafe.dflash.config import DFlash2, DrafterConfig
from fxsafe.dflash.flops import drafter_flops, target_flops
from fxsafe.dflash.model import parameter_count
from fxsafe.dflash.settings import Settings, devices_of, dtype_of
from fxsafe.dflash.target import Target

__all__ = ["Plan", "make_plan"]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Numbers for one process. Memory is in bytes, without what kernels and allocators take on top."""

    parameters: int
    target_parameters: int
    target_bytes: int
    """on each different target device"""
    replica_bytes: int
    """for each drafter: weights, gradients, sums of gradients, embedding and head"""
    master_bytes: int
    """on the first drafter's device: fp32 weights, moments, moving average"""
    activation_bytes: int
    """of one micro-batch of the longest sequences, roughly"""
    drafter_flops: float
    """of one longest sequence"""
    target_flops: float
    steps: int
    memory: str
    """all of it, in words"""
    lines: tuple[str, ...]


def amount(number: float) -> str:
    """Three digits and k, M, G or T."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g} "


def size_of(count: float) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


def _dflash2_lines(parts: DFlash2 | None, parameters: int) -> tuple[str, ...]:
    if parts is None:
        return ()
    return (
        f"DFlash 2 {amount(parameters)} parameters of these; convolutions of {parts.conv_kernel_size} taps, with a "
        f"correction for {parts.conv_group_size} channels; selector of rank {parts.selector_rank} among "
        f"{parts.selector_top_k} tokens",
    )


def _tap_lines(taps: tuple[int, ...]) -> tuple[str, ...]:
    if list(taps) == sorted(set(taps)):
        return ()
    return (
        "warning  tapped layers repeat or do not ascend: z-lab's package takes them as they are named, and vLLM and "
        "SGLang collect each once while the layers run, in ascending order: they cannot serve this drafter as it is "
        "trained (drafter.target_layer_ids)",
    )


def _devices(names: Sequence[str]) -> str:
    return ", ".join(f"auto ({devices_of((name,), name)[0]})" if name == "auto" else name for name in names)


def make_plan(settings: Settings, target: Target, config: DrafterConfig, rows: int | None, steps: int) -> Plan:
    """Compute the plan.

    Args:
        settings: of the run.
        target: loaded.
        config: of the drafter.
        rows: of training data, None for a stream.
        steps: of the optimizer.
    """
    size = dtype_of(settings.drafter.dtype).itemsize
    parameters = parameter_count(config)
    plain = parameter_count(dataclasses.replace(config, dflash2=None))
    target_parameters = sum(p.numel() for p in target.model.parameters())
    tied = target.head.embedding_VH.data_ptr() == target.head.output_VH.data_ptr()
    tables = target.rows * target.hidden_size * (1 if tied else 2) * size
    target_bytes = sum(p.numel() * p.element_size() for p in target.model.parameters())
    replica = parameters * (2 * size + 4) + tables
    master = parameters * 4 * (4 if settings.optim.ema else 3)
    length, batch, hidden = settings.data.max_length, settings.data.batch_size, config.hidden_size
    slots = settings.drafter.anchors * config.block_size
    inner = (
        8 * hidden + 3 * config.intermediate_size + 2 * (config.num_attention_heads + 1) * config.head_dim
    ) * config.num_hidden_layers
    chunk_slots = min(settings.loss.chunk_blocks, batch * settings.drafter.anchors) * config.block_size
    chunk = chunk_slots * target.rows * 4 * 3
    second = 0
    if (parts := config.dflash2) is not None:
        # Each of the four convolutions of a layer keeps what goes in and comes out, and its corrections.
        kernels = 4 * parts.conv_kernel_size * (hidden // parts.conv_group_size)
        inner += (8 * hidden + kernels) * config.num_hidden_layers
        # The candidates' share of the logits' gradient; the gradient of a codebook in fp32 and one chunk's share of it;
        # the candidates' rows; the gates of all slots.
        second = chunk_slots * target.rows * 4 + config.vocab_size * parts.selector_rank * (4 + size)
        second += chunk_slots * parts.selector_top_k * parts.selector_rank * (size + 4)
        second += batch * slots * 3 * parts.selector_rank * size
    features = batch * length * len(config.target_layer_ids) * hidden * size
    activations = batch * slots * inner * size + features + chunk + second
    drafter = drafter_flops(config, length, settings.drafter.anchors, target.rows)
    target_cost = target_flops(target.text_config, max(config.target_layer_ids) + 1, length)
    sequences = settings.data.batch_size * settings.data.micro_batches
    share = drafter / target_cost
    memory = (
        f"target {size_of(target_bytes)}, each drafter {size_of(replica)} and up to {size_of(activations)} of "
        f"activations, master {size_of(master)} on the first drafter's device, {settings.data.depth} x "
        f"{size_of(features)} of features for each pair"
    )
    lines = (
        f"target   {target.family}, {amount(target_parameters)} parameters, {target.layer_count} layers, "
        f"tapped {', '.join(map(str, config.target_layer_ids))}",
        f"drafter  {amount(parameters)} parameters, {config.num_hidden_layers} layers, "
        f"{settings.drafter.anchors} blocks of {config.block_size} in each sequence, mask token {config.mask_token_id}",
        *_dflash2_lines(config.dflash2, parameters - plain),
        *_tap_lines(config.target_layer_ids),
        f"devices  targets {_devices(settings.target.devices)}; drafters {_devices(settings.drafter.devices)}",
        f"memory   {memory}",
        f"work     {amount(target_cost)}FLOP target and {amount(drafter)}FLOP drafter for a sequence of "
        f"{length} tokens: one target thread keeps {1 / share:.2f} drafter threads busy on equal devices; "
        f"here it has {len(settings.drafter.devices) / len(settings.target.devices):.2f}",
        *(
            ()
            if config.input_embedding_scale == 1.0
            else (
                f"warning  embeddings are scaled by {config.input_embedding_scale:.4g}, as the target does; "
                + (
                    "z-lab's package reads that from the export, and SGLang 0.5.23 and vLLM 0.33.0 do not: they would "
                    "draft badly"
                    if config.dflash2 is None
                    else "z-lab's package and vLLM 0.33.0 read that from the export of a DFlash 2 drafter, and SGLang "
                    "0.5.23 does not: it would draft badly"
                ),
            )
        ),
        f"steps    {steps} of {sequences} sequences, from {'a stream' if rows is None else f'{rows} rows'}",
    )
    return Plan(
        parameters=parameters,
        target_parameters=target_parameters,
        target_bytes=target_bytes,
        replica_bytes=replica,
        master_bytes=master,
        activation_bytes=activations,
        drafter_flops=drafter,
        target_flops=target_cost,
        steps=steps,
        memory=memory,
        lines=lines,
    )
