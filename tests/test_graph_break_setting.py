from __future__ import annotations

import pytest
import torch
import torch._dynamo
from locks_support import applied
from support import inside_elsewhere, thread_of_its_own

pytestmark = pytest.mark.skipif(not hasattr(torch._dynamo, "error_on_graph_break"), reason="since torch 2.9")


def breaks() -> torch.Tensor:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    torch._dynamo.reset()
    return torch.compile(function, backend="eager")(torch.ones(2))


@pytest.mark.parametrize("patches", [(), ("graph-break-setting",)])
def test_another_threads_setting_is_no_error_here(patches: tuple[str, ...]) -> None:
    with applied(*patches), inside_elsewhere(lambda: torch._dynamo.error_on_graph_break(True)):
        if patches:
            assert torch.equal(breaks(), torch.full((2,), 4.0))
        else:
            with pytest.raises(torch._dynamo.exc.Unsupported):
                breaks()


def test_ones_own_setting_still_is() -> None:
    with applied("graph-break-setting"):
        with torch._dynamo.error_on_graph_break(True), pytest.raises(torch._dynamo.exc.Unsupported):
            breaks()
        assert torch.equal(breaks(), torch.full((2,), 4.0))


def test_a_setting_that_outlives_an_installation_is_over_in_the_next() -> None:
    with thread_of_its_own() as does:
        setting = torch._dynamo.error_on_graph_break(True)
        with applied("graph-break-setting"):
            does(setting.__enter__)
        does(lambda: setting.__exit__(None, None, None))
        with applied("graph-break-setting"):
            assert torch.equal(does(breaks), torch.full((2,), 4.0))


def test_a_setting_may_end_before_fxsafe_goes() -> None:
    setting = torch._dynamo.error_on_graph_break(True)
    setting.__enter__()
    with applied("graph-break-setting"):
        with pytest.raises(torch._dynamo.exc.Unsupported):
            breaks()
        setting.__exit__(None, None, None)
        assert torch.equal(breaks(), torch.full((2,), 4.0))
    assert torch.equal(breaks(), torch.full((2,), 4.0))
