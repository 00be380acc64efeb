"""The pairs of a session: each command runs once under both launchers, for all its tests."""

from __future__ import annotations

import pytest

from tests.compat.pair import Pairs
from tests.harness import ELASTICRUN, World


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Runs a case under torchrun and elasticrun, or remembers what came of it."""
    return Pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def theirs_or_ours(request: pytest.FixtureRequest) -> World:
    """The strict world for elasticrun, the forgiving one for torchrun."""
    launcher = request.node.callspec.params["launcher"]
    name = "world" if launcher == ELASTICRUN else "torchrun_world"
    found: World = request.getfixturevalue(name)
    return found
