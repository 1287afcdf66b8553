"""One drafter on one device: a copy of the weights, the frozen head, and the sums of its gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fxsafe.dflash.anchors import make_blocks
from fxsafe.dflash.batches import Features
from fxsafe.dflash.compiling import compile_here
from fxsafe.dflash.config import DrafterConfig
from fxsafe.dflash.head import Head
from fxsafe.dflash.losses import ChunkLoss, LossSettings, candidate_loss, chunk_loss, objective
from fxsafe.dflash.masks import block_masks, dense_masks
from fxsafe.dflash.model import Drafter

__all__ = ["Replica", "ReplicaSettings"]


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How a drafter computes.

    Attributes:
        dtype: of weights and activations; masters and sums of gradients are fp32 always.
        compile: compile forward, backward and loss, in the drafter's own thread.
        backend: of torch.compile.
        attention: "flex" for flex_attention (its backward exists on CUDA only), "dense" for SDPA with a dense mask of
            the same cells, "auto" for flex on CUDA and dense elsewhere.
    """

    dtype: torch.dtype = torch.float32
    compile: bool = True
    backend: str = "inductor"
    attention: Literal["auto", "flex", "dense"] = "auto"


class Replica:
    """Not to be used by two threads at a time; the engine hands it from its thread to the main one and back.

    Args:
        config: of the drafter.
        head: of the target, on any device.
        device: where this drafter computes.
        settings: how.
        loss: what is minimised.
        around: put around the two functions before they are compiled, to watch them.
    """

    def __init__(
        self,
        config: DrafterConfig,
        head: Head,
        device: torch.device,
        settings: ReplicaSettings,
        loss: LossSettings,
        around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self.config, self.device, self.settings, self.loss = config, device, settings, loss
        self.head = head.to(device, settings.dtype)
        with torch.device(device):
            self.drafter = Drafter(config).to(settings.dtype)
        self._parameters = dict(self.drafter.named_parameters())
        self.sums: list[Tensor] = []
        self.tally: Tensor | None = None
        self._forward: Callable[..., Tensor] = self.drafter
        self._chunk: ChunkLoss = chunk_loss if config.dflash2 is None else candidate_loss
        if settings.compile:
            forward, chunk = self.drafter.forward, self._chunk
            if around is not None:
                forward, chunk = around(forward), around(chunk)
            self._forward = compile_here(forward, backend=settings.backend)
            self._chunk = compile_here(chunk, backend=settings.backend)
        flex = settings.attention == "flex" or (settings.attention == "auto" and device.type == "cuda")
        self._masks: Callable[..., Sequence[Any]] = block_masks if flex else dense_masks

    def wrap_compiled(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put something around the compiled functions, for experiments."""
        self._forward, self._chunk = wrap(self._forward), wrap(self._chunk)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy weights into place, converting them; compiled code stays valid."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state[name], non_blocking=True)

    def learn(self, features: Features) -> None:
        """Forward and backward of a micro-batch; gradients and the tally are added to the sums."""
        self._widen()
        total, tally = self._run(features)
        total.backward()  # type: ignore[no-untyped-call]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters.values()]
        for parameter in self._parameters.values():
            parameter.grad = None
        if self.sums:
            torch._foreach_add_(self.sums, grads)
        else:
            self.sums = grads
        self.tally = tally if self.tally is None else self.tally + tally

    def measure(self, features: Features) -> Tensor:
        """The tally of a micro-batch, without learning from it."""
        with torch.no_grad():
            return self._run(features)[1]

    def take(self) -> tuple[list[Tensor], Tensor | None]:
        """The sums, fp32 and in the order of the parameters, and the tally; both start anew."""
        self._widen()
        out = self.sums, self.tally
        self.sums, self.tally = [], None
        return out

    def _widen(self) -> None:
        """Make the sums fp32: a bf16 sum of many micro-batches loses the small ones.

        Only once something is to be added or they are wanted, as the gradients of a first micro-batch are what they are
        and take half the memory beside its activations; one after the other, so that there are never two copies.
        """
        for number in range(len(self.sums)):
            self.sums[number] = self.sums[number].float()

    def _run(self, features: Features) -> tuple[Tensor, Tensor]:
        batch, device = features.batch, self.device
        feats_BSF = features.feats_BSF.to(device, self.settings.dtype)
        ids_BS, learn_BS, anchors_BN, keep_BN = (
            t.to(device, non_blocking=True) for t in (batch.ids_BS, batch.learn_BS, batch.anchors_BN, batch.keep_BN)
        )
        config = self.config
        blocks = make_blocks(ids_BS, learn_BS, anchors_BN, keep_BN, config.block_size, config.mask_token_id)
        masks = self._masks(config, anchors_BN, keep_BN, ids_BS.shape[1])
        noise_BQH = self.head.embed(blocks.ids_BNK.flatten(1))
        hidden_BQH = self._forward(feats_BSF, noise_BQH, blocks.positions_BNK.flatten(1), masks)
        teacher = None
        if features.last_BSH is not None:
            # The target's distribution of the token at anchor + k stands at anchor + k - 1.
            at = (blocks.positions_BNK - 1).clamp(0, ids_BS.shape[1] - 1).flatten(1)
            last_BSH = features.last_BSH.to(device, self.settings.dtype)
            teacher = last_BSH.gather(1, at[..., None].expand(-1, -1, last_BSH.shape[-1]))
            teacher = teacher.view(*blocks.positions_BNK.shape, -1)
        selector = self.drafter.candidate_selector
        return objective(hidden_BQH, blocks, self.head, self.loss, teacher, self._chunk, selector)
