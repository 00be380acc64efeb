"""One fork server for the tests that only look at ranks; it is started once and ended once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elasticrun.wire.types import EntryKind, Entrypoint
from tests.forkserver.driver import Driver, plain_environment


@pytest.fixture(scope="session")
def server() -> Iterator[Driver]:
    """Shared by tests that start ranks and wait for their end."""
    with Driver(
        Entrypoint(EntryKind.SCRIPT, "none.py"), env=plain_environment(), cold=True
    ) as driver:
        ready = driver.ready()
        assert ready.mode == "fork", ready.reason
        yield driver
