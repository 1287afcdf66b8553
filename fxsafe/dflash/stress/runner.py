"""Starts each mode in fresh processes with caches of their own, notices hangs, and collects what they tell.

This process imports what all need and forks; it never computes, so a child begins as cold as a new interpreter, but for
the seconds of imports. A hang is noticed from outside, so that one in which nobody lets go of the GIL is noticed too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fxsafe.dflash.errors import DFlashError
from fxsafe.dflash.stress.plan import Mode, Plan, modes_of

__all__ = ["fit_for_forking", "import_all", "run_at_once", "run_mode", "run_modes"]

# A process that was asked for its stacks writes them in C, at once; this is for a machine that is very busy.
_DUMP_S = 5.0


@contextlib.contextmanager
def fit_for_forking() -> Iterator[None]:
    """For imports in a process whose children are to use the GPU and to compile."""
    # A process that asked the driver itself could not fork children that use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Nor may Inductor's pool of compile workers begin here: children would share it.
    before = os.environ.get("TORCH_WARM_POOL")
    os.environ["TORCH_WARM_POOL"] = "0"
    yield
    del os.environ["TORCH_WARM_POOL"]
    if before is not None:
        os.environ["TORCH_WARM_POOL"] = before


def import_all() -> None:
    """Everything that a start uses, so that no start's time has imports in it."""
    with fit_for_forking():
        import torch._dynamo
        import torch._functorch.aot_autograd
        import torch._inductor.compile_fx
        import torch.nn.attention.flex_attention  # noqa: F401
        import transformers.models.qwen3.modeling_qwen3  # noqa: F401

        import fxsafe.dflash.stress.start  # noqa: F401


@dataclasses.dataclass(slots=True)
class _Child:
    pid: int
    pipe: BinaryIO
    log: Path
    numbers: Sequence[int]
    buffer: bytes = b""
    last: dict[str, Any] = dataclasses.field(default_factory=dict)
    moved_at: float = dataclasses.field(default_factory=time.monotonic)
    still: dict[int, tuple[Any, float]] = dataclasses.field(default_factory=dict)
    hung: bool = False
    open: bool = True

    def hear(self, data: bytes, now: float) -> None:
        self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        if lines:
            self.moved_at = now
            self.last = json.loads(lines[-1])
        for row in self.last.get("drafters", ()):
            # A drafter moves when it ends a step, and all do while anybody's compiles come to an end.
            mark = row["tried"], row["done"], self.last["graphs"]
            if self.still.get(row["number"], (None,))[0] != mark:
                self.still[row["number"]] = mark, now

    def stuck(self, now: float, bound: float) -> bool:
        if self.last.get("ended"):
            return False
        waiting = [since for mark, since in self.still.values() if not mark[1]]
        return now - min(waiting, default=self.moved_at) > bound


def run_modes(
    plan: Plan, modes: Sequence[Mode], say: Callable[[str], None], rows: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The starts of every mode, in turns, so that what drifts on the machine drifts for all.

    Args:
        rows: gets them as they come, so that a run which is interrupted loses none.

    Returns:
        For each mode ``{"mode": name, "label": text, "starts": [...]}``.

    Raises:
        DFlashError: nothing runs: the first starts have all died before their first step.
    """
    if not plan.spawn:
        import_all()
    began = time.monotonic()
    rows = [] if rows is None else rows
    rows += [{"mode": m.name, "label": m.label, "starts": []} for m in modes]
    turns = [(row, mode) for _ in range(plan.starts) for row, mode in zip(rows, modes, strict=True)]
    recorded = next((n for n, (_, mode) in enumerate(turns) if mode.name == "fxsafe"), None)
    quiet = dataclasses.replace(plan, record=None)
    plans = [plan if number == recorded else quiet for number in range(len(turns))]
    for first in range(0, len(turns), plan.jobs):
        if plan.at_most is not None and time.monotonic() - began > plan.at_most:
            say(f"the time is over: {len(turns) - first} starts are left out")
            break
        now = turns[first : first + plan.jobs]
        outcomes = run_at_once(plans[first : first + plan.jobs], [mode for _, mode in now])
        for (row, mode), outcome in zip(now, outcomes, strict=True):
            row["starts"].append(outcome)
            say(f"{mode.label}, start {len(row['starts'])} of {plan.starts}: {_line(outcome)}")
        if not any(start["tried"] or start["hung"] for row in rows for start in row["starts"]):
            raise DFlashError(f"the starts end before their first step: {outcomes[0]['died'][0]}")
    return rows


def _line(outcome: dict[str, Any]) -> str:
    words = [f"{outcome['ok']} of {outcome['tried']} steps"]
    words += [f"{outcome['hung']} hung"] if outcome["hung"] else []
    words += [f"{outcome['eager']} ran eager"] if outcome["eager"] else []
    words += [f"residue: {', '.join(outcome['residue'])}"] if outcome["residue"] else []
    words += [f"died: {outcome['died']}"] if outcome["died"] else []
    return ", ".join(words)


def run_mode(plan: Plan, mode: Mode) -> dict[str, Any]:
    """One cold start."""
    return run_at_once([plan], [mode])[0]


def run_at_once(plans: Sequence[Plan], modes: Sequence[Mode]) -> list[dict[str, Any]]:
    """One cold start of each mode, all at one time."""
    caches = Path(tempfile.mkdtemp(prefix="dflash-stress-"))
    starts: list[list[_Child]] = [[] for _ in modes]
    everybody: list[_Child] = []
    try:
        for place, (plan, mode, children) in enumerate(zip(plans, modes, starts, strict=True)):
            groups = [[number] for number in range(plan.threads)] if mode.apart else [list(range(plan.threads))]
            for number, group in enumerate(groups):
                children.append(_fork(plan, mode, group, caches / f"{place}-{number}"))
                everybody.append(children[-1])
        _watch(everybody, plans[0].stall_after)
        return [_collect(children) for children in starts]
    finally:
        for child in everybody:
            child.pipe.close()
        shutil.rmtree(caches, ignore_errors=True)


def _fork(plan: Plan, mode: Mode, group: Sequence[int], caches: Path) -> _Child:
    caches.mkdir()
    log = caches / "log"
    log.touch()
    reading, writing = os.pipe()
    os.set_inheritable(writing, plan.spawn)
    sys.stdout.flush()
    sys.stderr.flush()
    if plan.spawn:
        arguments = [dataclasses.asdict(plan), mode.name, list(group), str(caches), writing]
        command = [sys.executable, "-c", _SPAWNED, json.dumps(arguments)]
        pid = os.posix_spawn(sys.executable, command, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    else:
        pid = os.fork()
    if pid:
        os.close(writing)
        return _Child(pid, os.fdopen(reading, "rb", 0), log, group)
    status = 1
    try:
        os.close(reading)
        _child(plan, mode, group, caches, writing)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


_SPAWNED = "import sys; from fxsafe.dflash.stress.runner import spawned; spawned(sys.argv[1])"


def spawned(arguments: str) -> None:
    """What a process does that was started afresh."""
    plan, mode, group, caches, writing = json.loads(arguments)
    plan["devices"] = tuple(plan["devices"])
    (only,) = modes_of([mode])
    _child(Plan(**plan), only, group, Path(caches), writing)
    os._exit(0)


def _child(plan: Plan, mode: Mode, group: Sequence[int], caches: Path, writing: int) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(caches / "triton")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    stream = (caches / "log").open("w", buffering=1)
    sys.stdout = sys.stderr = stream
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, stream, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # a blocked one is inherited from whoever started us

    def tell(state: dict[str, Any]) -> None:
        os.write(writing, json.dumps(state).encode() + b"\n")

    from fxsafe.dflash.stress.start import run_start

    run_start(plan, mode, group, tell)


def _watch(children: Sequence[_Child], bound: float) -> None:
    """Until every child has closed its pipe or was ended because it hung."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.pipe, selectors.EVENT_READ, child)
        try:
            while any(child.open for child in children):
                for key, _ in selector.select(0.5):
                    child = key.data
                    data = child.pipe.read(1 << 16)
                    if data:
                        child.hear(data, time.monotonic())
                    else:
                        child.open = False
                        selector.unregister(child.pipe)
                for child in children:
                    if child.open and not child.hung and child.stuck(time.monotonic(), bound):
                        child.hung = True
                        _dump_and_kill(child)
        except BaseException:
            for child in children:
                if child.open:
                    os.kill(child.pid, signal.SIGKILL)
            raise
        finally:
            for child in children:
                child.last["status"] = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])


def _dump_and_kill(child: _Child) -> None:
    """Have all stacks written, then end the process: SIGKILL, since nothing else ends one that hangs in C."""
    before = child.log.stat().st_size
    os.kill(child.pid, signal.SIGUSR1)
    deadline = time.monotonic() + _DUMP_S
    while time.monotonic() < deadline and child.log.stat().st_size == before:
        time.sleep(0.05)
    if child.log.stat().st_size == before:
        with child.log.open("a") as log:
            log.write(f"It wrote no stacks within {_DUMP_S:g} s. Its threads, as the kernel sees them:\n")
            log.writelines(_kernel_states(child.pid))
    os.kill(child.pid, signal.SIGKILL)


def _kernel_states(pid: int) -> Iterator[str]:
    """A line for each thread: its name, its state (D: in the kernel, where no signal reaches it), where it waits."""
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            state = next(line for line in (task / "status").read_text().splitlines() if line.startswith("State:"))
            yield f"{(task / 'comm').read_text().strip()} ({task.name}), {state}, {(task / 'wchan').read_text()}\n"


def _last_words(child: _Child) -> str:
    lines = child.log.read_text().rstrip().splitlines()
    return f"status {child.last['status']}: {lines[-1] if lines else 'it said nothing'}"


def _collect(children: Sequence[_Child]) -> dict[str, Any]:
    """One outcome of all children of a start; see the keys."""
    states = [child.last for child in children]
    rows = [row for state in states for row in state.get("drafters", ())]
    errors: dict[str, int] = {}
    for row in rows:
        for kind, count in row["errors"].items():
            errors[kind] = errors.get(kind, 0) + count

    def total(key: str) -> Any:
        return sum(state[key] for state in states) if all(key in state for state in states) else None

    firsts: list[Any] = [state.get("first_s") for state in states]
    counters: dict[str, Any] = {}
    for state in states:
        counters |= state.get("counters", {})
    return {
        "ok": sum(row["ok"] for row in rows),
        "tried": sum(row["tried"] for row in rows),
        "errors": errors,
        "eager": sum(row["eager"] for row in rows),
        "hung": sum(child.hung for child in children),
        "stacks": [child.log.read_text() for child in children if child.hung],
        "died": [_last_words(c) for c in children if c.last["status"] and not c.hung],
        "logs": [c.log.read_text()[-3000:] for c in children if c.last["status"] and not c.hung],
        "tokens": sum(row["tokens"] for row in rows),
        "first_s": None if None in firsts else max(firsts),
        "first_tokens_per_second": total("first_tokens_per_second"),
        "steady_tokens_per_second": total("steady_tokens_per_second"),
        "peak_rss_mb": total("peak_rss_mb"),
        "peak_device_mb": total("peak_device_mb"),
        "graphs": sum(state.get("graphs", 0) for state in states),
        # None: nobody could look.
        "residue": sorted({name for state in states for name in state["residue"]})
        if all("residue" in state for state in states)
        else None,
        "counters": counters,
    }
