"""Are kernels compiled while another thread traces those that are compiled alone? Their source, and their speed.

    python benchmarks/same_kernels.py                  # the CPU; needs a C++ compiler
    python benchmarks/same_kernels.py --device cuda
    python benchmarks/same_kernels.py --only "always-false, trac"     # beside both kinds of trace

The story that fxsafe comes from asks it: a compile that was let through beside a trace might have made worse kernels.
A small transformer's forward and backward are compiled by Inductor, all caches off: on plain torch while nothing else
runs, and under each fix alone, beside a thread that stands inside a trace, and beside one that traces all the time.
Prints one line for each and exits 0 if every source is the first one's. Speed is measured in turns that alternate
with the first one's, when nobody traces.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import json
import os
import re
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import models
import torch
import turns
from isolation import trace_in_flight
from torch._inductor.utils import run_and_get_code

import fxsafe


def step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def normal(source: str) -> str:
    """Without the number that Inductor gives each graph of a process, and without the place of its files.

    With its caches off each compile has a directory of its own, which a comment above each Triton kernel names; the
    name of the kernel's file there, a hash of its source, is compared.
    """
    return re.sub(r"(# kernel path: ).*/", r"\1", re.sub(r"AOT ID: \[.*\]", "AOT ID", source))


def compiled(model: torch.nn.Module, x: torch.Tensor) -> tuple[Callable[[], None], list[str]]:
    """A training step of the model, compiled now, and the source of its graphs."""
    call = torch.compile(types.FunctionType(step.__code__.replace(), globals()))

    def train() -> None:
        model.zero_grad()
        call(model, x).backward()

    _, sources = run_and_get_code(train)
    return train, [normal(source) for source in sources]


def keep(directory: str | None, name: str, sources: list[str]) -> None:
    if directory is not None:
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, name.replace(", ", "-").replace(" ", "_") + ".txt"), "w") as file:
            file.write("\n# ==== next graph ====\n".join(sources))


@contextlib.contextmanager
def tracing_all_the_time() -> Iterator[None]:
    stop = threading.Event()
    model = models.Transformer()

    def trace() -> None:
        while not stop.is_set():
            torch.fx.symbolic_trace(model)

    thread = threading.Thread(target=trace)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


BESIDE = (contextlib.nullcontext, trace_in_flight, tracing_all_the_time)
CASES: list[tuple[str, Any]] = [
    ("plain", contextlib.nullcontext),  # the control: the same compile once more
    *itertools.product(("thread-local", "always-false"), BESIDE),
]


def where_of(beside: Any) -> str:
    return "alone" if beside is contextlib.nullcontext else beside.__name__.replace("_", " ")


def name_of(fix: str, beside: Any) -> str:
    return f"{fix}, {where_of(beside)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each comparison of speeds (default: 5)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose 'FIX, WHERE' has this text in it")
    parser.add_argument("--json", help="file for all numbers")
    parser.add_argument("--sources", help="directory for the sources, one file for each compile")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in name_of(*case)]
    if not cases:
        parser.error(f"no case has {options.only!r} in its name: {'; '.join(name_of(*case) for case in CASES)}")
    warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
    if options.device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    model = models.Transformer(layers=2, width=256).to(options.device)
    x = torch.randn(4, 128, 256, device=options.device)

    def timed(train: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            train()
            if options.device != "cpu":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        return run

    alone, expected = compiled(model, x)
    keep(options.sources, "first", expected)
    print(f"torch {torch.__version__}, {options.device}: {len(expected)} graphs, plain and alone")
    rows: list[dict[str, Any]] = []
    for fix, beside in cases:
        with contextlib.nullcontext() if fix == "plain" else fxsafe.install(fix):
            with beside():
                train, sources = compiled(model, x)
            found = turns.compare(timed(alone), timed(train), seconds=options.seconds)
        same, where = sources == expected, where_of(beside)
        rows.append({"fix": fix, "where": where, "same": same, "ratio": found.ratio, "error": found.error})
        print(
            f"{fix:>12}, {where:<25} source {'the same' if same else 'DIFFERS'}, "
            f"{found.before * 1e3:.3f} -> {found.after * 1e3:.3f} ms a step, ratio {found.ratio:.3f} "
            f"+-{found.error / found.before:.3f}",
            flush=True,
        )
        keep(options.sources, name_of(fix, beside), sources)
        for one, other in zip(expected, sources, strict=False):
            changes = difflib.unified_diff(one.splitlines(), other.splitlines(), "plain and alone", where, "", "", 0)
            for change in list(changes)[:8]:
                print(change)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "graphs": len(expected), "rows": rows}, file, indent=1)
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
