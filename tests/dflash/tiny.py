"""Models small enough for tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from fxsafe.dflash.anchors import make_blocks
from fxsafe.dflash.config import SLIDING, DFlash2, DrafterConfig
from fxsafe.dflash.head import Head
from fxsafe.dflash.masks import dense_masks
from fxsafe.dflash.model import Drafter

VOCAB = 64

KEEPS_ORDER = hasattr(torch._C._dynamo.eval_frame, "_set_lru_cache")
"""From torch 2.10. Before, one thread can miss the variant that another one moves, and compile it once more."""


def config(**changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "num_target_layers": 4,
        "target_layer_ids": (0, 2),
        "mask_token_id": VOCAB - 1,
        "block_size": 4,
    }
    return DrafterConfig(**(values | changes))


def sliding(window: int = 6, causal: bool | None = False) -> DrafterConfig:
    return config(layer_types=("full_attention", SLIDING), sliding_window=window, is_causal=causal)


def second(**changes: Any) -> DrafterConfig:
    """Of DFlash 2."""
    return config(dflash2=DFlash2(conv_group_size=8, selector_rank=6, selector_top_k=5), **changes)


def drafter(shape: DrafterConfig, seed: int = 0, std: float = 0.2) -> Drafter:
    """Weights larger than usual, so that attention is far from uniform."""
    model = Drafter(shape)
    generator = torch.Generator().manual_seed(seed)
    model.initialize(generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=std)
    return model


def head(rows: int = VOCAB, hidden: int = 32, seed: int = 1) -> Head:
    generator = torch.Generator().manual_seed(seed)
    return Head(torch.randn(rows, hidden, generator=generator), torch.randn(rows, hidden, generator=generator))


def inputs(shape: DrafterConfig, anchors: list[int], length: int = 24, batch: int = 2, seed: int = 2) -> Any:
    """ids, features and the blocks at the anchors, the same ones in each sequence."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB - 2, (batch, length), generator=generator)
    feats = torch.randn(batch, length, 2 * shape.hidden_size, generator=generator)
    at = torch.tensor([anchors] * batch)
    keep = torch.ones_like(at, dtype=torch.bool)
    return ids, feats, make_blocks(ids, torch.ones_like(ids), at, keep, shape.block_size, shape.mask_token_id)


def hidden_states(model: Drafter, feats: torch.Tensor, blocks: Any, head: Head) -> torch.Tensor:
    """[B, N, K, H], of all blocks at once and with dense masks, as in training."""
    noise, positions = head.embed(blocks.ids_BNK.flatten(1)), blocks.positions_BNK.flatten(1)
    masks = dense_masks(model.config, blocks.anchors_BN, blocks.keep_BN, feats.shape[1])
    out: torch.Tensor = model(feats, noise, positions, masks)
    return out.view(*blocks.ids_BNK.shape, -1)


_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def target_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random causal LM of a family of transformers, in eval mode."""
    llama = {**_SIZES, **_SPECIAL, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
    config_class, values = {
        "qwen3": (transformers.Qwen3Config, llama | {"tie_word_embeddings": False}),
        "llama": (transformers.LlamaConfig, llama),
        "gemma": (transformers.GemmaConfig, llama),
        "gemma2": (transformers.Gemma2Config, llama | {"final_logit_softcapping": 5.0}),
        "mixtral": (
            transformers.MixtralConfig,
            llama | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        ),
        "gpt_neox": (transformers.GPTNeoXConfig, {**_SIZES, **_SPECIAL, "intermediate_size": 48}),
        "gpt2": (
            transformers.GPT2Config,
            {**_SPECIAL, "vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128},
        ),
        "bloom": (
            transformers.BloomConfig,
            {**_SPECIAL, "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 4, "n_head": 4},
        ),
        "opt": (
            transformers.OPTConfig,
            {
                **_SIZES,
                **_SPECIAL,
                "ffn_dim": 48,
                "word_embed_proj_dim": 16,
                "max_position_embeddings": 128,
            },
        ),
    }[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config_class(**(values | {"initializer_range": 0.3} | changes))
    )
    return model.eval()
