"""Each test is a rank of its own, though all of them are one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elasticrun.checkpointing import choosing, line
from tests.checkpointing.played import PlayedAgent, playing
from tests.harness import LIMIT


@pytest.fixture(autouse=True)
def as_if_just_born(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known of the agent that another test has played. A storage is not taken for away
    because this machine stands still."""
    monkeypatch.setattr(choosing, "LOOK_LIMIT", LIMIT)
    yield
    line._places.clear()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedAgent]:
    """The agent of this process, which is its only rank."""
    with playing() as played:
        monkeypatch.setenv("ELASTICRUN_SNAPSHOTS", played.place(0))
        yield played
