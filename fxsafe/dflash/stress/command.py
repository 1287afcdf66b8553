"""``fxsafe dflash stress`` from its options to its table."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fxsafe.dflash.errors import SettingsError
from fxsafe.dflash.files import require_writable, write_whole
from fxsafe.dflash.stress.plan import MODES, Mode, Plan, modes_of
from fxsafe.dflash.stress.report import draw, require_picture, summary, table
from fxsafe.dflash.stress.runner import fit_for_forking, run_modes

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
    modes = modes_of([name.strip() for name in options.modes.split(",") if name.strip()])
    if options.modes and not options.modes.strip(" ,"):
        raise SettingsError(f"--modes {options.modes!r} names no mode")
    if os.environ.get("FXSAFE_DISABLE") and any(mode.fix for mode in modes):
        raise SettingsError("FXSAFE_DISABLE is set, and would make plain torch of fxsafe's modes; unset it")
    plan = plan_of(options, modes)
    for name in ("json", "png", "record"):
        if path := getattr(options, name):
            require_writable(f"--{name}", Path(path))
    if options.png:
        require_picture(Path(options.png))
    import torch

    title = f"torch {torch.__version__}, {plan.threads} drafters on {', '.join(plan.devices)}, {plan.backend}"
    print(f"{title}: {len(modes)} modes x {plan.starts} cold starts x {plan.seconds:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        with _ended_by_sigterm():
            run_modes(plan, modes, lambda line: print(line, file=sys.stderr, flush=True), rows)
    except KeyboardInterrupt:
        if not any(row["starts"] for row in rows):
            raise
        interrupted = True
    written = _report(rows, plan, title, options)
    if interrupted:
        print("interrupted", file=sys.stderr)
        return 130
    ours = [summary(row) for row in rows if row["mode"] == "fxsafe"]
    good = all(o["ok"] == o["tried"] > 0 and not (o["hung"] or o["died"] or o["eager"] or o["residue"]) for o in ours)
    return 0 if good and written else 1


def _report(rows: list[dict[str, Any]], plan: Plan, title: str, options: Any) -> bool:
    """Print the table and write the files; False if one could not be written."""
    for row in rows:
        for number, start in enumerate(row["starts"]):
            for text in start["stacks"]:
                print(f"== {row['label']}, start {number + 1}: hung at\n{text}", file=sys.stderr)
    print(table(rows), flush=True)
    written = True
    if options.json:
        content = {
            "torch": title.split(",")[0].removeprefix("torch "),
            "plan": {name: getattr(plan, name) for name in Plan.__slots__},
            "command": sys.argv[1:],
            "summary": [summary(row) for row in rows],
            "modes": rows,
        }
        try:
            write_whole(Path(options.json), json.dumps(content, indent=1) + "\n")
        except OSError as error:
            print(f"--json {options.json} cannot be written: {error}", file=sys.stderr)
            written = False
    if options.png:
        try:
            draw(rows, Path(options.png), title)
        except OSError as error:
            print(f"--png {options.png} cannot be written: {error}", file=sys.stderr)
            written = False
    return written


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as an exception, so that its processes and caches go."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    if options.stall_after is not None and not options.stall_after > 0:
        raise SettingsError("--stall-after must be above 0: every start would pass for one that hangs")
    _require_there(devices, backend)
    jobs = min(options.jobs, options.starts * len(modes))
    stall = options.stall_after if options.stall_after is not None else (120.0 if backend == "inductor" else 45.0)
    return Plan(
        threads=options.threads,
        devices=devices,
        backend=backend,
        seconds=options.seconds * jobs / (options.starts * len(modes)),
        starts=options.starts,
        stall_after=stall,
        trace_every=options.trace_every,
        steps=options.steps,
        at_most=options.at_most,
        spawn=options.spawn,
        jobs=jobs,
        record=None if options.record is None else os.path.abspath(options.record),
        **sizes,
    )


def _require_there(devices: Sequence[str], backend: str) -> None:
    with fit_for_forking():
        import torch
        import torch._dynamo

        backends = torch._dynamo.list_backends(None)
    for name in devices:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise SettingsError(f"--devices {name}: {str(error).splitlines()[0]}") from None
        if device.type not in ("cpu", "cuda"):
            raise SettingsError(f"--devices {name}: the load knows cpu and cuda")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise SettingsError(f"--devices {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    if backend not in backends:
        raise SettingsError(f"--backend {backend}: torch.compile has no such backend")
