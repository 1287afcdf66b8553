from __future__ import annotations

import importlib.util
import types
from dataclasses import replace

import pytest
import torch
import torch.fx._symbolic_trace as st

import fxsafe
from fxsafe.gate import ask, predates, release_doubt
from fxsafe.patches import CATALOGUE
from fxsafe.patches.base import NotNeeded, Patch, Plan
from fxsafe.shapes import Shape, ShapeError, own_function, require, shape_of
from fxsafe.traces import FX


@pytest.mark.parametrize(
    "version",
    [
        "2.5.0",
        "2.5.1+cu124",
        "2.11.0+cu130",
        "2.13.0a0+git1234567",
        "2.14.0.dev20260701+cpu",
        "2.15.0",
        "2.15.3",
        "2.13.0rc2",
        "2.10.0+rocm6.4",
    ],
)
def test_supported_releases_raise_no_doubt(version):
    assert release_doubt(version) is None


@pytest.mark.parametrize(
    ("version", "status", "says"),
    [
        ("2.4.1", "unsupported", "older"),
        ("1.13.1+cu117", "unsupported", "older"),
        ("2.16.0.dev20261101+cu130", "active", "newer"),
        ("3.0.0", "active", "newer"),
        ("2.16.0a0+gitabc", "active", "newer"),
        ("not-a-version", "active", "no version number"),
    ],
)
def test_other_releases_raise_a_doubt_that_names_the_supported_ones(version, status, says):
    doubt = release_doubt(version)
    assert doubt is not None
    assert doubt[0] == status
    assert says in doubt[1]
    assert "2.5 to 2.15" in doubt[1]


def _patch(plan):
    return Patch(name="p", summary="", upstream=(), modules=(FX,), plan=plan)


def _unknown_shape(modules):
    raise ShapeError("x.y has an unknown shape")


@pytest.mark.parametrize(
    ("version", "plan", "status", "doubt"),
    [
        ("2.13.0", lambda m: Plan([]), "active", False),
        ("2.13.0", _unknown_shape, "unsupported", True),
        ("2.14.0", lambda m: NotNeeded("fixed"), "not-needed", False),
        ("2.16.0", lambda m: NotNeeded("fixed"), "not-needed", False),
        ("2.16.0", lambda m: Plan([]), "active", True),
        ("2.16.0", _unknown_shape, "unsupported", True),
        ("2.4.0", lambda m: Plan([]), "unsupported", True),
    ],
)
def test_release_and_shape_together_decide(version, plan, status, doubt):
    verdict = ask(_patch(plan), {FX: st}, version)
    assert (verdict.status, verdict.doubt, verdict.plan is not None) == (status, doubt, status == "active")
    assert verdict.reason or version == "2.13.0"


@pytest.mark.parametrize(("version", "needed"), [("2.8.0+cu126", False), ("2.9.0a0+git1", True), ("odd", True)])
def test_what_came_with_a_later_release_is_not_waited_for(version, needed):
    verdict = predates(replace(_patch(lambda m: Plan([])), since=(2, 9)), version)
    assert (verdict is None) == needed
    if verdict is not None:
        assert verdict.status == "not-needed"
        assert "came with 2.9" in verdict.reason


def test_no_patch_waits_for_a_module_that_this_torch_does_not_have():
    with fxsafe.install():
        waiting = {status["name"] for status in fxsafe.info() if status["status"] == "waiting"}
    expected = {m for p in CATALOGUE if p.name in waiting for m in p.modules if m.startswith("torch")}
    assert not [m for m in expected if importlib.util.find_spec(m) is None]


def test_the_shape_of_a_function_is_its_parameters_and_the_globals_it_reads_and_writes():
    module = types.ModuleType("m")
    exec("flag = 0\ndef f(a, *, b=1):\n    global flag\n    flag = len([a, b])\n    return flag", vars(module))
    shape = shape_of(module.f.__code__)
    assert shape == Shape(("a", "b"), frozenset({"flag", "len"}), frozenset({"flag"}))
    assert require("m.f", module.f, shape) is shape
    with pytest.raises(ShapeError, match=r"m\.f has an unknown shape: \(a, b\) reading \['flag', 'len'\]"):
        require("m.f", module.f, Shape((), frozenset(), frozenset()))


def test_a_function_below_a_well_behaved_wrapper_is_found_and_a_replacement_is_named(monkeypatch):
    import functools

    original = st.is_fx_tracing

    @functools.wraps(original)
    def wrapper():
        return original()

    monkeypatch.setattr(st, "is_fx_tracing", wrapper)
    assert own_function(st, "is_fx_tracing") is original

    def replacement():
        return False

    monkeypatch.setattr(st, "is_fx_tracing", replacement)
    with pytest.raises(ShapeError, match=r"is_fx_tracing was replaced by .*replacement, which is left in place"):
        own_function(st, "is_fx_tracing")
    with pytest.raises(ShapeError, match="does not exist"):
        own_function(st, "no_such_function")


def _exists(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor its package
        return False


def test_planning_any_patch_changes_nothing_and_names_its_targets():
    for patch in CATALOGUE:
        if any(not _exists(name) for name in patch.modules):
            continue  # a module that this release, or this machine, does not have: the patch waits for it in vain
        modules = {name: importlib.import_module(name) for name in patch.modules}
        verdict = ask(patch, modules, torch.__version__)
        assert verdict.status in ("active", "not-needed"), (patch.name, verdict)
        if verdict.plan is not None:
            roots = {edit.target.partition(".")[0] for edit in verdict.plan.edits}
            assert roots <= {"torch", "builtins", "math", "sympy", "transformers"}
