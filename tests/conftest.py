from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from places import changed_places
from support import RELEASE, X, double_plus_one
from torch.utils import _python_dispatch

import fxsafe
from fxsafe.patches._slots import places

# From 2.12 on torch keeps settings per thread, and the patch has nothing to do; doctor still runs its program.
collect_ignore = ["test_config_blocks.py"] if RELEASE >= (2, 12) else []
# The same from 2.13 on for the trees of CUDA graphs, which moreover need a GPU to be more than empty.
collect_ignore += ["test_cudagraph_threads.py", "gpu"] if RELEASE >= (2, 13) else []
collect_ignore += [] if torch.cuda.is_available() else ["gpu"]

# A shell that starts us in the background has SIGINT ignored, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


for name in ("FXSAFE_DISABLE", "FXSAFE_STRICT", "FXSAFE_STALL_AFTER"):
    os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def nothing_stays_behind(num_parallel_threads: int) -> Iterator[None]:
    if num_parallel_threads > 1:
        # What a test does in several threads at once it does on plain torch in none.
        with fxsafe.install():
            yield
    else:
        yield
    left = fxsafe.is_installed()
    while fxsafe.is_installed():
        fxsafe.uninstall()
    # Modes that overlap on plain torch leave these set, and up to 2.10 nothing compiles then any more in the process.
    modes = vars(_python_dispatch)
    modes.update((name, False) for name in list(modes) if name.startswith("_is_in_"))
    assert not left, "the test left fxsafe installed"
    assert changed_places() == []
    assert len(places) == 0, "a trace left what it patched"
    # A lock that is left taken lets another test wait for ever.
    assert not places.lock._is_owned()
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    assert convert_frame is None or not convert_frame.compile_lock._is_owned()


@pytest.fixture
def warm():
    """``double_plus_one``, compiled and called before the test begins."""
    compiled = torch.compile(double_plus_one, backend="eager")
    compiled(X)
    yield compiled
    torch._dynamo.reset()
