"""What holds for all tests of snapshots."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from elasticrun.host.log import logger
from tests.agent.snapshots.played import Node, opened


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="elasticrun-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def node(shm: Path) -> AbstractAsyncContextManager[Node]:
    """A node of a job of its own."""
    return opened(shm)


@pytest.fixture
def one_of_three(shm: Path) -> AbstractAsyncContextManager[Node]:
    """A node of a job of three."""
    return opened(shm, several=True)


@pytest.fixture(autouse=True)
def hearing(caplog) -> None:
    logger.propagate = True
    caplog.set_level(20, logger="elasticrun")
