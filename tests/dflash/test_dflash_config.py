from __future__ import annotations

from typing import Any

import pytest
import tiny

from fxsafe.dflash.config import DFlash2, DrafterConfig, default_layer_ids
from fxsafe.dflash.errors import CheckpointError, SettingsError


@pytest.mark.parametrize(
    ("target", "drafter", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (40, 5, (1, 10, 19, 28, 37)),
        (28, 5, (1, 7, 13, 19, 25)),
        (24, 5, (1, 6, 11, 16, 21)),
        (32, 5, (1, 8, 15, 22, 29)),
        (48, 5, (1, 12, 23, 34, 45)),
        (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)),
        (36, 1, (18,)),
        (4, 3, (1, 1, 1)),
    ],
)
def test_default_layers_are_those_of_the_reference(target: int, drafter: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(target, drafter) == ids


def test_a_target_of_few_layers_needs_named_ones() -> None:
    with pytest.raises(SettingsError, match="name the ids yourself"):
        default_layer_ids(3, 2)


@pytest.mark.parametrize("shape", [tiny.config(), tiny.sliding(), tiny.sliding(causal=None), tiny.second()], ids=str)
def test_json_and_back(shape: DrafterConfig) -> None:
    assert DrafterConfig.from_json(shape.to_json()) == shape


def test_rope_is_read_in_either_form() -> None:
    document = tiny.config(rope_theta=123456.0).to_json()
    old = {k: v for k, v in document.items() if k != "rope_parameters"}
    new = {k: v for k, v in document.items() if k not in ("rope_theta", "rope_scaling")}
    assert DrafterConfig.from_json(old).rope_theta == DrafterConfig.from_json(new).rope_theta == 123456.0


def test_transformers_reads_the_rope_that_was_written() -> None:
    from transformers import Qwen3Config

    document = tiny.config(rope_theta=123456.0).to_json()
    read = Qwen3Config(**{k: v for k, v in document.items() if k != "torch_dtype"})
    assert read.rope_parameters["rope_theta"] == 123456.0
    assert document["rope_theta"] == 123456.0, "transformers 4 reads this one"


def test_gemma_like_targets_are_written_down() -> None:
    shape = tiny.config(input_embedding_scale=5.5, output_multiplier=0.5, final_logit_softcapping=30.0)
    document = shape.to_json()
    assert document["dflash_config"]["input_embedding_scale"] == 5.5
    assert document["dflash_config"]["final_logit_softcapping"] == 30.0
    assert DrafterConfig.from_json(document) == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlashSpeculator"]}, "this is a DFlashSpeculator"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "no mask_token_id"),
        ({"dflash_config": {"target_layer_ids": [3], "mask_token_id": 1}}, "is the last one"),
    ],
)
def test_foreign_configs_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        DrafterConfig.from_json(tiny.config().to_json() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layer_ids": (4,)}, "does not exist"),
        ({"target_layer_ids": (3,)}, "is the last one"),
        ({"target_layer_ids": ()}, "empty"),
        ({"mask_token_id": 64}, "no row"),
        ({"block_size": 1}, "block_size"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 2}, "sliding_window"),
        ({"dflash2": DFlash2(conv_group_size=5)}, "conv_group_size 5 does not divide the hidden size, 32"),
        ({"dflash2": DFlash2(conv_kernel_size=5)}, "conv_kernel_size 5 is more than the block size, 4"),
        ({"dflash2": DFlash2(selector_top_k=65)}, "selector_top_k 65 is more than the tokens there are, 64"),
        ({"dflash2": DFlash2(selector_rank=0)}, "selector_rank is 0 and has to be at least 1"),
    ],
)
def test_settings_without_a_meaning_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        tiny.config(**change)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", "wide", "hidden_size is 'wide' and should be a number"),
        ("hidden_size", None, "has no hidden_size"),
        ("num_key_value_heads", [2], r"num_key_value_heads is \[2\]"),
        ("num_attention_heads", 0, "num_attention_heads is 0 and should be a number of at least 1"),
        ("rope_theta", "far", "far"),
        ("dflash_config", [1], r"dflash_config is \[1\], which is no dict"),
        ("rope_parameters", "default", "rope_parameters is 'default', which is no dict"),
        ("architectures", "DFlashDraftModel", "architectures is 'DFlashDraftModel', which is no list"),
    ],
)
def test_a_config_with_something_else_in_a_place_is_refused(name: str, value: Any, message: str) -> None:
    document = tiny.config().to_json() | {"rope_parameters": None, name: value}
    with pytest.raises(CheckpointError, match=message):
        DrafterConfig.from_json(document)


def test_a_plain_drafter_says_nothing_of_dflash2() -> None:
    document = tiny.config().to_json()
    assert document["architectures"] == ["DFlashDraftModel"]
    assert not [name for part in (document, document["dflash_config"]) for name in part if name[:4] in ("conv", "sele")]
    assert tiny.second().to_json()["architectures"] == ["DFlash2DraftModel"]


def test_the_sizes_of_dflash2_are_read_where_readers_look() -> None:
    document = tiny.second().to_json()
    rank = document["dflash_config"].pop("selector_rank")
    with pytest.raises(CheckpointError, match=r"config\.json has no selector_rank"):
        DrafterConfig.from_json(document)
    assert DrafterConfig.from_json(document | {"selector_rank": rank}) == tiny.second()
    with pytest.raises(CheckpointError, match="conv_group_size 7 does not divide"):
        DrafterConfig.from_json(
            document | {"selector_rank": rank, "dflash_config": document["dflash_config"] | {"conv_group_size": 7}}
        )
