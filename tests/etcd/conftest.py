"""A real etcd for the tests of this folder; without the program they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.etcd.server import EtcdServer


@pytest.fixture
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A server that runs, its own and empty."""
    binary = needs.program("etcd", package="etcd-server")
    folder: Path = tmp_path_factory.mktemp("etcd")
    server = EtcdServer(binary, folder)
    try:
        server.start()
        yield server
    finally:
        server.close()
