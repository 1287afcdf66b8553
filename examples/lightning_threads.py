"""A search over learning rates in a pool of threads: several ``Trainer.fit`` at once, and another thread loads models.

Each trial compiles its own model. Loading a pickled ``GraphModule`` is a trace: up to torch 2.13 it makes the trials'
compiled calls fail ("Detected that you are using FX to symbolically trace a dynamo-optimized function"), and on every
torch their eager modules ("module is not installed as a submodule").

    pip install lightning
    python examples/lightning_threads.py [--plain]

Lightning's own state: outside of the main thread it registers no signal handlers; ``seed_everything`` seeds the whole
process, so the models are made in the main thread instead, and each loader shuffles with a generator of its own; and
trainers that ask for their loaders together get into each other's way, hence ``LoadersInTurn``. Losses are compared
with those of a serial run, to the bit.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import logging
import pickle
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

if missing := [name for name in ("lightning",) if importlib.util.find_spec(name) is None]:
    sys.exit(f"this example needs {' and '.join(missing)}: pip install {' '.join(missing)}")

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxsafe

RATES = (0.001, 0.003, 0.01, 0.03)
EPOCHS = 5


class Trial(lightning.LightningModule):
    def __init__(self, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.rest = torch.compile(self._rest, backend="aot_eager")
        self.rate = rate
        self.losses: list[float] = []

    def _rest(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.body(torch.relu(x)), y)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = self.rest(self.embed(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.rate)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 8, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True, generator=generator)


class LoadersInTurn(lightning.Callback):
    """One trainer at a time asks for its loaders.

    Lightning replaces ``DataLoader.__init__`` and its like in the whole process meanwhile; two that overlap leave the
    replacement there for good. Nothing is compiled under the lock: ``on_train_start`` comes before the first step, and
    the validation before training, which would run in between, is off (``num_sanity_val_steps=0``).
    """

    _lock = threading.Lock()
    _mine = False

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._lock.acquire()
        self._mine = True

    def _release(self) -> None:
        if self._mine:
            self._mine = False
            self._lock.release()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._release()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        self._release()

    on_fit_end = on_train_start  # where there was nothing to train


def fit(trial: Trial) -> list[float]:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        callbacks=[LoadersInTurn()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(trial)
    return trial.losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without fxsafe")
    plain = parser.parse_args().plain
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    handle = None if plain else fxsafe.install()
    # Also what imports all that a compile imports, in one thread.
    right = {rate: fit(Trial(rate)) for rate in RATES}
    torch._dynamo.reset()  # the threads compile for themselves
    saved = pickle.dumps(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    x = torch.ones(4)
    answer = pickle.loads(saved)(x)
    loads: collections.Counter[str] = collections.Counter()
    trials = [Trial(rate) for rate in RATES]
    finished = threading.Event()

    def traces() -> None:
        while not finished.is_set():
            try:
                loads["right" if torch.equal(pickle.loads(saved)(x), answer) else "WRONG"] += 1
            except Exception as error:
                loads[f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"] += 1

    def search(trial: Trial) -> str:
        try:
            losses = fit(trial)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
        return "the losses of the serial run" if losses == right[trial.rate] else "OTHER LOSSES than the serial run"

    tracer = threading.Thread(target=traces)
    tracer.start()
    try:
        with ThreadPoolExecutor(len(trials)) as pool:
            outcomes = list(pool.map(search, trials))
    finally:
        finished.set()
        tracer.join()
    if handle is not None:
        handle.uninstall()
    for trial, outcome in zip(trials, outcomes, strict=True):
        print(f"rate {trial.rate}: {len(trial.losses)} of {len(right[trial.rate])} steps, {outcome}")
    print(f"loads meanwhile: {dict(loads)}")
    good = set(outcomes) == {"the losses of the serial run"} and set(loads) == {"right"}
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
