"""The full state of a run on disk: one directory for each save, complete or absent, of safetensors and JSON only."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from fxsafe.dflash.errors import CheckpointError

__all__ = ["latest", "list_checkpoints", "load_checkpoint", "save_checkpoint"]

_FORMAT = "fxsafe-dflash-checkpoint"
_VERSION = 1
_KEYS: dict[str, type] = {
    "version": int,
    "step": int,
    "blake2b": str,
    "config": dict,
    "settings.data": dict,
    "settings.run": dict,
    "position.epoch": int,
    "position.offset": int,
}
"""what a ``state.json`` must have"""
_LATER: dict[str, type] = {"data": dict}
"""what one of an earlier release lacks"""
_NAME = re.compile(r"step-(\d{8})")


def save_checkpoint(
    root: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keep: int = 3
) -> Path:
    """Write ``root/step-NNNNNNNN`` and delete all but the last ``keep``.

    Everything is written beside the final name, flushed to the disk and renamed; the older ones go only then, so that
    a full disk costs the new checkpoint and nothing else.

    Args:
        root: directory of the run's checkpoints; made if absent.
        step: finished optimizer steps.
        tensors: any device; duplicates of storage are not allowed.
        state: JSON.
        keep: at least 1.

    Raises:
        CheckpointError: it could not be written; the older ones are untouched.
    """
    final = root / f"step-{step:08d}"
    new = root / f".new-{step:08d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for rest in root.glob(".new-*"):  # of a process that was killed
            shutil.rmtree(rest, ignore_errors=True)
        new.mkdir()
        file = new / "state.safetensors"
        save_file({name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}, file)
        document = {"format": _FORMAT, "version": _VERSION, "step": step, "blake2b": _digest(file), **state}
        (new / "state.json").write_text(json.dumps(document, indent=2) + "\n")
        for path in (file, new / "state.json", new):
            _flush(path)
        if final.exists():
            shutil.rmtree(final)
        new.rename(final)
        _flush(root)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        kept = latest(root)
        raise CheckpointError(
            f"checkpoint {final} cannot be written: {error}; "
            + (f"the last good one is {kept.name}" if kept else "there is no older one")
        ) from error
    for old in list_checkpoints(root)[: -max(1, keep)]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, the oldest first."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if _NAME.fullmatch(p.name) and (p / "state.json").exists())


def latest(root: Path) -> Path | None:
    """The newest one, None if there is none."""
    found = list_checkpoints(root)
    return found[-1] if found else None


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what was saved, after checking that it is whole.

    Returns:
        Tensors on the CPU, and the state with "step" in it.

    Raises:
        CheckpointError: damaged, foreign, or of a later version; names the next older one.
    """
    try:
        document = json.loads((path / "state.json").read_text())
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is no checkpoint of this trainer")
        if type(document.get("version")) is int and document["version"] > _VERSION:
            raise CheckpointError(f"{path} was written by a later version of this trainer")
        _check_keys(document, path)
        file = path / "state.safetensors"
        if _digest(file) != document["blake2b"]:
            raise CheckpointError(f"{path} is damaged: its tensors are not those that were saved{_older(path)}")
        return load_file(file), document
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}{_older(path)}") from error


def _check_keys(document: Mapping[str, Any], path: Path) -> None:
    later = {name: kind for name, kind in _LATER.items() if name in document}
    for name, kind in (_KEYS | later).items():
        value: Any = document
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                raise CheckpointError(f"{path / 'state.json'} lacks {name}{_older(path)}")
            value = value[part]
        if type(value) is not kind:  # True is no number
            words = {int: "a whole number", str: "a text", dict: "an object"}[kind]
            raise CheckpointError(f"{path / 'state.json'}: {name} is {value!r} and should be {words}{_older(path)}")


def _older(path: Path) -> str:
    before = [p for p in list_checkpoints(path.parent) if p.name < path.name]
    return f"; an older one is {before[-1]}, from which a run goes on if {path.name} is moved away" if before else ""


def _digest(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
