"""Drafters on disk in z-lab's layout: ``config.json`` and ``model.safetensors``, bf16, nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fxsafe.dflash.config import PLAIN, SECOND, DrafterConfig
from fxsafe.dflash.errors import CheckpointError
from fxsafe.dflash.model import Drafter

__all__ = ["export_drafter", "load_drafter", "load_into", "refuse_other_than_drafter", "tensor_shapes"]

_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
"""without ``.weight``: z-lab's package puts it there itself"""


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a drafter's tensors: 3 and 11 for each layer; DFlash 2 has 3 and 4 for each layer more."""
    hidden, d = config.hidden_size, config.head_dim
    heads, groups, inner = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    out: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_hidden_layers):
        out |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in (
                ("input_layernorm", (hidden,)),
                ("post_attention_layernorm", (hidden,)),
                ("self_attn.q_proj", (heads * d, hidden)),
                ("self_attn.k_proj", (groups * d, hidden)),
                ("self_attn.v_proj", (groups * d, hidden)),
                ("self_attn.o_proj", (hidden, heads * d)),
                ("self_attn.q_norm", (d,)),
                ("self_attn.k_norm", (d,)),
                ("mlp.gate_proj", (inner, hidden)),
                ("mlp.up_proj", (inner, hidden)),
                ("mlp.down_proj", (hidden, inner)),
            )
        }
    if (parts := config.dflash2) is not None:
        kernels = 2 * parts.conv_kernel_size * (hidden // parts.conv_group_size)
        for i in range(config.num_hidden_layers):
            for name in ("attention_conv", "mlp_conv"):
                out[f"layers.{i}.{name}.base_kernel"] = (2, parts.conv_kernel_size, hidden)
                out[f"layers.{i}.{name}.kernel_projection.weight"] = (kernels, hidden)
        out |= dict.fromkeys(_CODEBOOKS, (config.vocab_size, parts.selector_rank))
        out["candidate_selector.hidden_projection.weight"] = (parts.selector_rank, hidden)
    return out


def export_drafter(state: Mapping[str, Tensor], config: DrafterConfig, directory: str | os.PathLike[str]) -> Path:
    """Write a drafter for z-lab's package, SGLang and vLLM, and read it back to compare.

    SGLang passes over tensors whose names it does not know, and vLLM over those that are not there, without a word, so
    that a wrong file would run, and draft badly.
    The directory appears complete or not at all; an older export of the same name is replaced.

    Raises:
        CheckpointError: the state does not fit the config, the disk refuses, or what was read back differs.
    """
    given, path = Path(directory), Path(os.path.abspath(directory))  # "." has no name to write a new one beside
    _check_shapes({name: tuple(tensor.shape) for name, tensor in state.items()}, config, "the drafter")
    half = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in state.items()}
    refuse_other_than_drafter(path)
    new = path.with_name(f".{path.name}.new")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        save_file(half, new / "model.safetensors", metadata={"format": "pt"})
        (new / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")
        again, read = load_drafter(new)
        if again != config or any(not torch.equal(half[name], read[name]) for name in half):
            raise CheckpointError(f"{path}: what was read back is not what was written; check the disk")
        if path.exists():
            shutil.rmtree(path)
        new.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return given


def refuse_other_than_drafter(directory: str | os.PathLike[str]) -> None:
    """See that an export to this place would replace nothing, or an older export.

    Raises:
        CheckpointError: it would replace something else.
    """
    path = Path(os.path.abspath(directory))
    if not _replaceable(path):
        raise CheckpointError(
            f"{path} exists and holds something else than a drafter{_beside(path)}; move it away, or choose another "
            "directory"
        )
    if path.exists() and path.samefile(os.curdir):
        raise CheckpointError(f"{path} is where this command runs, and would be replaced; choose another directory")


def load_drafter(directory: str | os.PathLike[str]) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a drafter, of one file or several, with or without the prefix ``model.``, plain or DFlash 2.

    Returns:
        The config and the tensors on the CPU in the dtype of the file.

    Raises:
        CheckpointError: the directory holds no drafter that can be read completely.
    """
    path = Path(directory)
    try:
        document = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} holds no readable config.json: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}/config.json is no JSON object")
    config = DrafterConfig.from_json(document)
    state: dict[str, Tensor] = {}
    try:
        for file in _files(path):
            state |= {_name(name): tensor for name, tensor in load_file(file).items()}
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"the tensors of {path} cannot be read: {error}") from error
    _check_shapes({name: tuple(tensor.shape) for name, tensor in state.items()}, config, str(path))
    return config, state


def load_into(drafter: Drafter, state: Mapping[str, Tensor]) -> None:
    """Copy tensors into a drafter, whatever its device and dtype."""
    drafter.load_state_dict(dict(state), strict=True)


def _replaceable(path: Path) -> bool:
    """Whether there is nothing, or an export of ours and nothing beside it: a target has a config.json too."""
    if not path.exists():
        return True
    if not path.is_dir() or _beside(path):
        return False
    if not (path / "config.json").exists():
        return not any(path.iterdir())
    try:
        document = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("architectures") in ([PLAIN], [SECOND])


def _beside(path: Path) -> str:
    """What a directory holds beside an export, as words."""
    names = {p.name for p in path.iterdir()} - {"config.json", "model.safetensors"} if path.is_dir() else ()
    return f" ({sorted(names)[0]})" if names else ""


def _name(name: str) -> str:
    """The layout's name of a tensor; trainers that hold codebooks as embeddings write ``.weight`` behind theirs."""
    name = name.removeprefix("model.")
    short = name.removesuffix(".weight")
    return short if short in _CODEBOOKS else name


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [path / "model.safetensors"]


def _check_shapes(found: Mapping[str, Any], config: DrafterConfig, what: str) -> None:
    expected = tensor_shapes(config)
    if missing := sorted(expected.keys() - found.keys()):
        raise CheckpointError(f"{what} lacks {len(missing)} tensors, the first being {missing[0]}")
    if extra := sorted(found.keys() - expected.keys()):
        raise CheckpointError(f"{what} has {len(extra)} tensors too many, the first being {extra[0]}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise CheckpointError(f"{what}: {name} has the shape {tuple(found[name])} instead of {shape}")
