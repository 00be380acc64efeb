"""Code of a test in every Python of a job, before all else; and a warm process for such jobs.

The folder of the hook is the same for all, so that their fork servers may come from one warm
process: the run's own has no such folder in its PYTHONPATH.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elasticrun.agent.link.master_process import PACKAGE_ROOT
from elasticrun.wire.env import OMP_NUM_THREADS, WARM_SERVER
from tests.forkserver.driver import warm_process
from tests.harness import SCRIPTS, clean_environment

_PATH = {"PYTHONPATH": os.pathsep.join((str(SCRIPTS / "hook"), PACKAGE_ROOT))}
_warm: dict[str, str] = {}


def hooked(code: str, **env: str) -> dict[str, str]:
    """The variables with which this code is run in all that they reach. One warm process serves
    jobs of one rank a node as well, because OMP_NUM_THREADS is set."""
    return {**_PATH, **_warm, OMP_NUM_THREADS: "1", "ELASTICRUN_TEST_HOOK": code, **env}


@contextmanager
def warmed(folder: Path) -> Iterator[None]:
    """Jobs with a hook are forked from a warm process while this lasts."""
    with warm_process(
        folder / "warm.sock", {OMP_NUM_THREADS: "1", **clean_environment(), **_PATH}
    ) as place:
        _warm[WARM_SERVER] = str(place)
        try:
            yield
        finally:
            _warm.clear()
