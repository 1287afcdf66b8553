"""Exports against what the loaders of two engines want. Neither engine runs here: these are facts read in their code.

``tools/engine_loaders.py`` runs that code, in environments that have the engines.

SGLang 0.5.23, below ``sglang/srt``: ``models/dflash.py`` (parameters, ``load_weights``), below ``speculative``
``dflash_utils.py`` (the config) and ``dflash_worker_v2.py`` (the mask token), and for RoPE
``utils/hf_transformers/common.py``.
vLLM 0.33.0, below ``vllm``: ``model_executor/models/qwen3_dflash.py`` (parameters, ``load_weights``, attention of a
layer), ``model_executor/models/registry.py``, ``transformers_utils/configs/eagle.py``, ``v1/worker/gpu/spec_decode``
(``utils.py`` and ``eagle/eagle3_utils.py``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import transformers
from safetensors.torch import load_file

from fxsafe.dflash.config import SLIDING, DrafterConfig
from fxsafe.dflash.export import export_drafter

SHAPES = [tiny.config(), tiny.sliding(), tiny.sliding(causal=None), tiny.config(target_layer_ids=(0, 1, 2))]


@pytest.fixture(params=SHAPES, ids=["full", "sliding", "sliding-causal", "three-taps"])
def shape(request: pytest.FixtureRequest) -> DrafterConfig:
    made: DrafterConfig = request.param
    return made


@pytest.fixture
def exported(shape: DrafterConfig, tmp_path: Path) -> Path:
    return export_drafter(tiny.drafter(shape).state_dict(), shape, tmp_path / "out")


@pytest.fixture
def config(exported: Path) -> Any:
    """As both engines get it: transformers reads the file, by its ``model_type``."""
    return transformers.AutoConfig.from_pretrained(exported)


def parameters(config: Any) -> dict[str, tuple[int, ...]]:
    """What both build from the config on one device; embedding and head are taken from the target."""
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    out: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.dflash_config["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_hidden_layers):
        out |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.qkv_proj.weight": ((heads + 2 * groups) * d, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, heads * d),
            f"layers.{i}.self_attn.q_norm.weight": (d,),
            f"layers.{i}.self_attn.k_norm.weight": (d,),
            f"layers.{i}.mlp.gate_up_proj.weight": (2 * inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    return out


STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def test_the_tensors_fill_each_parameter_of_both_engines_and_none_is_left_over(exported: Path, config: Any) -> None:
    wanted = parameters(config)
    parts: dict[str, list[tuple[int, ...]]] = {}
    for name, tensor in load_file(exported / "model.safetensors").items():
        # vLLM puts "model." before each name, SGLang takes names with it and without.
        assert not name.startswith("model.")
        # vLLM refuses the first word, and takes the others for a vocabulary or a head of the drafter's own.
        assert not re.search("mask_hidden|t2d|d2t|lm_head|embed_tokens", name)
        place = re.sub(r"(?<=\.)\w+_proj(?=\.)", lambda word: STACKED.get(word[0], word[0]), name)
        assert place in wanted, "SGLang passes over such a tensor without a word"
        parts.setdefault(place, []).append(tuple(tensor.shape))
    assert parts.keys() == wanted.keys()
    for name, (rows, *columns) in wanted.items():
        assert sum(part[0] for part in parts[name]) == rows
        assert {part[1:] for part in parts[name]} == {tuple(columns)}
        assert len(parts[name]) == {"qkv_proj": 3, "gate_up_proj": 2}.get(name.split(".")[-2], 1)


def test_both_engines_find_their_class(config: Any) -> None:
    # vLLM puts "DFlash" before other names, so that this one is its registry's entry; SGLang's class has this name.
    assert config.architectures == ["DFlashDraftModel"]
    assert config.hidden_act == "silu"
    assert config.attention_bias is False
    for name in ("quantization_config", "has_own_lm_head", "has_embed_tokens", "draft_vocab_size", "eagle_config"):
        assert not hasattr(config, name), "another branch of their loaders"
    assert "projector_type" not in config.dflash_config


def test_both_engines_read_taps_block_and_mask_token(config: Any, shape: DrafterConfig) -> None:
    dflash = config.dflash_config
    taps = dflash["target_layer_ids"]
    assert taps == list(shape.target_layer_ids)
    assert all(type(tap) is int and 0 <= tap < config.num_target_layers for tap in taps)
    # vLLM: mask_token_id of dflash_config; SGLang the same, a whole number below the target's vocabulary.
    assert type(dflash["mask_token_id"]) is int
    assert 0 <= dflash["mask_token_id"] == shape.mask_token_id < config.vocab_size
    # SGLang: block_size of dflash_config. vLLM is told by its user, who has to say block_size - 1.
    assert dflash["block_size"] == config.block_size == shape.block_size


def test_both_engines_turn_heads_as_the_trainer_did(config: Any, shape: DrafterConfig) -> None:
    if rope := getattr(config, "rope_parameters", None):  # transformers 5
        assert rope == {"rope_type": "default", "rope_theta": shape.rope_theta}
    else:
        assert config.rope_theta == shape.rope_theta
        assert config.rope_scaling is None
    for name in ("partial_rotary_factor", "is_neox_style", "rope_is_neox_style", "use_gemma_norm"):
        assert not hasattr(config, name)
    assert config.rms_norm_eps == shape.rms_norm_eps
    assert config.max_position_embeddings == shape.max_position_embeddings


def test_both_engines_give_each_layer_the_sight_that_it_was_trained_with(config: Any, shape: DrafterConfig) -> None:
    assert config.get_text_config() is config
    dflash = config.dflash_config
    for layer, kind in enumerate(config.layer_types):
        # vLLM: is_causal, else dflash_config.causal, else sliding layers are causal. SGLang: is_causal, else the same.
        said = getattr(config, "is_causal", None)
        assert (kind == SLIDING if said is None else said) == shape.layer_is_causal(layer)
        assert said is not None or "causal" not in dflash
        # vLLM: dflash_config.swa_window_size; SGLang: sliding_window.
        windows = {dflash["swa_window_size"], config.sliding_window} if kind == SLIDING else {None}
        assert windows == {shape.layer_window(layer)}
    # Without a sliding layer, use_swa would make all layers slide in vLLM.
    assert dflash.get("use_swa", False) == (SLIDING in config.layer_types)
