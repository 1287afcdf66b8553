"""What each drafter thread does: the trainer's own step, and now and then a trace.

A step is one of the trainer's: features from the target's eager modules, the drafter's compiled forward and backward,
the compiled loss, the optimizer. Its compiles come cold, in each thread, for each shape. The traces are those of
programs around a trainer that are not compiles: a pickled ``GraphModule`` is loaded, a module is traced symbolically,
a function with ``make_fx``. Each answer is compared with the one of a quiet process.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pickle
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxsafe.dflash.batches import Example, Features, MicroBatch, collate, seed_for
from fxsafe.dflash.losses import LossSettings
from fxsafe.dflash.optim import Master, OptimSettings
from fxsafe.dflash.replica import Replica, ReplicaSettings
from fxsafe.dflash.stress.plan import Mode, Plan
from fxsafe.dflash.target import Target

__all__ = ["LEAST_STEPS", "Drafter", "Record", "make_target", "residue", "trace_jobs"]

ROWS = 512  # of the vocabulary
# On a busy machine the cold compiles alone may outlast the time: all drafters go on until the last has tried these, or
# three times the time is over.
LEAST_STEPS = 20
BATCHES_OF_A_SHAPE = 4
FLAG = "_is_fx_tracing_flag"


@dataclasses.dataclass(slots=True)
class Record:
    """What one drafter has done so far; written by its thread, read by others."""

    ok: int = 0
    eager: int = 0
    """of those that succeeded: steps in which Python ran what should have been compiled"""
    tokens: int = 0
    done: bool = False
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    steps: list[tuple[float, float, int]] = dataclasses.field(default_factory=list)
    """beginning and end of each step that succeeded, in seconds, and its tokens"""
    warm_at: float | None = None
    """when every shape had been tried"""
    last_at: float = 0.0
    """when the last step ended, succeeded or not"""

    @property
    def tried(self) -> int:
        return self.ok + sum(self.errors.copy().values())


class WrongAnswer(Exception):
    """A trace gave another graph or value than in a quiet process."""


def make_target(plan: Plan, device: torch.device) -> Target:
    """A random Qwen3 of four layers."""
    import transformers

    head = min(128, max(16, plan.hidden // 4))
    heads = max(4, plan.hidden // head)
    config = transformers.Qwen3Config(
        vocab_size=ROWS,
        hidden_size=plan.hidden,
        intermediate_size=2 * plan.hidden,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        use_sliding_window=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call,unused-ignore]
        config, attn_implementation="sdpa"
    )
    return Target(model.eval().to(device, _dtype(device)))


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Drafter:
    """One drafter, with weights and moments of its own; used by one thread."""

    def __init__(self, plan: Plan, mode: Mode, number: int, target: Target) -> None:
        self.number, self.record = number, Record()
        self._plan, self._target = plan, target
        self._ran_in_python = 0
        self._jobs = itertools.cycle(trace_jobs())
        device = target.device
        self.config = target.drafter_config(
            layers=plan.layers, block_size=plan.block, mask_token_id=ROWS - 1, taps=tuple(range(plan.layers))
        )
        how = ReplicaSettings(dtype=_dtype(device), backend=plan.backend)
        loss = LossSettings(chunk_blocks=plan.anchors)
        self._replica = Replica(self.config, target.head, device, how, loss, self._noticing)
        self._replica.drafter.initialize(torch.Generator(device).manual_seed(1 + number))
        self._master = Master(self._replica.drafter.state_dict(), OptimSettings(), device)
        if mode.clear:
            self._replica.wrap_compiled(_clearing)
        # Made beforehand: the trainer has threads for that, and it is pure Python, which other drafters would wait for.
        self._batches = list(itertools.islice(_batches(plan, number), plan.shapes * BATCHES_OF_A_SHAPE))

    def _noticing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which counts when Python runs it: Dynamo takes the branch for dead."""

        def noticed(*args: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                self._ran_in_python += 1
            return function(*args)

        noticed.__code__ = noticed.__code__.replace()  # code of its own is compiled anew in each thread
        return noticed

    def step(self, batch: MicroBatch) -> None:
        """One optimizer step."""
        target, replica = self._target, self._replica
        ids = batch.ids_BS.to(target.device, non_blocking=True)
        replica.learn(Features(batch, target.features(ids, self.config.target_layer_ids), None))
        sums, tally = replica.take()
        assert tally is not None
        self._master.update(sums, 1e-4)
        replica.load(dict(zip(self._master.names, self._master.weights, strict=True)))
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)

    def run(self, until: float, enough: Callable[[], bool]) -> None:
        """Steps until ``time.perf_counter()`` says ``until`` and there are ``enough``; failures are recorded."""
        record, plan = self.record, self._plan
        if self._target.device.type == "cuda":
            torch.cuda.set_device(self._target.device)
        for number, batch in enumerate(itertools.cycle(self._batches)):
            began, before = time.perf_counter(), self._ran_in_python
            if (began >= until and enough()) or (plan.steps and number >= plan.steps):
                break
            try:
                if plan.trace_every and number % plan.trace_every == 0:
                    next(self._jobs)()
                self.step(batch)
            except Exception as error:
                self._replica.take()
                record.errors[kind_of(error)] += 1
                record.last_at = time.perf_counter()
            else:
                record.last_at = time.perf_counter()
                record.ok += 1
                record.eager += self._ran_in_python > before
                record.tokens += batch.tokens
                record.steps.append((began, record.last_at, batch.tokens))
            if number + 1 == plan.shapes:
                record.warm_at = record.last_at
        record.done = True

    def warm(self) -> None:
        """Every shape once."""
        if self._target.device.type == "cuda":
            torch.cuda.set_device(self._target.device)
        for batch in self._batches[: self._plan.shapes]:
            self.step(batch)


def _clearing(function: Callable[..., Any]) -> Callable[..., Any]:
    def cleared(*args: Any) -> Any:
        setattr(symbolic, FLAG, False)
        return function(*args)

    return cleared


def _batches(plan: Plan, number: int) -> Iterator[MicroBatch]:
    """Full sequences of random tokens; the lengths come in turns, beginning with another one for each drafter."""
    rng = random.Random(seed_for(0, "stress", number))
    lengths = [max(plan.block + 1, plan.length * (i + 1) // plan.shapes) for i in range(plan.shapes)]
    for index in itertools.count():
        length = lengths[(index + number) % len(lengths)]
        examples = [
            Example([rng.randrange(ROWS - 1) for _ in range(length)], [True] * length) for _ in range(plan.batch)
        ]
        yield collate(examples, index=index, seed=number, anchors=plan.anchors, bucket=length)


def kind_of(error: BaseException) -> str:
    """Type and first words, without what differs each time."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])  # "backend='inductor' raised:" says nothing
    return f"{type(error).__name__}: {re.sub(r'0x[0-9a-f]+|[0-9]+', 'N', text)[:90]}".rstrip(": ")


class _Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


_Perceptron.forward.__annotations__.clear()  # strings here, which a pickled GraphModule cannot hold


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w).sin().sum(0)


_made: list[tuple[Callable[[], str], str]] = []


def trace_jobs() -> list[Callable[[], None]]:
    """Jobs that each trace once and raise WrongAnswer if the graph is not that of a quiet process.

    The first call makes the right answers and must be made while nothing else runs.
    """
    if not _made:
        module = _Perceptron()
        pickled = pickle.dumps(torch.fx.symbolic_trace(module))
        x, w = torch.ones(3, 8), torch.ones(8, 4)
        answers: list[Callable[[], str]] = [
            lambda: str(pickle.loads(pickled).code),
            lambda: str(torch.fx.symbolic_trace(module).code),
            lambda: str(make_fx(_product)(x, w).code),
        ]
        _made.extend((answer, answer()) for answer in answers)

    def job(answer: Callable[[], str], right: str) -> Callable[[], None]:
        def check() -> None:
            if answer() != right:
                raise WrongAnswer("a trace gave another graph")

        return check

    return [job(*made) for made in _made]


def residue(originals: dict[str, Any]) -> list[str]:
    """What is not as it was; see ``places``."""
    return [name for name, value in places().items() if value is not originals[name]]


def places() -> dict[str, Any]:
    """What traces and compiles replace for a time, and must put back."""
    return {
        "tracing flag": bool(vars(symbolic).get(FLAG, False)),
        "nn.Module.__call__": vars(nn.Module)["__call__"],
        "nn.Module.__getattr__": vars(nn.Module)["__getattr__"],
        "CURRENT_PATCHER": vars(symbolic).get("CURRENT_PATCHER"),
        "is_compiling": torch.compiler.is_compiling(),
        "autograd multithreading": torch._C._is_multithreading_enabled(),
    }
