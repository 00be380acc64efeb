"""docs/tutorials/kubernetes.md is followed as it stands, in a cluster with a stand-in for the API
server, whose pods are real processes."""

from __future__ import annotations

from pathlib import Path

from elasticrun.testing.hosts import Lab
from tests.further import further
from tests.harness import World
from tests.kubernetes.cluster import KUBECTL, StandIn
from tests.tutorials.terminals import follow, home

PAGE = Path(__file__).parents[2] / "docs/tutorials/kubernetes.md"


@further("jobs/test_kubernetes::test_an_elastic_job_from_submit_to_delete")
def test_the_tutorial_works_as_it_stands(lab: Lab, world: World, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    cluster = StandIn(tmp_path, lab=lab, env={"OMP_NUM_THREADS": "1"})
    try:
        cluster.node("n0", gpus=8)
        environ = home(folder, world.environment(cluster.client().environment))
        environ["PATH"] = f"{Path(KUBECTL).parent}:{environ['PATH']}"
        follow(PAGE, folder, environ)
    finally:
        cluster.close()
