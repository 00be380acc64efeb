"""A stand-in for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.cluster import StandIn


@pytest.fixture
def standin(tmp_path: Path) -> Iterator[StandIn]:
    """Without nodes: what pods there are is what somebody has made."""
    cluster = StandIn(tmp_path, workloads=False)
    yield cluster
    cluster.close()
