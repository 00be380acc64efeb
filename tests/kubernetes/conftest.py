"""A stand-in for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.cluster import StandIn


@pytest.fixture
def standin(tmp_path: Path) -> Iterator[StandIn]:
    cluster = StandIn(tmp_path)
    yield cluster
    cluster.close()
