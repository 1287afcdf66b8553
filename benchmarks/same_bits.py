"""Are a drafter's gradients the same to the bit in another process, from cold caches, whichever length comes first?

    python benchmarks/same_bits.py                              # a GPU
    python benchmarks/same_bits.py --device cpu --hidden 64     # does the script run at all

Three processes: two with empty caches of Inductor, of which one meets the lengths the other way round, and
then one with the caches of the first. Each computes the gradients of two micro-batches, of 512 and 256 positions,
three times. Prints how many tensors (gradients of the parameters, the tally, the target's features) differ from the
first process's, and exits 0 if none does. ``--plain`` compiles as ``torch.compile`` does by itself, without
``deterministic``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import fxsafe
from fxsafe.dflash import compiling, replica
from fxsafe.dflash.batches import Example, Features, MicroBatch, collate
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.replica import Replica, ReplicaSettings
from fxsafe.dflash.target import Target

ROWS, BUCKET = 8192, 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--hidden", type=int, default=1024, help="size of the target's hidden states")
    parser.add_argument("--plain", action="store_true", help="without Inductor's deterministic")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--order", default="512,256", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        cold = [start(folder, "first", "512,256", "a"), start(folder, "other caches", "256,512", "b")]
        wait(cold)
        wait([start(folder, "first's caches", "256,512", "a")])
        found = {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}
    first = found.pop("first")
    print(f"torch {torch.__version__}, {options.device}, {len(first)} tensors, three turns each")
    print(f"first: {sum(len(set(hashes)) > 1 for hashes in first.values())} differ from turn to turn")
    differ = {name: sum(hashes != other[key] for key, hashes in first.items()) for name, other in found.items()}
    for name, count in sorted(differ.items()):
        print(f"{name}: {count} differ")
    return int(any(differ.values()) or any(len(set(hashes)) > 1 for hashes in first.values()))


def start(folder: str, name: str, order: str, caches: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, *sys.argv[1:], "--order", order, "--worker", f"{folder}/{name}.json"]
    return subprocess.Popen(command, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{caches}"})


def wait(processes: list[subprocess.Popen[bytes]]) -> None:
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit("a process failed; see above")


def work(options: argparse.Namespace) -> None:
    import transformers

    fxsafe.install()
    compiling.promise_recompile_limit()
    if options.plain:
        vars(replica)["compile_here"] = lambda function, backend: torch.compile(
            function, dynamic=False, backend=backend
        )
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = transformers.Qwen3Config(
        vocab_size=ROWS, hidden_size=options.hidden, num_hidden_layers=12, num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128), head_dim=64, intermediate_size=3 * options.hidden,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    target = Target(model.eval().to(device, dtype))
    shape = target.drafter_config(layers=3, block_size=8, mask_token_id=ROWS - 1)
    learner = Replica(shape, target.head, device, ReplicaSettings(dtype), LossSettings())
    learner.drafter.initialize(torch.Generator(device).manual_seed(0))
    names = [name for name, _ in learner.drafter.named_parameters()]
    hashes: dict[str, list[str]] = {}
    for length in map(int, options.order.split(",")):
        batch = sequences(length)
        features = Features(batch, target.features(batch.ids_BS.to(device), shape.target_layer_ids), None)
        hashes[f"{length} features"] = [digest(features.feats_BSF)]
        for _ in range(3):
            learner.learn(features)
            sums, tally = learner.take()
            assert tally is not None
            for name, tensor in zip([*names, "tally"], [*sums, tally], strict=True):
                hashes.setdefault(f"{length} {name}", []).append(digest(tensor))
    Path(options.worker).write_text(json.dumps(hashes))


def sequences(length: int) -> MicroBatch:
    """Two that fill a bucket of ``length`` positions."""
    rng = random.Random(length)
    examples = []
    for _ in range(2):
        tokens = rng.randint(length - 100, length)
        examples.append(Example([rng.randrange(ROWS - 1) for _ in range(tokens)], [True] * tokens))
    return collate(examples, index=0, seed=0, anchors=64, bucket=BUCKET)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
