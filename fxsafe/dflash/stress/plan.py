"""The choices of a stress run, and the modes that are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fxsafe import Fix
from fxsafe.dflash.errors import SettingsError

__all__ = ["MODES", "Mode", "Plan", "modes_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class Mode:
    """One row of the table.

    Attributes:
        name: as ``--modes`` spells it.
        label: for people.
        fix: of ``fxsafe.install``, None to leave torch plain.
        patches: of ``fxsafe.install``; None for all.
        settings: of torch, for all threads.
        clear: set the tracing flag to False before each compiled call.
        warm: one thread runs every drafter and shape once before the threads start.
        apart: each drafter in a process of its own.
    """

    name: str
    label: str
    fix: Fix | None = None
    patches: tuple[str, ...] | None = None
    settings: tuple[tuple[str, bool], ...] = ()
    clear: bool = False
    warm: bool = False
    apart: bool = False


MODES = (
    Mode("plain", "plain torch"),
    Mode(
        "eager",
        "error_on_nested_fx_trace=False",
        settings=(("torch._dynamo.config.error_on_nested_fx_trace", False),),
    ),
    Mode("cleared", "flag cleared before each call", clear=True),
    Mode("warmed", "warmed by one thread first", warm=True),
    Mode("always-false", "fxsafe: always-false alone", fix="always-false", patches=("guard-override",)),
    Mode("thread-local", "fxsafe: thread-local alone", fix="thread-local", patches=("tracing-flag", "checkpoint-flag")),
    Mode("fxsafe", "all of fxsafe", fix="thread-local"),
    Mode("processes", "a process for each drafter", apart=True),
)


def modes_of(names: Sequence[str]) -> tuple[Mode, ...]:
    """The modes of these names, in the order of the table; all for none.

    Raises:
        SettingsError: an unknown name.
    """
    known = {mode.name: mode for mode in MODES}
    if unknown := [name for name in names if name not in known]:
        raise SettingsError(f"--modes {','.join(unknown)} is unknown; it is of {', '.join(known)}")
    return tuple(mode for mode in MODES if not names or mode.name in names)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What every mode runs.

    Attributes:
        threads: drafters.
        devices: torch's names; drafter m is on device m modulo their number, so one device is shared by all.
        backend: of torch.compile.
        seconds: of one start, from the first thread on, compiles included; up to three times as long, until each
            drafter has tried 20 steps.
        steps: of one drafter at most, 0 for as many as there is time for.
        starts: cold starts of each mode.
        stall_after: seconds without a step of some drafter and without a new graph that count as a hang.
        shapes: different lengths, each of which is compiled for.
        trace_every: steps of a drafter between two traces of its own, 0 for none.
        hidden: size of the target's hidden state.
        layers: of the drafter.
        length: tokens of the longest sequences.
        anchors: blocks of a sequence.
        block: tokens of a block.
        batch: sequences of a step.
        record: file for a timeline of the first start of all of fxsafe, or None.
        at_most: seconds after which no further start begins, or None.
        spawn: processes are started afresh and not forked.
        jobs: starts at a time; more than one is for counting errors and hangs, not for speeds.
    """

    threads: int
    devices: tuple[str, ...]
    backend: str
    seconds: float
    steps: int
    starts: int
    stall_after: float
    shapes: int
    trace_every: int
    hidden: int
    layers: int
    length: int
    anchors: int
    block: int
    batch: int
    record: str | None = None
    at_most: float | None = None
    spawn: bool = False
    jobs: int = 1

    @property
    def cuda(self) -> bool:
        return any(device.startswith("cuda") for device in self.devices)
