"""The shape of a drafter, and its ``config.json`` in the layout that z-lab's package, SGLang and vLLM read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fxsafe.dflash.errors import CheckpointError, SettingsError

__all__ = ["FULL", "SLIDING", "DFlash2", "DrafterConfig", "default_layer_ids"]

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN, SECOND = "DFlashDraftModel", "DFlash2DraftModel"
_ROPE = ("rope_parameters", "rope_scaling")


def default_layer_ids(target_layers: int, drafter_layers: int) -> tuple[int, ...]:
    """The target layers that z-lab's package taps if none are named: spread from layer 1 to the fourth last.

    Args:
        target_layers: number of decoder layers of the target, at least 4.
        drafter_layers: number of layers of the drafter.

    Returns:
        Ids of decoder layers, counted from 0; id ``i`` is the *output* of layer ``i``. Few target layers for many
        drafter layers give repeated ids, as in the reference; vLLM and SGLang cannot serve these, and the plan says so.

    Raises:
        SettingsError: the target has fewer than 4 layers; name the ids then.
    """
    if target_layers < 4:
        raise SettingsError(
            f"the target has {target_layers} layers and the rule for target_layer_ids needs 4; name the ids yourself"
        )
    if drafter_layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (drafter_layers - 1)) for i in range(drafter_layers))


@dataclasses.dataclass(frozen=True, slots=True)
class DFlash2:
    """What DFlash 2 adds to a drafter, with the sizes of the published ones and their names in ``config.json``.

    Attributes:
        conv_kernel_size: taps of the convolutions around attention and MLP: a slot and those before it.
        conv_group_size: channels that share a correction of the kernel.
        selector_rank: columns of the selector's codebooks.
        selector_top_k: candidates of each slot.
    """

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16


@dataclasses.dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Everything that determines a drafter's parameters and its forward.

    ``is_causal`` is about the slots of a block among themselves: None means causal in sliding layers only, which is
    how readers take a config that does not say it. ``input_embedding_scale``, ``output_multiplier`` and
    ``final_logit_softcapping`` repeat what the target does to its embeddings and logits. ``dflash2`` is None for plain
    drafters.

    Raises:
        SettingsError: a combination that has no meaning.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 40960
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = False
    initializer_range: float = 0.02
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    dflash2: DFlash2 | None = None

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_hidden_layers)
        for wrong, message in (
            (self.num_hidden_layers < 1, "a drafter needs at least one layer"),
            (self.block_size < 2, f"block_size is {self.block_size}; slot 0 is given, so 2 is the least"),
            (
                self.num_attention_heads % self.num_key_value_heads,
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}",
            ),
            (self.head_dim % 2, f"head_dim {self.head_dim} is odd; rotary embeddings turn pairs"),
            (len(self.layer_types) != self.num_hidden_layers, "layer_types must name each layer of the drafter"),
            (set(self.layer_types) - {FULL, SLIDING}, f"layer_types may be {FULL!r} or {SLIDING!r}"),
            (not self.target_layer_ids, "target_layer_ids is empty"),
            (
                SLIDING in self.layer_types and (self.sliding_window or 0) < self.block_size,
                f"sliding layers need a sliding_window of at least the block size, {self.block_size}",
            ),
            (
                not 0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id {self.mask_token_id} is no row of the embedding, which has {self.vocab_size}",
            ),
        ):
            if wrong:
                raise SettingsError(message)
        self._check_dflash2()
        for tap in self.target_layer_ids:
            if not 0 <= tap < self.num_target_layers:
                raise SettingsError(
                    f"target layer {tap} does not exist: the target has layers 0 to {self.num_target_layers - 1}"
                )
            if tap == self.num_target_layers - 1:
                raise SettingsError(
                    f"target layer {tap} is the last one; readers would take its output after the final norm. "
                    f"Tap layers up to {self.num_target_layers - 2}"
                )

    def _check_dflash2(self) -> None:
        parts = self.dflash2
        if parts is None:
            return
        for name, value in dataclasses.asdict(parts).items():
            if value < 1:
                raise SettingsError(f"{name} is {value} and has to be at least 1")
        if parts.conv_kernel_size > self.block_size:
            raise SettingsError(
                f"conv_kernel_size {parts.conv_kernel_size} is more than the block size, {self.block_size}: a "
                "convolution does not look beyond its block"
            )
        if self.hidden_size % parts.conv_group_size:
            raise SettingsError(
                f"conv_group_size {parts.conv_group_size} does not divide the hidden size, {self.hidden_size}"
            )
        if parts.selector_top_k > self.vocab_size:
            raise SettingsError(
                f"selector_top_k {parts.selector_top_k} is more than the tokens there are, {self.vocab_size}"
            )

    def layer_is_causal(self, layer: int) -> bool:
        """Whether slots of a block see only earlier slots in this layer."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of this layer in tokens, None for a full layer."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def to_json(self) -> dict[str, Any]:
        """The ``config.json``.

        RoPE stands there in both forms: transformers 4 reads ``rope_theta`` and takes 10000 without it, silently;
        transformers 5 reads ``rope_parameters``. The block size stands in both places that readers look at.
        """
        sliding = SLIDING in self.layer_types
        dflash: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "block_size": self.block_size,
        }
        if self.input_embedding_scale != 1.0:
            dflash["input_embedding_scale"] = self.input_embedding_scale
        if self.output_multiplier != 1.0:
            dflash["output_multiplier"] = self.output_multiplier
        if self.final_logit_softcapping is not None:
            dflash["final_logit_softcapping"] = self.final_logit_softcapping
        if sliding:
            dflash |= {"use_swa": True, "swa_window_size": self.sliding_window}
            if self.is_causal is not None:
                dflash["causal"] = self.is_causal
        if self.dflash2 is not None:
            dflash |= dataclasses.asdict(self.dflash2)
        document: dict[str, Any] = {
            "architectures": [PLAIN if self.dflash2 is None else SECOND],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": dflash,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "layer_types": list(self.layer_types),
            "max_window_layers": self.num_hidden_layers,
            "use_sliding_window": sliding,
            "sliding_window": self.sliding_window if sliding else None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": False,
            "use_cache": True,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
        }
        if self.is_causal is not None:
            document["is_causal"] = self.is_causal
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> DrafterConfig:
        """Read a ``config.json`` of this layout, with RoPE in either form.

        Raises:
            CheckpointError: the file describes something else, or a drafter with parts that are not supported here.
        """
        for part, kind in (("architectures", list), *((s, dict) for s in ("dflash_config", *_ROPE))):
            if document.get(part) is not None and not isinstance(document[part], kind):
                raise CheckpointError(f"config.json: {part} is {document[part]!r}, which is no {kind.__name__}")
        name = (document.get("architectures") or ["no architecture"])[0]
        if name not in (PLAIN, SECOND):
            raise CheckpointError(f"this is a {name}; only {PLAIN} and {SECOND} can be read")
        dflash = document.get("dflash_config") or {}
        rope = document.get("rope_parameters") or {}
        scaling = document.get("rope_scaling") or {}
        for section in (rope, scaling):
            kind = section.get("rope_type", section.get("type", "default"))
            if kind != "default":
                raise CheckpointError(f"rope_type {kind!r} is not supported; drafters use the default one")
        if rope.get("partial_rotary_factor", 1.0) != 1.0 or document.get("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError("a partial rotary embedding is not supported; drafters rotate the full head")
        for key, allowed in (("attention_bias", (False, None)), ("hidden_act", ("silu",))):
            if key in document and document[key] not in allowed:
                raise CheckpointError(f"{key} {document[key]!r} is not supported")
        if dflash.get("projector_type"):
            raise CheckpointError(f"projector_type {dflash['projector_type']!r} is not supported")
        try:
            layers, hidden = _size(document, "num_hidden_layers"), _size(document, "hidden_size")
            heads = _size(document, "num_attention_heads")
            targets = int(document.get("num_target_layers", dflash.get("num_target_layers", 0)))
            taps = dflash.get("target_layer_ids", document.get("target_layer_ids"))
            mask = dflash.get("mask_token_id", document.get("mask_token_id"))
            if mask is None:
                raise CheckpointError("config.json has no mask_token_id")
            softcap = dflash.get("final_logit_softcapping")
            causal = document.get("is_causal", dflash.get("causal"))
            return cls(
                hidden_size=hidden,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=_size(document, "num_key_value_heads", heads),
                head_dim=_size(document, "head_dim", hidden // heads),
                intermediate_size=_size(document, "intermediate_size"),
                vocab_size=_size(document, "vocab_size"),
                num_target_layers=targets,
                target_layer_ids=tuple(taps) if taps is not None else default_layer_ids(targets, layers),
                mask_token_id=int(mask),
                block_size=int(dflash.get("block_size", document.get("block_size", 16))),
                rms_norm_eps=float(document.get("rms_norm_eps", 1e-6)),
                rope_theta=float(rope.get("rope_theta", document.get("rope_theta", 10000.0))),
                max_position_embeddings=_size(document, "max_position_embeddings", 40960),
                layer_types=tuple(document.get("layer_types") or ()),
                sliding_window=document.get("sliding_window"),
                is_causal=None if causal is None else bool(causal),
                initializer_range=float(document.get("initializer_range", 0.02)),
                input_embedding_scale=float(dflash.get("input_embedding_scale", 1.0)),
                output_multiplier=float(dflash.get("output_multiplier", 1.0)),
                final_logit_softcapping=float(softcap) if softcap else None,
                bos_token_id=document.get("bos_token_id"),
                eos_token_id=document.get("eos_token_id"),
                dflash2=_dflash2(dflash, document) if name == SECOND else None,
            )
        except (SettingsError, TypeError, ValueError) as error:
            raise CheckpointError(f"config.json: {error}") from error


def _dflash2(dflash: Mapping[str, Any], document: Mapping[str, Any]) -> DFlash2:
    """Readers look into ``dflash_config`` first and beside it then, and have no defaults."""
    names = [field.name for field in dataclasses.fields(DFlash2)]
    return DFlash2(**{name: _size(dflash if name in dflash else document, name) for name in names})


def _size(document: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = document.get(name)
    if value is None and default is None:
        raise CheckpointError(f"config.json has no {name}")
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {name} is {value!r} and should be a number of at least 1")
    return value
