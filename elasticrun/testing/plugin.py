"""What pytest loads (entry point `pytest11`): the fixture `elastic_job`, and logs where tests fail.

Nothing else of elasticrun is imported before a test uses the fixture. See docs/testing.md.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from elasticrun.testing.job import ElasticJob

JOBS = pytest.StashKey[list["ElasticJob"]]()
FAILED = pytest.StashKey[bool]()
WARM_FOLDER = "ELASTICRUN_TEST_WARM"
"""Variable that names the folder to all processes of the run; `off`: there is none."""
WARM = pytest.StashKey[str]()
LIMIT = "elasticrun_timeout"


def pytest_addoption(parser: pytest.Parser) -> None:
    """One limit for all waits of a project, which knows how busy its machines are."""
    parser.addini(LIMIT, "seconds that anything awaited of an elastic_job may take (default: 60)")


def pytest_configure(config: pytest.Config) -> None:
    """The folder of the run's warm process (`testing.warm`) is named before xdist's workers are
    started; it is made by the first job."""
    if WARM_FOLDER not in os.environ:
        name = f"elasticrun-warm-{os.getpid()}-{secrets.token_hex(4)}"
        os.environ[WARM_FOLDER] = os.path.join(tempfile.gettempdir(), name)
        config.stash[WARM] = os.environ[WARM_FOLDER]


def pytest_unconfigure(config: pytest.Config) -> None:
    """The warm process ends with the run."""
    folder = config.stash.get(WARM, "")
    if folder:
        os.environ.pop(WARM_FOLDER, None)
    if folder and os.path.isdir(folder):
        from elasticrun.testing.warm import end

        end(folder)


def _limit(config: pytest.Config) -> dict[str, float]:
    word = str(config.getini(LIMIT) or "")
    try:
        seconds = float(word) if word else None
    except ValueError:
        seconds = 0.0
    if seconds is None:
        return {}
    if not 0.0 < seconds < float("inf"):
        raise pytest.UsageError(f"{LIMIT}={word}: a number of seconds is wanted, as in {LIMIT}=180")
    return {"timeout": seconds}


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
    limit = _limit(request.config)

    def factory(script: Any, *args: Any, **options: Any) -> ElasticJob:
        __tracebackhide__ = True  # a mistake is shown at the line of the test that made it
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
