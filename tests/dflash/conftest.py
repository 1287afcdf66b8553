"""These tests are collected where the packages of the extra ``fxsafe[dflash]`` are installed, and only there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

_NEEDED = ("transformers", "datasets", "jsonargparse", "rich", "matplotlib", "safetensors")
collect_ignore_glob = ["test_*.py"] if any(importlib.util.find_spec(name) is None for name in _NEEDED) else []


@pytest.fixture(autouse=True, scope="session")
def offline_and_frugal() -> Iterator[None]:
    """No test may ask the network, and two threads of torch do for tensors this small."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)
