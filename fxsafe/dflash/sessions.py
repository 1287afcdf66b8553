"""What a target and a drafter remember while they decode one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxsafe.dflash.head import Head
from fxsafe.dflash.model import ContextKV, Drafter
from fxsafe.dflash.target import Target

__all__ = ["DraftSession", "TargetSession"]


class TargetSession:
    """A target in the middle of a sequence, which can take tokens back.

    With a cache where transformers has one that can be cropped; a target that cannot roll back (linear attention,
    sliding windows before transformers 5) computes the whole prefix again each time, which is slow and right.

    Args:
        target: of the sequence.
        taps: layers whose outputs are wanted, may be empty.
        cached: False to do without a cache in any case.
    """

    def __init__(self, target: Target, taps: Sequence[int], *, cached: bool = True) -> None:
        self._target, self._taps = target, tuple(taps)
        self._cache: Any = None
        self._records = False
        if cached:
            self._cache, self._records = _croppable_cache(target)
        self._ids = torch.empty(1, 0, dtype=torch.int64, device=target.device)

    @property
    def length(self) -> int:
        """Tokens that were fed and not taken back."""
        return self._ids.shape[1]

    def feed(self, ids_1L: Tensor, *, last: bool = False) -> tuple[Tensor, Tensor | None]:
        """Logits [1, L, V] behind each token (behind the last one only if ``last``) and features [1, L, F]."""
        count = ids_1L.shape[1]
        self._ids = torch.cat((self._ids, ids_1L), dim=1)
        if self._cache is not None:
            logits, feats = self._target.forward(ids_1L, self._taps, self._cache, last=last)
        else:
            logits, feats = self._target.forward(self._ids, self._taps, last=last)
        return logits[:, -count:], None if feats is None else feats[:, -count:]

    def keep(self, length: int) -> None:
        """Take back all tokens from ``length`` on. To be called after each :meth:`feed`."""
        surplus = self.length - length
        self._ids = self._ids[:, :length]
        # A cache that records the past trims itself when it is cropped, by 0 too; an older one would empty itself then.
        if self._cache is not None and (surplus or self._records):
            self._cache.crop(-surplus)


class DraftSession:
    """A drafter in the middle of a sequence; the context's keys and values are computed once for each position.

    Args:
        drafter: in eval mode.
        head: of its target, on the drafter's device and in its dtype.
    """

    def __init__(self, drafter: Drafter, head: Head) -> None:
        self._drafter, self._head = drafter, head
        self._config = drafter.config
        self._context: list[ContextKV] | None = None
        self._length = 0

    def propose(self, feats_1LF: Tensor, token: int) -> list[int]:
        """The tokens of a block behind ``token``, whose position is that behind all features so far.

        The likeliest of each slot by itself, or with a selector the path that it takes through them.

        Args:
            feats_1LF: features of the positions since the last call.
            token: the anchor.

        Returns:
            block_size - 1 tokens.
        """
        device = self._head.embedding_VH.device
        new = feats_1LF.shape[1]
        with torch.no_grad():
            positions = torch.arange(self._length, self._length + new, device=device)[None]
            fresh = self._drafter.context(feats_1LF.to(device, self._head.embedding_VH.dtype), positions)
            if self._context is None:
                self._context = fresh
            else:
                pairs = zip(self._context, fresh, strict=True)
                self._context = [(torch.cat((k, a), 2), torch.cat((v, b), 2)) for (k, v), (a, b) in pairs]
            self._length += new
            ids = torch.full((1, self._config.block_size), self._config.mask_token_id, device=device)
            ids[0, 0] = token
            at = self._length + torch.arange(self._config.block_size, device=device)
            hidden = self._drafter.blocks(self._head.embed(ids), at[None], self._context, self._masks(at))
            logits = self._head.logits(hidden[0, 1:])
            if self._drafter.candidate_selector is not None:
                return self._drafter.candidate_selector.walk(hidden[0, 1:], logits, token)
            said: list[int] = logits.argmax(-1).tolist()
            return said

    def _masks(self, at_K: Tensor) -> list[Tensor | None]:
        """Masks of positions; None where a layer sees everything, as full layers that are not causal do."""
        key_T = torch.arange(int(at_K[-1]) + 1, device=at_K.device)
        masks: list[Tensor | None] = []
        for layer in range(self._config.num_hidden_layers):
            window, causal = self._config.layer_window(layer), self._config.layer_is_causal(layer)
            if window is None and not causal:
                masks.append(None)
                continue
            sight = torch.ones(len(at_K), len(key_T), dtype=torch.bool, device=at_K.device)
            if window is not None:
                sight &= at_K[:, None] - key_T < window
            if causal:
                sight &= key_T <= at_K[:, None]
            masks.append(sight)
        return masks


def _croppable_cache(target: Target) -> tuple[Any, bool]:
    """A cache that can take tokens back and whether it records for that; None if there is none for this target."""
    from transformers import DynamicCache

    config = target.text_config
    cache: Any = DynamicCache(config=config)
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
        return (cache, True) if cache.is_croppable else (None, False)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return (cache, False) if kinds == {"full_attention"} and not windowed else (None, False)
