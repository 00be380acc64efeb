"""The pairs of a session: each command runs once under both launchers, for all its tests."""

from __future__ import annotations

import pytest

from tests.compat.pair import Pairs


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Runs a case under torchrun and elasticrun, or remembers what came of it."""
    return Pairs(tmp_path_factory.mktemp("pairs"))
