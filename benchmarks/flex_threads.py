"""Several threads train small compiled flex_attention models on one GPU, from cold caches: does it finish?

    python benchmarks/flex_threads.py --fix plain
    python benchmarks/flex_threads.py --fix fxsafe
    python benchmarks/flex_threads.py --fix fxsafe --without compile-lock     # shows what that patch is for

Prints one line of JSON: the outcome of each thread, and how far its losses are from those of the same model trained
alone afterwards. Exits 0 if every thread finished with the losses of the serial run, 1 if one raised or differs, and
3 after ``--watchdog`` seconds without an end, with the stack of every thread on stderr: that is a hang.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--fix", choices=("plain", "fxsafe"), required=True)
parser.add_argument(
    "--without", default="", metavar="NAMES", help="patches to leave out, as FXSAFE_DISABLE spells them"
)
parser.add_argument("--threads", type=int, default=3)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--device", default="cuda:0")
parser.add_argument("--watchdog", type=float, default=240, metavar="SECONDS")
parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference of a loss")
arguments = parser.parse_args()

if arguments.without:
    os.environ["FXSAFE_DISABLE"] = arguments.without
_caches = tempfile.mkdtemp(prefix="flex_threads_")
os.environ |= {
    "TORCHINDUCTOR_CACHE_DIR": _caches,
    "TRITON_CACHE_DIR": os.path.join(_caches, "triton"),
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

LENGTH, HEADS = 256, 4


class Model(nn.Module):
    """One block of attention. The head's width differs between threads, so each has graphs of its own to compile."""

    def __init__(self, index: int) -> None:
        super().__init__()
        width = HEADS * (16 << index % 3)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.width = width
        self.bias = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.mix(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)

        def distance(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + self.bias[h] * (i - j)

        mixed = flex_attention(q, k, v, score_mod=distance, block_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def train(index: int, steps: int) -> list[float]:
    """The losses of a fresh model, in order; the same for the same arguments."""
    device = torch.device(arguments.device)
    generator = torch.Generator().manual_seed(index)
    model = Model(index)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device=device)
    compiled = torch.compile(model, dynamic=False)
    losses = []
    for _ in range(steps):
        x = torch.randn(2, LENGTH, model.width, generator=generator).to(device)
        loss = (compiled(x, mask) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": "needs a CUDA device"}))
        return 2
    torch.ones(1, device=arguments.device)
    installed: list[str] = []
    if arguments.fix == "fxsafe":
        import fxsafe

        fxsafe.install()
        installed = [f"{record['name']}: {record['status']}" for record in fxsafe.info()]
    outcomes: list[Any] = [None] * arguments.threads
    barrier = threading.Barrier(arguments.threads)

    def work(index: int) -> None:
        try:
            barrier.wait()
            outcomes[index] = train(index, arguments.steps)
        except BaseException as error:
            traceback.print_exc()
            outcomes[index] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"

    def hung() -> None:
        print(json.dumps({"torch": torch.__version__, "fix": arguments.fix, "hung": True, "patches": installed}))
        sys.stdout.flush()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(3)

    watchdog = threading.Timer(arguments.watchdog, hung)
    watchdog.daemon = True
    watchdog.start()
    begun = time.perf_counter()
    threads = [threading.Thread(target=work, args=(index,), name=f"trainer-{index}") for index in range(len(outcomes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - begun
    differences = []
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, list):
            alone = train(index, arguments.steps)
            differences.append(max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(outcome, alone, strict=True)))
    watchdog.cancel()
    good = len(differences) == len(outcomes) and max(differences) <= arguments.tolerance
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name(arguments.device),
                "fix": arguments.fix,
                "without": arguments.without,
                "hung": False,
                "good": good,
                "seconds": round(elapsed, 1),
                "outcomes": outcomes,
                "relative_differences_from_serial": differences,
                "patches": installed,
            }
        )
    )
    return 0 if good else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
