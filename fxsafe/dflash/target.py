"""The target: any causal LM of transformers, frozen, with its tapped layers' outputs.

Id ``i`` is the output of decoder layer ``i``, transformers' ``hidden_states[i + 1]`` for all layers but the last.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from fxsafe.dflash.compiling import compile_here
from fxsafe.dflash.config import DrafterConfig, default_layer_ids
from fxsafe.dflash.errors import DataError, TargetError
from fxsafe.dflash.head import Head

__all__ = ["Target", "find_layers", "load_target", "load_tokenizer"]

_LAYER_PATHS = (
    "model.layers",
    "model.language_model.layers",
    "language_model.model.layers",
    "model.model.language_model.layers",
    "model.decoder.layers",
    "transformer.h",
    "transformer.blocks",
    "gpt_neox.layers",
    "layers",
)

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "tekken.json")
"""one of which a directory with a tokenizer has"""


class _Enough(BaseException):
    """Leaves a forward after the last tapped layer; no ``except Exception`` of a model may swallow it."""


class _Sink(threading.local):
    """Where the hooks of one thread's forward put what they see; hooks stay installed and are idle otherwise."""

    taps: dict[int, Tensor] | None = None
    stop_after: int | None = None
    compiled: bool = False


def find_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers, by the usual places and then by its length.

    Raises:
        TargetError: none is found, or several could be meant.
    """
    count = _text_config(model).num_hidden_layers
    for path in _LAYER_PATHS:
        found: Any = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if isinstance(found, nn.ModuleList) and len(found) == count:
            return found
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise TargetError(f"{type(model).__name__}: {len(lists)} module lists could be its {count} decoder layers")
    return lists[0]


def load_target(name: str, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False) -> Target:
    """Load a causal LM from a Hub id or a local directory.

    Raises:
        TargetError: it does not exist, is no causal LM, or is of a family that is not supported.
    """
    import transformers

    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise TargetError(f"no causal LM can be loaded from {name!r}: there is no such directory")
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise TargetError(f"no causal LM can be loaded from {name!r}: {error}") from error
    model, found = loaded
    if absent := sorted(found["missing_keys"]):
        # transformers draws them at random and goes on.
        raise TargetError(
            f"{name} is no complete {type(model).__name__}: it lacks {len(absent)} weights, the first being {absent[0]}"
        )
    try:
        return Target(model.to(device))
    except torch.OutOfMemoryError as error:
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
        raise TargetError(
            f"{name} needs {size:.1f} GiB of {device}, which has less left; take another device or a smaller target, "
            "or bfloat16 if target.dtype is float32"
        ) from error


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a Hub id or a local directory; None if it has none, and all rows must hold input_ids then.

    Raises:
        DataError: it has one, which cannot be loaded. Without a word its rows would all be left out.
    """
    import transformers

    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises Exception itself, and readers of JSON what a wrong shape leads to
        if Path(name).is_dir():
            absent = not any(file for pattern in _TOKENIZER_FILES for file in Path(name).glob(pattern))
        else:
            absent = isinstance(error, OSError)
        if absent:
            return None
        text = " ".join(str(error).split())
        raise DataError(
            f"the tokenizer of {name} cannot be loaded: {type(error).__name__}: {text}. Mend its files, or remove them "
            "if all rows hold input_ids"
        ) from error
    # Where there are no files at all, transformers 5 makes an empty one of the model's class.
    return tokenizer if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else None


class Target:
    """A frozen causal LM with hooks on its layers.

    Several threads may call one target at the same time: what a forward captures belongs to its thread.

    Args:
        model: a causal LM of transformers, on one device.

    Raises:
        TargetError: naming the class, if no drafter can be trained for it.
    """

    def __init__(self, model: Any) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.family = type(model).__name__
        self.text_config: Any = _text_config(model)
        if getattr(model.config, "is_encoder_decoder", False):
            raise TargetError(f"{self.family} is an encoder-decoder; a target must be a causal LM")
        if any(p.is_meta for p in model.parameters()):
            raise TargetError(f"{self.family} is on the meta device; load its weights first")
        self.layers = find_layers(model)
        self._sink = _Sink()
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(self._hook(index))
        known = inspect.signature(inspect.unwrap(type(model).forward)).parameters
        # transformers 5.24 renamed the argument; the old name warns.
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._keep_logits = "logits_to_keep" in known
        self._quiet = {"output_router_logits": False} if "output_router_logits" in known else {}
        self.head = self._probe()
        self._compiles = False

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile the decoder layers for :meth:`features` and :meth:`features_and_last`, each in the calling thread.

        Layer by layer, because hooks stay outside so; layers that are alike share what is compiled. Decoding, whose
        lengths differ from forward to forward, goes on without.
        """
        if self._compiles:
            return
        self._compiles = True
        for layer in self.layers:
            layer.forward = self._either(layer.forward, compile_here(layer.forward, backend=backend))

    def _either(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        sink = self._sink

        @functools.wraps(plain)
        def forward(*args: Any, **words: Any) -> Any:
            return (compiled if sink.compiled else plain)(*args, **words)

        return forward

    @property
    def device(self) -> torch.device:
        return self.head.embedding_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.embedding_VH.dtype

    @property
    def positions(self) -> int | None:
        """How long a sequence may be, None if nothing is said; beyond it there is an error, or rubbish without one."""
        return getattr(self.text_config, "max_position_embeddings", None) or None

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self.head.embedding_VH.shape[1]

    @property
    def rows(self) -> int:
        """Rows of the embedding, which may be more than the tokenizer has tokens."""
        return self.head.embedding_VH.shape[0]

    def drafter_config(
        self, *, layers: int, block_size: int, mask_token_id: int, taps: Sequence[int] | None = None, **shape: Any
    ) -> DrafterConfig:
        """A drafter's config for this target; what ``shape`` does not give is taken from the target.

        Raises:
            SettingsError: see :class:`DrafterConfig`.
        """
        config = self.text_config
        heads = shape.pop("num_attention_heads", None) or config.num_attention_heads
        groups = shape.pop("num_key_value_heads", None) or getattr(config, "num_key_value_heads", None) or heads
        size = shape.pop("head_dim", None) or getattr(config, "head_dim", None) or self.hidden_size // heads
        inner = shape.pop("intermediate_size", None) or getattr(config, "intermediate_size", None)
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") if isinstance(rope, dict) else None
        return DrafterConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=min(groups, heads),
            head_dim=size,
            intermediate_size=inner or 4 * self.hidden_size,
            vocab_size=self.rows,
            num_target_layers=self.layer_count,
            target_layer_ids=default_layer_ids(self.layer_count, layers) if taps is None else tuple(taps),
            mask_token_id=mask_token_id,
            block_size=block_size,
            rope_theta=float(shape.pop("rope_theta", None) or theta or getattr(config, "rope_theta", None) or 1e6),
            max_position_embeddings=int(getattr(config, "max_position_embeddings", 40960)),
            input_embedding_scale=self.head.input_scale,
            output_multiplier=self.head.multiplier,
            final_logit_softcapping=self.head.softcap,
            bos_token_id=_one(getattr(config, "bos_token_id", None)),
            eos_token_id=_one(getattr(config, "eos_token_id", None)),
            **shape,
        )

    def features(self, ids_BS: Tensor, taps: Sequence[int], attention_mask_BS: Tensor | None = None) -> Tensor:
        """Outputs of the tapped layers [B, S, F], concatenated in the order of ``taps``.

        Layers beyond the last tapped one, the final norm and the head do not run. Pad on the right.
        """
        with self._capture(stop_after=max(taps), compiled=self._compiles) as seen, torch.no_grad():
            with suppress(_Enough):
                self.model(input_ids=ids_BS, attention_mask=attention_mask_BS, use_cache=False, **self._quiet)
        return join(seen, taps)

    def features_and_last(
        self, ids_BS: Tensor, taps: Sequence[int], attention_mask_BS: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """:meth:`features` and the hidden states [B, S, H] that go into the head, for distillation."""
        with self._capture(compiled=self._compiles) as seen, torch.no_grad():
            out = self.model.base_model(
                input_ids=ids_BS, attention_mask=attention_mask_BS, use_cache=False, **self._quiet
            )
        return join(seen, taps), out.last_hidden_state

    def forward(self, ids_BS: Tensor, taps: Sequence[int], cache: Any = None, *, last: bool = False) -> Any:
        """A whole forward: logits [B, S, V] (of the last position only if ``last``) and features [B, S, F].

        Args:
            ids_BS: the tokens behind those that the cache holds.
            taps: may be empty; the features are None then.
            cache: one of transformers, which is extended; None for none.
            last: only the last position's logits are wanted.
        """
        words: dict[str, Any] = dict(self._quiet)
        if cache is not None:
            words |= {self._cache_name: cache, "use_cache": True}
        else:
            words["use_cache"] = False
        if last and self._keep_logits:
            words["logits_to_keep"] = 1
        with self._capture() as seen, torch.no_grad():
            logits = self.model(input_ids=ids_BS, **words).logits
        return (logits[:, -1:] if last else logits), join(seen, taps) if taps else None

    @contextmanager
    def _capture(self, stop_after: int | None = None, compiled: bool = False) -> Iterator[dict[int, Tensor]]:
        sink = self._sink
        sink.taps, sink.stop_after, sink.compiled = {}, stop_after, compiled
        try:
            yield sink.taps
        finally:
            sink.taps, sink.stop_after, sink.compiled = None, None, False

    def _hook(self, index: int) -> Any:
        sink = self._sink

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if sink.taps is None:
                return
            sink.taps[index] = output[0] if isinstance(output, tuple) else output
            if index == sink.stop_after:
                raise _Enough

        return hook

    def _probe(self) -> Head:
        """Find out what the target does between embedding and layers, and between head and logits."""
        embedding, output = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if output is None or embedding is None:
            raise TargetError(f"{self.family} does not say which modules its embedding and head are")
        table_VH, out_VH = embedding.weight, output.weight
        rows, hidden = table_VH.shape
        if out_VH.shape[1] != hidden:
            raise TargetError(
                f"{self.family}: its embedding has {hidden} columns and its head {out_VH.shape[1]}; drafters share both"
            )
        seen: dict[str, Tensor] = {}
        hooks = [
            self.layers[0].register_forward_pre_hook(
                lambda m, args, kw: seen.__setitem__("first", args[0] if args else kw["hidden_states"]),
                with_kwargs=True,
            ),
            output.register_forward_pre_hook(lambda m, args: seen.__setitem__("head", args[0])),
        ]
        ids = torch.tensor([[1 % rows, 2 % rows], [min(3, rows - 1), 2 % rows]], device=table_VH.device)
        try:
            logits, feats = self.forward(ids, (0,))
        except Exception as error:
            raise TargetError(f"{self.family} cannot be called with input_ids alone: {error}") from error
        finally:
            for handle in hooks:
                handle.remove()
        if feats.shape[-1] != hidden:
            raise TargetError(f"{self.family}: layers work on {feats.shape[-1]} columns and embeddings have {hidden}")
        config = self.text_config
        softcap = getattr(config, "final_logit_softcapping", None)
        multiplier = 1.0
        if divisor := getattr(config, "logits_scaling", None):
            multiplier = 1.0 / divisor
        elif factor := getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None):
            multiplier = float(factor)
        head = Head(
            table_VH.detach(),
            out_VH.detach(),
            None if getattr(output, "bias", None) is None else output.bias.detach(),
            _scale(table_VH[ids[0, 0]] - table_VH[ids[1, 0]], seen["first"][0, 0] - seen["first"][1, 0], hidden),
            multiplier,
            float(softcap) if softcap else None,
        )
        expected = head.logits(seen["head"]).float()
        room = 1e-4 if table_VH.dtype == torch.float32 else 5e-2
        if logits.shape != expected.shape or (logits.float() - expected).abs().max() > room * (
            1 + expected.abs().max()
        ):
            raise TargetError(
                f"{self.family}: its logits are more than its head's output, in a way that readers of drafters "
                "cannot repeat; it is not supported"
            )
        return head


def join(seen: dict[int, Tensor], taps: Sequence[int]) -> Tensor:
    """Features in the order of the taps; a target spread over devices gives them on the first one's."""
    device = seen[taps[0]].device
    return torch.cat([seen[i].to(device) for i in taps], dim=-1)


def _scale(embedded_H: Tensor, given_H: Tensor, hidden: int) -> float:
    """The factor between an embedding and what the first layer gets; differences rid it of position embeddings."""
    e, x = embedded_H.double(), given_H.double()
    factor = float((e @ x) / (e @ e).clamp_min(1e-30))
    if (x - factor * e).norm() > 0.02 * x.norm():
        warnings.warn(
            "the target does more to its embeddings than to scale them; the drafter gets them as they are", stacklevel=4
        )
        return 1.0
    for exact in (1.0, hidden**0.5):
        if abs(factor / exact - 1) < 0.01:
            return exact
    return factor


def _text_config(model: Any) -> Any:
    getter = getattr(model.config, "get_text_config", None)
    return getter() if getter else model.config


def _one(token: Any) -> int | None:
    return token[0] if isinstance(token, (list, tuple)) and token else (None if isinstance(token, list) else token)
