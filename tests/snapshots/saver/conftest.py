"""The fork server that forks these savers is started once, as for the tests of the fork server."""

from pathlib import Path

import pytest

from elasticrun.snapshots.storage.folder import Folder
from tests.forkserver.conftest import server

__all__ = ["server"]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Where checkpoints lie."""
    return Folder(str(tmp_path))
