from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fxsafe.dflash.errors import CheckpointError
from fxsafe.dflash.optim import Master, OptimSettings, learning_rate

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        # Two steps of ten warm up; from there to min_lr, which the step behind the last one would have.
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125]),
        ("wsd", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325]),
        (
            "cosine",
            [0.5, 1.0, *(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8))],
        ),
    ],
)
def test_schedules_by_hand(schedule: Any, rates: list[float]) -> None:
    settings = OptimSettings(lr=1.0, schedule=schedule, warmup=0.2, min_lr=0.1, decay=0.4)
    assert [learning_rate(settings, step, 10) for step in range(10)] == pytest.approx(rates)


def test_a_run_of_one_step_has_its_peak_rate() -> None:
    assert learning_rate(OptimSettings(lr=3.0), 0, 1) == 3.0


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(4, 3, generator=generator).to(dtype), "b": torch.ones(3, dtype=dtype)}


def grads(number: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [scale * torch.randn(shape, generator=generator) for shape in ((4, 3), (3,))]


def test_steps_are_adamw_on_fp32_copies_with_decay_of_matrices_only() -> None:
    settings = OptimSettings(weight_decay=0.1, clip=0.0)
    master = Master(weights(torch.bfloat16), settings, CPU)
    mine = [weight.float().requires_grad_() for weight in weights(torch.bfloat16).values()]
    reference = torch.optim.AdamW(
        [{"params": mine[:1], "weight_decay": 0.1}, {"params": mine[1:], "weight_decay": 0.0}], lr=1e-2
    )
    for number in range(5):
        for weight, grad in zip(mine, grads(number), strict=True):
            weight.grad = grad
        reference.step()
        norm, moved = master.update(grads(number), 1e-2)
        assert moved
        assert norm == pytest.approx(float(torch.cat([g.flatten() for g in grads(number)]).norm()))
    assert all(weight.dtype == torch.float32 for weight in master.weights)
    assert all(torch.equal(a, b) for a, b in zip(master.weights, mine, strict=True))


def test_a_gradient_above_the_norm_is_scaled_down_to_it() -> None:
    clipped, scaled = (Master(weights(), OptimSettings(clip=clip, eps=1.0), CPU) for clip in (1.0, 0.0))
    norm, _ = clipped.update(grads(0, 100.0), 1e-2)
    assert norm > 100
    scaled.update([grad / norm for grad in grads(0, 100.0)], 1e-2)
    for ours, theirs in zip(clipped.weights, scaled.weights, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    master = Master(weights(), OptimSettings(), CPU)
    bad = grads(0)
    bad[1][0] = math.inf
    norm, moved = master.update(bad, 1e-2)
    assert not moved
    assert math.isinf(norm)
    assert all(torch.equal(a, b) for a, b in zip(master.weights, weights().values(), strict=True))


def test_the_moving_average_is_what_is_exported() -> None:
    master = Master(weights(), OptimSettings(ema=0.75), CPU)
    expected = [weight.clone() for weight in weights().values()]
    for number in range(3):
        master.update(grads(number), 1e-1)
        expected = [0.75 * e + 0.25 * w for e, w in zip(expected, master.weights, strict=True)]
    for name, average in zip(("a", "b"), expected, strict=True):
        torch.testing.assert_close(master.best()[name], average)
        assert not torch.equal(master.best()[name], master.tensors()[f"weight.{name}"])


def test_a_restored_state_goes_on_to_the_bit() -> None:
    settings = OptimSettings(ema=0.9, weight_decay=0.1)
    whole, first, second = (Master(weights(), settings, CPU) for _ in range(3))
    for number in range(4):
        whole.update(grads(number), 1e-2)
    for number in range(2):
        first.update(grads(number), 1e-2)
    second.restore({name: tensor.clone() for name, tensor in first.tensors().items()})
    for number in range(2, 4):
        second.update(grads(number), 1e-2)
    ours, theirs = second.tensors(), whole.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_state_of_another_model_changes_nothing() -> None:
    master = Master(weights(), OptimSettings(), CPU)
    with pytest.raises(CheckpointError, match=r"has no b of the shape \(3,\)"):
        master.restore({"weight.a": torch.zeros(4, 3), "weight.b": torch.zeros(4)})
    assert all(torch.equal(a, b) for a, b in zip(master.weights, weights().values(), strict=True))
    averaged = Master(weights(), OptimSettings(ema=0.9), CPU)
    with pytest.raises(CheckpointError, match="no moving average"):
        averaged.restore(Master(weights(), OptimSettings(), CPU).tensors())
