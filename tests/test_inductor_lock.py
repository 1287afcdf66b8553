"""Inductor called without Dynamo takes Dynamo's compile lock, on every way into it."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as fx
from support import RELEASE, inside_elsewhere, python
from torch._dynamo import convert_frame
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import fxsafe
from fxsafe.patches import _locked, inductor_lock

X = torch.arange(6.0).reshape(2, 3)
NAMES = ("compile_fx", "compile_fx_aot", "compile_fx_inner")
PATCHES = ("inductor-lock", "standalone-lock")
STANDALONE = hasattr(torch._inductor, "standalone_compile")
PACKAGE = RELEASE >= (2, 6)  # before, it takes the arguments once more
BOTH = ((), PATCHES)


class Mend(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1


def graph() -> Any:
    return make_fx(lambda x: (x.sin() + 1,))(X)


def owned() -> bool:
    return bool(convert_frame.compile_lock._is_owned())


def package(path: Path) -> Any:
    exported = torch.export.export(Mend(), (X,), strict=False)
    return torch._inductor.aoti_compile_and_package(exported, package_path=str(path / "mend.pt2"))


WAYS: dict[str, Callable[[Path], Any]] = {
    "compile": lambda _: torch._inductor.compile(graph(), [X]),
    "compile_fx_inner": lambda _: fx.compile_fx_inner(graph(), [X]),
    "aot_compile": lambda _: torch._inductor.aot_compile(torch.export.export(Mend(), (X,)).module(), (X,)),  # type: ignore[arg-type]
}
if STANDALONE:
    WAYS["standalone_compile"] = lambda _: torch._inductor.standalone_compile(
        graph(), [X], dynamic_shapes="from_example_inputs"
    )
if PACKAGE:
    WAYS["aoti_compile_and_package"] = package


@pytest.mark.parametrize("patches", BOTH)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_into_inductor_is_under_the_lock(
    way: str, patches: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def compiles(*args: Any, **kwargs: Any) -> Any:
        seen.append(owned())
        raise ArithmeticError

    monkeypatch.setattr(fx, "_compile_fx_inner", compiles)
    with fxsafe.install(patches=patches) if patches else contextlib.nullcontext():
        with contextlib.suppress(Exception):  # ours, in some wrapping
            WAYS[way](tmp_path)
        assert not owned()
    assert seen == [bool(patches)]


@pytest.mark.skipif(not STANDALONE, reason="no standalone_compile before torch 2.8")
@pytest.mark.parametrize("patches", BOTH)
def test_standalone_compile_makes_its_cache_under_the_lock(
    patches: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.compiler._cache import CacheArtifactManager

    seen = []

    def fresh() -> Any:
        seen.append(owned())
        raise ArithmeticError

    monkeypatch.setattr(CacheArtifactManager, "with_fresh_cache", fresh)
    with fxsafe.install(patches=patches) if patches else contextlib.nullcontext():
        with pytest.raises(ArithmeticError):
            torch._inductor.standalone_compile(graph(), [X], dynamic_shapes="from_example_inputs")
        assert not owned()
    assert seen == [bool(patches)]


def test_the_first_use_in_two_threads() -> None:
    module = "fxsafe.doctor.faults.inductor_first_use"
    plain = python("-m", module)
    assert plain.returncode == 1, plain.stdout + plain.stderr
    assert '"registered_at_once": true' in plain.stdout
    if RELEASE >= (2, 9):  # before some release the second registration passes
        assert "Duplicate pattern" in plain.stdout
    mended = python("-m", "fxsafe", "run", "--patches", "inductor-lock", "-m", module)
    assert mended.returncode == 0, mended.stdout + mended.stderr


def test_one_thread_gets_the_same_code_and_the_same_bits() -> None:
    def compiled(function: Callable[..., Any]) -> tuple[Any, list[str]]:
        result, code = run_and_get_code(lambda: function()(X)[0])
        assert code
        return result, [re.sub(r"'\d+_inference'", "", text) for text in code]  # the number of the graph

    ways: list[Callable[[], Any]] = [
        lambda: torch._inductor.compile(graph(), [X]),
        lambda: torch.compile(lambda x: (x.cos() * 2,)),
    ]
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        for way in ways:
            torch._dynamo.reset()
            plain, code = compiled(way)
            torch._dynamo.reset()
            with fxsafe.install(patches=PATCHES):
                locked, locked_code = compiled(way)
            assert torch.equal(plain, locked)
            assert code == locked_code


def test_what_others_hold_by_name_follows_and_is_given_back() -> None:
    held = {name: getattr(fx, name) for name in NAMES}
    before = {name: (function.__code__, inspect.signature(function)) for name, function in held.items()}
    with fxsafe.install(patches=("inductor-lock",)):
        for name, function in held.items():
            assert getattr(fx, name) is function
            assert function.__code__ is not before[name][0]
            assert inspect.signature(function) == before[name][1]
    for name, function in held.items():
        assert function.__code__ is before[name][0]


def test_other_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_fx_aot(model_: Any) -> Any:
        return model_

    compile_fx_aot.__module__ = fx.__name__
    monkeypatch.setattr(fx, "compile_fx_aot", compile_fx_aot)
    with pytest.raises(fxsafe.patches.base.ShapeError, match="compile_fx_aot takes other parameters"):
        inductor_lock.PATCH.plan({inductor_lock.COMPILE_FX: fx})


def waited_in_vain(monkeypatch: pytest.MonkeyPatch, places: list[Any]) -> int:
    """How many times the lock was looked at before a thread went on without it."""
    looks = []

    def place(lock: Any) -> Any:
        looks.append(lock)
        return places[min(len(looks), len(places)) - 1]

    monkeypatch.setattr(_locked, "WAIT_S", 0.01)
    monkeypatch.setattr(_locked, "_place", place)
    monkeypatch.setattr(_locked._given_up, "until", 0.0)
    with inside_elsewhere(lambda: convert_frame.compile_lock), _locked.under_compile_lock("it does a thing", 4) as held:
        assert not held
    return len(looks)


def test_who_waits_goes_on_behind_a_holder_that_stands_still(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL, "fxsafe"):
        assert waited_in_vain(monkeypatch, [None]) == 2
        assert waited_in_vain(monkeypatch, [1, 2, 2]) == 3
        assert waited_in_vain(monkeypatch, [1, 2, 3, 4, 5, 6]) == 5


def test_the_place_of_the_holder_is_known_by_the_stand_in() -> None:
    assert _locked._place(convert_frame.compile_lock) is None
    with fxsafe.install(patches=("compile-lock",)):
        with inside_elsewhere(lambda: convert_frame.compile_lock):
            place = _locked._place(convert_frame.compile_lock)
            assert place is not None
        assert _locked._place(convert_frame.compile_lock) is None
