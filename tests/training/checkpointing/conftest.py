"""Each test is a rank of its own, though all of them are one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrun.training import Checkpointer
from elasticrun.training.checkpointing import agent_connection, checkpointer, restore_choice
from tests.harness import LIMIT
from tests.training.checkpointing.played import PlayedAgent, playing


@pytest.fixture(autouse=True)
def as_if_just_born(monkeypatch) -> Iterator[None]:
    """Nothing is known of the agent that another test has played. A storage is not taken for away
    because this machine stands still."""
    monkeypatch.setattr(restore_choice, "QUERY_LIMIT", LIMIT)
    yield
    agent_connection._places.clear()
    as_another_process()


def as_another_process() -> None:
    """No Checkpointer is known that was made before."""
    checkpointer._made.clear()
    checkpointer._owners_by_pid.clear()


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Callable[..., Checkpointer]]:
    """Makes Checkpointers, each as in a process of its own, which are closed at the end of the
    test."""
    with contextlib.ExitStack() as ends:

        def made(**words: Any) -> Checkpointer:
            as_another_process()
            return ends.enter_context(contextlib.closing(Checkpointer(tmp_path, **words)))

        yield made


@pytest.fixture
def agent(monkeypatch) -> Iterator[PlayedAgent]:
    """The agent of this process, which is its only rank."""
    with playing() as played:
        monkeypatch.setenv("ELASTICRUN_SNAPSHOTS", played.place(0))
        yield played
