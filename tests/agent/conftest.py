"""What holds for all tests of the agent."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest

from elasticrun.agent.snapshots import segments
from tests.harness import LIMIT


@pytest.fixture(autouse=True)
def unhurried(monkeypatch) -> None:
    """A machine that stands still for seconds is no file system that hangs."""
    monkeypatch.setattr(segments, "OPEN_LIMIT", LIMIT)
    monkeypatch.setattr(segments, "REMOVE_LIMIT", LIMIT)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A coroutine is given what its fixtures enter, on a loop of its own, and that is left after
    it; one without such fixtures runs on the loop that all tests share (tests/conftest.py)."""
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    contexts = {k: v for k, v in given.items() if isinstance(v, AbstractAsyncContextManager)}
    if not contexts or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def entered() -> None:
        async with AsyncExitStack() as stack:
            for name, context in contexts.items():
                given[name] = await stack.enter_async_context(context)
            await pyfuncitem.obj(**given)

    asyncio.run(entered())
    return True
