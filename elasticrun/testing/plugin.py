"""The plugin that pytest loads (entry point `pytest11`): the fixture `elastic_job`, and the logs of
failed tests.

Nothing else of elasticrun is imported before a test uses the fixture. See docs/testing.md.

A run of pytest has one warm process, from which the jobs of its tests are forked. The first job
that can use the process starts it, and all processes of the run share it (including xdist's
workers). A job whose environment differs in a relevant way starts cold, as outside of tests; so
does a job with ELASTICRUN_WARM_SERVER=off.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from elasticrun.testing import WARM_FOLDER

if TYPE_CHECKING:
    from elasticrun.testing.job import ElasticJob

JOBS = pytest.StashKey[list["ElasticJob"]]()
FAILED = pytest.StashKey[bool]()
WARM = pytest.StashKey[str]()
LIMIT = "elasticrun_timeout"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini setting for a project's default timeout, which depends on its machines."""
    parser.addini(LIMIT, "default time limit for waits of elastic_job, in seconds (default: 60)")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the path of the warm process's folder before xdist's workers start; the first job
    creates the folder."""
    if WARM_FOLDER not in os.environ:
        name = f"elasticrun-warm-{os.getpid()}-{secrets.token_hex(4)}"
        os.environ[WARM_FOLDER] = os.path.join(tempfile.gettempdir(), name)
        config.stash[WARM] = os.environ[WARM_FOLDER]


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the run's warm process."""
    if folder := config.stash.get(WARM, ""):
        os.environ.pop(WARM_FOLDER, None)
        if os.path.isdir(folder):
            from elasticrun.testing.processes import end_warm_process

            end_warm_process(folder)


def _limit(config: pytest.Config) -> dict[str, float]:
    word = str(config.getini(LIMIT) or "")
    if not word:
        return {}
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise pytest.UsageError(f"{LIMIT}={word}: give a number of seconds, as in {LIMIT}=180")
    return {"timeout": seconds}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the last output of agents and ranks to the report of a failed test."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        jobs: list[ElasticJob] = item.stash.get(JOBS, [])
        for number, job in enumerate(jobs):
            title = f"elastic_job {number}" if number else "elastic_job"
            with contextlib.suppress(OSError, ValueError):  # folder removed, invalid step log
                report.sections += job.sections(title)
    return report


@pytest.fixture
def elastic_job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A factory of jobs: `elastic_job(script, *args, nnodes="2:4", ...)` starts real agents on this
    host, each a separate node; see `elasticrun.testing.job.start` for its arguments.

    At the end of the test every job is ended; a process that outlives its agent is an error.
    """
    from elasticrun.testing.hosts import Impossible
    from elasticrun.testing.job import start

    jobs: list[ElasticJob] = request.node.stash.setdefault(JOBS, [])
    limit = _limit(request.config)

    def factory(script: Any, *args: Any, **options: Any) -> ElasticJob:
        __tracebackhide__ = True  # pytest shows the line of the test instead
        scratch = tmp_path_factory.mktemp("elastic-job")
        try:
            own = {**limit, **options}
            job = start(script, *args, scratch=scratch, register=jobs.append, **own)
        except Impossible as why:
            pytest.skip(str(why))
        return job

    yield factory
    complaints = [complaint for job in jobs if (complaint := job.close())]
    if complaints and not request.node.stash.get(FAILED, False):
        pytest.fail("; ".join(complaints), pytrace=False)
