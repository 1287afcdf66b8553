from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from places import changed_places

import fxsafe

# A shell that starts us in the background has SIGINT ignored, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FXSAFE_DISABLE", "FXSAFE_STRICT"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    left = fxsafe.is_installed()
    while fxsafe.is_installed():
        fxsafe.uninstall()
    assert not left, "the test left fxsafe installed"
    assert changed_places() == []
