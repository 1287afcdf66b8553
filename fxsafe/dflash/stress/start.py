"""One cold start of one mode, or a part of it, in the process that calls it."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

import fxsafe
from fxsafe import settings
from fxsafe.dflash.compiling import graph_count, promise_recompile_limit
from fxsafe.dflash.stress.load import LEAST_STEPS, Drafter, Record, make_target, places, residue, trace_jobs
from fxsafe.dflash.stress.plan import Mode, Plan
from fxsafe.dflash.target import Target

__all__ = ["run_start"]

_BEAT_S = 0.2


def run_start(plan: Plan, mode: Mode, numbers: Sequence[int], tell: Callable[[dict[str, Any]], None]) -> None:
    """Run the drafters of these numbers, each in a thread, for ``plan.seconds``.

    Args:
        tell: is called every moment with the state so far, as JSON would have it; the last one has ``"ended": True``.
    """
    if not plan.cuda:
        torch.set_num_threads(1)
    trace_jobs()
    devices = [torch.device(plan.devices[number % len(plan.devices)]) for number in numbers]
    targets: dict[torch.device, Target] = {}
    for device in devices:
        if device not in targets:
            targets[device] = make_target(plan, device)
    drafters = [Drafter(plan, mode, n, targets[d]) for n, d in zip(numbers, devices, strict=True)]
    originals = places()
    promise_recompile_limit()
    with contextlib.ExitStack() as stack:
        stack.enter_context(settings.everywhere(dict(mode.settings)))
        handle = fxsafe.install(mode.fix, patches=mode.patches) if mode.fix is not None else None
        if plan.record is not None and mode.name == "fxsafe":
            stack.enter_context(fxsafe.record(plan.record))
        if mode.warm:
            with ThreadPoolExecutor(1) as one:
                began = time.perf_counter()
                warming = one.submit(_warm, drafters)
                while wait([warming], _BEAT_S).not_done:
                    tell(_state(drafters, began))
                warming.result()
        began = time.perf_counter()

        def enough() -> bool:
            late = time.perf_counter() - began > 3 * plan.seconds
            return late or all(d.record.done or d.record.tried >= LEAST_STEPS for d in drafters)

        until = began + plan.seconds
        threads = [
            threading.Thread(target=d.run, args=(until, enough), name=f"drafter-{d.number}", daemon=True)
            for d in drafters
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_BEAT_S)
                tell(_state(drafters, began))
        counters = _counters() if handle is not None else {}
        if handle is not None:
            handle.uninstall()
    last = _state(drafters, began)
    last |= _speeds([d.record for d in drafters], began)
    last |= {"ended": True, "residue": residue(originals), "counters": counters, **_memory(plan)}
    tell(last)


def _warm(drafters: Sequence[Drafter]) -> None:
    for drafter in drafters:
        drafter.warm()


def _state(drafters: Sequence[Drafter], began: float) -> dict[str, Any]:
    rows = []
    for drafter in drafters:
        record, errors = drafter.record, dict(drafter.record.errors.copy())
        tried = record.ok + sum(errors.values())
        row = {"number": drafter.number, "done": record.done, "ok": record.ok, "errors": errors, "tried": tried}
        rows.append(row | {"eager": record.eager, "tokens": record.tokens})
    return {"ended": False, "elapsed": time.perf_counter() - began, "graphs": graph_count(), "drafters": rows}


def _speeds(records: Sequence[Record], began: float) -> dict[str, Any]:
    """Tokens per second in the first half of the time; and of each drafter in the second half of the time after it had
    tried every shape, added up.

    ``first_s`` is how long it took until each drafter had made a step; None if one never did.
    """
    half = (time.perf_counter() - began) / 2
    first, steady = 0, 0.0
    for record in records:
        first += sum(tokens for _, end, tokens in record.steps if end <= began + half)
        if record.warm_at is not None and record.last_at > record.warm_at:
            middle = (record.warm_at + record.last_at) / 2
            steady += sum(tokens for _, end, tokens in record.steps if end > middle) / (record.last_at - middle)
    starts = [record.steps[0][1] - began if record.steps else None for record in records]
    return {
        "first_tokens_per_second": first / half,
        "steady_tokens_per_second": steady,
        "first_s": None if None in starts else max((s for s in starts if s is not None), default=None),
    }


def _memory(plan: Plan) -> dict[str, float]:
    out = {"peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if plan.cuda:
        out["peak_device_mb"] = sum(torch.cuda.max_memory_allocated(d) for d in {*plan.devices}) / 2**20
    return out


def _counters() -> dict[str, Any]:
    counters: dict[str, Any] = {}
    for entry in fxsafe.info():
        counters |= entry["counters"]
    return counters
