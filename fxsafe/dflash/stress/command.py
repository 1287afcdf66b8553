"""``fxsafe dflash stress`` from its options to its table."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from fxsafe.dflash.errors import SettingsError
from fxsafe.dflash.stress.plan import MODES, Mode, Plan, modes_of
from fxsafe.dflash.stress.report import draw, summary, table

__all__ = ["stress"]

_SIZES = {
    "cpu": {"hidden": 32, "layers": 1, "length": 64, "anchors": 8, "block": 4, "batch": 2, "shapes": 2},
    "cuda": {"hidden": 512, "layers": 2, "length": 1024, "anchors": 64, "block": 16, "batch": 4, "shapes": 2},
}


def stress(options: Any) -> int:
    """Run it and print the table.

    Returns:
        0 if all of fxsafe, where it is among the modes, had every step and no hang, no eager step and no residue.

    Raises:
        SettingsError: options that do not go together.
    """
    if not hasattr(os, "fork"):
        raise SettingsError("stress forks its processes, which this system does not have")
    modes = modes_of([name for name in options.modes.split(",") if name])
    plan = plan_of(options, modes)
    import torch

    title = f"torch {torch.__version__}, {plan.threads} drafters on {', '.join(plan.devices)}, {plan.backend}"
    print(f"{title}: {len(modes)} modes x {plan.starts} cold starts x {plan.seconds:.1f} s", flush=True)
    from fxsafe.dflash.stress.runner import run_modes

    rows = run_modes(plan, modes, lambda line: print(line, file=sys.stderr, flush=True))
    for row in rows:
        for number, start in enumerate(row["starts"]):
            for text in start["stacks"]:
                print(f"== {row['label']}, start {number + 1}: hung at\n{text}", file=sys.stderr)
    print(table(rows))
    if options.json:
        content = {
            "torch": torch.__version__,
            "plan": {name: getattr(plan, name) for name in Plan.__slots__},
            "command": sys.argv[1:],
            "summary": [summary(row) for row in rows],
            "modes": rows,
        }
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")
    if options.png:
        draw(rows, Path(options.png), title)
    ours = [summary(row) for row in rows if row["mode"] == "fxsafe"]
    good = all(o["ok"] == o["tried"] > 0 and not (o["hung"] or o["died"] or o["eager"] or o["residue"]) for o in ours)
    return 0 if good else 1


def plan_of(options: Any, modes: tuple[Mode, ...] = MODES) -> Plan:
    """The plan of these options; asks nothing of a GPU but how many there are.

    Raises:
        SettingsError: a number that is too small.
    """
    import torch

    devices = tuple(name for name in options.devices.split(",") if name)
    if devices == ("auto",):
        # Not is_available(): a process that has asked the driver cannot fork children that use it.
        devices = ("cuda:0",) if torch.cuda.device_count() else ("cpu",)
    cuda = any(name.startswith("cuda") for name in devices)
    backend = options.backend if options.backend != "auto" else ("inductor" if cuda else "aot_eager")
    sizes = {
        name: value if getattr(options, name) is None else getattr(options, name)
        for name, value in _SIZES["cuda" if cuda else "cpu"].items()
    }
    counts = {"starts": options.starts, "threads": options.threads, "jobs": options.jobs, **sizes}
    if too_small := [name for name, value in counts.items() if value < 1]:
        raise SettingsError(f"--{too_small[0]} must be at least 1")
    if not options.seconds > 0 or min(options.trace_every, options.steps) < 0 or not devices:
        raise SettingsError("--seconds must be above 0, --trace-every and --steps not below, --devices not empty")
    stall = options.stall_after if options.stall_after is not None else (120.0 if backend == "inductor" else 45.0)
    return Plan(
        threads=options.threads,
        devices=devices,
        backend=backend,
        seconds=options.seconds * options.jobs / (options.starts * len(modes)),
        starts=options.starts,
        stall_after=stall,
        trace_every=options.trace_every,
        steps=options.steps,
        at_most=options.at_most,
        spawn=options.spawn,
        jobs=options.jobs,
        record=None if options.record is None else os.path.abspath(options.record),
        **sizes,
    )
