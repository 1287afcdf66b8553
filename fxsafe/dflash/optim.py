"""AdamW on fp32 master weights, schedules of the learning rate, clipping and an exponential moving average."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fxsafe.dflash.errors import CheckpointError

__all__ = ["Master", "OptimSettings", "learning_rate"]


@dataclasses.dataclass(frozen=True, slots=True)
class OptimSettings:
    """How the parameters move.

    Attributes:
        lr: peak learning rate.
        schedule: "cosine" and "linear" fall from the peak to ``min_lr``; "wsd" stays and falls over the last
            ``decay`` of the steps; "constant" stays.
        warmup: share of the steps over which the rate rises linearly from 0.
        min_lr: final rate of all schedules but "constant".
        decay: share of the steps for which "wsd" falls.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW, on matrices only.
        clip: greatest norm of the gradient; 0 for no limit.
        ema: decay of the moving average of the weights for each step, 0 for none. It is what is exported.
    """

    lr: float = 6e-4
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: float = 0.04
    min_lr: float = 0.0
    decay: float = 0.2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    ema: float = 0.0


def learning_rate(settings: OptimSettings, step: int, total: int) -> float:
    """The rate for step ``step`` of ``total``, counted from 0."""
    warm = round(settings.warmup * total)
    if step < warm:
        return settings.lr * (step + 1) / warm
    if settings.schedule == "constant":
        return settings.lr
    start = warm
    if settings.schedule == "wsd":
        start = max(warm, total - round(settings.decay * total))
        if step < start:
            return settings.lr
    done = (step - start) / max(1, total - start)
    share = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.min_lr + (settings.lr - settings.min_lr) * share


class Master:
    """The one copy of the weights that is trained, in fp32 on one device.

    Args:
        state: names and values of the parameters at the start.
        settings: how they move.
        device: where they live.
    """

    def __init__(self, state: Mapping[str, Tensor], settings: OptimSettings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.names = list(state)
        # A copy also where nothing is to be converted: the replica's tensors are its own.
        self.weights = [t.detach().to(device, torch.float32, copy=True) for t in state.values()]
        groups = [
            {"params": [w for w in self.weights if w.dim() == 2], "weight_decay": settings.weight_decay},
            {"params": [w for w in self.weights if w.dim() != 2], "weight_decay": 0.0},
        ]
        # Unfused on a GPU it would make temporaries of the size of all weights.
        fused = device.type == "cuda"
        self._steps_device = device if fused else torch.device("cpu")
        self._adam = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused
        )
        self.average = [w.clone() for w in self.weights] if settings.ema else []

    def update(self, grads: Sequence[Tensor], lr: float) -> tuple[float, bool]:
        """One step with gradients in the order of ``names``, fp32 on the master's device; they are consumed.

        Returns:
            The norm of the gradient before clipping and whether the step was made: not if the norm is not finite.
        """
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads))))
        value = float(norm)
        if not math.isfinite(value):
            return value, False
        if self.settings.clip and value > self.settings.clip:
            torch._foreach_mul_(list(grads), self.settings.clip / value)
        for group in self._adam.param_groups:
            group["lr"] = lr
        for weight, grad in zip(self.weights, grads, strict=True):
            weight.grad = grad
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        if self.average:
            torch._foreach_lerp_(self.average, self.weights, 1 - self.settings.ema)
        return value, True

    def best(self) -> dict[str, Tensor]:
        """The weights to evaluate and export: the moving average where there is one."""
        return dict(zip(self.names, self.average or self.weights, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """The whole state under flat names; references, not copies."""
        out: dict[str, Tensor] = {}
        for i, (name, weight) in enumerate(zip(self.names, self.weights, strict=True)):
            out[f"weight.{name}"] = weight
            if self.average:
                out[f"average.{name}"] = self.average[i]
            state = self._adam.state.get(weight)
            if state:
                out[f"first.{name}"], out[f"second.{name}"] = state["exp_avg"], state["exp_avg_sq"]
                out[f"steps.{name}"] = state["step"].reshape(1)
        return out

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state of :meth:`tensors`.

        Raises:
            CheckpointError: it is that of another model or has another moving average; nothing was changed.
        """
        for name, weight in zip(self.names, self.weights, strict=True):
            found = tensors.get(f"weight.{name}")
            if found is None or found.shape != weight.shape:
                raise CheckpointError(f"the checkpoint has no {name} of the shape {tuple(weight.shape)}")
        if self.average and f"average.{self.names[0]}" not in tensors:
            raise CheckpointError("the checkpoint has no moving average and the settings want one (optim.ema)")
        with torch.no_grad():
            for i, (name, weight) in enumerate(zip(self.names, self.weights, strict=True)):
                weight.copy_(tensors[f"weight.{name}"])
                if self.average:
                    self.average[i].copy_(tensors[f"average.{name}"])
                if f"first.{name}" in tensors:
                    self._adam.state[weight] = {
                        "step": tensors[f"steps.{name}"].reshape(()).to(self._steps_device, copy=True),
                        "exp_avg": tensors[f"first.{name}"].to(self.device, copy=True),
                        "exp_avg_sq": tensors[f"second.{name}"].to(self.device, copy=True),
                    }
