"""Whole runs in small: what is measured in training is what decoding gains."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import torch

from fxsafe.dflash import demo
from fxsafe.dflash.batches import Example, collate
from fxsafe.dflash.config import DrafterConfig
from fxsafe.dflash.demo import DemoSize, run_demo
from fxsafe.dflash.engine import Engine, StepReport
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.optim import Master, OptimSettings
from fxsafe.dflash.replica import Replica, ReplicaSettings
from fxsafe.dflash.speculate import decode, evaluate
from fxsafe.dflash.target import Target
from fxsafe.dflash.train import Outcome, Trainer

CPU = torch.device("cpu")


class Learnt(NamedTuple):
    """A drafter that was trained on what a tiny target says."""

    target: Target
    config: DrafterConfig
    prompts: list[list[int]]
    replica: Replica
    master: Master
    reports: list[StepReport]


EAGER = ReplicaSettings(compile=False)


def learn(device: torch.device = CPU, settings: ReplicaSettings = EAGER, bucket: int = 32, **shape: Any) -> Learnt:
    target = Target(tiny.target_model("qwen3").to(device))
    config = target.drafter_config(
        layers=2, block_size=4, mask_token_id=63, taps=(0, 1, 2), intermediate_size=96, head_dim=16, **shape
    )
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randint(3, 60, (8, 6), generator=generator).tolist()
    examples = []
    for prompt in prompts:
        text = [*prompt, *decode(target, prompt, new_tokens=25).tokens]
        examples.append(Example(text, [i >= len(prompt) for i in range(len(text))]))
    batches = (collate(examples, index=i, seed=0, anchors=10, bucket=bucket) for i in range(10**9))
    replica = Replica(config, target.head, device, settings, LossSettings())
    replica.drafter.initialize(torch.Generator(device).manual_seed(0))
    master = Master(replica.drafter.state_dict(), OptimSettings(), device)
    with Engine([target], [replica], master, batches, per_step=1) as engine:
        reports = [engine.step(5e-3 * min(1.0, (200 - step) / 100)) for step in range(200)]
    return Learnt(target, config, prompts, replica, master, reports)


def test_a_drafter_that_knows_its_texts_gains_in_decoding_what_training_measured() -> None:
    """Catches leaks and shifts: with either, training looks as good and decoding gains nothing."""
    target, _, prompts, replica, _, reports = learn()
    simulated = reports[-1].tally.metrics()
    assert simulated["accuracy"] > 0.9
    real = evaluate(target, replica.drafter, target.head, prompts, new_tokens=25)
    assert real.equal == len(prompts)
    assert real.acceptance_pooled == pytest.approx(simulated["accept_length"], rel=0.15)
    assert real.acceptance_pooled > 3


def test_a_demo_that_is_stopped_ends_without_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Trainer):
        def run(self, **words: Any) -> Outcome:
            self.stop()
            return super().run(**words)

    monkeypatch.setattr(demo, "Trainer", Stopped)
    size = DemoSize(hidden=64, length=48, target_steps=1, target_batch=1, drafter_steps=25, anchors=6, compile=False)
    assert run_demo(tmp_path / "demo", size, lambda line: None) is None
    assert (tmp_path / "demo" / demo.MARK).exists()
    assert not (tmp_path / "demo" / "evaluation.json").exists()


def test_the_demo_in_small(tmp_path: Path) -> None:
    size = DemoSize(
        hidden=64, length=48, target_steps=60, target_batch=4, drafter_steps=25, anchors=6, prompts=2, new_tokens=24,
        compile=False,
    )  # fmt: skip
    said: list[str] = []
    result = run_demo(tmp_path / "demo", size, said.append)
    assert result is not None
    for name in ("untrained", "trained"):
        assert result[name]["equal"] == 2
        assert result[name]["new_tokens"] == 48
    assert result["trained"]["acceptance_pooled"] > result["untrained"]["acceptance_pooled"]
    assert (tmp_path / "demo" / "evaluation.json").exists()
    alone, drafted = (
        next(line for line in said if line.startswith(start)) for start in ("target alone:", "with the drafter:")
    )
    own, joined = (line[20 : line.rindex("   (")].replace("|", "") for line in (alone, drafted))
    assert len(own) >= 24
    assert joined == own
    assert "(untrained 1." in said[-1]
    assert said[-1].endswith("greedy text equal to the target's own in 2 of 2")
