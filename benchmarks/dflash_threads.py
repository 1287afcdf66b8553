"""What the GIL costs drafters: threads of one process against as many processes, at the same work, and the host's time.

    python benchmarks/dflash_threads.py                              # one GPU, Qwen3-8B's shape, 1, 2 and 3 drafters
    python benchmarks/dflash_threads.py --shape qwen3-0.6b           # a drafter so small that the host decides
    python benchmarks/dflash_threads.py --devices cuda:0,cuda:1 --counts 1,2
    python benchmarks/dflash_threads.py --shape tiny --devices cpu --length 256 --anchors 16 --seconds 2

Each drafter learns from one micro-batch over and over (``Replica.learn``: compiled forward, loss and backward), eight
to a step, after which it waits for its device as the trainer's does; the optimizer and the target are left out. All of
a row are ready before any begins; turns of threads and of processes alternate. ``tokens/s`` adds all drafters up.
``host ms`` is the median time of a micro-batch until the device has been told everything, measured afterwards with idle
devices, all drafters at a time; ``CPU ms`` is what the drafter's own thread used of it (on CUDA the backward runs in a
thread of the autograd engine, which is not in it).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import fxsafe
from fxsafe.dflash.batches import Example, Features, MicroBatch, collate
from fxsafe.dflash.compiling import graph_count, promise_recompile_limit
from fxsafe.dflash.config import DrafterConfig, default_layer_ids
from fxsafe.dflash.head import Head
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.replica import Replica, ReplicaSettings

sys.path.insert(0, str(Path(__file__).resolve().parent))
from dflash_step import SHAPES, synchronize

PER_STEP = 8
HOST_TURNS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="of the target; the drafter has 5 layers")
    parser.add_argument("--counts", default="1,2,3", help="of drafters")
    parser.add_argument("--devices", default="cuda:0", help="given to the drafters in turns")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the sequence")
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=2, help="of each row, each in fresh processes")
    parser.add_argument("--json", help="file for the numbers")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    rows: list[dict[str, Any]] = []
    print(f"{'':24s}{'tokens/s':>12s}{'to processes':>14s}{'host ms':>10s}{'CPU ms':>10s}{'graphs':>8s}", flush=True)
    for count in map(int, options.counts.split(",")):
        turns: dict[str, list[dict[str, Any]]] = {"processes": [], "threads": []}
        for number in range(options.turns):
            for how in list(turns)[:: -1 if number % 2 else 1]:
                turns[how].append(together(options, count, how))
        speed = {how: statistics.mean(t["tokens_per_second"] for t in found) for how, found in turns.items()}
        for how, found in turns.items():
            row = {
                "drafters": count,
                "how": how,
                "tokens_per_second": speed[how],
                "turns": [t["tokens_per_second"] for t in found],
                "to_processes": speed[how] / speed["processes"],
                "host_ms": statistics.mean(t["host_ms"] for t in found),
                "cpu_ms": statistics.mean(t["cpu_ms"] for t in found),
                "graphs": sum(t["graphs"] for t in found),
            }
            rows.append(row)
            print(
                f"{f'{count} {how}':24s}{row['tokens_per_second']:12,.0f}{row['to_processes']:14.1%}"
                f"{row['host_ms']:10.2f}{row['cpu_ms']:10.2f}{row['graphs']:8d}",
                flush=True,
            )
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2))


def together(options: argparse.Namespace, count: int, how: str) -> dict[str, Any]:
    """One turn of ``count`` drafters."""
    words = [
        sys.executable, __file__, "--shape", options.shape, "--devices", options.devices, "--length",
        str(options.length), "--anchors", str(options.anchors), "--seconds", str(options.seconds),
    ]  # fmt: skip
    shares = [(count, 0)] if how == "threads" else [(1, number) for number in range(count)]
    children = [
        subprocess.Popen(
            [*words, "--worker", str(threads), "--first", str(first)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for threads, first in shares
    ]
    found: list[dict[str, Any]] = []
    try:
        for _ in ("compiled", "counted"):
            for child in children:
                said = child.stdout.readline() if child.stdout else ""
                if said.strip() != "ready":
                    raise SystemExit(f"a worker ended before it was ready: {child.wait()}")
            for child in children:
                assert child.stdin is not None
                child.stdin.write("go\n")
                child.stdin.flush()
        for child in children:
            found += json.loads(child.communicate()[0])
    finally:
        for child in children:
            child.kill()
            child.wait()
    return {
        "tokens_per_second": sum(f["tokens"] / f["seconds"] for f in found),
        "host_ms": statistics.mean(f["host_ms"] for f in found),
        "cpu_ms": statistics.mean(f["cpu_ms"] for f in found),
        "graphs": sum(f["graphs"] for f in found),
    }


def work(options: argparse.Namespace) -> None:
    """Some drafters in threads of this process, which begins each part when it is told to."""
    fxsafe.install()
    promise_recompile_limit()
    names = options.devices.split(",")
    devices = [torch.device(names[(options.first + i) % len(names)]) for i in range(options.worker)]
    if devices[0].type == "cpu":
        torch.set_num_threads(1)
    replicas = [make(options, device) for device in devices]
    batch = micro_batch(options, replicas[0].config.vocab_size)
    parts = [threading.Barrier(len(replicas) + 1) for _ in range(4)]
    found: list[dict[str, Any]] = [{} for _ in replicas]
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            drafter(options, replicas[number], batch, parts, found[number])
        except BaseException as error:
            failures.append(error)
            for part in parts:
                part.abort()

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(len(replicas))]
    for thread in threads:
        thread.start()
    try:
        for ready, go in (parts[:2], parts[2:]):
            ready.wait()
            print("ready", flush=True)
            sys.stdin.readline()
            go.wait()
    except threading.BrokenBarrierError:
        pass
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    print(json.dumps(found), flush=True)


def drafter(
    options: argparse.Namespace,
    replica: Replica,
    batch: MicroBatch,
    parts: list[threading.Barrier],
    found: dict[str, Any],
) -> None:
    """Compile, then as many steps as there is time for, then single micro-batches on an idle device."""
    if replica.device.type == "cuda":
        torch.cuda.set_device(replica.device)
    config = replica.config
    width = len(config.target_layer_ids) * config.hidden_size
    generator = torch.Generator(replica.device).manual_seed(0)
    feats = torch.randn(1, options.length, width, device=replica.device, generator=generator).to(replica.settings.dtype)
    features = Features(batch, feats, None)
    for _ in range(2):
        step(replica, features)
    parts[0].wait()
    parts[1].wait()
    graphs, tokens, started = graph_count(), 0, time.perf_counter()
    while time.perf_counter() - started < options.seconds:
        step(replica, features)
        tokens += PER_STEP * options.length
    found["tokens"], found["seconds"] = tokens, time.perf_counter() - started
    parts[2].wait()
    parts[3].wait()
    wall, cpu = [], []
    for _ in range(HOST_TURNS):
        replica.take()
        synchronize([replica])
        began, used = time.perf_counter(), time.thread_time()
        replica.learn(features)
        wall.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - used)
        synchronize([replica])
    found["host_ms"], found["cpu_ms"] = 1e3 * statistics.median(wall), 1e3 * statistics.median(cpu)
    found["graphs"] = graph_count() - graphs


def step(replica: Replica, features: Features) -> None:
    replica.take()
    for _ in range(PER_STEP):
        replica.learn(features)
    synchronize([replica])


def make(options: argparse.Namespace, device: torch.device) -> Replica:
    shape: dict[str, Any] = {**SHAPES[options.shape]}
    rows, layers = shape["vocab_size"], shape.pop("num_hidden_layers")
    config = DrafterConfig(
        **shape,
        num_hidden_layers=5,
        num_target_layers=layers,
        target_layer_ids=default_layer_ids(layers, 5) if layers > 8 else (0, 1, 3, 4, 6),
        mask_token_id=rows - 1,
    )
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    embedding, output = (
        torch.empty(rows, config.hidden_size, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
        for _ in range(2)
    )
    how = ReplicaSettings(dtype, backend="inductor" if cuda else "aot_eager")
    replica = Replica(config, Head(embedding, output), device, how, LossSettings())
    replica.drafter.initialize(generator)
    return replica


def micro_batch(options: argparse.Namespace, rows: int) -> MicroBatch:
    rng = random.Random(0)
    example = Example([rng.randrange(rows - 1) for _ in range(options.length)], [True] * options.length)
    return collate([example], index=0, seed=0, anchors=options.anchors, bucket=options.length)


if __name__ == "__main__":
    main()
