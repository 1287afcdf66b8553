"""A training run from settings to export: everything around the engine's step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fxsafe
from fxsafe.dflash import chat, checkpoint
from fxsafe.dflash.batches import MicroBatch, seed_for
from fxsafe.dflash.compiling import promise_recompile_limit
from fxsafe.dflash.config import FULL, SLIDING, DFlash2, DrafterConfig
from fxsafe.dflash.engine import Engine, StepReport, WorkerError, advice
from fxsafe.dflash.errors import CheckpointError, DataError, SettingsError
from fxsafe.dflash.export import export_drafter, load_drafter, load_into, refuse_other_than_drafter
from fxsafe.dflash.flops import drafter_flops, peak_flops, target_flops
from fxsafe.dflash.journal import Journal, plot, read_metrics
from fxsafe.dflash.losses import LossSettings, Tally
from fxsafe.dflash.optim import Master, learning_rate
from fxsafe.dflash.plan import Plan, make_plan
from fxsafe.dflash.processes import Processes, alone, joined
from fxsafe.dflash.replica import Replica, ReplicaSettings
from fxsafe.dflash.rows import Rows, Stream, Table, open_rows, open_stream, split_rows
from fxsafe.dflash.settings import DrafterSettings, Settings, devices_of, dtype_of
from fxsafe.dflash.stream import Examples, micro_batches
from fxsafe.dflash.target import Target, load_target, load_tokenizer

__all__ = ["Outcome", "Trainer"]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool
    """false if a signal stopped it"""
    checkpoint: Path
    export: Path | None
    validation: Tally | None


def counted() -> dict[str, float]:
    """What fxsafe has counted in this process so far; empty where it is not installed."""
    counters: dict[str, Any] = {}
    for entry in fxsafe.info():
        counters |= entry["counters"]
    names = ("traces", "most_traces_at_once", "refusals_avoided", "waits", "longest_wait_s")
    return {f"fx_{name}": counters[name] for name in names if name in counters}


class Trainer:
    """One run. Everything that can be refused is refused in the constructor, before anything is written.

    Args:
        settings: of the run.
        target: given instead of loading ``settings.target.model``.
        tokenizer: given instead of loading the target's.
        rows: given instead of ``settings.data.train``.
        say: prints a line.

    Raises:
        DFlashError: see the kinds in ``errors``.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        target: Target | None = None,
        tokenizer: Any = None,
        rows: Rows | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.settings, self._say = settings, say
        data, run = settings.data, settings.run
        self._drafter_devices = devices_of(settings.drafter.devices, "drafter.devices")
        if settings.drafter.attention == "flex" and any(d.type == "cpu" for d in self._drafter_devices):
            raise SettingsError('drafter.attention: flex_attention has no backward on a CPU; take "auto" or "dense"')
        self._targets = self._place_targets(target)
        self.target = self._targets[0]
        if settings.target.compile:
            for each in self._targets:
                each.compile_layers(settings.drafter.backend)
        if target is None:
            name = settings.target.model
            tokenizer = load_tokenizer(name, trust_remote_code=settings.target.trust_remote_code)
        self.tokenizer = tokenizer
        if self.tokenizer is not None and len(self.tokenizer) > self.target.rows:
            raise DataError(
                f"the tokenizer has {len(self.tokenizer)} tokens and the target's embedding {self.target.rows} rows; "
                "they do not belong together"
            )
        self.warm: dict[str, Tensor] | None = None
        self.config = self._drafter_config()
        self._refuse_parts_of_dflash2()
        self._positions = self.target.positions
        if self._positions and data.max_length > self._positions:
            raise SettingsError(f"data.max_length is {data.max_length}, and the target has {self._positions} positions")
        self.rows: Rows | Stream
        self.held_out: Rows = open_rows(data.validation) if data.validation else Table([], "no rows")
        if rows is None and data.streaming:
            assert run.max_steps is not None  # the settings see to it
            self.rows, self.steps, count = open_stream(data.train, data.window), run.max_steps, None
            self._whole: Rows | None = None
        else:
            self.rows = self._whole = open_rows(data.train) if rows is None else rows
            if not data.validation:
                self.rows, self.held_out = split_rows(self.rows, data.validation_share, run.seed)
            count = len(self.rows)
            steps = max(1, math.floor(run.epochs * count / (data.batch_size * data.micro_batches)))
            self.steps = min(steps, run.max_steps) if run.max_steps else steps
        self.plan: Plan = make_plan(settings, self.target, self.config, count, self.steps)
        self.out = Path(run.out)
        refuse_other_than_drafter(self.out / "export")  # and not after the last step
        self._stop = threading.Event()
        self._interrupted = self._saving = False

    def run(self, *, quiet: bool = False, on_step: Callable[[int, StepReport], None] | None = None) -> Outcome:
        """Train to the end, or to a signal; resumes what stands in ``run.out``.

        SIGINT and SIGTERM finish the step, save and return; a second one interrupts at once, though not a save. If
        anything fails, the state of the last finished step is saved before the exception goes on.

        Args:
            quiet: print nothing.
            on_step: is called after each step.
        """
        promise_recompile_limit()
        try:
            with joined(self._drafter_devices[0].type == "cuda") as processes, ExitStack() as stack:
                return self._run(processes, quiet or not processes.first, on_step, stack)
        except OSError as error:
            kept = checkpoint.latest(self.out / "checkpoints")
            what = "what is printed" if isinstance(error, BrokenPipeError) else self.out
            raise CheckpointError(
                f"{what} cannot be written: {error}"
                + (f"; the state is that of {kept.name}, and the same command goes on from there" if kept else "")
            ) from error
        except torch.OutOfMemoryError as error:  # in a thread it is the engine's to tell
            text = str(error).splitlines()[0]
            raise WorkerError(f"out of memory: {text}{advice(self.plan.memory)}") from error

    def _run(
        self,
        processes: Processes,
        quiet: bool,
        on_step: Callable[[int, StepReport], None] | None,
        stack: ExitStack,
    ) -> Outcome:
        settings, run = self.settings, self.settings.run
        if settings.data.micro_batches % processes.world:
            raise SettingsError(
                f"data.micro_batches {settings.data.micro_batches} is no multiple of the {processes.world} processes"
            )
        if processes.first:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingsError(f"run.out {self.out} cannot be made: {error}") from error
            stack.enter_context(alone(self.out))
        processes.wait()
        root = self.out / "checkpoints"
        examples = self._examples(self.rows, "data", "data.train")
        replicas = self._replicas()
        master = Master(self._first_weights(replicas[0]), settings.optim, self._drafter_devices[0])
        step = self._resume(root, master, examples)
        batches = micro_batches(
            examples,
            seed=run.seed,
            batch_size=settings.data.batch_size,
            anchors=settings.drafter.anchors,
            bucket=settings.data.bucket,
            limit=self._positions,
            start=step * settings.data.micro_batches,
            rank=processes.rank,
            world=processes.world,
        )
        digests = self._digests if processes.first else {}  # of what is there now, not at the first save
        processes.wait()  # nobody may write before all have read
        held_out = self._held_out() if processes.first else []
        if processes.first:
            (self.out / "settings.json").write_text(json.dumps(settings.to_json(), indent=2) + "\n")
        # Others than the first process keep a journal that nobody reads.
        place = self.out if processes.first else Path(tempfile.mkdtemp(prefix="dflash-"))
        journal = Journal(
            place,
            self.steps,
            first=step,
            tensorboard=run.tensorboard and processes.first,
            wandb=run.wandb if processes.first else None,
            settings=settings.to_json(),
            quiet=quiet,
        )
        position: dict[str, Any] = examples.position
        saved = step if step else -1
        validation: Tally | None = None
        window: list[StepReport] = []

        def save() -> None:
            nonlocal saved
            if saved != step and processes.first:
                state = {
                    "position": position,
                    "rows": self._count(),
                    "data": digests,
                    "config": self.config.to_json(),
                    "settings": settings.to_json(),
                }
                self._saving = True
                try:
                    checkpoint.save_checkpoint(root, step, master.tensors(), state, keep=run.keep)
                    saved = step
                finally:
                    self._saving = False

        engine = Engine(
            self._targets,
            replicas,
            master,
            batches,
            per_step=settings.data.micro_batches // processes.world,
            depth=settings.data.depth,
            reduce=processes.reduce if processes.world > 1 else None,
            memory=self.plan.memory,
            stall_after=run.stall_after or None,
        )
        try:
            with self._signals(journal, engine):  # around every save: a signal's own action would end it half-way
                try:
                    with engine:
                        while step < self.steps and not processes.any(self._stop.is_set()):
                            lr = learning_rate(settings.optim, step, self.steps)
                            report = engine.step(lr)
                            step, position = step + 1, report.position
                            engine.committing = False
                            self._leave_if_interrupted()
                            window.append(report)
                            if step % run.log_every == 0 or step == self.steps or report.graphs:
                                journal.record(step, self._numbers(window, lr))
                                window = []
                            if held_out and (step == self.steps or (run.eval_every and step % run.eval_every == 0)):
                                validation = engine.measure(held_out, master.best())
                                journal.record(step, validation.metrics("val_"))
                            if step % run.save_every == 0:
                                save()
                                self._leave_if_interrupted()
                            if on_step is not None:
                                on_step(step, report)
                        if window:  # stopped between two lines
                            journal.record(step, self._numbers(window, lr))
                    save()
                    self._leave_if_interrupted()
                except BaseException as error:
                    # Whatever it was, what has been learnt stays; a failure to save must not hide the first one.
                    try:
                        if not engine.committing:  # else the weights are between two steps: the last save is the state
                            save()
                    except CheckpointError as second:
                        error.add_note(str(second)) if hasattr(error, "add_note") else journal.say(str(second))
                    raise
        finally:
            journal.close()
        export = None
        processes.wait()
        if not processes.first:
            shutil.rmtree(place, ignore_errors=True)
        elif step >= self.steps:
            export = export_drafter(master.best(), self.config, self.out / "export")
        if processes.first and read_metrics(journal.path):  # none if it was stopped before the first line
            plot(self.out)
        found = checkpoint.latest(root)
        assert found is not None
        return Outcome(step, step >= self.steps, found, export, validation)

    def stop(self) -> None:
        """Finish the step, save and return from :meth:`run`; from any thread."""
        self._stop.set()

    @functools.cached_property
    def _digests(self) -> dict[str, str]:
        """Of the training rows, before any were set apart; none of a stream, which is not read before."""
        return {} if self._whole is None else self._whole.digests()

    def _count(self) -> int | None:
        return None if isinstance(self.rows, Stream) else len(self.rows)

    def _leave_if_interrupted(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt

    def _place_targets(self, given: Target | None) -> list[Target]:
        """One target for each device, shared by the threads of that device."""
        settings = self.settings.target
        if given is not None:
            return [given] * len(settings.devices)
        if not settings.model:
            raise SettingsError("target.model is not given")
        made: dict[torch.device, Target] = {}
        out = []
        for device in devices_of(settings.devices, "target.devices"):
            if device not in made:
                made[device] = load_target(
                    settings.model,
                    dtype=dtype_of(settings.dtype),
                    device=device,
                    trust_remote_code=settings.trust_remote_code,
                )
            out.append(made[device])
        return out

    def _drafter_config(self) -> DrafterConfig:
        wish = self.settings.drafter
        parts = DFlash2(**{field.name: getattr(wish, field.name) for field in dataclasses.fields(DFlash2)})
        if wish.warm_start:
            config, self.warm = load_drafter(wish.warm_start)
            if wish.version == 1 and config.dflash2 is not None:
                raise SettingsError(
                    f"drafter.version is 1 and {wish.warm_start} is a DFlash 2 drafter, which does not do without its "
                    "convolutions; leave drafter.version out, or start from a plain one"
                )
            if wish.version == 2 and config.dflash2 is None:
                config = dataclasses.replace(config, dflash2=parts)
                self._say(
                    f"{wish.warm_start} is a plain DFlash drafter: the convolutions and the selector of DFlash 2 are "
                    "new, and change nothing at first"
                )
            for name, ours in (
                ("layers", config.num_hidden_layers),
                ("block_size", config.block_size),
                ("target_layer_ids", config.target_layer_ids),
                ("mask_token_id", config.mask_token_id),
                ("num_attention_heads", config.num_attention_heads),
                ("num_key_value_heads", config.num_key_value_heads),
                ("head_dim", config.head_dim),
                ("intermediate_size", config.intermediate_size),
            ):
                if (asked := getattr(wish, name)) not in (ours, getattr(DrafterSettings(), name)):
                    self._say(f"drafter.{name} is not {asked} but {ours}, as in {wish.warm_start}")
            if not self.target.head.fits(config) or config.num_target_layers != self.target.layer_count:
                raise CheckpointError(f"{wish.warm_start} is no drafter for this target: sizes or scales differ")
            return config
        mask = chat.mask_token(self.tokenizer, self.target.rows, wish.mask_token_id)
        if mask is None:
            raise SettingsError(
                f"no row of the embedding ({self.target.rows}) is free for the mask token; "
                "name a token that never occurs with drafter.mask_token_id"
            )
        sliding = wish.sliding_layers
        return self.target.drafter_config(
            layers=wish.layers,
            block_size=wish.block_size,
            mask_token_id=mask,
            taps=wish.target_layer_ids,
            num_attention_heads=wish.num_attention_heads,
            num_key_value_heads=wish.num_key_value_heads,
            head_dim=wish.head_dim,
            intermediate_size=wish.intermediate_size,
            layer_types=(SLIDING,) * sliding + (FULL,) * (wish.layers - sliding),
            sliding_window=wish.sliding_window if sliding else None,
            dflash2=parts if wish.version == 2 else None,
        )

    def _refuse_parts_of_dflash2(self) -> None:
        """See that nothing is asked for that the drafter does not have."""
        if self.config.dflash2 is not None:
            return
        drafter, loss = self.settings.drafter, self.settings.loss
        names = [field.name for field in dataclasses.fields(DFlash2)]
        asked = [f"drafter.{name}" for name in names if getattr(drafter, name) != getattr(DrafterSettings(), name)]
        asked += ["loss.selector_weight"] if loss.selector_weight != LossSettings().selector_weight else []
        if asked:
            raise SettingsError(f"{asked[0]} belongs to DFlash 2 and the drafter is a plain one; say drafter.version 2")

    def _replicas(self) -> list[Replica]:
        wish = self.settings.drafter
        how = ReplicaSettings(dtype_of(wish.dtype), wish.compile, wish.backend, wish.attention)
        return [
            Replica(self.config, self.target.head, device, how, self.settings.loss) for device in self._drafter_devices
        ]

    def _first_weights(self, replica: Replica) -> dict[str, Tensor]:
        """fp32 on the CPU, so that neither dtype nor device of the drafters changes the draw."""
        from fxsafe.dflash.model import Drafter

        drafter = Drafter(self.config)
        drafter.initialize(torch.Generator().manual_seed(seed_for(self.settings.run.seed, "weights")))
        if self.warm is not None:
            # A plain drafter has no tensors for what is new: those stay as they were drawn.
            load_into(drafter, drafter.state_dict() | self.warm)
        return drafter.state_dict()

    def _examples(self, rows: Rows | Stream, purpose: str, name: str, *, shuffle: bool = True) -> Examples:
        data = self.settings.data
        return Examples(
            rows,
            chat.encoder(self.tokenizer, self.target.rows),
            seed=seed_for(self.settings.run.seed, purpose),
            max_length=data.max_length,
            too_long=data.too_long,
            on_error=data.on_error,
            report=self._say,
            shuffle=shuffle,
            name=name,
        )

    def _held_out(self) -> list[MicroBatch]:
        """The same micro-batches each time, from as many different rows as there are."""
        if not len(self.held_out):
            return []
        data = self.settings.data
        count = min(data.validation_batches, max(1, len(self.held_out) // data.batch_size))
        name = "data.validation" if data.validation else "the rows that data.validation_share sets apart"
        stream = micro_batches(
            self._examples(self.held_out, "validation", name, shuffle=False),
            seed=seed_for(self.settings.run.seed, "validation"),
            batch_size=data.batch_size,
            anchors=self.settings.drafter.anchors,
            bucket=data.bucket,
            limit=self._positions,
        )
        return list(itertools.islice(stream, count))

    def _resume(self, root: Path, master: Master, examples: Examples) -> int:
        """Restore the newest checkpoint, if there is one; returns the finished steps."""
        path = checkpoint.latest(root)
        if path is None:
            return 0
        tensors, state = checkpoint.load_checkpoint(path)
        if state["config"] != self.config.to_json():
            raise CheckpointError(f"{path} is of another drafter; choose another run.out or the same settings")
        settings = json.loads(json.dumps(self.settings.to_json()))
        same = ["data.micro_batches", "data.batch_size", "data.train", "data.streaming", "run.seed"]
        for name in [*same, "data.window"] if self.settings.data.streaming else same:
            section, _, part = name.partition(".")
            now = settings[section][part]
            before = state["settings"][section].get(part, now)  # the setting may be younger than the checkpoint
            if before != now:
                raise CheckpointError(f"{path} was trained with {name} {before}, and now it is {now}")
        # Other validation rows that are set apart are other training rows.
        new = settings["data"]
        old = new | state["settings"]["data"]
        before, now = (0 if data["validation"] else data["validation_share"] for data in (old, new))
        if before != now:
            raise CheckpointError(
                f"{path} was trained with a share of {before} of data.train set apart, and now it is {now} "
                "(data.validation_share; 0 with data.validation)"
            )
        if (before := state.get("rows", self._count())) != self._count():
            raise CheckpointError(
                f"{path} was trained with {before} rows, and now there are {self._count()}: a file of data.train, "
                "data.validation or data.validation_share has changed, and the order of the rows with it"
            )
        kept: dict[str, str] = state.get("data", {})  # older checkpoints have none
        if changed := [name for name, digest in self._digests.items() if kept.get(name, digest) != digest]:
            raise CheckpointError(
                f"{path} was trained on other rows: {', '.join(changed)} has been changed since. Put back what it was, "
                "or choose another run.out to begin anew"
            )
        master.restore(tensors)
        examples.seek(state["position"])
        self._say(f"resumed from {path}")
        if others := _changes(state["settings"], settings):
            self._say(f"with other settings than before: {', '.join(others)}")
        return int(state["step"])

    def _numbers(self, reports: list[StepReport], lr: float) -> dict[str, Any]:
        """The record of some steps: means over all of their slots."""
        total = Tally.total(r.tally for r in reports)
        seconds = sum(r.seconds for r in reports)
        tokens = sum(r.tokens for r in reports)
        numbers: dict[str, Any] = total.metrics()
        numbers |= {
            "lr": lr,
            "grad_norm": reports[-1].norm,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds / len(reports),
            "drafter_wait": sum(r.drafter_wait for r in reports) / seconds,
            "target_wait": sum(r.target_wait for r in reports) / seconds,
            "optimizer_seconds": sum(r.optimizer for r in reports) / len(reports),
            "graphs": sum(r.graphs for r in reports),
            "skipped": sum(r.skipped for r in reports),
            **counted(),
        }
        # Of targets and drafters, over all devices: whoever waits lowers it.
        sequences = len(reports) * self.settings.data.batch_size * self.settings.data.micro_batches
        length = round(tokens / sequences)
        work = sequences * (
            drafter_flops(self.config, length, self.settings.drafter.anchors, self.target.rows)
            + target_flops(self.target.text_config, max(self.config.target_layer_ids) + 1, length)
        )
        numbers["tflops"] = work / seconds / 1e12
        if peak := peak_flops(self._drafter_devices[0], self.settings.run.peak_tflops):
            numbers["mfu"] = work / seconds / peak / len({*self._drafter_devices, *(t.device for t in self._targets)})
        return numbers

    @contextmanager
    def _signals(self, journal: Journal, engine: Engine) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # handlers belong to the main thread; stop() serves others
            return
        before: dict[int, Any] = {}

        def handle(number: int, frame: Any) -> None:
            if self._stop.is_set():
                if engine.committing or self._saving:
                    self._interrupted = True  # in a moment: not in the middle of a change of the weights or of a save
                    return
                raise KeyboardInterrupt
            self._stop.set()
            journal.say(f"{signal.Signals(number).name}: finishing the step and saving; once more interrupts at once")

        for which in (signal.SIGINT, signal.SIGTERM):
            before[which] = signal.signal(which, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings that differ and may, in words; those that an older checkpoint lacks are no change."""
    out = []
    for section, values in now.items():
        for name, value in values.items():
            was = before.get(section, {}).get(name, value)
            if was != value and (section, name) != ("run", "out"):
                out.append(f"{section}.{name} {value} ({was})")
    return out
