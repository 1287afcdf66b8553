"""What a run tells: lines or a progress bar, ``metrics.jsonl``, TensorBoard, W&B, and a plot of the curves."""

from __future__ import annotations

import json
import math
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxsafe.dflash.errors import DFlashError

__all__ = ["Journal", "plot", "read_metrics"]


class Journal:
    """Writes records of a run; one JSON object a line, flushed at once.

    Args:
        directory: of the run, which exists.
        total: steps of the whole run.
        first: finished steps; records of later ones, from a run that was cut off, are removed.
        tensorboard: write events too.
        wandb: project of Weights & Biases that gets the numbers too; None for none. A resumed run goes on there.
        settings: of the run, for Weights & Biases.
        quiet: print nothing.

    Raises:
        DFlashError: a package is missing, or Weights & Biases does not take the run.
    """

    def __init__(
        self,
        directory: Path,
        total: int,
        *,
        first: int = 0,
        tensorboard: bool = False,
        wandb: str | None = None,
        settings: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> None:
        self.path = directory / "metrics.jsonl"
        kept = [r for r in read_metrics(self.path) if r["step"] <= first] if self.path.exists() else []
        new = self.path.with_suffix(".new")
        new.write_text("".join(json.dumps(r) + "\n" for r in kept))
        new.replace(self.path)
        self._total, self._quiet = total, quiet
        self._writer: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise DFlashError("run.tensorboard needs the package tensorboard") from error
            self._writer = SummaryWriter(str(directory / "tensorboard"))
        self._wandb = None if wandb is None else _wandb_run(directory, wandb, settings or {})
        self._stream = self.path.open("a")  # after all that can fail
        self._bar: Any = None
        if not quiet and sys.stdout.isatty():
            from rich.progress import Progress

            self._bar = Progress()
            self._task = self._bar.add_task("training", total=total, completed=first)
            self._bar.start()

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep the numbers of a step."""
        row = {"step": step, **values}
        self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)
        self.say(f"step {step}/{self._total}  {describe(values)}")
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """A line for people."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """May be called again."""
        self._stream.close()
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _wandb_run(directory: Path, project: str, settings: Mapping[str, Any]) -> Any:
    """The run of that project that belongs to the directory, made if there is none."""
    try:
        import wandb
    except ImportError as error:
        raise DFlashError("run.wandb needs the package wandb") from error
    kept = directory / "wandb_id.txt"
    name = kept.read_text().strip() if kept.exists() else secrets.token_hex(4)
    try:
        run = wandb.init(
            project=project,
            name=directory.resolve().name,
            id=name,
            resume="allow",
            dir=str(directory),
            config=dict(settings),
            settings=wandb.Settings(console="off", silent=True),
        )
    except wandb.errors.Error as error:
        raise DFlashError(f"run.wandb: Weights & Biases does not take the run: {error}") from error
    kept.write_text(name + "\n")
    return run


_SHOWN = (
    ("loss", "loss {:.3f}"),
    ("accuracy", "acc {:.3f}"),
    ("accept_length", "accept {:.2f}"),
    ("base_accept_length", "without selector {:.2f}"),
    ("selector_loss", "selector loss {:.3f}"),
    ("candidate_recall", "recall {:.1%}"),
    ("val_loss", "val loss {:.3f}"),
    ("val_accept_length", "val accept {:.2f}"),
    ("val_base_accept_length", "val without selector {:.2f}"),
    ("lr", "lr {:.2e}"),
    ("grad_norm", "norm {:.2f}"),
    ("tokens_per_second", "{:.0f} tok/s"),
    ("tflops", "{:.2f} TFLOP/s"),
    ("mfu", "MFU {:.1%}"),
    ("drafter_wait", "wait drafter {:.0%}"),
    ("target_wait", "target {:.0%}"),
    ("graphs", "compiled {:.0f}"),
    ("fx_refusals_avoided", "refusals avoided {:.0f}"),
    ("fx_waits", "waits {:.0f}"),
    ("fx_longest_wait_s", "longest {:.1f} s"),
)


def describe(values: Mapping[str, Any]) -> str:
    """The numbers that people watch, in one line."""
    return "  ".join(form.format(values[name]) for name, form in _SHOWN if name in values)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a ``metrics.jsonl``; a last line that was cut off is left out.

    Raises:
        DFlashError: there is no such file.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise DFlashError(f"{path} cannot be read: {error}") from error
    out = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            out.append(row)
    return out


def plot(directory: Path) -> Path:
    """Draw the curves of a run into ``curves.png``.

    Raises:
        DFlashError: the directory holds no metrics.
    """
    rows = read_metrics(directory / "metrics.jsonl")
    if not rows:
        raise DFlashError(f"{directory} holds no metrics yet")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2).flatten()
    positions = sorted(
        {n for row in rows for n in row if n.startswith("accuracy_")}, key=lambda n: int(n.removeprefix("accuracy_"))
    )
    panels = (
        ("loss", ("loss", "val_loss", "selector_loss")),
        ("simulated acceptance length", ("accept_length", "val_accept_length", "base_accept_length")),
        ("accuracy by position", tuple(positions)),
        ("tokens per second", ("tokens_per_second",)),
    )
    for ax, (title, names) in zip(axes, panels, strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                ax.plot(*zip(*points, strict=True), label=name, marker="." if name.startswith("val") else None)
        ax.set_title(title)
        ax.set_xlabel("step")
        if ax.lines:
            ax.legend(fontsize="small")
    out = directory / "curves.png"
    figure.savefig(out, dpi=100)
    return out
