"""Jobs whose nodes are hosts, with the same habits for every schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticrun.testing.job import ElasticJob
from tests import counting
from tests.harness import SCRIPTS

LIMIT = 240.0
"""Seconds that healing may take on a busy machine, with back-offs of a minute that are not ours."""

Build = Callable[..., ElasticJob]


def times(**seconds: float) -> str:
    """--rdzv-conf with times at which a schedule is over in seconds, but no agent that merely
    stands still for a while on a busy machine is given up; and whatever differs."""
    return counting.times(**{"last_call_timeout": 2.0, "heartbeat_timeout": 8.0, **seconds})


@pytest.fixture
def cluster(elastic_job: Any) -> Iterator[Build]:
    """Makes a job of hosts that sums; after every schedule no two of its worlds overlapped."""
    jobs: list[ElasticJob] = []

    def build(nnodes: str, nodes: int, *, conf: str = times(), **more: Any) -> ElasticJob:
        job: ElasticJob = elastic_job(
            str(SCRIPTS / "sums.py"),
            100_000,
            more.pop("pause", 0.02),
            nnodes=nnodes,
            nodes=nodes,
            hosts=True,
            options=["--grow=now", "--restart-grace=20", conf],
            **more,
        )
        jobs.append(job)
        job.wait_for(step=3, world_size=nodes, timeout=LIMIT)
        return job

    yield build
    for job in jobs:
        job.one_world()


def whole_again(job: ElasticJob, size: int, since: float) -> None:
    """The network has healed: a world of all nodes trains, and none of this cost a restart."""
    job.wait_for(step=3, world_size=size, since=since, timeout=LIMIT)
    assert job.wait_for(world_size=size).restart_count == 0
