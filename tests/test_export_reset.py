"""A strict export keeps Dynamo's caches for the other threads; alone, it clears them as torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from locks_support import applied, passes
from support import RELEASE, Task
from torch import nn

pytestmark = pytest.mark.skipif(RELEASE < (2, 10), reason="no reset in an export before 2.10")
X = torch.ones(3, 2)


def export() -> Any:
    return torch.export.export(nn.Linear(2, 2), (X,), strict=True)


class Counted:
    """A compiled function, and how often it was compiled."""

    def __init__(self) -> None:
        self.compiles = 0
        self.call = torch.compile(lambda x: x + 1, backend=self._backend)

    def _backend(self, module: Any, example_inputs: Any) -> Any:
        self.compiles += 1
        return module.forward

    def __call__(self) -> None:
        assert self.call(X).tolist() == (X + 1).tolist()


@pytest.mark.parametrize("patches", [(), ("export-reset",)])
def test_what_others_have_compiled_outlives_an_export(patches: tuple[str, ...]) -> None:
    counted = Counted()
    with applied(*patches):
        right = export().graph_module.code
        counted()
        assert Task(lambda: export().graph_module.code).result() == right
        counted()
    assert counted.compiles == (1 if patches else 2)
    torch._dynamo.reset()


def test_a_reset_of_the_users_own_is_made_in_any_thread() -> None:
    counted = Counted()
    with applied("export-reset"):
        counted()
        Task(torch._dynamo.reset).result()
        counted()
    assert counted.compiles == 2


def test_the_only_thread_of_a_program_resets_as_ever() -> None:
    passes(
        """
        compiles = []
        def backend(module, inputs):
            compiles.append(1)
            return module.forward
        compiled = torch.compile(lambda x: x + 1, backend=backend)
        compiled(torch.ones(2))
        torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2),), strict=True)
        compiled(torch.ones(2))
        assert compiles == [1, 1], compiles
        """,
        "export-reset",
    )


def test_reset_is_torchs_own_afterwards() -> None:
    code = torch._dynamo.reset.__code__
    with applied("export-reset"):
        assert torch._dynamo.reset.__code__ is not code
    assert torch._dynamo.reset.__code__ is code
