"""A Ray actor with ``max_concurrency``: its methods run in threads of one worker process.

Some calls use a compiled model, others load one that was saved as a ``GraphModule``, which is a trace, and others
trace with ``make_fx``. Up to torch 2.13 the first are refused while another traces ("Detected that you are using FX to
symbolically trace a dynamo-optimized function"); on every torch eager modules raise then ("module is not installed as
a submodule"), and two ``make_fx`` fail or give graphs with other names.

    pip install ray
    python examples/ray_actor_threads.py [--plain | --hook]

A worker is a process of its own, and fxsafe has to be installed in it: in the actor's ``__init__``, as here, or in
every worker of the job by ``ray.init(runtime_env={"worker_process_setup_hook": install})`` (``--hook``).
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import logging
import pickle
import sys
from typing import Any

if missing := [name for name in ("ray",) if importlib.util.find_spec(name) is None]:
    sys.exit(f"this example needs {' and '.join(missing)}: pip install {' '.join(missing)}")

import ray
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxsafe

THREADS = 4
CALLS = 300
KINDS = ("predict", "load", "graph")


def install() -> None:
    """For ``worker_process_setup_hook``: runs when a worker starts. It imports torch, in workers without models too."""
    fxsafe.install()


@ray.remote(num_cpus=1)
class Models:
    def __init__(self, where: str) -> None:
        if where == "__init__":
            self.handle = fxsafe.install()
        self.installed = fxsafe.is_installed()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
        self.saved = pickle.dumps(torch.fx.symbolic_trace(self.model))
        self.compiled = torch.compile(self.model, backend="aot_eager")
        # Still one thread: no call runs before this returns. It warms what calls will use, as they will call it, and
        # imports what threads should not import together.
        self.right = {kind: getattr(self, kind)(0.5) for kind in KINDS}

    def predict(self, value: float) -> list[float]:
        with torch.no_grad():
            return self.compiled(torch.full((1, 8), value))[0].tolist()

    def load(self, value: float) -> list[float]:
        with torch.no_grad():
            return pickle.loads(self.saved)(torch.full((1, 8), value))[0].tolist()

    def graph(self, value: float) -> tuple[list[float], list[str], str]:
        """What the traced model gives, its operators, and its code."""
        x = torch.full((1, 8), value)
        with torch.no_grad():
            traced = make_fx(self.model)(x)
            operators = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
            return traced(x)[0].tolist(), operators, traced.code

    def serial(self) -> tuple[bool, dict[str, Any]]:
        """Whether fxsafe is installed, and the answers of one thread."""
        return self.installed, self.right


def verdict(kind: str, answer: Any, right: Any) -> str:
    if answer == right:
        return "right"
    return "right but for names" if kind == "graph" and answer[:2] == right[:2] else "WRONG"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--plain", action="store_true", help="without fxsafe")
    group.add_argument("--hook", action="store_true", help="fxsafe comes by worker_process_setup_hook")
    arguments = parser.parse_args()
    ray.init(
        "local",  # a cluster of its own, whatever else runs on the machine
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        logging_level=logging.ERROR,
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": install} if arguments.hook else None,
    )
    outcomes: collections.Counter[str] = collections.Counter()
    try:
        where = "nowhere" if arguments.plain else "the hook" if arguments.hook else "__init__"
        actor = Models.options(max_concurrency=THREADS).remote(where)
        installed, right = ray.get(actor.serial.remote())
        # All at once, so that the actor's threads always have something to do.
        calls = [(kind, getattr(actor, kind).remote(0.5)) for _ in range(CALLS // len(KINDS)) for kind in KINDS]
        for kind, call in calls:
            try:
                outcomes[f"{kind} {verdict(kind, ray.get(call), right[kind])}"] += 1
            except Exception as error:
                # A RayTaskError has what the call raised as its cause.
                cause = getattr(error, "cause", error)
                outcomes[f"{kind} {type(cause).__name__}: {str(cause).partition(chr(10))[0][:80]}"] += 1
    finally:
        ray.shutdown()
    print(f"fxsafe in the worker: {installed}")
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:4d} {outcome}")
    return 0 if set(outcomes) == {f"{kind} right" for kind in KINDS} else 1


if __name__ == "__main__":
    sys.exit(main())
