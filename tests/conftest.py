"""Fixtures for all packages, such as a world of processes that must be empty when its test ends."""

from __future__ import annotations

import gc
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
"""Fixtures, also of other fixtures, with which a test starts processes: such a test becomes `slow`
automatically."""


LONG = (
    *("faults", "snapshots", "slurm", "jobs", "partitions", "etcd", "health", "containers"),
    *("training", "sim", "fidelity"),
)
"""Packages with files that take minutes, in the order in which they begin; packages within them
begin with them."""


def pytest_configure(config: pytest.Config) -> None:
    """A background run (a shell's `&`, `nohup`) ignores SIGINT or SIGHUP from the start, and so
    would all processes of the tests, which would lose the tests' signals. An empty handler also
    ignores the signals in this process, but processes after exec get the default action."""
    for number in ignored_signals():
        signal.signal(number, lambda *_: None)
    os.environ.pop("PYTHONUNBUFFERED", None)  # one environment for all jobs, so one warm process
    if not hasattr(config, "workerinput"):  # xdist's controller does it for all workers
        planted.plant()
        state = tempfile.mkdtemp(prefix="elasticrun-state-")  # run folders, for example
        config.stash[STATE] = os.environ["XDG_STATE_HOME"] = state


def pytest_runtest_setup() -> None:
    """torch sets this variable in a process that imports its compiler. The jobs of such a worker
    would then differ from all others, for which the run's warm process was made."""
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what the run has planted."""
    if not hasattr(config, "workerinput"):
        planted.remove()
        shutil.rmtree(config.stash[STATE], ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make check` does not even import files that are slow as a whole."""
    if config.option.markexpr != QUICK or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8") if collection_path.is_file() else ""
    return True if SLOW_AS_A_WHOLE.search(text) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collection, and then exempt what was collected from it: thousands of
    tests and modules that live until the end. Every process of the run spends a third less CPU time
    on them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark tests that start a job as slow, so that they are not quick tests (`make check`). Long
    files come first and quick tests last, so that none of several processes is left with a long
    file at the end (`--no-loadscope-reorder`; otherwise files with few tests, which are the long
    ones, come last)."""
    for item in items:
        if STARTERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    yield
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def turn(item: pytest.Item) -> int:
        if item.path not in slow:
            return len(LONG) + 1
        rooms = [LONG.index(room) for room in item.path.parts if room in LONG]
        return min(rooms, default=len(LONG))

    items.sort(key=turn)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on the event loop that all tests share."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    aio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Store each phase's report on the item, so that fixtures know whether their test failed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    setattr(item, "report_" + report.when, report)


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """Processes of this test; at the end none may live and shared memory must be empty."""
    created = World(tmp_path)
    yield created
    created.close(strict=passed(request))


@pytest.fixture
def torchrun_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A second world for torchrun's side of a comparison: its leftovers are removed without
    complaint."""
    created = World(tmp_path_factory.mktemp("torchrun"))
    yield created
    created.close(strict=False)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A `Lab` of hosts, or a skip with the reason."""
    needs.several_hosts()
    made = Lab(tmp_path)
    yield made
    made.close()


@pytest.fixture
def counting(
    elastic_job: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Counting]:
    """One job that counts its steps; at the end nothing of it is left, also in shared memory."""
    created = Counting(elastic_job, tmp_path)
    yield created
    if passed(request):
        created.close()
