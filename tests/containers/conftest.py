"""Agents in containers of their own, as their first process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticrun.testing import cgroups
from elasticrun.testing.hosts import Impossible
from tests import needs
from tests.containers.container import MIB, PATH, Container, Wanted
from tests.harness import PATIENT, World, passed

Box = Callable[..., Container]


@pytest.fixture(scope="session")
def why_none(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Why there can be no containers here, "" if there can: found out by one that does nothing."""
    if os.geteuid() != 0:
        return "that needs root"
    if shutil.which("runc", path=PATH) is None:
        return "there is no runc (Debian: runc)"
    try:
        cgroups.require()
    except Impossible as why:
        return str(why)
    world = World(tmp_path_factory.mktemp("container"))
    first = Container(world, Wanted(memory=64 * MIB, cpus=1.0))
    try:
        first.start(["true"], {})
        return first.launched.stderr.strip() or "runc fails" if first.launched.wait() else ""
    finally:
        first.close()
        world.close(strict=False)


@pytest.fixture
def box(world: World, why_none: str, request: pytest.FixtureRequest) -> Iterator[Box]:
    """Starts `elasticrun` with the given words in a container; `Wanted`'s fields say how it is."""
    if why_none:
        needs.lacking(f"no containers here: {why_none}")
    started: list[Container] = []

    def start(
        *words: str,
        program: tuple[str, ...] = ("elasticrun",),
        env: dict[str, str] | None = None,
        **wanted: Any,
    ) -> Container:
        made = Container(world, Wanted(**wanted))
        started.append(made)
        made.start([*program, *words], {"LOGLEVEL": "INFO", **PATIENT, **(env or {})})
        return made

    yield start
    for one in started:
        one.close()
        if not passed(request):
            print(f"--- {one.launched.stdout}\n--- {one.launched.stderr}")
