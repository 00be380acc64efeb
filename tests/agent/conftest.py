"""What holds for all tests of the agent."""

from __future__ import annotations

import pytest

from elasticrun.agent.snapshots import segments
from tests.harness import LIMIT


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds is no file system that hangs."""
    monkeypatch.setattr(segments, "OPEN_LIMIT", LIMIT)
    monkeypatch.setattr(segments, "REMOVE_LIMIT", LIMIT)
