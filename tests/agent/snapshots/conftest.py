"""What holds for all tests of snapshots."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.operator_log import logger


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="elasticrun-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def hearing(caplog: pytest.LogCaptureFixture) -> None:
    logger.propagate = True
    caplog.set_level(20, logger="elasticrun")
