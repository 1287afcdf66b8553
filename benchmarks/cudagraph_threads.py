"""CUDA graph trees in worker threads: inference, training and a pool, each against the same work in the main thread.

    python benchmarks/cudagraph_threads.py              # plain torch
    python benchmarks/cudagraph_threads.py --fxsafe     # with the patch

Needs a CUDA device. Prints one line per job and exits 0 if all results are those of the eager model.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--fxsafe", action="store_true")
parser.add_argument("--threads", type=int, default=3)
parser.add_argument("--mode", default="reduce-overhead")
options = parser.parse_args()
if options.fxsafe:
    import fxsafe

    fxsafe.install()

import torch  # noqa: E402
from torch import nn  # noqa: E402

STEPS = 8
failures: list[str] = []


def model(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()


def data(seed: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randn(16, 64, generator=generator).cuda()


def infer(seed: int) -> None:
    net = made[seed].eval()
    compiled = torch.compile(net, mode=options.mode)
    with torch.no_grad():
        for step in range(STEPS):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(data(seed, step)).clone(), net(data(seed, step)), rtol=1e-3, atol=1e-3)


def train(seed: int) -> None:
    net = made[seed].train()
    compiled = torch.compile(net, mode=options.mode)
    for step in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        net.zero_grad()
        compiled(data(seed, step)).square().mean().backward()
        got = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
        net(data(seed, step)).square().mean().backward()
        right = [p.grad for p in net.parameters()]
        for mine, eager in zip(got, right, strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-3, atol=1e-3)


def job(name: str, call: Any, *args: Any) -> None:
    began = time.perf_counter()
    try:
        call(*args)
        outcome = "ok"
    except Exception as error:
        outcome = f"{type(error).__name__}: {(str(error).splitlines() or ['(no message)'])[0][:120]}"
        failures.append(name)
    print(f"{name:32} {outcome:60} {time.perf_counter() - began:6.1f} s", flush=True)


def in_threads(name: str, call: Any) -> None:
    threads = [
        threading.Thread(target=job, args=(f"{name}, thread {i}", call, i), daemon=True) for i in range(options.threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        if thread.is_alive():
            failures.append(name)
            print(f"{name}: a thread hangs", flush=True)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, fxsafe {'on' if options.fxsafe else 'off'}")
    if options.fxsafe:
        importlib.import_module("torch._inductor.cudagraph_trees")
        for record in fxsafe.info():
            if record["name"] == "cudagraph-threads":
                print(f"patch: {record['status']} {record['reason']}")
    job("inference, main thread", infer, 0)
    in_threads("inference", infer)
    in_threads("training", train)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(job, "inference, pool of one", infer, 0).result()
    print("FAILED: " + ", ".join(failures) if failures else "all ok")
    return 1 if failures else 0


if __name__ == "__main__":
    if torch.cuda.is_available():
        # Random state is the process's: models are made before there are threads.
        made = [model(seed) for seed in range(max(options.threads, 1))]
    status = main()
    sys.stdout.flush()
    os._exit(status)
