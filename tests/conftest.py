"""Fixtures for all rooms: a world of processes that must be empty when its test ends."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from elasticrun.testing.hosts import Lab
from elasticrun.wire.spawning import ignored_signals
from tests import aio, needs, planted
from tests.counting import Counting
from tests.harness import World, passed

settings.register_profile(
    "a machine that stands still now and then",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("a machine that stands still now and then")

STATE = pytest.StashKey[str]()

QUICK = "not slow and not soak"
SLOW_AS_A_WHOLE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.M)

STARTERS = frozenset({"world", "torchrun_world", "lab", "elastic_job", "inner"})
"""Fixtures, also of other fixtures, with which a test starts processes: it is `slow` by itself."""


LONG = ("faults", "snapshots", "slurm", "partitions", "etcd", "health", "containers", "training")
"""Rooms with files that take minutes, in the order in which they begin."""


def pytest_configure(config: pytest.Config) -> None:
    """A run in the background (a shell's `&`, `nohup`) is born ignoring SIGINT or SIGHUP, and so
    would be all that the tests start: what they send would be lost. With a handler that does
    nothing we ignore them no less, but what is exec'd has the default again."""
    for number in ignored_signals():
        signal.signal(number, lambda *_: None)
    os.environ.pop("PYTHONUNBUFFERED", None)  # all jobs have one environment, so one warm process
    if not hasattr(config, "workerinput"):  # of xdist: its controller does it for all
        planted.plant()
        state = tempfile.mkdtemp(prefix="elasticrun-state-")  # run folders, for one
        config.stash[STATE] = os.environ["XDG_STATE_HOME"] = state


def pytest_runtest_setup() -> None:
    """torch sets this variable in a process that imports its compiler: the jobs of such a worker
    would differ from those of all others, for which the run's warm process was made."""
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


def pytest_unconfigure(config: pytest.Config) -> None:
    """What the run has planted goes."""
    if not hasattr(config, "workerinput"):
        planted.remove()
        shutil.rmtree(config.stash[STATE], ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that are slow as a whole are not even imported for `make check`."""
    if config.option.markexpr != QUICK or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8") if collection_path.is_file() else ""
    return True if SLOW_AS_A_WHOLE.search(text) else None


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Who starts a job is not one of the quick tests (`make check`). Of several processes that
    share the files none is left with a long one at the end: those begin, and quick ones are last
    (`--no-loadscope-reorder`; else the files with few tests would be, which are the long ones)."""
    for item in items:
        if STARTERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    yield
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def turn(item: pytest.Item) -> int:
        room = item.path.parent.name
        if item.path not in slow:
            return len(LONG) + 1
        return LONG.index(room) if room in LONG else len(LONG)

    items.sort(key=turn)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs on the loop that all tests share."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    aio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Keep each phase's report on the item, so that fixtures know whether their test failed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    setattr(item, "report_" + report.when, report)


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """Processes of this test; at the end none of them may live and /dev/shm is as it was."""
    created = World(tmp_path)
    yield created
    created.close(strict=passed(request))


@pytest.fixture
def torchrun_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A second world for torchrun's side of a comparison: what it leaves is only removed."""
    created = World(tmp_path_factory.mktemp("torchrun"))
    yield created
    created.close(strict=False)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Hosts, or a skip with the reason."""
    needs.several_hosts()
    made = Lab(tmp_path)
    yield made
    made.close()


@pytest.fixture
def counting(
    elastic_job: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Counting]:
    """One job that counts its steps; at the end nothing of it is left, in /dev/shm either."""
    created = Counting(elastic_job, tmp_path)
    yield created
    if passed(request):
        created.close()
