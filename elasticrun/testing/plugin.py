"""What pytest loads (entry point `pytest11`): the fixture `elastic_job`, and logs where tests fail.

Nothing else of elasticrun is imported before a test uses the fixture. See docs/testing.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from elasticrun.testing.job import ElasticJob

JOBS = pytest.StashKey[list["ElasticJob"]]()
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what agents and ranks said last to the report of a test that failed."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        jobs: list[ElasticJob] = item.stash.get(JOBS, [])
        for number, job in enumerate(jobs):
            with contextlib.suppress(OSError, ValueError):  # a folder has gone, a line is no step
                report.sections += job.sections(
                    f"elastic_job {number}" if number else "elastic_job"
                )
    return report


@pytest.fixture
def elastic_job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A factory of jobs: `elastic_job(script, *args, nnodes="2:4", ...)` starts real agents on this
    host, each a node of its own; see `elasticrun.testing.job.start` for its arguments.

    At the end of the test every job is ended; a process that had outlived its agent is an error.
    """
    from elasticrun.testing.hosts import Impossible
    from elasticrun.testing.job import start

    jobs: list[ElasticJob] = request.node.stash.setdefault(JOBS, [])

    def factory(script: Any, *args: Any, **options: Any) -> ElasticJob:
        __tracebackhide__ = True  # a mistake is shown at the line of the test that made it
        scratch = tmp_path_factory.mktemp("elastic-job")
        try:
            job = start(script, *args, scratch=scratch, register=jobs.append, **options)
        except Impossible as why:
            pytest.skip(str(why))
        return job

    yield factory
    complaints = [complaint for job in jobs if (complaint := job.close())]
    if complaints and not request.node.stash.get(FAILED, False):
        pytest.fail("; ".join(complaints), pytrace=False)
