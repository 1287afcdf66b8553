"""What exists on a GPU only: flex_attention's backward and the autograd engine's own threads."""

from __future__ import annotations

import threading

import pytest
import test_dflash_engine
import test_dflash_learning
import tiny
import torch

import fxsafe
from fxsafe.dflash.compiling import RECOMPILE_LIMIT, promise_recompile_limit, recompile_limit_here
from fxsafe.dflash.config import DFlash2
from fxsafe.dflash.engine import Engine
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.optim import Master, OptimSettings
from fxsafe.dflash.replica import Replica, ReplicaSettings
from fxsafe.dflash.speculate import evaluate
from fxsafe.dflash.target import Target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


PARTS = DFlash2(conv_group_size=8, selector_rank=6, selector_top_k=5)
KINDS = pytest.mark.parametrize("parts", [None, PARTS], ids=["plain", "dflash2"])


def trained(
    attention: str,
    compile: bool,  # noqa: A002
    drafters: int,
    parts: DFlash2 | None,
) -> tuple[dict[str, torch.Tensor], int]:
    """Weights after some steps and graphs compiled after the warm-up."""
    device = torch.device("cuda:0")
    target = Target(tiny.target_model("qwen3").to(device))
    config = target.drafter_config(layers=2, block_size=4, mask_token_id=63, taps=(0, 2), head_dim=16, dflash2=parts)
    how = ReplicaSettings(compile=compile, attention=attention)  # type: ignore[arg-type]
    replicas = [Replica(config, target.head, device, how, LossSettings()) for _ in range(drafters)]
    torch.manual_seed(0)
    replicas[0].drafter.initialize(torch.Generator(device).manual_seed(0))
    master = Master(replicas[0].drafter.state_dict(), OptimSettings(), device)
    with Engine([target], replicas, master, test_dflash_engine.batches(bucket=128), per_step=4) as engine:
        for _ in range(3):
            engine.step(1e-3)
        graphs = sum(engine.step(1e-3).graphs for _ in range(10))
    return {name: w.cpu() for name, w in zip(master.names, master.weights, strict=True)}, graphs


@KINDS
def test_flex_and_dense_attention_learn_the_same(parts: DFlash2 | None) -> None:
    dense, _ = trained("dense", False, 1, parts)
    with fxsafe.install():
        flexed, graphs = trained("flex", True, 2, parts)
    assert graphs == 0
    for name, theirs in dense.items():
        torch.testing.assert_close(flexed[name], theirs, atol=1e-3, rtol=1e-2, msg=lambda text, n=name: f"{n}: {text}")


@KINDS
def test_the_same_seed_gives_the_same_bits(parts: DFlash2 | None) -> None:
    with fxsafe.install():
        first, second = (trained("flex", True, 2, parts)[0] for _ in range(2))
    assert [name for name, weight in first.items() if not torch.equal(weight, second[name])] == []


def test_a_dflash2_drafter_that_knows_its_texts_gains_in_decoding_what_training_measured() -> None:
    with fxsafe.install():
        target, _, prompts, replica, _, reports = test_dflash_learning.learn(
            torch.device("cuda:0"), ReplicaSettings(attention="flex"), bucket=128, dflash2=PARTS, is_causal=True
        )
    first, simulated = reports[0].tally.metrics(), reports[-1].tally.metrics()
    assert simulated["loss"] < first["loss"] / 4
    assert simulated["selector_loss"] < first["selector_loss"] / 4
    assert simulated["accuracy"] > 0.9
    assert simulated["candidate_recall"] > 0.95
    assert sum(report.graphs for report in reports[3:]) == 0
    real = evaluate(target, replica.drafter, target.head, prompts, new_tokens=25)
    assert real.equal == len(prompts)
    assert real.acceptance_pooled == pytest.approx(simulated["accept_length"], rel=0.15)
    assert real.acceptance_pooled > 3


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
