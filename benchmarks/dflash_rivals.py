"""A drafter's micro-batch in ours and in other trainers of DFlash: milliseconds, memory, tokens/s, in turns on a card.

    python benchmarks/dflash_rivals.py --packages DIR [--json FILE]
    python benchmarks/dflash_rivals.py --packages DIR --shape tiny --device cpu --length 256 --anchors 16 [--check]

DIR holds what is in the wheels of specforge 0.2.0 and speculators 0.9.0, their dist-info too; neither their
dependencies nor a target are needed. What they import here is torch, transformers and, for speculators, pydantic.

Each trainer is measured through its own training module, called as its own trainer calls it:

- ours: ``Replica.learn``, which compiles the drafter and the loss and attends with flex_attention. Its sums of
  gradients are fp32 from the second micro-batch on; those of specforge are bf16.
- specforge: ``TrainerCore.train_step`` with ``DFlashTrainStrategy``, ``OnlineDFlashModel`` and ``FSDPTrainingBackend``,
  at a micro-batch that is not the last of an optimizer step. Its trainer compiles flex_attention alone, through
  transformers, and so it is here. FSDP is left out (``prepare_model(wrap=False)``): one card needs none. Once with
  128 blocks of the loss at a time, its default, which repeats the head's pass in the backward, and once with
  ``objective_chunk_blocks=0``, which does not.
- speculators: what ``Trainer.train_epoch`` does: ``DFlashDraftModel.forward`` under autocast, compiled on CUDA, then
  ``zero_grad`` and ``backward``. Weights and tables are fp32, as its trainer keeps them on one card; and once with
  weights in bf16 and the tables shared, which its trainer has inside FSDP only.

The same in all: weights of the drafter (loaded by name, all of them), embedding and head, ids, labels, features, number
of anchors and blocks, full attention in all layers, cross entropy with a decay of gamma 7, AdamW. ``--check`` gives all
the same anchors and compares their gradients instead of their speed.

Not the same, and not to be had by an option:

- specforge and speculators draw anchors in the step, on the device. Ours come with the batch, from the reader.
- speculators takes for labels what the head says to the target's last hidden states, not the data's tokens (here they
  are the same): one pass of the head more. Its fused loss holds the logits of all slots; ours holds those of
  64 blocks, its default, of the 128 here.
- speculators draws no anchor from the last 16 tokens, so that a few more slots have a loss.
- The optimizer's step: ours and specforge have fp32 copies of bf16 weights. speculators' default is Muon, which does
  more; AdamW is an option of it.

A turn is one micro-batch, the first of an optimizer step. Ours has one before or after each turn of another, and the
ratio is the median over these pairs. Peak memory counts a trainer's weights, the shared tables and features, and what a
micro-batch takes at most, the first of an optimizer step and a later one (where gradients lie already; speculators'
trainer knows no accumulation); not the optimizer, whose step is measured by itself afterwards. ``graphs`` are graphs
compiled in turns that count and should be 0. fxsafe's patches are not installed: this is one thread, all runs on plain
torch.

A package that is missing or fails gets a row that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import gc
import importlib
import importlib.metadata
import json
import random
import statistics
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxsafe.dflash.batches import Example, Features, MicroBatch, collate
from fxsafe.dflash.compiling import graph_count
from fxsafe.dflash.config import DrafterConfig, default_layer_ids
from fxsafe.dflash.flops import drafter_flops
from fxsafe.dflash.head import Head
from fxsafe.dflash.losses import LossSettings, Tally
from fxsafe.dflash.model import Drafter
from fxsafe.dflash.optim import Master, OptimSettings
from fxsafe.dflash.replica import Replica, ReplicaSettings

sys.path.insert(0, str(Path(__file__).resolve().parent))
from dflash_step import SHAPES, matmul_rate
from turns import median_and_error

GAMMA, LR = 7.0, 1e-5


@dataclasses.dataclass
class Common:
    """What all trainers get; tensors are on the device, except for the weights and the micro-batch."""

    config: DrafterConfig
    head: Head
    batch: MicroBatch
    feats_BSF: Tensor
    last_BSH: Tensor
    weights: dict[str, Tensor]
    device: torch.device
    dtype: torch.dtype
    attention: str
    """ "flex" or "sdpa" """
    packages: Path

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclasses.dataclass
class Trainer:
    """A trainer that is ready for turns.

    Attributes:
        parameters: number of those that are trained.
        step: forward and backward of the micro-batch; gradients stay.
        clear: drop gradients.
        facts: how many slots had a loss in the last step, and the loss.
        gradients: by name, of the weighted sum of the losses in the last step.
        pin: take the anchors of the micro-batch from now on.
        optimizer: make an optimizer, and return its step on the gradients that ``step`` left.
        accumulates: a second ``step`` adds its gradients to those of the first.
        unused: bytes of what is shared that this trainer does without.
    """

    parameters: int
    step: Callable[[], None]
    clear: Callable[[], None]
    facts: Callable[[], tuple[int, float]]
    gradients: Callable[[], dict[str, Tensor]]
    pin: Callable[[], None]
    optimizer: Callable[[], Callable[[], None]] | None
    accumulates: bool = True
    unused: int = 0


@dataclasses.dataclass
class Entry:
    """A row, which fills up."""

    name: str
    make: Callable[[Common], Trainer]
    trainer: Trainer | None = None
    own: int = 0
    row: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: list[float] = dataclasses.field(default_factory=list)
    pairs: list[float] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Drop this trainer if something fails, and say why."""
        try:
            yield
        except Exception as error:
            line = next(iter(str(error).splitlines()), "")
            self.row["failed"] = f"{type(error).__name__}: {line}"
            self.trainer = None
            traceback.print_exc()
            # The frames of the error would hold tensors.
            error.__traceback__ = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="folder with specforge/ and speculators/")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="of the target; the drafter has 5 layers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=20, help="turns of each other trainer")
    parser.add_argument("--warm", type=int, default=3, help="steps of each that are not counted")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the sequence")
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--only", help="names of other trainers, by commas")
    parser.add_argument("--check", action="store_true", help="compare gradients, not speed")
    parser.add_argument("--json", help="file for the numbers")
    options = parser.parse_args()
    sys.path.insert(0, str(options.packages.resolve()))
    numbers, rows = measure(options)
    for name, value in numbers.items():
        print(f"{name:32s} {value:.4g}" if isinstance(value, float) else f"{name:32s} {value}")
    show(rows)
    if options.json:
        Path(options.json).write_text(json.dumps({**numbers, "rows": rows}, indent=2))


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    common = make_common(options)
    rate = matmul_rate(common.device, common.dtype)
    shared = allocated(common)
    entries = [
        Entry("ours", make_ours),
        Entry("specforge", lambda c: make_specforge(c, chunk_blocks=128)),
        Entry("specforge, chunks off", lambda c: make_specforge(c, chunk_blocks=0)),
        Entry("speculators", lambda c: make_speculators(c, bf16=False)),
        Entry("speculators, bf16", lambda c: make_speculators(c, bf16=True)),
    ]
    if options.only:
        names = [name.strip() for name in options.only.split(",")]
        entries = [entry for entry in entries if entry.name == "ours" or entry.name.split(",")[0] in names]
    if options.check:
        check(entries, common)
        return {"torch": torch.__version__}, [{"name": entry.name, **entry.row} for entry in entries]
    for entry in entries:
        with entry.reporting():
            prepare(entry, common, options.warm, shared)
        gc.collect()
    turns(entries, common, options.steps)
    for entry in entries:
        if entry.seconds:
            print(f"{entry.name}: {1e3 * statistics.median(entry.seconds):.2f} ms", flush=True)
    # A kernel that failed may have left the device unusable; what was measured before is kept.
    with contextlib.suppress(RuntimeError):
        rate = max(rate, matmul_rate(common.device, common.dtype))
    for entry in entries:
        with entry.reporting():
            time_optimizer(entry, common)
        gc.collect()
    rows = [finished(entry, options.length) for entry in entries]
    work = drafter_flops(common.config, options.length, options.anchors, common.head.output_VH.shape[0])
    numbers: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(common.device) if common.cuda else "cpu",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("transformers", "specforge", "speculators")),
        "tokens": options.length,
        "anchors": f"{options.anchors} of {common.config.block_size}",
        "tflop": work / 1e12,
        "measured_matmul_tflops": rate / 1e12,
        "floor_ms_at_measured_rate": 1e3 * work / rate,
    }
    for row in rows:
        if "ms" in row:
            row["mfu_against_measured"] = work / rate / (row["ms"] / 1e3)
    return numbers, rows


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def make_common(options: argparse.Namespace) -> Common:
    cuda = options.device == "cuda"
    device = torch.device("cuda:0" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    shape = SHAPES[options.shape]
    rows, hidden, layers = shape["vocab_size"], shape["hidden_size"], shape["num_hidden_layers"]
    taps = default_layer_ids(layers, 5) if layers > 8 else (0, 1, 3, 4, 6)  # distinct ones
    drafter_shape: dict[str, Any] = {**shape, "num_hidden_layers": 5}
    config = DrafterConfig(**drafter_shape, num_target_layers=layers, target_layer_ids=taps, mask_token_id=rows - 1)
    torch.manual_seed(0)
    generator = torch.Generator(device).manual_seed(0)
    embedding, output = (
        torch.empty(rows, hidden, dtype=dtype, device=device).normal_(0, 0.02, generator=generator) for _ in range(2)
    )
    with torch.device(device):
        drafter = Drafter(config).to(dtype)
    drafter.initialize(generator)
    weights = {name: value.cpu() for name, value in drafter.state_dict().items()}
    del drafter
    rng = random.Random(0)
    example = Example([rng.randrange(rows - 1) for _ in range(options.length)], [True] * options.length)
    batch = collate([example], index=0, seed=0, anchors=options.anchors, bucket=options.length)
    feats = torch.empty(1, options.length, len(taps) * hidden, dtype=dtype, device=device).normal_(generator=generator)
    # To which the head says the next token, so that labels of either kind are the same.
    last = output[batch.ids_BS.roll(-1, 1).to(device)] * 50
    attention = "flex" if cuda else "sdpa"  # flex_attention has no backward on a CPU
    return Common(
        config, Head(embedding, output), batch, feats, last, weights, device, dtype, attention, options.packages
    )


def make_ours(common: Common) -> Trainer:
    how = ReplicaSettings(common.dtype, compile=common.cuda)
    replica = Replica(common.config, common.head, common.device, how, LossSettings(gamma=GAMMA))
    replica.load(common.weights)
    features = Features(common.batch, common.feats_BSF, None)

    def facts() -> tuple[int, float]:
        assert replica.tally is not None
        tally = Tally.of(replica.tally)
        return int(sum(tally.valid_K)), tally.metrics()["loss"]

    def optimizer() -> Callable[[], None]:
        master = Master(common.weights, OptimSettings(), common.device)

        def update() -> None:
            grads, vector = replica.take()
            assert vector is not None
            torch._foreach_div_(grads, Tally.of(vector).weight)
            master.update(grads, LR)
            replica.load(dict(zip(master.names, master.weights, strict=True)))

        return update

    def gradients() -> dict[str, Tensor]:
        found = [g.float() for g in replica.sums]
        return dict(zip((name for name, _ in replica.drafter.named_parameters()), found, strict=True))

    count = sum(p.numel() for p in replica.drafter.parameters())
    return Trainer(
        count,
        lambda: replica.learn(features),
        lambda: void(replica.take()),
        facts,
        gradients,
        lambda: None,
        optimizer,
    )


def make_specforge(common: Common, chunk_blocks: int) -> Trainer:
    """The package imports as it is; sglang, yunchang, wandb and the like are behind functions that are not called."""
    there(common, "specforge")
    model_code: Any = importlib.import_module("specforge.algorithms.common.dflash_family_model")
    draft_code: Any = importlib.import_module("specforge.modeling.draft.dflash")
    backend_code: Any = importlib.import_module("specforge.training.backend")
    strategies: Any = importlib.import_module("specforge.training.strategies.base")
    controller: Any = importlib.import_module("specforge.training.controller")
    contracts: Any = importlib.import_module("specforge.runtime.contracts")
    import transformers

    backend_name = "flex_attention" if common.attention == "flex" else "sdpa"
    config: Any = transformers.Qwen3Config.from_dict(common.config.to_json())
    config._attn_implementation = backend_name
    with torch.device(common.device):
        draft = draft_code.DFlashDraftModel(config).to(dtype=common.dtype)
    draft.load_state_dict(common.weights)
    model = model_code.OnlineDFlashModel(
        draft_model=draft,
        target_lm_head=frozen_linear(common.head.output_VH),
        target_embed_tokens=nn.Embedding.from_pretrained(common.head.embedding_VH),
        mask_token_id=common.config.mask_token_id,
        block_size=common.config.block_size,
        attention_backend=backend_name,
        num_anchors=common.batch.anchors_BN.shape[1],
        loss_decay_gamma=GAMMA,
        objective_chunk_blocks=chunk_blocks,
        loss_type="dflash",
    ).to(device=common.device, dtype=common.dtype)
    model.train()
    backend = backend_code.FSDPTrainingBackend(backend_code.ParallelConfig())
    strategy = strategies.DFlashTrainStrategy(backend.prepare_model(model, wrap=False))
    tensors = {
        "input_ids": common.batch.ids_BS.to(common.device),
        "loss_mask": common.batch.learn_BS.to(common.device, torch.int64),
        "hidden_states": common.feats_BSF,
    }
    batch = contracts.TrainBatch(sample_ids=["0"], strategy="dflash", tensors=tensors)
    last: dict[str, float] = {}
    slots: list[Tensor] = []

    def step() -> None:
        # The first micro-batch of an optimizer step, so that it ends with the backward.
        core = controller.TrainerCore(strategy, backend, accumulation_steps=2)
        last["loss"] = core.train_step(batch).metrics["loss"]

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        slots[:] = [output[2]["accuracy_denom"]]

    hook = model.register_forward_hook(count)

    def facts() -> tuple[int, float]:
        hook.remove()
        return int(slots[0]), last["loss"]

    def optimizer() -> Callable[[], None]:
        optim: Any = importlib.import_module("specforge.optimizer")
        backend.set_optimizer(optim.BF16Optimizer(draft, lr=LR, max_grad_norm=1.0, total_steps=1000, warmup_ratio=0.04))
        scale = torch.tensor(1e-3, device=common.device)

        def update() -> None:
            backend.scale_gradients(scale)
            backend.step()

        return update

    def gradients() -> dict[str, Tensor]:
        # Halved by the number of micro-batches.
        return {name: 2 * p.grad.float() for name, p in draft.named_parameters()}

    def pin() -> None:
        drawn = common.batch.anchors_BN.to(common.device), common.batch.keep_BN.to(common.device)
        model._sample_anchor_positions = lambda *_: drawn

    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    clear = functools.partial(model.zero_grad, set_to_none=True)
    return Trainer(parameters, step, clear, facts, gradients, pin, optimizer)


def make_speculators(common: Common, bf16: bool) -> Trainer:
    """Without the ``__init__`` of the package and of its models.

    They import every kind of speculator, of which Eagle 3 wants the reading of data, and this openai. The module of
    DFlash needs one name of the package, which it is given.
    """
    there(common, "speculators")
    if "speculators" not in sys.modules:
        root = (common.packages / "speculators").resolve()
        package: Any = bare("speculators", root)
        bare("speculators.models", root / "models")
        config_code: Any = importlib.import_module("speculators.config")
        package.SpeculatorModelConfig = config_code.SpeculatorModelConfig
    dflash: Any = importlib.import_module("speculators.models.dflash")
    sys.modules["speculators.config"].reload_schemas()
    import transformers

    shape = common.config.to_json()
    layers: Any = transformers.Qwen3Config.from_dict(
        {name: value for name, value in shape.items() if name not in ("architectures", "dflash_config", "block_size")}
    )
    layers._attn_implementation = "simple_flex_attention" if common.attention == "flex" else "sdpa"
    config = dflash.DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=common.config.vocab_size,
        block_size=common.config.block_size,
        # Its numbers are of the layer before which a state is taken.
        aux_hidden_state_layer_ids=[i + 1 for i in common.config.target_layer_ids],
        mask_token_id=common.config.mask_token_id,
    )
    with torch.device(common.device):
        model = dflash.DFlashDraftModel(config)
    tables = {
        "embed_tokens": common.head.embedding_VH,
        "lm_head": common.head.output_VH,
        "verifier_lm_head": common.head.output_VH,
    }
    if bf16:
        for name, table in tables.items():
            getattr(model, name).weight = nn.Parameter(table, requires_grad=False)
        for parameter in model.parameters():  # and not the frequencies of the rotary embedding
            parameter.data = parameter.data.to(common.dtype)
    else:
        for name, table in tables.items():
            getattr(model, name).load_state_dict({"weight": table})
    missing, unexpected = model.load_state_dict(common.weights, strict=False)
    if unexpected or {name.split(".")[0] for name in missing} - {*tables, "verifier_norm"}:
        raise ValueError(f"other parameters: {missing} {unexpected}")
    model.train()
    if common.cuda:
        fused = importlib.import_module("speculators.losses.fused")  # Triton's; it would be imported while compiling
        # Its two kernels share one list of tiles to try, which Dynamo of torch 2.11 refuses to meet twice.
        fused.loss_backward_kernel.configs = copy.deepcopy(fused.loss_backward_kernel.configs)
    # What its trainer makes of its options.
    call, _ = model.get_trainer_kwargs(
        loss_fn="ce",
        loss_implementation="fused" if common.cuda else "eager",
        dflash_decay_gamma=GAMMA,
        max_anchors=common.batch.anchors_BN.shape[1],
        per_position_loss_weight="fixed-exp-decay",
    )
    length = common.batch.ids_BS.shape[1]
    batch = {
        "hidden_states": common.feats_BSF,
        "input_ids": common.batch.ids_BS.to(common.device),
        "loss_mask": common.batch.learn_BS.to(common.device),
        "verifier_last_hidden_states": common.last_BSH,
        "document_ids": torch.zeros(1, length, dtype=torch.int64, device=common.device),
        "position_ids": torch.arange(length, device=common.device)[None],
    }
    last: dict[str, Tensor] = {}

    def clear() -> None:
        model.zero_grad(set_to_none=True)

    def step() -> None:
        with torch.autocast(common.device.type, dtype=torch.bfloat16, enabled=common.cuda):
            _, loss, metrics = model(**batch, **call)
        clear()
        loss.backward()
        last.update(loss=loss.detach(), slots=metrics["full_acc_total"])

    def optimizer() -> Callable[[], None]:
        optimizers: Any = importlib.import_module("speculators.train.optimizers")
        wanted = types.SimpleNamespace(optimizer="adamw", lr=LR, weight_decay=0.01)
        made = optimizers.build_optimizers(model, wanted)

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for each in made:
                each.step()

        return update

    def gradients() -> dict[str, Tensor]:
        return {name: last["slots"] * p.grad.float() for name, p in model.named_parameters() if p.requires_grad}

    def pin() -> None:
        drawn = common.batch.anchors_BN[0].to(common.device), common.batch.keep_BN[0].to(common.device)
        core: Any = sys.modules["speculators.models.dflash.core"]
        core.select_anchors = lambda *_: drawn

    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Trainer(
        parameters,
        step,
        clear,
        lambda: (int(last["slots"]), float(last["loss"])),
        gradients,
        pin,
        None if bf16 else optimizer,  # with bf16 weights AdamW would not have its fp32 copies
        accumulates=False,
        unused=0 if bf16 else common.head.embedding_VH.nbytes + common.head.output_VH.nbytes,
    )


def there(common: Common, name: str) -> None:
    if not (common.packages / name).is_dir():
        raise FileNotFoundError(f"{common.packages} has no {name}/")


def bare(name: str, folder: Path) -> types.ModuleType:
    """A package whose submodules can be imported and whose ``__init__`` does not run."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    return package


def frozen_linear(table_VH: Tensor) -> nn.Linear:
    """A head around a table, which is shared."""
    with torch.device("meta"):
        linear = nn.Linear(table_VH.shape[1], table_VH.shape[0], bias=False)
    linear.weight = nn.Parameter(table_VH, requires_grad=False)
    return linear


def void(_: Any) -> None:
    """Drop a value."""


def check(entries: list[Entry], common: Common) -> None:
    """The largest relative difference between the gradients of a parameter in ours and in the others."""
    # speculators wants whole blocks.
    common.batch.anchors_BN.clamp_(max=common.batch.ids_BS.shape[1] - common.config.block_size)
    ours: dict[str, Tensor] = {}
    for entry in entries:
        with entry.reporting():
            trainer = entry.make(common)
            trainer.pin()
            trainer.step()
            entry.row["loss_slots"], entry.row["loss"] = trainer.facts()
            found = trainer.gradients()
            ours = ours or found
            entry.row["gradient_difference"] = max(
                float((found[name] - mine).norm() / mine.norm()) for name, mine in ours.items()
            )
        gc.collect()


def prepare(entry: Entry, common: Common, warm: int, shared: int) -> None:
    """Make a trainer, compile it and find what a step needs."""
    started, before = time.perf_counter(), allocated(common)
    entry.trainer = trainer = entry.make(common)
    entry.own = allocated(common) - before
    entry.row["parameters"] = trainer.parameters
    for _ in range(warm):
        trainer.clear()
        trainer.step()
    entry.row["loss_slots"], entry.row["loss"] = trainer.facts()
    trainer.clear()
    if common.cuda:
        held = allocated(common)
        torch.cuda.reset_peak_memory_stats(common.device)
        trainer.step()
        synchronize(common)
        peak = torch.cuda.max_memory_allocated(common.device)
        entry.row["peak_gib"] = (shared - trainer.unused + entry.own + peak - held) / 2**30
        if trainer.accumulates:
            torch.cuda.reset_peak_memory_stats(common.device)
            trainer.step()
            synchronize(common)
            peak = torch.cuda.max_memory_allocated(common.device)
            entry.row["peak_gib_later"] = (shared - trainer.unused + entry.own + peak - held) / 2**30
        trainer.clear()
    entry.row["warm_seconds"] = time.perf_counter() - started
    print(f"{entry.name}: ready after {entry.row['warm_seconds']:.0f} s", flush=True)


def turns(entries: list[Entry], common: Common, steps: int) -> None:
    """Ours beside each other trainer, which of both first alternating."""
    ours, others = entries[0], entries[1:]
    # What another one imports or sets is a guard of what was compiled before.
    for entry in entries:
        with entry.reporting():
            if entry.trainer is not None:
                entry.trainer.step()
                entry.trainer.clear()
    graphs = dict.fromkeys((entry.name for entry in entries), 0)

    def turn(entry: Entry) -> float:
        assert entry.trainer is not None
        entry.trainer.clear()
        before = graph_count()
        synchronize(common)
        started = time.perf_counter()
        entry.trainer.step()
        synchronize(common)
        seconds = time.perf_counter() - started
        graphs[entry.name] += graph_count() - before
        entry.trainer.clear()
        entry.seconds.append(seconds)
        return seconds

    for number in range(steps):
        pairs = [other for other in others if other.trainer is not None]
        if ours.trainer is None:
            for other in pairs:
                with other.reporting():
                    turn(other)
        elif not pairs:
            turn(ours)
        else:
            for other in pairs:
                with other.reporting():
                    late = turn(other) if number % 2 else 0.0
                    mine = turn(ours)
                    other.pairs.append((late or turn(other)) / mine)
    for entry in entries:
        if entry.seconds:
            entry.row["graphs"] = graphs[entry.name]


def time_optimizer(entry: Entry, common: Common) -> None:
    """Three steps behind one that makes the state; each on fresh gradients."""
    trainer = entry.trainer
    if trainer is None or trainer.optimizer is None:
        return
    update = trainer.optimizer()
    seconds = []
    for _ in range(4):
        trainer.clear()
        trainer.step()
        synchronize(common)
        started = time.perf_counter()
        update()
        synchronize(common)
        seconds.append(time.perf_counter() - started)
    trainer.clear()
    entry.row["optimizer_ms"] = 1e3 * statistics.median(seconds[1:])
    # Its state must not stand in the way of the next one's.
    entry.trainer = None


def finished(entry: Entry, tokens: int) -> dict[str, Any]:
    row = {"name": entry.name, **entry.row}
    if entry.seconds:
        row["ms"], row["ms_error"] = (1e3 * value for value in median_and_error(entry.seconds))
        row["ms_least"] = 1e3 * min(entry.seconds)
        row["ms_all"] = [round(1e3 * seconds, 3) for seconds in entry.seconds]
        row["tokens_per_second"] = 1e3 * tokens / row["ms"]
    if entry.pairs:
        row["ratio_to_ours"], row["ratio_error"] = median_and_error(entry.pairs)
    return row


def show(rows: list[dict[str, Any]]) -> None:
    columns = [
        ("ms", "ms", ".2f"), ("ms_error", "+-", ".2f"), ("ratio_to_ours", "to ours", ".3f"),
        ("ratio_error", "+-", ".3f"),
        ("tokens_per_second", "tokens/s", ",.0f"), ("mfu_against_measured", "MFU", ".1%"), ("peak_gib", "GiB", ".2f"),
        ("peak_gib_later", "GiB later", ".2f"),
        ("optimizer_ms", "optim. ms", ".2f"), ("parameters", "parameters", ",d"), ("loss_slots", "slots", "d"),
        ("loss", "loss", ".3f"), ("graphs", "graphs", "d"), ("warm_seconds", "warm s", ".0f"),
        ("gradient_difference", "gradients", ".1e"),
    ]  # fmt: skip
    columns = [column for column in columns if any(column[0] in row for row in rows)]
    print(f"{'':24s}" + "".join(f"{title:>14s}" for _, title, _ in columns))
    for row in rows:
        cells = "".join(f"{format(row[key], form) if key in row else '':>14s}" for key, _, form in columns)
        print(f"{row['name']:24s}{cells}")
        if "failed" in row:
            print(f"{'':24s}    failed: {row['failed']}")


def allocated(common: Common) -> int:
    if not common.cuda:
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(common.device)


def synchronize(common: Common) -> None:
    if common.cuda:
        torch.cuda.synchronize(common.device)


if __name__ == "__main__":
    main()
