"""Two Hugging Face ``Trainer``s in two threads, each compiling its model, while a third thread traces.

    pip install transformers accelerate
    python examples/hf_trainer_threads.py [--plain]

Both are made in the main thread, because accelerate keeps one state for the process. Adam asks torch whether anything
is being compiled, in any thread (docs/limits.md): losses are those of serial runs up to rounding, not to the bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import threading

if missing := [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]:
    sys.exit(f"this example needs {' and '.join(missing)}: pip install {' '.join(missing)}")

import torch
import transformers
from torch import nn

import fxsafe

STEPS = 6


def make_trainer(seed: int, directory: str) -> transformers.Trainer:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    arguments = transformers.TrainingArguments(
        output_dir=directory,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        torch_compile=True,
        torch_compile_backend="aot_eager",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=seed,
    )
    rows = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(2 * STEPS)]
    return transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without fxsafe")
    plain = parser.parse_args().plain
    handle = None if plain else fxsafe.install()
    outcomes: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        trainers = [make_trainer(seed, directory) for seed in range(2)]
        finished = threading.Event()

        def train(seed: int) -> None:
            try:
                loss = trainers[seed].train().training_loss
                outcomes[seed] = f"trained, loss {loss:.4f}"
            except Exception as error:
                outcomes[seed] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"

        def traces() -> None:
            module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            while not finished.is_set():
                torch.fx.symbolic_trace(module)

        threads = [threading.Thread(target=train, args=(seed,)) for seed in range(2)]
        tracer = threading.Thread(target=traces)
        for thread in (*threads, tracer):
            thread.start()
        for thread in threads:
            thread.join()
        finished.set()
        tracer.join()
    if handle is not None:
        handle.uninstall()
    for seed, text in sorted(outcomes.items()):
        print(f"trainer {seed}: {text}")
    return 0 if all(text.startswith("trained") for text in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
