"""What holds for all tests of the agent."""

from __future__ import annotations

import inspect

import pytest

from elasticrun.agent.snapshots import segments
from tests.aio import run
from tests.harness import LIMIT


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds is no file system that hangs."""
    monkeypatch.setattr(segments, "OPEN_LIMIT", LIMIT)
    monkeypatch.setattr(segments, "REMOVE_LIMIT", LIMIT)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs on the loop that all tests share."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in fixtures}))
    return True
