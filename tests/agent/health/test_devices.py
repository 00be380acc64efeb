"""The agent's watch of devices: its child, what the master learns, and a child that fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

import pytest

from elasticrun.agent.health import devices
from elasticrun.agent.health.devices import DeviceWatch
from elasticrun.agent.health.reports import HealthReporter
from elasticrun.host.accelerators import nvidia
from tests.agent.configs import launched, node_context, reaping
from tests.agent.health.test_command import Heard
from tests.harness import LIMIT, is_alive
from tests.host.accelerators.standins import gpu, nvml


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IO[str]]:
    """A node with two GPUs, the second of them used; yields where their events are written."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    environ = nvml(tmp_path, gpu(0), gpu(1), fifo=str(fifo))
    for name in ("PYTHONPATH", "STANDIN_NVML"):
        monkeypatch.setenv(name, environ[name])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(nvidia, "_DRIVER_FILES", (str(fifo),))
    monkeypatch.setattr(devices, "POLL", 0.05)
    for limit in ("ANSWER_LIMIT", "FREE_LIMIT"):  # a child that stands still does not hang
        monkeypatch.setattr(devices, limit, LIMIT)
    with os.fdopen(os.open(fifo, os.O_RDWR), "w") as events:  # nobody needs to read yet
        yield events


@contextlib.asynccontextmanager
async def watching(tmp_path: Path, **launch: str) -> AsyncIterator[tuple[DeviceWatch, Heard]]:
    async with reaping() as reaper:
        link = Heard()
        shared = node_context(launched(**launch), link, reaper=reaper)
        mine = DeviceWatch(shared, HealthReporter(shared), str(tmp_path / "sys"))
        mine.start()
        try:
            yield mine, link
        finally:
            mine.close()


def tell(events: IO[str], line: str) -> None:
    events.write(f"{line}\n")
    events.flush()


async def test_a_fatal_xid_is_a_fault(node: IO[str], tmp_path: Path) -> None:
    """One of a GPU that no rank sees is nothing; one that is not fatal is a notice."""
    async with watching(tmp_path) as (_, link):
        tell(node, "0 79")
        tell(node, "1 94")
        await link.until(lambda: link.reports)
        assert link.reports[0].notices == ("GPU 1 reports Xid 94 (contained memory error)",)
        tell(node, "1 79")
        await link.until(lambda: link.reports[-1].fault)
    assert "GPU 1 reports Xid 79 (GPU has fallen off the bus)" in link.reports[-1].fault


async def test_with_tell_it_is_a_notice(node: IO[str], tmp_path: Path) -> None:
    async with watching(tmp_path, watch_devices="tell") as (_, link):
        tell(node, "1 79")
        await link.until(lambda: link.reports)
    assert link.reports[0].fault == ""
    assert "Xid 79" in link.reports[0].notices[0]


@pytest.mark.parametrize("launch", [{"watch_devices": "off"}, {"accelerator": "cpu"}])
async def test_where_nothing_is_to_be_watched(node: IO[str], tmp_path: Path, launch) -> None:
    async with watching(tmp_path, **launch) as (mine, _):
        assert not len(mine._tasks)


async def test_a_child_that_fails_is_started_again_and_then_given_up(
    node: IO[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that hangs, one after the other."""
    environ = nvml(tmp_path, hangs=True)
    monkeypatch.setenv("STANDIN_NVML", environ["STANDIN_NVML"])
    monkeypatch.setattr(devices, "SILENCE", 0.2)
    monkeypatch.setattr(devices, "PAUSES", (0.01, 0.01))
    started: list[int] = []
    start = DeviceWatch._start_child

    def counted(watch: DeviceWatch, gpus: bool):  # type: ignore[no-untyped-def]
        process = start(watch, gpus)
        started.append(process.pid)
        return process

    monkeypatch.setattr(DeviceWatch, "_start_child", counted)
    async with watching(tmp_path) as (_, link):
        await link.until(lambda: link.reports)
        assert link.reports[0].notices == (
            "its devices are no longer watched: the driver has not answered for 0.2 s",
        )
        assert link.reports[0].fault == ""
        assert len(started) == 3
    assert not [pid for pid in started if is_alive(pid)]


class Wakes(logging.Handler):
    """Wakes a test at each line of the log."""

    def __init__(self, link: Heard) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        self._link.changed.set()


def gpus_with(tmp_path: Path, *held: list[int | None]) -> None:
    """From now on, these processes hold memory of GPU 1: pid, bytes."""
    described = tmp_path / "nvml.json"
    node = json.loads(described.read_text())
    node["gpus"][1]["held"] = held
    new = described.with_suffix(".new")
    new.write_text(json.dumps(node))
    new.replace(described)


async def test_ranks_wait_for_the_memory_of_those_before(
    node: IO[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others' processes are not waited for."""
    gpus_with(tmp_path, [4711, 70 * 2**30], [4712, 2**30])
    ours = logging.getLogger("elasticrun")
    async with watching(tmp_path) as (mine, link):
        tell(node, "1 94")
        await link.until(lambda: link.reports)  # the child runs
        wakes = Wakes(link)
        ours.addHandler(wakes)
        with caplog.at_level(logging.INFO, "elasticrun"):
            waiting = asyncio.create_task(mine.wait_until_free({4711, 5000}))
            await link.until(lambda: "process 4711 holds 70 GiB of GPU 1" in caplog.text)
        ours.removeHandler(wakes)
        assert not waiting.done()
        gpus_with(tmp_path, [4712, 2**30])
        await asyncio.wait_for(waiting, LIMIT)
    assert "4712" not in caplog.text
    assert "although" not in caplog.text


def engine_of_a_rank() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE)


async def test_ranks_wait_for_processes_that_others_had_started(
    node: IO[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that has exited since it was seen on a GPU; while it lives it is not waited for."""
    with engine_of_a_rank() as engine:
        gpus_with(tmp_path, [engine.pid, 2**31])
        async with watching(tmp_path) as (mine, link):
            tell(node, "1 94")
            await link.until(lambda: link.reports)
            await asyncio.wait_for(mine.wait_until_free({5000}), LIMIT)
            assert "waiting up to" not in caplog.text
            engine.kill()
            engine.wait()
            wakes = Wakes(link)
            logging.getLogger("elasticrun").addHandler(wakes)
            with caplog.at_level(logging.INFO, "elasticrun"):
                waiting = asyncio.create_task(mine.wait_until_free({5000}))
                held = f"process {engine.pid} holds 2 GiB of GPU 1"
                await link.until(lambda: held in caplog.text)
            logging.getLogger("elasticrun").removeHandler(wakes)
            assert not waiting.done()
            gpus_with(tmp_path)
            await asyncio.wait_for(waiting, LIMIT)


async def test_they_wait_for_a_limited_time(
    node: IO[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(devices, "FREE_LIMIT", 0.3)
    gpus_with(tmp_path, [4711, None])
    async with watching(tmp_path) as (mine, link):
        tell(node, "1 94")
        await link.until(lambda: link.reports)
        await asyncio.wait_for(mine.wait_until_free({4711}), LIMIT)
    assert caplog.messages[-1] == (
        "starting the ranks although memory of exited ranks is not free after 0.3 s: "
        "process 4711 holds GPU 1"
    )


async def test_nobody_waits_for_a_child_that_hangs_or_is_not_there(
    node: IO[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = nvml(tmp_path, hangs=True)
    monkeypatch.setenv("STANDIN_NVML", environ["STANDIN_NVML"])
    monkeypatch.setattr(devices, "ANSWER_LIMIT", 0.1)
    async with watching(tmp_path) as (mine, _):
        await asyncio.wait_for(mine.wait_until_free({4711}), LIMIT)
    async with watching(tmp_path, watch_devices="off") as (mine, _):
        await asyncio.wait_for(mine.wait_until_free({4711}), LIMIT)
