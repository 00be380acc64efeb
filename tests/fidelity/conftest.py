"""The runs of a test module: the planted environment and the warm process are made once for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fidelity.runner import Runs, runs_in
from tests.harness import world_in


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with world_in(tmp_path_factory.mktemp("fidelity")) as world, runs_in(world) as made:
        yield made
