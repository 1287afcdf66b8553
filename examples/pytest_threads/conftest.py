"""fxsafe for a test suite that runs in threads: installed before the first test, undone behind the last."""

import pytest

import fxsafe


@pytest.fixture(scope="session", autouse=True)
def _threads_may_trace():
    with fxsafe.install():
        yield
