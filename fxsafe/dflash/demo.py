"""``fxsafe dflash demo``: the whole story on a laptop, without a network and without a GPU.

A small Qwen3-shaped target learns English from the texts of Python's own help (one token for each byte), then a drafter
learns from its hidden states with one target thread and two drafter threads, each of which compiles its drafter, and
both are put to the test: the text must be the target's own, and a forward of the target must gain several tokens.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fxsafe.dflash.errors import SettingsError
from fxsafe.dflash.export import load_drafter, load_into
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.model import Drafter
from fxsafe.dflash.optim import OptimSettings, learning_rate
from fxsafe.dflash.rows import Table
from fxsafe.dflash.sessions import DraftSession
from fxsafe.dflash.settings import DataSettings, DrafterSettings, RunSettings, Settings, TargetSettings
from fxsafe.dflash.speculate import Evaluation, decode, evaluate
from fxsafe.dflash.target import Target
from fxsafe.dflash.train import Trainer

__all__ = ["MARK", "DemoSize", "byte_target", "run_demo"]

MARK = ".dflash-demo"
"""empty file in the directory of a demo, which the next one may replace"""

MASK_BYTE = 0xFF
"""never occurs in UTF-8, and is what the drafter is shown for tokens to come"""


@dataclasses.dataclass(frozen=True, slots=True)
class DemoSize:
    """How much is done; the default takes a few minutes on two cores."""

    hidden: int = 128
    layers: int = 4
    length: int = 128
    target_steps: int = 500
    target_batch: int = 8
    drafter_steps: int = 300
    block: int = 8
    anchors: int = 24
    drafter_layers: int = 2
    prompts: int = 8
    new_tokens: int = 96
    compile: bool = True


def run_demo(out: Path, size: DemoSize | None = None, say: Callable[[str], None] = print) -> dict[str, Any] | None:
    """Train both, evaluate, and write everything below ``out``.

    Returns:
        The evaluations of the trained and of an untrained drafter, and the seconds of each part; None if a signal
        stopped the training of the drafter.

    Raises:
        SettingsError: ``out`` cannot be made.
    """
    size = size or DemoSize()
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / MARK).touch()
    except OSError as error:
        raise SettingsError(f"{out} cannot be made: {error}") from error
    text = english()
    held_out, training = text[: len(text) // 20], text[len(text) // 20 :]
    say(f"target: {size.layers} layers of {size.hidden}, learning {len(training):,} bytes of Python's help texts")
    started = time.perf_counter()
    model, loss = byte_target(training, size, say)
    target = Target(model)
    target_seconds = time.perf_counter() - started
    say(f"target: {loss:.2f} nats for a byte after {target_seconds:.0f} s")

    rows = target_text(target, training, size)
    settings = demo_settings(out, size)
    trainer = Trainer(settings, target=target, rows=Table(rows, "the target's own text"), say=say)
    for line in trainer.plan.lines:
        say(line)
    started = time.perf_counter()
    threads = torch.get_num_threads()
    # Three threads of ours share the cores; more threads inside of each operation would only wait for each other.
    torch.set_num_threads(max(1, threads // 3))
    try:
        outcome = trainer.run()
    finally:
        torch.set_num_threads(threads)
    drafter_seconds = time.perf_counter() - started
    if outcome.export is None:
        return None

    prompts = [list(held_out[i : i + 48]) for i in range(0, len(held_out) - 48, len(held_out) // size.prompts)]
    prompts = prompts[: size.prompts]
    config, state = load_drafter(outcome.export)
    trained, untrained = Drafter(config), Drafter(config)
    load_into(trained, state)
    untrained.initialize(torch.Generator().manual_seed(0))
    started = time.perf_counter()
    reports: dict[str, Evaluation] = {}
    for name, drafter in (("untrained", untrained), ("trained", trained)):
        reports[name] = evaluate(target, drafter, target.head, prompts, new_tokens=size.new_tokens)
        say(f"{name} drafter of {config.block_size} tokens, {len(prompts)} prompts of held-out text, greedy:")
        for line in reports[name].lines():
            say(f"  {line}")
    result = {
        **{name: report.to_json() for name, report in reports.items()},
        "seconds": {
            "target": target_seconds,
            "drafter": drafter_seconds,
            "evaluation": time.perf_counter() - started,
        },
    }
    (out / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    for line in sample_of(target, trained, prompts[0], size.new_tokens):
        say(line)
    say(f"checkpoints, curves.png, evaluation.json and the drafter for z-lab's package, SGLang and vLLM are in {out}")
    mine, other = reports["trained"], reports["untrained"]
    say(
        f"acceptance length {mine.acceptance_per_request:.2f} of {config.block_size} "
        f"(untrained {other.acceptance_per_request:.2f}), "
        f"greedy text equal to the target's own in {mine.equal} of {len(prompts)}"
    )
    return result


def sample_of(target: Target, drafter: Drafter, prompt: Sequence[int], new_tokens: int) -> list[str]:
    """A prompt and what follows it, decoded with the drafter and without; bars part what single forwards gave."""
    plain = decode(target, prompt, new_tokens=new_tokens)
    propose = DraftSession(drafter, target.head).propose
    fast = decode(target, prompt, new_tokens=new_tokens, taps=drafter.config.target_layer_ids, propose=propose)
    pieces, at = [[fast.tokens[0]]], 1
    for count in fast.taken:
        pieces.append(list(fast.tokens[at : at + count]))
        at += count

    def words(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace").replace("\n", "\\n")

    return [
        f"prompt:             {words(prompt)}",
        f"target alone:       {words(plain.tokens)}   ({len(plain.taken) + 1} forwards)",
        f"with the drafter:   {'|'.join(map(words, pieces))}   ({len(fast.taken) + 1} forwards)",
    ]


def english() -> bytes:
    """Half a megabyte of English that comes with Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def byte_target(text: bytes, size: DemoSize, say: Callable[[str], None] = print) -> tuple[Any, float]:
    """A causal LM over bytes, trained on a text; returns it and its last loss in nats for a byte."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=256,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        num_key_value_heads=max(1, size.hidden // 64),
        head_dim=32,
        intermediate_size=size.hidden * 3,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    auto: Any = transformers.AutoModelForCausalLM  # untyped
    model = auto.from_config(config)
    data = torch.tensor(list(text))
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = OptimSettings(lr=2e-3, warmup=0.05, min_lr=1e-4)
    average = 0.0
    for step in range(size.target_steps):
        at = torch.randint(len(data) - size.length, (size.target_batch,), generator=generator)
        ids = data[at[:, None] + torch.arange(size.length)]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, step, size.target_steps)
        logits = model(input_ids=ids).logits
        loss: Any = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average = loss.item() if not average else 0.95 * average + 0.05 * loss.item()
        if (step + 1) % 100 == 0:
            say(f"target step {step + 1}/{size.target_steps}  loss {average:.3f}")
    return model, average


def target_text(target: Target, text: bytes, size: DemoSize) -> list[dict[str, Any]]:
    """Rows of bytes; the real text, which the target has learnt to write."""
    step = size.length
    return [{"input_ids": list(text[i : i + step])} for i in range(0, len(text) - step, step)]


def demo_settings(out: Path, size: DemoSize) -> Settings:
    """One target thread, two drafter threads, all on the CPU."""
    return Settings(
        target=TargetSettings(devices=("cpu",)),
        drafter=DrafterSettings(
            layers=size.drafter_layers,
            block_size=size.block,
            anchors=size.anchors,
            target_layer_ids=tuple(range(size.layers - 1)),
            mask_token_id=MASK_BYTE,
            devices=("cpu", "cpu"),
            dtype="float32",
            compile=size.compile,
        ),
        data=DataSettings(
            validation_share=0.02,
            validation_batches=4,
            max_length=size.length,
            batch_size=4,
            micro_batches=4,
            bucket=size.length,
        ),
        # The real text is not what the target would have written; its own distribution there is.
        loss=LossSettings(kind="distill"),
        optim=OptimSettings(lr=2e-3, warmup=0.05),
        run=RunSettings(
            out=str(out),
            epochs=1000,
            max_steps=size.drafter_steps,
            log_every=25,
            eval_every=100,
            save_every=100,
        ),
    )
