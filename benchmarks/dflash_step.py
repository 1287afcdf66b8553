"""A drafter step at Qwen3-8B's shape with random weights: seconds, MFU, memory, host time.

    python benchmarks/dflash_step.py                       # one GPU for both, 2,048 tokens, 128 anchors of 16
    python benchmarks/dflash_step.py --part drafter        # the drafter alone, on features made once
    python benchmarks/dflash_step.py --version 2           # a DFlash 2 drafter
    python benchmarks/dflash_step.py --drafters 3          # three drafter threads, sharing the GPUs there are
    python benchmarks/dflash_step.py --shape tiny --device cpu   # does the script run at all

FLOPs are those of the model in fxsafe/dflash/flops.py: three times the trainable forward, twice the frozen head, and
the target's forward up to its last tapped layer. MFU is against what a large bf16 product of matrices reaches on this
card in the same process, measured before and after, and against the data sheet. The floor is the time that these FLOPs
would take at the measured rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

import fxsafe
from fxsafe.dflash.batches import Example, Features, MicroBatch, collate
from fxsafe.dflash.compiling import graph_count, promise_recompile_limit
from fxsafe.dflash.config import DFlash2
from fxsafe.dflash.engine import Engine
from fxsafe.dflash.flops import drafter_flops, peak_flops, target_flops
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.optim import Master, OptimSettings
from fxsafe.dflash.replica import Replica, ReplicaSettings
from fxsafe.dflash.target import Target

SHAPES = {
    "qwen3-8b": {
        "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="of the target; the drafter has 5 layers")
    parser.add_argument("--version", type=int, choices=(1, 2), default=1, help="of the drafter; 2 is DFlash 2")
    parser.add_argument("--part", choices=("all", "drafter"), default="all")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8, help="of an optimizer step")
    parser.add_argument("--drafters", type=int, default=1, help="threads")
    parser.add_argument("--targets", type=int, default=1, help="threads")
    parser.add_argument("--chunk-blocks", type=int, default=LossSettings().chunk_blocks)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=3, help="steps that are not counted")
    parser.add_argument("--weighting", choices=("decay", "dpace"), default="decay")
    parser.add_argument("--attention", choices=("auto", "flex", "dense"), default="auto")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--compile-target", action="store_true", help="compile the target's layers too")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="file for the numbers")
    options = parser.parse_args()
    fxsafe.install()
    promise_recompile_limit()
    numbers = measure(options)
    for name, value in numbers.items():
        print(f"{name:32s} {value:.4g}" if isinstance(value, float) else f"{name:32s} {value}")
    if options.json:
        with open(options.json, "w") as stream:
            json.dump(numbers, stream, indent=2)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    cuda = options.device == "cuda"
    device = torch.device("cuda:0" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    devices = [
        torch.device(f"cuda:{i % torch.cuda.device_count()}") if cuda else device for i in range(options.drafters)
    ]
    rate_before = matmul_rate(device, dtype)
    target = make_target(options.shape, device, dtype)
    if options.compile_target:
        target.compile_layers()
    parts = DFlash2() if options.version == 2 else None
    config = target.drafter_config(layers=5, block_size=options.block, mask_token_id=target.rows - 1, dflash2=parts)
    how = ReplicaSettings(dtype, not options.eager, "inductor", options.attention)
    loss = LossSettings(weighting=options.weighting, chunk_blocks=options.chunk_blocks)
    replicas = [Replica(config, target.head, d, how, loss) for d in devices]
    replicas[0].drafter.initialize(torch.Generator(device).manual_seed(0))
    sequences = options.batch * options.micro_batches
    draft_work = drafter_flops(config, options.length, options.anchors, target.rows)
    target_work = target_flops(target.text_config, max(config.target_layer_ids) + 1, options.length)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    if options.part == "drafter":
        seconds, host, graphs = drafter_alone(options, target, replicas[0])
        work, sequences = draft_work * options.batch, options.batch
    else:
        seconds, host, graphs = whole_steps(options, target, replicas)
        work = (draft_work + target_work) * sequences
    rate = max(rate_before, matmul_rate(device, dtype))
    used = len({device, *devices})
    numbers: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "part": options.part,
        "version": options.version,
        "seconds_median": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_all": [round(s, 5) for s in seconds],
        "floor_seconds_at_measured_rate": work / rate / used,
        "tflop": work / 1e12,
        "tflop_of_drafter_for_a_sequence": draft_work / 1e12,
        "tflop_of_target_for_a_sequence": target_work / 1e12,
        "measured_matmul_tflops": rate / 1e12,
        "mfu_against_measured": work / statistics.median(seconds) / rate / used,
        "tokens_per_second": sequences * options.length / statistics.median(seconds),
        "graphs_compiled_while_counting": graphs,
        "host_seconds_for_a_micro_batch": host,
    }
    if peak := peak_flops(device, None):
        numbers["mfu_against_data_sheet"] = work / statistics.median(seconds) / peak / used
    if cuda:
        numbers["peak_gib_allocated"] = torch.cuda.max_memory_allocated(device) / 2**30
    return numbers


def whole_steps(
    options: argparse.Namespace, target: Target, replicas: list[Replica]
) -> tuple[list[float], float | None, int]:
    """Optimizer steps of the engine, and how many graphs were compiled in those that count."""
    master = Master(replicas[0].drafter.state_dict(), OptimSettings(), replicas[0].device)
    engine = Engine(
        [target] * options.targets, replicas, master, batches(options, target.rows), per_step=options.micro_batches
    )
    with engine:
        for _ in range(options.warm):
            engine.step(1e-4)
        before = graph_count()
        seconds = []
        for _ in range(options.steps):
            synchronize(replicas)
            started = time.perf_counter()
            report = engine.step(1e-4)
            synchronize(replicas)
            seconds.append(time.perf_counter() - started)
        print(
            f"last step: loss {report.tally.metrics()['loss']:.3f}, drafters waited {report.drafter_wait:.3f} s, "
            f"targets {report.target_wait:.3f} s, optimizer {report.optimizer:.3f} s"
        )
    return seconds, None, graph_count() - before


def drafter_alone(
    options: argparse.Namespace, target: Target, replica: Replica
) -> tuple[list[float], float | None, int]:
    """Forward and backward of a micro-batch in a thread of its own, on features made once."""
    batch = next(batches(options, target.rows))
    taps = replica.config.target_layer_ids
    features = Features(batch, target.features(batch.ids_BS.to(target.device), taps), None)
    seconds: list[float] = []
    host: list[float] = []
    graphs = [0]

    def work() -> None:
        if replica.device.type == "cuda":
            torch.cuda.set_device(replica.device)
        for _ in range(options.warm):
            replica.learn(features)
        graphs[0] = graph_count()
        for _ in range(options.steps):
            replica.take()
            synchronize([replica])
            started = time.perf_counter()
            replica.learn(features)
            host.append(time.perf_counter() - started)  # the device may still be at it
            synchronize([replica])
            seconds.append(time.perf_counter() - started)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return seconds, statistics.median(host), graph_count() - graphs[0]


def batches(options: argparse.Namespace, rows: int) -> Iterator[MicroBatch]:
    """Full sequences of random tokens, all to be learnt."""
    rng = random.Random(0)
    for index in itertools.count():
        examples = [
            Example([rng.randrange(rows - 1) for _ in range(options.length)], [True] * options.length)
            for _ in range(options.batch)
        ]
        yield collate(examples, index=index, seed=0, anchors=options.anchors, bucket=options.length)


def make_target(shape: str, device: torch.device, dtype: torch.dtype) -> Target:
    import transformers

    config = transformers.Qwen3Config(
        **SHAPES[shape], max_position_embeddings=40960, tie_word_embeddings=False, use_sliding_window=False
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    return Target(model)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product of matrices, the best of several."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(12):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(5):
            a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - started) / 5)
    return 2 * size**3 / best


def synchronize(replicas: list[Replica]) -> None:
    for replica in replicas:
        if replica.device.type == "cuda":
            torch.cuda.synchronize(replica.device)


if __name__ == "__main__":
    main()
