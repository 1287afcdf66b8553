"""Loads exports of the DFlash trainer with the loaders of vLLM and SGLang themselves. No GPU and no network are needed.

``python tools/engine_loaders.py --vllm VENV --sglang VENV``, of which one is enough, runs where ``fxsafe[dflash]``
is installed; the environments, of 9 GB each, have the engines (``pip install vllm==0.33.0`` and ``sglang==0.5.23``;
Python 3.11 was taken) and need not have fxsafe. It writes tiny targets and drafters, lets each engine read them, and
compares, see `Case`. The status is 1 if anything differs. It is no part of the test suite.

What runs is the engines' own code, up to the device's kernels, which do not exist on a CPU:

- vLLM, on its CPU platform: the engine's config with ``speculative_config``, the target, ``load_dflash_model``
  (registry, model, weights, sharing of the target's embedding and head), which target layers are tapped, and the
  drafter's forward.
- SGLang, whose server refuses DFLASH on the CPU: its config of the draft model, ``get_model`` (registry, model,
  weights), target layers, mask token, block size, and the drafter's forward, called as its worker does.
  ``import vllm._custom_ops``, which it wants for RoPE where there is no GPU, is answered by an empty module.

In both `DenseAttention` takes the place of attention and its cache, with the causality and the window that the engine
gave the layer; for the kernels of RoPE stand the engines' own functions in PyTorch, and for vLLM's kernel of RMSNorm
over the context three lines. vLLM's walk along the path of DFlash 2 is a kernel too and written anew here.
Not run: the schedulers, the workers' loops, sampling, tensor parallelism, attention backends, and anything of CUDA.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
CONTEXT, BLOCK = 20, 4
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight")


@dataclasses.dataclass
class Case:
    """What an engine is to make of an export; ``files`` has ``export`` and what the trainer computes with it."""

    name: str
    files: str
    target: str
    taps: list[int]
    mask_token: int
    causal: list[bool]
    windows: list[int | None]
    heads: int
    groups: int
    second: bool
    scaled: bool

    def numbers(self) -> dict[str, torch.Tensor]:
        return load_file(Path(self.files) / "numbers.safetensors")

    @property
    def export(self) -> str:
        return str(Path(self.files) / "export")


def write_cases(work: Path) -> None:
    """Exports, and the numbers of the trainer's own forward in fp32 with the weights that they have."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "dflash")]
    import tiny

    from fxsafe.dflash.config import SLIDING, DFlash2
    from fxsafe.dflash.export import export_drafter, load_drafter, load_into
    from fxsafe.dflash.head import Head
    from fxsafe.dflash.model import Drafter

    all_slide = {"layer_types": (SLIDING, SLIDING), "sliding_window": 6}
    scales = {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 5.0}
    shapes = {
        "full attention": tiny.config(),
        "full attention, tied target": tiny.config(),
        "no groups": tiny.config(num_key_value_heads=4),
        "three layers, three taps": tiny.config(num_hidden_layers=3, target_layer_ids=(0, 1, 2)),
        "one tap": tiny.config(target_layer_ids=(1,)),
        "causal": tiny.config(is_causal=True),
        "another RoPE": tiny.config(rope_theta=50_000.0, rms_norm_eps=1e-3),
        "sliding and full": tiny.sliding(),
        "sliding and full, causality not said": tiny.sliding(causal=None),
        "all sliding": tiny.config(**all_slide),
        "DFlash 2": tiny.second(),
        "DFlash 2, sliding and full": tiny.second(layer_types=("full_attention", SLIDING), sliding_window=6),
        "DFlash 2, three taps of the convolution": tiny.config(dflash2=DFlash2(3, 4, 6, 5)),
        "scaled target": tiny.config(**scales),
        "DFlash 2, scaled target": tiny.second(**scales),
    }
    cases = []
    for number, (name, shape) in enumerate(shapes.items()):
        files = work / f"case{number}"
        export = export_drafter(tiny.drafter(shape, seed=number).state_dict(), shape, files / "export")
        drafter = Drafter(shape)
        load_into(drafter, load_drafter(export)[1])
        target = tiny.target_model("qwen3", seed=number, tie_word_embeddings="tied" in name)
        target.save_pretrained(files / "target")
        head = Head(
            target.get_input_embeddings().weight.detach(),
            target.get_output_embeddings().weight.detach(),
            input_scale=shape.input_embedding_scale,
            multiplier=shape.output_multiplier,
            softcap=shape.final_logit_softcapping,
        )
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, tiny.VOCAB - 2, (1, CONTEXT + BLOCK), generator=generator)
        feats = torch.randn(1, CONTEXT + BLOCK, len(shape.target_layer_ids) * shape.hidden_size, generator=generator)
        blocks = tiny.make_blocks(
            ids, torch.ones_like(ids), torch.tensor([[CONTEXT]]), torch.ones(1, 1, dtype=torch.bool), BLOCK,
            shape.mask_token_id,
        )  # fmt: skip
        with torch.no_grad():
            hidden = tiny.hidden_states(drafter, feats, blocks, head)[0, 0]
            logits = head.logits(hidden)
            path = logits[1:].argmax(-1)
            if drafter.candidate_selector is not None:
                anchor = int(blocks.ids_BNK[0, 0, 0])
                path = torch.tensor(drafter.candidate_selector.walk(hidden[1:], logits[1:], anchor))
        numbers = {
            "feats": feats[0, :CONTEXT].clone(),
            "ids": blocks.ids_BNK[0, 0].clone(),
            "embedding": head.embedding_VH.clone(),
            "head": head.output_VH.clone(),
            "hidden": hidden.clone(),
            "path": path,
        }
        save_file(numbers, files / "numbers.safetensors")
        layers = range(shape.num_hidden_layers)
        case = Case(
            name=name,
            files=str(files),
            target=str(files / "target"),
            taps=list(shape.target_layer_ids),
            mask_token=shape.mask_token_id,
            causal=[shape.layer_is_causal(i) for i in layers],
            windows=[shape.layer_window(i) for i in layers],
            heads=shape.num_attention_heads,
            groups=shape.num_key_value_heads,
            second=shape.dflash2 is not None,
            scaled=shape.input_embedding_scale != 1.0,
        )
        cases.append(dataclasses.asdict(case))
    (work / "cases.json").write_text(json.dumps(cases))


def expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {found!r} instead of {wanted!r}")


def compare_weights(case: Case, parameters: dict[str, torch.Tensor]) -> int:
    """Each exported tensor with where the engine has put it, bit for bit; returns how many. None may be left over."""
    exported = load_file(Path(case.export) / "model.safetensors")
    left, compared = set(exported), 0
    for full, parameter in parameters.items():
        name = full.removeprefix("model.")
        if name in TARGETS_OWN or name == "mask_embedding":
            continue
        module = name.split(".")[-2] if "." in name else ""
        parts = [name.replace(module, part) for part in STACKED[module]] if module in STACKED else [name]
        for part, rows in zip(parts, parameter.split([len(exported[part]) for part in parts]), strict=True):
            if not torch.equal(rows, exported[part].to(parameter.dtype)):
                raise AssertionError(f"{full} has not the numbers of {part}")
            left.remove(part)
            compared += 1
    expect("tensors that nothing was loaded from", sorted(left), [])
    return compared


class DenseAttention(nn.Module):
    """Takes the place of an engine's attention layer and its cache: softmax(q k^T) v, in plain sight.

    ``left`` and ``right`` are how many positions a query sees before and behind its own; None is all.
    """

    def __init__(self, case: Case, left: int | None, right: int | None) -> None:
        super().__init__()
        self.heads, self.groups, self.left, self.right = case.heads, case.groups, left, right
        self.impl, self.kv_cache = self, None  # as vLLM looks for them

    def do_kv_cache_update(self, _layer: object, k: torch.Tensor, v: torch.Tensor, _cache: object, _: object) -> None:
        self.context = k.view(len(k), self.groups, -1).clone(), v.reshape(len(v), self.groups, -1).clone()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _batch: object = None) -> torch.Tensor:
        length = len(q)
        q = q.view(length, self.heads, -1).transpose(0, 1)
        k, v = (
            torch.cat((old, new.reshape(length, self.groups, -1))).transpose(0, 1)
            for old, new in zip(self.context, (k, v), strict=True)
        )
        ahead = torch.arange(k.shape[1])[None] - torch.arange(k.shape[1] - length, k.shape[1])[:, None]
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.left is not None:
            seen &= ahead >= -self.left
        if self.right is not None:
            seen &= ahead <= self.right
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(length, -1)


def walk(candidates: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The greedy path of both engines: ``scores[slot, before, candidate]``; slot 0 has the anchor in every row."""
    index, path = torch.tensor(0), []
    for slot, tokens in zip(scores, candidates, strict=True):
        index = slot[index].argmax()
        path.append(tokens[index])
    return torch.stack(path)


def close(case: Case, reads_scale: bool, hidden: torch.Tensor, path: torch.Tensor) -> str:
    numbers = case.numbers()
    off, same = float((hidden - numbers["hidden"]).abs().max()), torch.equal(path, numbers["path"])
    if off < 1e-4 and same:
        expect("the scale of the embeddings is read", True, reads_scale or not case.scaled)
        return f"hidden states within {off:.1g}, the same tokens drafted"
    says = f"hidden states differ by {off:.2g} from the trainer's, and {'the same' if same else 'other'} tokens drafted"
    if case.scaled and not reads_scale:
        return f"{says}: the scale of the embeddings is not read, as is known"
    raise AssertionError(says)


def vllm_case(case: Case, port: int) -> str:
    from vllm import _custom_ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import set_eagle3_aux_hidden_state_layers
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """The kernel's: a weight of two dimensions has one row for each entry of the outermost one of ``x``."""
        if weight.dim() == 2:
            weight = weight.view(len(weight), *[1] * (x.dim() - 2), -1)
        out.copy_(weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)))

    def rotary_embedding(
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None,
        size: int,
        cache: torch.Tensor,
        is_neox: bool,
    ) -> None:
        turned = RotaryEmbedding.forward_static(positions, query, key, size, size, cache, is_neox)
        query.copy_(turned[0])
        if key is not None:
            key.copy_(turned[1])

    _custom_ops.rms_norm, _custom_ops.rotary_embedding = rms_norm, rotary_embedding
    numbers = case.numbers()
    speculative = {"method": "dflash", "model": case.export, "num_speculative_tokens": BLOCK - 1}
    config = EngineArgs(
        model=case.target,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        speculative_config=speculative,
    ).create_engine_config()
    draft_config = config.speculative_config.draft_model_config
    expect("architecture", draft_config.architectures, ["DFlash2DraftModel" if case.second else "DFlashDraftModel"])
    expect("mask token", get_parallel_drafting_token_id(draft_config.hf_config), case.mask_token)
    with set_current_vllm_config(config), torch.no_grad():
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
            initialize_model_parallel(1, 1)
        target = get_model(vllm_config=config)
        draft = load_dflash_model(target, config)
        set_eagle3_aux_hidden_state_layers(target, config.speculative_config)
        # It counts what goes into a layer, the export what comes out.
        expect("taps", list(target.model.aux_hidden_state_layers), [tap + 1 for tap in case.taps])
        compared = compare_weights(case, dict(draft.named_parameters()))
        if draft.model.embed_tokens is not target.model.embed_tokens or draft.lm_head is not target.lm_head:
            raise AssertionError("embedding or head are not the target's")
        expect("embedding", torch.equal(draft.model.embed_tokens.weight, numbers["embedding"]), True)
        expect("head", torch.equal(draft.lm_head.weight, numbers["head"]), True)
        expect("causal", draft.get_draft_attn_causal(), case.causal)
        expect("windows", [layer.self_attn.attn.sliding_window for layer in draft.model.layers], case.windows)
        for layer in draft.model.layers:
            window, causal = layer.self_attn.attn.sliding_window, layer.self_attn.causal
            # FlashAttention's backend there makes the window of a layer that is not causal symmetric.
            side = None if window is None else window - 1
            layer.self_attn.attn = DenseAttention(case, side, 0 if causal else side)
        draft.model._attn_layers = [layer.self_attn.attn for layer in draft.model.layers]
        with set_forward_context(None, config, num_tokens=BLOCK):
            states = draft.combine_hidden_states(numbers["feats"])
            draft.precompute_and_store_context_kv(states, torch.arange(CONTEXT), torch.arange(CONTEXT))
            hidden = draft(numbers["ids"], torch.arange(CONTEXT, CONTEXT + BLOCK), None)
            if case.second:
                candidates, unary = draft.compute_candidates(hidden[1:])
                scores = draft.model.candidate_selector(
                    candidates[None], unary[None], hidden[None, 1:], numbers["ids"][:1]
                )
                path = walk(candidates, scores[0])
            else:
                path = draft.compute_logits(hidden[1:]).argmax(-1)
    return f"{compared} tensors, {close(case, case.second, hidden, path)}"


def sglang_case(case: Case, port: int) -> str:
    from sglang.srt import runtime_context
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state
    from sglang.srt.model_loader import get_model
    from sglang.srt.models import dflash
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    numbers = case.numbers()
    server = ServerArgs(
        model_path=case.target,
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
    )
    server.resolve_once()
    runtime_context.publish(server, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
    runtime_context.get_context().override("engine_loaders", speculative_draft_model_path=case.export)
    if not torch.distributed.is_initialized():
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(backend="gloo")
    target_config = ModelConfig(case.target, dtype="float32")
    aux = spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
        server_args=server,
        model_config=target_config,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        is_draft_worker=False,
    )
    expect("taps", aux.dflash_target_layer_ids, case.taps)
    parsed = parse_dflash_draft_config(draft_hf_config=aux.draft_model_config.hf_config)
    expect("block size", parsed.resolve_block_size(), BLOCK)
    runner = types.SimpleNamespace(model_config=target_config)
    worker = types.SimpleNamespace(target_worker=types.SimpleNamespace(model_runner=runner, tokenizer=None))
    mask_token = DFlashWorkerV2._resolve_mask_token_id(
        worker, mask_token=parsed.mask_token, mask_token_id=parsed.mask_token_id
    )
    expect("mask token", mask_token, case.mask_token)
    with torch.no_grad():
        target = get_model(model_config=target_config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
        target.set_dflash_layers_to_capture(aux.dflash_target_layer_ids)
        # It counts what goes into a layer, the export what comes out.
        expect("taps in the target", target.model.layers_to_capture, [tap + 1 for tap in case.taps])
        draft_config = ModelConfig(case.export, is_draft_model=True, dtype="float32")
        draft = get_model(model_config=draft_config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
        expect("class", type(draft).__name__, "DFlash2DraftModel" if case.second else "DFlashDraftModel")
        compared = compare_weights(case, dict(draft.named_parameters()))
        causal = [layer.self_attn.attn_type is AttentionType.DECODER for layer in draft.layers]
        expect("causal", causal, case.causal)
        lefts = [layer.self_attn.attn.sliding_window_size for layer in draft.layers]
        expect("windows", [None if left == -1 else left + 1 for left in lefts], case.windows)
        draft.set_block_size(BLOCK)
        context = draft.project_target_hidden(numbers["feats"])
        for layer in draft.layers:
            attention = layer.self_attn
            attention.rotary_emb._forward_method = attention.rotary_emb.forward_native
            left = attention.attn.sliding_window_size
            # FlashAttention's backend there makes the window of a layer that is not causal symmetric.
            side = None if left == -1 else left
            attention.attn = DenseAttention(case, side, 0 if attention.attn_type is AttentionType.DECODER else side)
            k, v = attention.kv_proj_only(draft.prepare_context_hidden_for_kv(layer, context))
            k = attention.apply_k_rope(torch.arange(CONTEXT), attention.apply_k_norm(k))
            attention.attn.do_kv_cache_update(None, k, v, None, None)
        embeds = target.get_input_embeddings()(numbers["ids"])
        expect("embedding", torch.equal(embeds, F.embedding(numbers["ids"], numbers["embedding"])), True)
        expect("head", torch.equal(target.lm_head.weight, numbers["head"]), True)
        hidden = draft(numbers["ids"], torch.arange(CONTEXT, CONTEXT + BLOCK), None, embeds).hidden_states
        if case.second:
            dflash._flashinfer_top_k = None  # it has no GPU; torch.topk is what SGLang takes without it
            draft.lm_head = target.lm_head
            candidates, unary = draft.compute_candidates(hidden[1:])
            scores = draft.candidate_selector.build_lattice(
                candidate_ids=candidates[None],
                unary_logits=unary[None],
                hidden_states=hidden[None, 1:],
                anchor_token_ids=numbers["ids"][:1],
            )
            path = draft.candidate_selector.sample_path(
                candidate_ids=candidates[None],
                scores=scores,
                uniforms=torch.zeros(1, BLOCK - 1),
                temperatures=torch.ones(1),
                greedy_mask=torch.ones(1, dtype=torch.bool),
            )[0][0]
        else:
            path = F.linear(hidden[1:], target.lm_head.weight).argmax(-1)
    return f"{compared} tensors, {close(case, False, hidden, path)}"


def inside(engine: str, work: Path) -> None:
    """In the engine's environment."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # drafters with sliding and full layers are refused without
    if engine == "sglang":
        stub = types.ModuleType("vllm._custom_ops")
        stub.rotary_embedding = None  # type: ignore[attr-defined]
        sys.modules |= {"vllm": types.ModuleType("vllm"), "vllm._custom_ops": stub}
    import importlib.metadata

    run = {"vllm": vllm_case, "sglang": sglang_case}[engine]
    results: dict[str, Any] = {"engine": f"{engine} {importlib.metadata.version(engine)}", "torch": torch.__version__}
    results["cases"] = {}
    for values in json.loads((work / "cases.json").read_text()):
        case = Case(**values)
        try:
            results["cases"][case.name] = {"fails": False, "says": run(case, 29517 if engine == "vllm" else 29518)}
        except Exception as error:
            traceback.print_exc()
            results["cases"][case.name] = {"fails": True, "says": f"{type(error).__name__}: {error}"}
    (work / f"{engine}.json").write_text(json.dumps(results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", metavar="VENV", help="environment that has vLLM")
    parser.add_argument("--sglang", metavar="VENV", help="environment that has SGLang")
    parser.add_argument("--inside", nargs=2, metavar=("ENGINE", "WORK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args.inside[0], Path(args.inside[1]))
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        write_cases(work)
        for engine in ("vllm", "sglang"):
            if (venv := getattr(args, engine)) is None:
                continue
            log = work / f"{engine}.log"
            with log.open("w") as stream:
                command = [str(Path(venv) / "bin" / "python"), __file__, "--inside", engine, directory]
                subprocess.run(command, cwd=work, stdout=stream, stderr=subprocess.STDOUT, check=False)
            output = work / f"{engine}.json"
            if not output.exists():
                print(f"{engine} has not come to its end:\n{log.read_text()[-4000:]}")
                failed += 1
                continue
            results = json.loads(output.read_text())
            print(f"{results['engine']}, torch {results['torch']}")
            for name, result in results["cases"].items():
                print(f"  {'FAILS' if result['fails'] else 'ok'}  {name}: {result['says']}")
                failed += result["fails"]
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
