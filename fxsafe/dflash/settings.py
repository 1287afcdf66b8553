"""All settings of a run. One dataclass for each section of the YAML file; dotted names on the command line override.

Lengths are in tokens, shares between 0 and 1, devices in torch's words ("cpu", "cuda:0"); the same device may stand in
several places and is shared then. Where a list of names is wanted, one name stands for a list of one.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import torch

from fxsafe.dflash.errors import SettingsError
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.optim import OptimSettings

__all__ = ["DataSettings", "DrafterSettings", "RunSettings", "Settings", "TargetSettings", "devices_of", "dtype_of"]

Dtype = Literal["float32", "bfloat16"]
Names = tuple[str, ...] | str
"""A tuple once the settings are made; ``tuple(name)`` would be its letters."""


def _listed(section: Any, *fields: str) -> None:
    for field in fields:
        if isinstance(name := getattr(section, field), str):
            object.__setattr__(section, field, (name,))


@dataclasses.dataclass(frozen=True, slots=True)
class TargetSettings:
    """The frozen model.

    Attributes:
        model: Hub id or local directory of a causal LM in safetensors.
        dtype: of its weights.
        devices: one target thread for each; the weights exist once on each different device. "auto" is the first GPU
            (that of LOCAL_RANK under torchrun), or the CPU without one.
        trust_remote_code: let a model's own Python code run; leave it off unless you have read that code.
        compile: compile its layers for training, each target in its own thread; faster on a GPU by what a family's
            code leaves unfused, and rounded otherwise than what decodes later.
    """

    model: str = ""
    dtype: Dtype = "bfloat16"
    devices: Names = ("auto",)
    trust_remote_code: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        _listed(self, "devices")


@dataclasses.dataclass(frozen=True, slots=True)
class DrafterSettings:
    """The trained model; sizes that are not given are the target's.

    Attributes:
        layers: decoder layers.
        block_size: tokens of a block, the given one included.
        anchors: blocks of each sequence; sequences with fewer possible anchors fill up with unused blocks.
        target_layer_ids: tapped layers of the target, from 0; null spreads as many as the drafter has layers.
        mask_token_id: row of the embedding that stands for "to be drafted"; null takes the tokenizer's mask token or
            the first row that no token uses.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: size of a head.
        intermediate_size: of the MLP.
        sliding_layers: the first so many layers see a window of the context only.
        sliding_window: tokens of that window.
        version: 1 for plain DFlash, 2 for DFlash 2: convolutions around the sublayers, and a selector of the path
            through each slot's likeliest tokens; null takes that of warm_start, and 1 without.
        conv_kernel_size: of DFlash 2, taps of the convolutions: a slot and those before it.
        conv_group_size: of DFlash 2, channels that share a correction of the kernel; divides the hidden size.
        selector_rank: of DFlash 2, columns of the selector's codebooks, which have a row for each token.
        selector_top_k: of DFlash 2, candidates of each slot.
        warm_start: directory of a drafter in z-lab's layout to start from; all sizes are taken from it, but those of
            DFlash 2 if it is a plain one and version is 2: these parts are new then, and change nothing at first.
        devices: one drafter thread for each; "auto" as for the target.
        dtype: of weights and activations; master weights are fp32 always.
        compile: compile each drafter in its own thread.
        backend: of torch.compile, for the target too.
        attention: flex_attention needs CUDA; auto takes it there and dense SDPA elsewhere.
    """

    layers: int = 5
    block_size: int = 16
    anchors: int = 512
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    sliding_layers: int = 0
    sliding_window: int = 2048
    version: Literal[1, 2] | None = None
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    warm_start: str | None = None
    devices: Names = ("auto",)
    dtype: Dtype = "bfloat16"
    compile: bool = True
    backend: str = "inductor"
    attention: Literal["auto", "flex", "dense"] = "auto"

    def __post_init__(self) -> None:
        _listed(self, "devices")


@dataclasses.dataclass(frozen=True, slots=True)
class DataSettings:
    """What is learnt from.

    Attributes:
        train: files (.jsonl, .parquet) or Hub ids, "owner/name", with "/config" or ":split" behind it. Rows hold
            "messages", or "conversations" with role/content or from/value, or "text", or "input_ids" and "loss_mask".
        validation: files or Hub ids of their own; none sets rows of ``train`` apart.
        validation_share: share of ``train`` that is set apart, if ``validation`` is empty.
        validation_batches: micro-batches measured each time.
        streaming: read ``train`` in order while training, instead of downloading it first; needs run.max_steps, and
            validation rows of their own or none. Shuffled within windows; a resumed run reads over what it had.
        window: rows of a stream that are in memory, and shuffled.
        max_length: longest sequence.
        too_long: what to do with longer ones: learn from the beginning, leave them out, or stop.
        on_error: what to do with a row that cannot be read: report and leave it out, or stop.
        batch_size: sequences of a micro-batch.
        micro_batches: micro-batches of one optimizer step, over all drafters and processes.
        bucket: lengths are padded to a multiple of this; each different length is compiled once.
        depth: micro-batches of features that may wait between a target and a drafter.
    """

    train: Names = ()
    validation: Names = ()
    validation_share: float = 0.01
    validation_batches: int = 8
    streaming: bool = False
    window: int = 10_000
    max_length: int = 3072
    too_long: Literal["truncate", "skip", "refuse"] = "truncate"
    on_error: Literal["skip", "refuse"] = "skip"
    batch_size: int = 1
    micro_batches: int = 8
    bucket: int = 512
    depth: int = 2

    def __post_init__(self) -> None:
        _listed(self, "train", "validation")


@dataclasses.dataclass(frozen=True, slots=True)
class RunSettings:
    """The run itself.

    Attributes:
        out: directory of checkpoints, metrics, plot and export; a run that stands there already is resumed.
        seed: decides weights, order of the data and anchors.
        epochs: passes over the data.
        max_steps: optimizer steps at most; null for as many as the epochs have.
        log_every: steps between lines.
        eval_every: steps between measurements on the validation rows; 0 for only one at the end.
        save_every: steps between checkpoints; one is made at the end in any case.
        keep: checkpoints that stay.
        tensorboard: write events for TensorBoard too.
        wandb: project of Weights & Biases that gets the numbers too (its own variables, WANDB_MODE and others, hold);
            null for none.
        peak_tflops: of one device in the drafter's dtype, for MFU; null knows some GPUs.
        stall_after: seconds without progress after which the stacks of all threads are printed, and of those that wait
            for one another in torch; 0 for never.
        record: file for a timeline of the threads, written at the end (fxsafe.record); null for none.
    """

    out: str = "run"
    seed: int = 42
    epochs: float = 6
    max_steps: int | None = None
    log_every: int = 10
    eval_every: int = 500
    save_every: int = 500
    keep: int = 3
    tensorboard: bool = False
    wandb: str | None = None
    peak_tflops: float | None = None
    stall_after: float = 600.0
    record: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Everything.

    Attributes:
        target: the frozen model.
        drafter: the trained model.
        data: what is learnt from.
        loss: what is minimised.
        optim: how the parameters move.
        run: the run itself.

    Raises:
        SettingsError: a number that cannot work.
    """

    target: TargetSettings = dataclasses.field(default_factory=TargetSettings)
    drafter: DrafterSettings = dataclasses.field(default_factory=DrafterSettings)
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    loss: LossSettings = dataclasses.field(default_factory=LossSettings)
    optim: OptimSettings = dataclasses.field(default_factory=OptimSettings)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        data, drafter = self.data, self.drafter
        for name, value in (
            ("data.batch_size", data.batch_size),
            ("data.micro_batches", data.micro_batches),
            ("data.bucket", data.bucket),
            ("data.window", data.window),
            ("data.depth", data.depth),
            ("data.max_length", data.max_length - 1),
            ("drafter.anchors", drafter.anchors),
            ("drafter.layers", drafter.layers),
            ("drafter.conv_kernel_size", drafter.conv_kernel_size),
            ("drafter.conv_group_size", drafter.conv_group_size),
            ("drafter.selector_rank", drafter.selector_rank),
            ("drafter.selector_top_k", drafter.selector_top_k),
            ("loss.chunk_blocks", self.loss.chunk_blocks),
            ("run.log_every", self.run.log_every),
            ("run.save_every", self.run.save_every),
            ("run.keep", self.run.keep),
            ("target.devices", len(self.target.devices)),
            ("drafter.devices", len(drafter.devices)),
        ):
            if value < 1:
                least = 2 if name == "data.max_length" else 1
                if name.endswith("devices"):
                    raise SettingsError(f"{name} names no device")
                raise SettingsError(f"{name} is {value + least - 1} and has to be at least {least}")
        loss, optim, run = self.loss, self.optim, self.run
        for name, fits, wish in (
            ("data.validation_share", 0 <= data.validation_share < 1, "at least 0 and below 1"),
            ("data.validation_batches", data.validation_batches >= 0, "at least 0"),
            ("drafter.sliding_layers", drafter.sliding_layers >= 0, "at least 0"),
            ("loss.gamma", loss.gamma is None or loss.gamma > 0, "above 0"),
            ("loss.alpha", 0 <= loss.alpha <= 1, "from 0 to 1"),
            ("loss.selector_weight", 0 <= loss.selector_weight < math.inf, "at least 0"),
            ("drafter.version", drafter.version in (None, 1, 2), "1 or 2"),
            ("optim.lr", 0 <= optim.lr < math.inf, "at least 0"),
            ("optim.min_lr", 0 <= optim.min_lr < math.inf, "at least 0"),
            ("optim.warmup", 0 <= optim.warmup <= 1, "a share of the steps, from 0 to 1"),
            ("optim.decay", 0 <= optim.decay <= 1, "a share of the steps, from 0 to 1"),
            ("optim.betas", all(0 <= beta < 1 for beta in optim.betas), "at least 0 and below 1"),
            ("optim.eps", optim.eps > 0, "above 0"),
            ("optim.weight_decay", optim.weight_decay >= 0, "at least 0"),
            ("optim.clip", optim.clip >= 0, "at least 0"),
            ("optim.ema", 0 <= optim.ema < 1, "at least 0 and below 1"),
            ("run.epochs", 0 < run.epochs < math.inf, "above 0"),
            ("run.max_steps", run.max_steps is None or run.max_steps > 0, "above 0"),
            ("run.eval_every", run.eval_every >= 0, "at least 0"),
            ("run.peak_tflops", run.peak_tflops is None or run.peak_tflops > 0, "above 0"),
        ):
            if not fits:
                section, _, part = name.partition(".")
                raise SettingsError(f"{name} is {getattr(getattr(self, section), part)} and has to be {wish}")
        if data.streaming and run.max_steps is None:
            raise SettingsError("data.streaming needs run.max_steps: nobody knows how long a stream is")
        if data.streaming and data.validation_share and not data.validation:
            raise SettingsError(
                "no rows of a stream can be set apart; name some with data.validation, or make data.validation_share 0"
            )
        if drafter.sliding_layers > drafter.layers:
            raise SettingsError("drafter.sliding_layers is more than drafter.layers")
        if self.run.stall_after < 0:
            raise SettingsError("run.stall_after is less than 0")

    def to_json(self) -> dict[str, Any]:
        """For checkpoints and ``settings.json``."""
        return dataclasses.asdict(self)


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a settings word."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def devices_of(names: Sequence[str], where: str) -> list[torch.device]:
    """The devices, after checking that they exist.

    Raises:
        SettingsError: naming the ones that exist.
    """
    out = []
    for name in names:
        if name == "auto":
            name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise SettingsError(f"{where}: {name!r} is no device") from error
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", 0)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise SettingsError(f"{where}: {name} does not exist; this machine has {torch.cuda.device_count()} GPUs")
        if device.type not in ("cpu", "cuda"):
            raise SettingsError(f"{where}: {device.type} devices are not supported")
        out.append(device)
    return out
