"""docs/tutorials/slurm.md is followed as it stands, on the login machine of the cluster."""

from __future__ import annotations

from pathlib import Path

from tests.further import further
from tests.slurm.cluster import LOGIN
from tests.slurm.conftest import Slurm
from tests.tutorials.terminals import follow, home

PAGE = Path(__file__).parents[2] / "docs/tutorials/slurm.md"


@further("slurm/test_submit::test_a_job_from_submit_to_delete")
def test_the_tutorial_works_as_it_stands(slurm: Slurm) -> None:
    folder, own = slurm.folder / "work", slurm.folder / "login"
    for each in (folder, own):
        each.mkdir()
    environ = home(folder, slurm.cluster.environment())
    environ["XDG_RUNTIME_DIR"] = str(own)  # not that of the nodes
    follow(PAGE, folder, environ, slurm.cluster.lab.prefix(LOGIN))
