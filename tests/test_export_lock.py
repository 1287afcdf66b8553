"""What takes Dynamo's compile lock, and that nobody waits for it for ever."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
from typing import Any

import pytest
import torch
from locks_support import applied
from support import RELEASE, SOON_S, inside_elsewhere
from torch import nn
from torch._dynamo import convert_frame

import fxsafe
from fxsafe.patches import _locked, export_lock

X = torch.ones(1, 2)
# Strict export runs Dynamo under its lock up to some release, and without it since.
WITHOUT_LOCK = RELEASE >= (2, 10)
BOTH = ((), ("export-lock",))


def owned() -> bool:
    return bool(convert_frame.compile_lock._is_owned())


def lock_held_elsewhere() -> contextlib.AbstractContextManager[threading.Event]:
    return inside_elsewhere(lambda: convert_frame.compile_lock)


@pytest.mark.parametrize("patches", BOTH)
def test_a_strict_export_captures_under_the_lock(patches: tuple[str, ...]) -> None:
    seen = []

    @torch.compiler.allow_in_graph
    def looks(x: torch.Tensor) -> torch.Tensor:
        seen.append(owned())
        return x + 1

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return looks(x)

    with applied(*patches):
        torch.export.export(Model(), (X,), strict=True)
        assert not owned()
    assert seen
    # The first is Dynamo's; make_fx, which follows it, takes no lock. On older releases Dynamo's has it by itself.
    assert seen[0] is bool(patches) or (seen[0] and not WITHOUT_LOCK)
    assert not all(seen) or len(seen) == 1


@pytest.mark.parametrize("patches", BOTH)
def test_decompositions_are_replaced_under_the_lock(patches: tuple[str, ...]) -> None:
    seen = []

    def silu(x: torch.Tensor) -> torch.Tensor:
        seen.append(owned())
        return x * torch.sigmoid(x)

    program = torch.export.export(nn.SiLU(), (X,), strict=False)
    with applied(*patches):
        program.run_decompositions({torch.ops.aten.silu.default: silu})
        assert not owned()
    assert set(seen) == {bool(patches)}


def test_a_decomposition_that_fails_leaves_the_lock_free() -> None:
    def silu(*args: Any) -> Any:
        raise ArithmeticError

    program = torch.export.export(nn.SiLU(), (X,), strict=False)
    with applied("export-lock"):
        with pytest.raises(ArithmeticError):
            program.run_decompositions({torch.ops.aten.silu.default: silu})
        assert not owned()


@pytest.mark.skipif(
    importlib.util.find_spec(export_lock.AOT_COMPILE) is None, reason="no compiling ahead of time before torch 2.9"
)
@pytest.mark.parametrize("patches", [(), ("aot-compile-lock",)])
def test_compiling_ahead_of_time_is_done_under_the_lock(patches: tuple[str, ...]) -> None:
    seen = []

    def backend(module: Any, example_inputs: Any) -> Any:
        seen.append(owned())
        raise ArithmeticError

    with contextlib.ExitStack() as stack:
        if patches:
            stack.enter_context(fxsafe.install(patches=patches))
        if hasattr(torch._dynamo.config, "enable_aot_compile"):  # up to some release it has to be asked for
            stack.enter_context(torch._dynamo.config.patch(enable_aot_compile=True))
        compiled: Any = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)
        with contextlib.suppress(Exception):  # the backend's own, in some wrapping
            compiled.aot_compile(((X,), {}))
        assert not owned()
    assert seen == [bool(patches)]


def test_who_waits_in_vain_says_so_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_locked, "WAIT_S", 0.05)
    with lock_held_elsewhere(), caplog.at_level(logging.WARNING, "fxsafe"):
        monkeypatch.setattr(_locked._given_up, "until", 0.0)
        with _locked.under_compile_lock("it does a thing") as held:
            assert not held
        monkeypatch.setattr(_locked, "WAIT_S", SOON_S)  # it would be seen to wait again
        monkeypatch.setattr(_locked._given_up, "until", float("inf"))
        with _locked.under_compile_lock("it does the next") as held:
            assert not held
    messages = [record.getMessage() for record in caplog.records if record.name == "fxsafe"]
    assert len(messages) == 1
    assert "before it does a thing and goes on without it" in messages[0]
    monkeypatch.undo()
    with _locked.under_compile_lock("it does a thing") as held:
        assert held
    assert not owned()
