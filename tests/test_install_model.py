"""Random sequences of install, uninstall, nesting, raising and foreign patches, against a model of what should hold."""

from __future__ import annotations

import pytest
import torch
import torch.fx._symbolic_trace as st
from hypothesis import HealthCheck, settings
from hypothesis import strategies as some
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from places import changed_places
from support import FLAG_IS_GLOBAL, Task, trace_elsewhere

import fxsafe

X = torch.ones(2)
GUARD = "is_fx_symbolic_tracing" if hasattr(st, "is_fx_symbolic_tracing") else "is_fx_tracing"
WARM = torch.compile(lambda x: x + 1, backend="eager")
WARM(X)


class Installations(RuleBasedStateMachine):
    handles = Bundle("handles")

    def __init__(self):
        super().__init__()
        self.open = []  # newest last
        self.fix = None
        self.foreign = None  # (our installed code that they replaced, the code they put there)

    @rule(target=handles, fix=some.sampled_from(["thread-local", "always-false"]), elsewhere=some.booleans())
    def install(self, fix, elsewhere):
        def call():
            return fxsafe.install(fix)

        if self.open and fix != self.fix:
            with pytest.raises(fxsafe.FxsafeError, match="already"):
                call()
            return None
        handle = Task(call).result() if elsewhere else call()
        self.open.append(handle)
        self.fix = fix
        return handle

    @rule(handle=consumes(handles), elsewhere=some.booleans())
    def give_back(self, handle, elsewhere):
        if handle is None:
            return
        self._leaving([h for h in self.open if h is not handle], handle.uninstall, elsewhere)

    @rule(elsewhere=some.booleans())
    def uninstall(self, elsewhere):
        if not self.open:
            with pytest.raises(fxsafe.FxsafeError, match="nothing is installed"):
                fxsafe.uninstall()
            return
        self._leaving(self.open[:-1], fxsafe.uninstall, elsewhere)

    def _leaving(self, left, call, elsewhere):
        Task(call).result() if elsewhere else call()
        self.open = left

    @rule(
        fix=some.sampled_from(["thread-local", "always-false"]), error=some.sampled_from([KeyError, KeyboardInterrupt])
    )
    def block_that_raises(self, fix, error):
        expected = fxsafe.FxsafeError if self.open and fix != self.fix else error
        with pytest.raises(expected):
            with fxsafe.installed(fix):
                raise error

    @rule()
    def trace(self):
        assert "relu" in torch.fx.symbolic_trace(torch.nn.ReLU()).code

    @rule()
    def call_while_another_thread_traces(self):
        with trace_elsewhere():
            if self.open or not FLAG_IS_GLOBAL:
                assert torch.equal(WARM(X), X + 1)
            else:
                with pytest.raises(RuntimeError, match="symbolically trace"):
                    WARM(X)

    @precondition(lambda self: self.foreign is None)
    @rule(name=some.sampled_from(["Tracer.trace", GUARD]))
    def somebody_patches_and_takes_it_back(self, name):
        owner, attribute = (st.Tracer, "trace") if name == "Tracer.trace" else (st, name)
        before = vars(owner)[attribute]

        def theirs(*args, **kwargs):
            return before(*args, **kwargs)

        setattr(owner, attribute, theirs)
        try:
            assert torch.fx.symbolic_trace(torch.nn.ReLU()) is not None
            assert fxsafe.is_installed() == bool(self.open)
        finally:
            setattr(owner, attribute, before)

    @invariant()
    def installed_as_the_model_says(self):
        assert fxsafe.is_installed() == bool(self.open)
        active = {r["name"] for r in fxsafe.info() if r["status"] == "active"}
        if not self.open:
            assert active == set()
            assert changed_places() == []
        else:
            assert ("guard-override" in active) == (self.fix == "always-false")
            assert ("tracing-flag" in active) == (self.fix == "thread-local" and FLAG_IS_GLOBAL)

    def teardown(self):
        while fxsafe.is_installed():
            fxsafe.uninstall()
        assert changed_places() == []


Installations.TestCase.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestInstallations = Installations.TestCase
