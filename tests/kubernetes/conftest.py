"""A cluster for each test that asks for one: a stand-in, or what ELASTICRUN_TEST_KUBECONFIG names;
`standin`, where only the former will do. Neither has nodes that a test could count on: what pods
there are is what somebody has made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.cluster import StandIn
from tests.kubernetes.real import KUBECONFIG, WHY, AnyCluster, RealCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[AnyCluster]:
    made: AnyCluster = (
        RealCluster(Path(KUBECONFIG), tmp_path)
        if KUBECONFIG
        else StandIn(tmp_path, workloads=False)
    )
    yield made
    made.close()


@pytest.fixture
def standin(request: pytest.FixtureRequest) -> StandIn:
    if KUBECONFIG:
        pytest.skip(WHY)
    made: StandIn = request.getfixturevalue("cluster")
    return made
