"""What exists on a GPU only: flex_attention's backward and the autograd engine's own threads."""

from __future__ import annotations

import threading

import pytest
import test_dflash_engine
import tiny
import torch

import fxsafe
from fxsafe.dflash.compiling import RECOMPILE_LIMIT, promise_recompile_limit, recompile_limit_here
from fxsafe.dflash.engine import Engine
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.optim import Master, OptimSettings
from fxsafe.dflash.replica import Replica, ReplicaSettings
from fxsafe.dflash.target import Target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def trained(attention: str, compile: bool, drafters: int) -> tuple[list[torch.Tensor], int]:  # noqa: A002
    """Weights after some steps and graphs compiled after the warm-up."""
    device = torch.device("cuda:0")
    target = Target(tiny.target_model("qwen3").to(device))
    config = target.drafter_config(layers=2, block_size=4, mask_token_id=63, taps=(0, 2), head_dim=16)
    how = ReplicaSettings(compile=compile, attention=attention)  # type: ignore[arg-type]
    replicas = [Replica(config, target.head, device, how, LossSettings()) for _ in range(drafters)]
    torch.manual_seed(0)
    replicas[0].drafter.initialize(torch.Generator(device).manual_seed(0))
    master = Master(replicas[0].drafter.state_dict(), OptimSettings(), device)
    with Engine([target], replicas, master, test_dflash_engine.batches(bucket=128), per_step=4) as engine:
        for _ in range(3):
            engine.step(1e-3)
        graphs = sum(engine.step(1e-3).graphs for _ in range(10))
    return [w.cpu() for w in master.weights], graphs


def test_flex_and_dense_attention_learn_the_same() -> None:
    dense, _ = trained("dense", False, 1)
    with fxsafe.install():
        flexed, graphs = trained("flex", True, 2)
    assert graphs == 0
    for ours, theirs in zip(flexed, dense, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)


def test_the_recompile_limit_reaches_the_threads_of_the_backward() -> None:
    before = recompile_limit_here()
    try:
        promise_recompile_limit()
        seen: list[tuple[int, int]] = []
        x = torch.ones(2, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: seen.append((recompile_limit_here(), threading.get_ident())))
        y.sum().backward()
        assert seen[0][0] == RECOMPILE_LIMIT
        assert seen[0][1] != threading.get_ident()
    finally:
        promise_recompile_limit(before)


def test_a_state_restored_on_a_gpu_goes_on_to_the_bit() -> None:
    device = torch.device("cuda:0")
    generator = torch.Generator().manual_seed(0)
    start = {"a": torch.randn(64, 32, generator=generator), "b": torch.ones(32)}
    grads = [[torch.randn(t.shape, generator=generator) for t in start.values()] for _ in range(4)]
    whole, first, second = (Master(start, OptimSettings(), device) for _ in range(3))
    for some in grads:
        whole.update([g.to(device) for g in some], 1e-2)
    for some in grads[:2]:
        first.update([g.to(device) for g in some], 1e-2)
    second.restore({name: tensor.cpu() for name, tensor in first.tensors().items()})
    for some in grads[2:]:
        second.update([g.to(device) for g in some], 1e-2)
    ours, theirs = second.tensors(), whole.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
