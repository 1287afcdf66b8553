"""F2 under every interleaving: all schedules of one preemption, and of two where that many can be run.

``FXSAFE_EXPLORE=all`` runs every schedule; otherwise the large sets are thinned, evenly and always to the same ones.
"""

from __future__ import annotations

import io
import os
import threading
import types
from pathlib import Path
from typing import Any

import explorer
import pytest
import torch
import torch.fx._symbolic_trace as st
import torch.fx.graph_module
from hook_faults import held, hooks, leaf, nodes, residue
from places import changed_places
from support import FLAG_IS_GLOBAL, GUARD_ASKS_SYMBOLIC, python
from torch import nn

import fxsafe
import fxsafe.patches
from fxsafe import installer, traces
from fxsafe.patches._slots import places

EVERYTHING = os.environ.get("FXSAFE_EXPLORE") == "all"
_PATCHES = Path(fxsafe.patches.__file__).parent
_SLOTS = str(_PATCHES / "_slots.py")
_OURS = frozenset(str(_PATCHES / name) for name in ("_slots.py", "_hook_readers.py", "module_hooks.py"))
_TORCHS = frozenset({st.__file__, torch.fx.graph_module.__file__})
LINES = explorer.Watch(lines=_OURS | _TORCHS)
SLOTS = explorer.Watch(lines=frozenset({_SLOTS}))
INSTRUCTIONS = explorer.Watch(lines=_OURS | _TORCHS, instructions=frozenset({_SLOTS}))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, x):
        return leaf(self.lin(x)) + torch.ones(1)


class SmallTracer(torch.fx.Tracer):
    """Without the fifty functions of math: they would repeat the same steps fifty times."""

    def __init__(self):
        super().__init__(autowrap_modules=())


MODULE, X = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)


def trace() -> Any:
    return nodes(SmallTracer().trace(Small()))  # a new one: constants are stored on it


def call() -> Any:
    return tuple(MODULE(X).shape), leaf(1)


def load() -> Any:
    return nodes(torch.load(io.BytesIO(SAVED), weights_only=False).graph)


def compiled() -> Any:
    graphs = []

    def backend(gm, inputs):
        graphs.append(nodes(gm.graph))
        return gm.forward

    def target(x):
        return MODULE(x) * 2

    fresh = types.FunctionType(target.__code__.replace(), globals())
    return tuple(torch.compile(fresh, backend=backend, fullgraph=True)(X).shape), graphs


def patch() -> Any:
    """The steps of a trace that meet other threads', and no more."""
    space = SPACE
    with st._new_patcher() as patcher:
        patcher.patch(space, "f", lambda x: ("mine", threading.get_ident()))
        seen = space["f"](1) == ("mine", threading.get_ident())
        with st._maybe_revert_all_patches():
            reverted = space["f"](1)
        return seen, reverted, space["f"](1) == ("mine", threading.get_ident())


def use() -> Any:
    return SPACE["f"](1)


SPACE = {"f": leaf}
_buffer = io.BytesIO()
torch.save(torch.fx.GraphModule(root := Small(), SmallTracer().trace(root)), _buffer)
SAVED = _buffer.getvalue()

# name: works, preemptions, switch points, schedules by default
EXPLORATIONS = {
    "trace, call": ((trace, call), 1, INSTRUCTIONS, 1500),
    "trace, trace": ((trace, trace), 1, LINES, 500),
    "trace, trace, twice": ((trace, trace), 2, SLOTS, 700),
    "patch, patch, twice": ((patch, patch), 2, SLOTS, 2500),
    "patch, patch, instruction by instruction": ((patch, patch), 1, INSTRUCTIONS, 1500),
    "patch, use, twice": ((patch, use), 2, INSTRUCTIONS, 1500),
    "patch, patch, use": ((patch, patch, use), 2, SLOTS, 1500),
    "trace, compile": ((trace, compiled), 1, LINES, 40),
    "compile, trace": ((compiled, trace), 1, LINES, 40),
    "load, call": ((load, call), 1, LINES, 400),
    "load, load": ((load, load), 1, LINES, 400),
}


def explored(name: str, give_up_after: int | None = None) -> tuple[int, list[Any]]:
    works, preemptions, watch, limit = EXPLORATIONS[name]
    alone = [work() for work in works]
    before = held() | {"space": id(SPACE["f"])}

    def check(result: explorer.Result) -> Any:
        left = residue({key: value for key, value in before.items() if key != "space"})
        if id(SPACE["f"]) != before["space"]:
            left.append("the dictionary holds another object")
            SPACE["f"] = leaf
        return [f"{got!r}" for got, one in zip(result.values, alone, strict=True) if got != one] + left

    def use_lock(lock: explorer.BatonLock) -> None:
        places.lock = lock  # type: ignore[assignment]

    lock = places.lock
    try:
        return explorer.explore(
            lambda: works,
            preemptions,
            watch,
            check,
            use_lock=use_lock,
            limit=None if EVERYTHING else limit,
            give_up_after=give_up_after,
        )
    finally:
        places.lock = lock


class Asks(Small):
    def forward(self, x):
        self.answers = [st.is_fx_symbolic_tracing() if GUARD_ASKS_SYMBOLIC else st.is_fx_tracing()]
        return super().forward(x)


def trace_that_asks() -> Any:
    model = Asks()
    return nodes(SmallTracer().trace(model)), model.answers


def toggle() -> Any:
    """All of an installation's life."""
    with fxsafe.install(patches=["tracing-flag", "module-hooks"]):
        return {r["status"] for r in fxsafe.info() if r["name"] in ("tracing-flag", "module-hooks")}


_PACKAGE = Path(fxsafe.__file__).parent
INSTALLER = explorer.Watch(
    lines=frozenset(str(_PACKAGE / name) for name in ("installer.py", "traces.py", "edits.py")) | {st.__file__}
)
INSTALLATIONS = {
    "trace, install and uninstall": ((trace_that_asks, toggle), 1, 600),
    "install and uninstall, trace": ((toggle, trace_that_asks), 1, 600),
    "install and uninstall, trace, twice": ((toggle, trace_that_asks), 2, 1000),
    "install and uninstall, the same, trace": ((toggle, toggle, trace_that_asks), 2, 600),
}


def explored_installations(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Any]]:
    works, preemptions, limit = INSTALLATIONS[name]
    toggle(), trace_that_asks()
    alone = [work() for work in works]

    def use_lock(lock: explorer.BatonLock) -> None:
        monkeypatch.setattr(traces, "lock", lock)
        monkeypatch.setattr(traces, "changed", explorer.BatonCondition(lock))

    def check(result: explorer.Result) -> Any:
        wrong = [f"{got!r}" for got, one in zip(result.values, alone, strict=True) if got != one]
        left = changed_places() + [str(traces.state.depth)] * bool(traces.state.depth)
        return wrong + left + ["installed"] * bool(installer._state.handles or installer._state.applied)

    limits = {"limit": None if EVERYTHING else limit}
    return explorer.explore(lambda: works, preemptions, INSTALLER, check, use_lock=use_lock, **limits)


@pytest.mark.parametrize("name", INSTALLATIONS)
def test_an_installation_may_come_and_go_at_any_point_of_a_trace(name, capsys, monkeypatch):
    count, wrong = explored_installations(name, monkeypatch)
    with capsys.disabled():
        print(f"\n{name}: {count} schedules", end="")
    assert wrong == []


@pytest.mark.skipif(not FLAG_IS_GLOBAL, reason="from torch 2.14 on no patch makes a trace answer otherwise")
def test_if_it_did_not_wait_for_traces_some_would_go_wrong():
    done = python(__file__, "without waiting")  # in a process of its own: what it leaves would stay
    assert done.stdout.strip().endswith("went wrong"), done.stdout + done.stderr


@pytest.mark.parametrize("name", EXPLORATIONS)
def test_no_interleaving_goes_wrong(name, capsys):
    with hooks():
        count, wrong = explored(name)
        assert len(places) == 0
    with capsys.disabled():
        print(f"\n{name}: {count} schedules", end="")
    assert wrong == []


@pytest.mark.parametrize(
    "name", ["trace, call", "trace, trace, twice", "patch, patch, twice", "load, call", "trace, compile"]
)
def test_without_the_patch_some_do(name):
    done = python(__file__, name)
    assert done.stdout.strip().endswith("went wrong"), done.stdout + done.stderr


if __name__ == "__main__":
    import sys

    EXPLORATIONS = {key: (w, n, explorer.Watch(lines=_TORCHS), limit) for key, (w, n, _, limit) in EXPLORATIONS.items()}
    if sys.argv[1] == "without waiting":
        traces._in_flight_elsewhere = lambda around: {}
        ran, faults = explored_installations("install and uninstall, trace, twice", pytest.MonkeyPatch())
    else:
        with hooks(False):
            ran, faults = explored(sys.argv[1], give_up_after=1)
    print(f"{ran} schedules, {faults[0][0]} went wrong" if faults else f"{ran} schedules, all right", flush=True)
    os._exit(0)
