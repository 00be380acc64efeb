"""The plugin that pytest loads (entry point `pytest11`): the fixture `elastic_job`, and the logs of
failed tests.

Nothing else of elasticrun is imported before a test uses the fixture. See docs/testing.md.

A run of pytest has one warm process, from which the jobs of its tests are forked. The first job
that can use it starts it, and all processes of the run share it (including xdist's workers). A job
with a relevant difference in its environment starts cold, as outside of tests; so does one with
ELASTICRUN_WARM_SERVER=off.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from elasticrun.testing.job import ElasticJob

JOBS = pytest.StashKey[list["ElasticJob"]]()
FAILED = pytest.StashKey[bool]()
WARM_FOLDER = "ELASTICRUN_TEST_WARM"
"""Variable with the folder for all processes of the run; `off`: no warm process."""
WARM = pytest.StashKey[str]()
LIMIT = "elasticrun_timeout"

IDLE: Final = 900.0
"""Seconds without a job after which the warm process exits by itself if the run was killed."""

MAX_STARTS: Final = 16
"""The warm process exits when a test installs a package, and is restarted; this limits the
restarts."""

OF_A_TEST: Final = ("ELASTICRUN_TEST_", "TMPDIR", "XDG_RUNTIME_DIR", "ELASTICRUN_RUNS")
"""Variables that belong to one test; they identify or separate its processes."""

_SOCKET: Final = "warm.sock"
_ONE_RANK: Final = f"{_SOCKET}.free"
"""Socket for jobs of one rank, whose OMP_NUM_THREADS is not set (`warm.FREE_THREADS`)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting for the default timeout of a project, which depends on its machines."""
    parser.addini(LIMIT, "seconds that anything awaited of an elastic_job may take (default: 60)")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the folder of the run's warm process before xdist's workers start; the first job
    creates it."""
    if WARM_FOLDER not in os.environ:
        name = f"elasticrun-warm-{os.getpid()}-{secrets.token_hex(4)}"
        os.environ[WARM_FOLDER] = os.path.join(tempfile.gettempdir(), name)
        config.stash[WARM] = os.environ[WARM_FOLDER]


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the warm process with the run."""
    if folder := config.stash.get(WARM, ""):
        os.environ.pop(WARM_FOLDER, None)
        if os.path.isdir(folder):
            end(folder)


def _limit(config: pytest.Config) -> dict[str, float]:
    word = str(config.getini(LIMIT) or "")
    if not word:
        return {}
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise pytest.UsageError(f"{LIMIT}={word}: a number of seconds is wanted, as in {LIMIT}=180")
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
            with contextlib.suppress(OSError, ValueError):  # removed folder, or not a step
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
        __tracebackhide__ = True  # an error shows the line of the test that caused it
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


def end(folder: str) -> None:
    """End the run's warm process and remove its folder."""
    from elasticrun.agent.warm import connect
    from elasticrun.wire import frames, spawning

    for name in (_SOCKET, _ONE_RANK):
        with contextlib.suppress(OSError), connect(Path(folder, name), 5.0) as conn:
            conn.sendall(frames.encode(spawning.Leave()))
            conn.recv(1)  # waits for its exit
    shutil.rmtree(folder, ignore_errors=True)


def named(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable by which a launcher with these variables finds the run's warm process, which is
    started if necessary; empty if the run has none."""
    from elasticrun.wire import env

    folder = os.environ.get(WARM_FOLDER, "")
    if folder in ("", "off") or env.WARM_SERVER in environ:
        return {}
    place = Path(folder, _SOCKET)
    own = {n: v for n, v in environ.items() if not n.startswith(OF_A_TEST)}
    try:
        place.parent.mkdir(mode=0o700, exist_ok=True)
        _start_at(place, {env.OMP_NUM_THREADS: "1", **own})
        if env.OMP_NUM_THREADS not in own:
            _start_at(Path(folder, _ONE_RANK), own)
    except OSError:
        return {}
    return {env.WARM_SERVER: str(place)} if place.is_socket() else {}


def _start_at(place: Path, environ: Mapping[str, str]) -> None:
    """Start a warm process there unless there is one; if that fails, jobs start cold."""
    from elasticrun.agent.warm import start

    if place.is_socket():
        return
    with open(place.with_name("starts"), "ab") as starts:
        fcntl.flock(starts, fcntl.LOCK_EX)
        if not place.is_socket() and starts.tell() < MAX_STARTS:
            starts.write(b".")
            starts.flush()
            start(place, IDLE, environ)
