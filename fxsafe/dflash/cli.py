"""``fxsafe dflash``: train, eval, export, prepare, plot, demo and stress.

A mistake of the user's is answered with one line on stderr and status 2; a run that a signal stopped, with 130.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import torch

import fxsafe
from fxsafe.dflash.errors import DFlashError
from fxsafe.dflash.files import require_writable, write_whole
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.optim import OptimSettings
from fxsafe.dflash.settings import (
    DataSettings,
    DrafterSettings,
    RunSettings,
    Settings,
    TargetSettings,
    devices_of,
    dtype_of,
)

for _needed in ("jsonargparse", "transformers", "datasets", "safetensors", "rich", "matplotlib"):
    # Looked for, not imported: transformers alone would take seconds, for --help too.
    if importlib.util.find_spec(_needed) is None:
        raise ModuleNotFoundError(f"No module named {_needed!r}", name=_needed)

__all__ = ["main"]

SECTIONS: dict[str, Any] = {
    "target": TargetSettings,
    "drafter": DrafterSettings,
    "data": DataSettings,
    "loss": LossSettings,
    "optim": OptimSettings,
    "run": RunSettings,
}


class _Parser(jsonargparse.ArgumentParser):  # type: ignore[misc, unused-ignore]
    """Answers a mistake with a line of its own; jsonargparse would print the usage, all settings of it, before."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        parser = getattr(ex, "subcommand_parser", None) or self
        prog = parser.prog.replace(" [options]", "")
        # YAML knows the text only, not whose it is.
        message = " ".join(message.replace(' in "<unicode string>",', " at").split())
        if (section := re.match(r'Parser key "(\w+)": Unable to load config', message)) and section[1] in SECTIONS:
            name = next(iter(SECTIONS[section[1]].__dataclass_fields__))
            message += f" (--{section[1]} takes a file of settings; one of them is given as --{section[1]}.{name})"
        print(f"{prog}: {message}; see {prog} --help", file=sys.stderr)
        sys.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command line, without the words ``fxsafe dflash``.

    Returns:
        The exit status.

    Raises:
        SystemExit: after ``--help`` and mistakes in the arguments.
    """
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.print_help()
        return 0
    options = parser.parse_args(words)
    try:
        _refuse_old_torch()
        if options.command == "stress":  # installs what each of its modes wants, in processes of their own
            return _stress(options.stress)
        # Several threads compile, which plain torch up to 2.13 does not survive.
        fxsafe.install()
        command = {"train": _train, "eval": _eval, "export": _export, "prepare": _prepare, "plot": _plot, "demo": _demo}
        return command[options.command](options[options.command])
    except fxsafe.FxsafeError as error:
        if getattr(error, "show_cause", False) and error.__cause__ is not None:
            import traceback

            traceback.print_exception(error.__cause__)
        print(f"fxsafe dflash {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _refuse_old_torch() -> None:
    # Pip sees to it, unless told otherwise. TorchVersion compares as versions, not as strings.
    if torch.__version__ < "2.6":
        raise DFlashError(
            f"torch {torch.__version__} is installed, and the trainer needs 2.6 or newer: transformers 5.24 passes "
            "over older ones, and their BlockMask takes no sequence lengths; pip install 'torch>=2.6'"
        )


def _parser() -> jsonargparse.ArgumentParser:
    parser = _Parser(
        prog="fxsafe dflash",
        description="Train DFlash drafters: several target threads feed several drafter threads in one process.",
    )
    commands = parser.add_subcommands(dest="command", metavar="COMMAND")

    train = _Parser(
        description="Train a drafter. The settings are those of a YAML file, changed by --SECTION.NAME. "
        "A run that stands in run.out is resumed. Ctrl-C finishes the step and saves."
    )
    train.add_argument("--config", action="config", help="YAML file of settings")
    train.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    # Section by section: jsonargparse cannot take defaults out of a dataclass with slots.
    for name, kind in SECTIONS.items():
        train.add_class_arguments(kind, name)
    commands.add_subcommand("train", train, help="train a drafter")

    evaluation = _Parser(
        description="Decode prompts with a drafter and without, greedily: acceptance length, speed-up, equality."
    )
    evaluation.add_argument("drafter", help="directory of an export")
    evaluation.add_argument("--target", required=True, help="Hub id or directory")
    evaluation.add_argument(
        "--prompts", required=True, help="JSONL, Parquet or Hub id; the first turns of conversations, or texts"
    )
    evaluation.add_argument("--limit", type=int, default=50, help="prompts at most")
    evaluation.add_argument("--new-tokens", type=int, default=512, help="tokens at most for each prompt")
    evaluation.add_argument("--prompt-tokens", type=int, default=1024, help="longer prompts are cut at the front")
    evaluation.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of both models")
    evaluation.add_argument("--device", default="auto", help="of both models")
    evaluation.add_argument("--no-cache", action="store_true", help="compute the whole prefix each time")
    evaluation.add_argument(
        "--template-args", type=dict, default={}, help='for the template: {"enable_thinking": false}'
    )
    evaluation.add_argument("--json", default=None, help="file for the report")
    evaluation.add_argument("--trust-remote-code", action="store_true", help="let the target's own code run")
    commands.add_subcommand("eval", evaluation, help="measure a drafter on prompts")

    export = _Parser(description="Write a checkpoint's drafter in z-lab's layout and read it back.")
    export.add_argument("run", help="directory of a run, or of one of its checkpoints")
    export.add_argument("out", help="directory to write")
    commands.add_subcommand("export", export, help="write a drafter for z-lab's package, SGLang and vLLM")

    prepare = _Parser(description="Let the target write the answers of a data set anew.")
    prepare.add_argument("data", nargs="+", help="JSONL, Parquet or Hub id, of conversations")
    prepare.add_argument("--target", required=True, help="Hub id or directory")
    prepare.add_argument("--out", required=True, help="JSONL to write; what stands there already is kept")
    prepare.add_argument("--new-tokens", type=int, default=2048, help="tokens at most for each answer")
    prepare.add_argument("--temperature", type=float, default=0.0, help="0 for greedy")
    prepare.add_argument("--top-p", type=float, default=1.0, help="share of probability that is drawn from")
    prepare.add_argument("--seed", type=int, default=0, help="of what is drawn")
    prepare.add_argument("--limit", type=int, default=None, help="rows at most")
    prepare.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the target")
    prepare.add_argument("--device", default="auto", help="of the target")
    prepare.add_argument("--trust-remote-code", action="store_true", help="let the target's own code run")
    commands.add_subcommand("prepare", prepare, help="answers written by the target")

    plot = _Parser(description="Draw the curves of a run into its curves.png.")
    plot.add_argument("run", help="directory of a run")
    commands.add_subcommand("plot", plot, help="draw the curves of a run")

    demo = _Parser(
        description="Train a small target and its drafter on English text that comes with Python, and evaluate: "
        "no network, no GPU, a few minutes on two cores."
    )
    demo.add_argument("--out", default="dflash-demo", help="directory to write; replaced if it is a demo's")
    commands.add_subcommand("demo", demo, help="the whole story on a laptop")

    stress = _Parser(
        description="Run one training load from cold caches under plain torch, the known work-arounds and fxsafe, and "
        "compare: steps, errors, hangs, silent eager steps, tokens per second, memory, residue."
    )
    stress.add_argument("--seconds", type=float, default=120.0, help="of all starts together, imports not counted")
    stress.add_argument("--starts", type=int, default=1, help="cold starts of each mode")
    stress.add_argument("--modes", default="", help="comma-separated; default: all (see docs/dflash.md)")
    stress.add_argument("--threads", type=int, default=2, help="drafters")
    stress.add_argument(
        "--devices", default="auto", help="comma-separated, given to the drafters in turns; auto: one GPU or the CPU"
    )
    stress.add_argument("--backend", default="auto", help="of torch.compile; auto: inductor, on the CPU aot_eager")
    stress.add_argument("--steps", type=int, default=0, help="of a drafter in one start at most; 0: as time allows")
    stress.add_argument("--at-most", type=float, default=None, help="seconds after which no further start begins")
    stress.add_argument("--jobs", type=int, default=1, help="starts at a time; speeds mean nothing with more than 1")
    stress.add_argument("--spawn", action="store_true", help="start each process afresh instead of forking it")
    stress.add_argument("--trace-every", type=int, default=1, help="steps between two traces of a drafter; 0: none")
    stress.add_argument("--stall-after", type=float, default=None, help="seconds that are a hang; default: by backend")
    for name, what in (
        ("hidden", "size of the target's states"),
        ("layers", "of the drafter"),
        ("length", "tokens of the longest sequence"),
        ("anchors", "blocks of a sequence"),
        ("block", "tokens of a block"),
        ("batch", "sequences of a step"),
        ("shapes", "different lengths, each of which is compiled for"),
    ):
        stress.add_argument(f"--{name}", type=int, default=None, help=f"{what}; default: by device")
    stress.add_argument("--json", default=None, help="file for all numbers")
    stress.add_argument("--png", default=None, help="file for a picture")
    stress.add_argument("--record", default=None, help="file for a timeline of the first start of all of fxsafe")
    commands.add_subcommand("stress", stress, help="the training load under plain torch, work-arounds and fxsafe")
    return parser


def _train(options: Any) -> int:
    from fxsafe.dflash.train import Trainer

    built = _settings(options)
    # Of the processes that torchrun starts one speaks.
    first = os.environ.get("RANK", "0") == "0"
    say = print if first else _silent
    trainer = Trainer(built, say=say)
    for line in trainer.plan.lines:
        say(line)
    if options.dry_run:
        return 0
    run = built.run
    with contextlib.ExitStack() as stack:
        if run.stall_after:
            stack.enter_context(fxsafe.install(stall_after=run.stall_after))
        if run.record:
            stack.enter_context(fxsafe.record(run.record))
        outcome = trainer.run()
    say(f"checkpoint {outcome.checkpoint}")
    if outcome.finished:
        say(f"drafter    {outcome.export}")
        return 0
    say(f"stopped after step {outcome.step}; the same command goes on from there")
    return 130


def _silent(text: str) -> None:
    """Another process prints it."""


def _settings(options: Any) -> Settings:
    made: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        section = options[name]
        made[name] = section if isinstance(section, kind) else kind(**section.as_dict())
    return Settings(**made)


def _eval(options: Any) -> int:
    from fxsafe.dflash.export import load_drafter, load_into
    from fxsafe.dflash.model import Drafter
    from fxsafe.dflash.rows import BrokenRow, open_rows
    from fxsafe.dflash.speculate import evaluate

    _counts(options, "limit", "new_tokens", "prompt_tokens")
    if options.json:  # not after all prompts
        require_writable("--json", Path(options.json))
    path = Path(options.drafter)
    if (path / "checkpoints").is_dir():
        made = path / "export"
        raise DFlashError(
            f"{path} is a run and no drafter; "
            + (f"its drafter is {made}" if made.is_dir() else f"fxsafe dflash export {path} DIR writes its drafter")
        )
    config, state = load_drafter(path)
    target, tokenizer = _load(options)
    if not target.head.fits(config):
        raise DFlashError(f"{options.drafter} is no drafter for {options.target}: sizes or scales differ")
    drafter = Drafter(config).to(target.device, target.dtype)
    load_into(drafter, state)
    rows = open_rows([options.prompts])
    prompts, names = [], []
    for number in range(min(len(rows), options.limit)):
        try:
            prompt = _prompt(tokenizer, target.rows, rows[number], options.template_args)
        except BrokenRow as error:
            print(f"left out: {error.at(rows.origin(number))}", file=sys.stderr)
            continue
        if prompt:
            prompts.append(prompt[-options.prompt_tokens :])
            names.append(rows.origin(number))
    if not prompts:
        raise DFlashError(f"{options.prompts} holds no prompts")
    for prompt, name in zip(prompts, names, strict=True):
        needed = len(prompt) + options.new_tokens - 1  # the last token is not put to the target
        if target.positions is not None and needed > target.positions:
            raise DFlashError(
                f"{name}: {len(prompt)} tokens and --new-tokens {options.new_tokens} take {needed} positions, and the "
                f"target has {target.positions}; lower --new-tokens or --prompt-tokens ({options.prompt_tokens})"
            )
    stop = {tokenizer.eos_token_id} if tokenizer is not None else set()
    eos = target.text_config.eos_token_id
    stop |= set(eos) if isinstance(eos, list) else {eos}
    report = evaluate(
        target,
        drafter,
        target.head,
        prompts,
        new_tokens=options.new_tokens,
        stop=stop - {None},
        names=names,
        cached=not options.no_cache,
    )
    for line in report.lines():
        print(line)
    for request in report.requests:
        if request.difference is not None:
            print(
                f"{request.name}: differs at token {request.difference}, where the best two are {request.margin} apart"
            )
    if options.json:
        try:
            write_whole(Path(options.json), json.dumps(report.to_json(), indent=2) + "\n")
        except OSError as error:  # the disk is full
            raise DFlashError(f"--json {options.json} cannot be written: {error}") from error
    return 0


def _export(options: Any) -> int:
    from fxsafe.dflash import checkpoint
    from fxsafe.dflash.config import DrafterConfig
    from fxsafe.dflash.export import export_drafter

    path = Path(options.run)
    if not (path / "state.json").exists():
        found = checkpoint.latest(path / "checkpoints")
        if found is None:
            raise DFlashError(f"{path} holds no checkpoint")
        path = found
    tensors, state = checkpoint.load_checkpoint(path)
    prefix = "average." if any(name.startswith("average.") for name in tensors) else "weight."
    weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    print(export_drafter(weights, DrafterConfig.from_json(state["config"]), options.out))
    return 0


def _prepare(options: Any) -> int:
    from fxsafe.dflash.prepare import prepare
    from fxsafe.dflash.rows import open_rows

    _counts(options, "limit", "new_tokens")
    for name, fits, wish in (
        ("temperature", 0 <= options.temperature < math.inf, "at least 0"),
        ("top-p", 0 < options.top_p <= 1, "above 0 and at most 1"),
    ):
        if not fits:
            raise DFlashError(f"--{name} is {options[name.replace('-', '_')]} and has to be {wish}")
    out = Path(options.out)
    for name in options.data:
        if out.exists() and Path(name).exists() and out.samefile(name):
            raise DFlashError(f"{out} is read and cannot be written too; choose another file with --out")
    rows = open_rows(options.data)
    target, tokenizer = _load(options)
    count = prepare(
        target,
        tokenizer,
        rows,
        out,
        new_tokens=options.new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        limit=options.limit,
    )
    if not count:
        raise DFlashError(f"no conversation was written to {out}: {', '.join(options.data)} holds none with an answer")
    print(f"{count} conversations in {options.out}")
    return 0


def _plot(options: Any) -> int:
    from fxsafe.dflash.journal import plot

    print(plot(Path(options.run)))
    return 0


def _demo(options: Any) -> int:
    import shutil

    from fxsafe.dflash.demo import MARK, run_demo

    out = Path(options.out)
    if out.exists():
        # A run of the user's own has metrics too.
        if not out.is_dir() or (any(out.iterdir()) and not (out / MARK).exists()):
            raise DFlashError(f"{out} exists and holds something else; choose another directory with --out")
        shutil.rmtree(out)
    result = run_demo(out)
    if result is None:
        print("the demo was stopped; the same command begins anew")
        return 130
    trained = result["trained"]
    return 0 if trained["equal"] == len(trained["requests"]) else 1


def _stress(options: Any) -> int:
    from fxsafe.dflash.stress.command import stress

    return stress(options)


def _load(options: Any) -> tuple[Any, Any]:
    from fxsafe.dflash.target import load_target, load_tokenizer

    (device,) = devices_of((options.device,), "--device")
    target = load_target(
        options.target, dtype=dtype_of(options.dtype), device=device, trust_remote_code=options.trust_remote_code
    )
    return target, load_tokenizer(options.target, trust_remote_code=options.trust_remote_code)


def _counts(options: Any, *names: str) -> None:
    for name in names:
        if options[name] is not None and options[name] < 1:
            raise DFlashError(f"--{name.replace('_', '-')} is {options[name]} and has to be at least 1")


def _prompt(tokenizer: Any, known: int, row: Any, template_args: dict[str, Any]) -> list[int]:
    """Tokens up to where the target is to go on; empty if the row has none."""
    from fxsafe.dflash.chat import check_text, conversation_of, ids_of

    if "input_ids" in row:
        return ids_of(row, known)
    if tokenizer is None:
        raise DFlashError("the target has no tokenizer, and the prompts have no input_ids")
    turns = conversation_of(row)
    if turns is None:
        text = row.get("text")
        if not isinstance(text, str):
            return []
        check_text(text)
        return list(tokenizer(text)["input_ids"])
    if not tokenizer.chat_template:
        raise DFlashError("the target's tokenizer has no chat template; give prompts as rows with text")
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=None)
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), len(turns))
    if last is None:
        return []
    text = tokenizer.apply_chat_template(turns[:first], tokenize=False, add_generation_prompt=True, **template_args)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


if __name__ == "__main__":
    sys.exit(main())
