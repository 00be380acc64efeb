"""The agent's ear for steps: who is believed, what becomes of it, and how little it may cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from elasticrun.agent.workers import progress as module
from elasticrun.agent.workers.progress import MOST_PER_RANK, Progress
from elasticrun.agent.workers.ranks import rank_environment
from elasticrun.wire.messages import MAX_MESSAGE_BYTES, MAX_METRIC_ROWS, Metrics, Steps
from elasticrun.wire.progress import (
    Own,
    RankCosts,
    RankQuiet,
    RankRows,
    RankSteps,
    address,
    encode,
    read_place,
)
from elasticrun.wire.rpc.protobuf import report_to_wire
from elasticrun.wire.types import RoundName
from tests.agent.configs import node_context, start
from tests.further import further
from tests.harness import (
    ELASTICRUN,
    PATIENT,
    SCRIPTS,
    World,
    await_true,
    descriptors_of,
    free_port,
)

SAID = RankSteps(0, 1, 1, 0.5, 0.2, 0.3, Own.KNOWN)


class Ear:
    """A Progress in a loop, what it said, and a socket to tell it things."""

    def __init__(self, nproc: int) -> None:
        self.said: list[Steps] = []
        self.rows: list[Metrics] = []
        self.busy = False
        self.beat_interval = 0.0
        self.progress = Progress(nproc, self)
        self.progress.round_began(start())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def offer(self, report: Steps | Metrics) -> bool:
        if self.busy:
            return False
        self.send(report)
        return True

    def send(self, report: Steps | Metrics) -> None:
        (self.rows if isinstance(report, Metrics) else self.said).append(report)

    @property
    def name(self) -> str:
        return read_place(self.progress.place(0))[0]

    async def tell(self, *said: RankSteps | bytes) -> None:
        """Send these and let the loop take them in."""
        for one in said:
            data = one if isinstance(one, bytes) else encode(one)
            self._socket.sendto(data, address(self.name))
            for _ in range(3):
                await asyncio.sleep(0)

    def close(self) -> None:
        self.progress.close()
        self._socket.close()


@contextlib.asynccontextmanager
async def listening(nproc: int) -> AsyncIterator[Ear]:
    ear = Ear(nproc)
    yield ear
    ear.close()


@pytest.fixture
def paced() -> AbstractAsyncContextManager[Ear]:
    """Of one rank; reports are as far apart as they are in a job."""
    return listening(1)


@pytest.fixture
def two_paced() -> AbstractAsyncContextManager[Ear]:
    return listening(2)


@pytest.fixture
def ear(monkeypatch) -> AbstractAsyncContextManager[Ear]:
    """Of one rank; a report for every datagram that completes one."""
    monkeypatch.setattr(module, "MIN_INTERVAL", 0.0)
    monkeypatch.setattr(module, "MAX_INTERVAL", 0.0)
    return listening(1)


@pytest.fixture
def two(ear: object) -> AbstractAsyncContextManager[Ear]:
    """The same of two ranks."""
    return listening(2)


async def test_a_rank_is_told_where_to_tell_its_steps(two_paced: Ear) -> None:
    place = two_paced.progress.place(1)
    assert re.fullmatch(r"elasticrun-[0-9a-f]{32}/1", place)
    made = rank_environment(node_context(), start(), 1, {}, {"ELASTICRUN_PROGRESS": place})
    assert made["ELASTICRUN_PROGRESS"] == place
    assert "ELASTICRUN_PROGRESS" not in rank_environment(node_context(), start(), 1, {}, {})


async def test_the_slowest_rank_is_reported_when_each_has_something_new(two: Ear) -> None:
    await two.tell(SAID)  # nobody knows yet of another one
    assert two.said == [Steps(start().round, 1, 1, 0.5, 0.2, 0.3)]
    await two.tell(replace(SAID, local_rank=1, step=6, steps=2, own=0.5, waited=0.0))
    assert len(two.said) == 1  # local rank 0 has nothing new
    await two.tell(replace(SAID, step=7, steps=3, seconds=0.6))
    assert two.said[1:] == [Steps(start().round, 6, 2, 0.5, 0.5, 0.0)]


async def test_where_no_own_part_is_known_the_longest_step_is_reported(two: Ear) -> None:
    unknown = RankSteps(0, 5, 4, 0.25, knows=Own.UNAVAILABLE)
    await two.tell(unknown)
    await two.tell(replace(unknown, local_rank=1, seconds=0.5))
    await two.tell(unknown)
    assert two.said[1:] == [Steps(start().round, 5, 4, 0.5, 0.0, 0.0)]


async def test_what_checkpointers_tell_goes_with_the_steps(two: Ear, monkeypatch) -> None:
    """Their steps count where the script tells none; the sums are those of all ranks."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    for step in (-1, 4, 5):  # restored; the first step; by the next `progress` would have spoken
        await two.tell(RankCosts(1, step, restored=1.5))
    assert two.said == []
    now += 2.0
    await two.tell(RankCosts(1, 9, 1, 0.25, 1.5))
    assert two.said == [Steps(start().round, 9, 4, 0.5, 0.0, 0.0, 1, 0.25, 1.5)]
    await two.tell(
        SAID, RankCosts(0, 9, 2, 0.5), RankCosts(0, 20, 2, 0.5), RankCosts(0, 30, 2, 1.0)
    )
    await two.tell(replace(SAID, local_rank=1), SAID)
    assert two.said[1:] == [Steps(start().round, 1, 1, 0.5, 0.2, 0.3, 2, 1.25, 1.5)]


async def test_a_rank_says_what_takes_long(ear: Ear, monkeypatch) -> None:
    """Until it is out, or the time is over; what is no word is not heard."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    await ear.tell(
        RankQuiet(0, "judge", 60.0), RankQuiet(0, "longer", 86401.0), RankQuiet(0, "\x1b", 9)
    )
    assert ear.progress.quiet_phase(0) == ("judge", 60.0)
    now += 59.0
    assert ear.progress.quiet_phase(0) == ("judge", pytest.approx(1.0))
    now += 1.5
    assert ear.progress.quiet_phase(0) == ("", 0.0)
    await ear.tell(RankQuiet(0, "é" * 40, 60.0))
    assert ear.progress.quiet_phase(0)[0] == "é" * 32
    await ear.tell(RankQuiet(0))
    assert ear.progress.quiet_phase(0) == ("", 0.0)


async def test_a_rank_that_tells_its_own_part_is_reported_only_with_it(ear: Ear) -> None:
    await ear.tell(SAID, replace(SAID, step=2, knows=Own.LATER), replace(SAID, step=3))
    assert [(one.step, one.steps) for one in ear.said] == [(1, 1), (3, 2)]


@pytest.mark.parametrize(
    ("beat", "nodes", "after"), [(0.0, 3, 1.0), (4.0, 3, 4.0), (0.0, 400, 8.0), (0.0, 9000, 20.0)]
)
async def test_how_far_reports_are_apart(
    paced: Ear, beat: float, nodes: int, after: float, monkeypatch
) -> None:
    """A second, or a beat where that is longer, or more where a master would hear too many."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    paced.progress.round_began(start(group_world_size=nodes))
    paced.beat_interval = beat
    await paced.tell(SAID)
    now += after - 0.01
    await paced.tell(SAID)
    assert len(paced.said) == 1
    now += 0.02
    await paced.tell(SAID)
    assert len(paced.said) == 2


async def test_a_silent_rank_hinders_others_only_for_a_while(two_paced: Ear, monkeypatch) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    await two_paced.tell(SAID)
    now += 2.0
    await two_paced.tell(SAID, replace(SAID, local_rank=1))
    assert len(two_paced.said) == 2
    heard_at: list[int] = []
    for second in range(10):
        now += 1.0
        await two_paced.tell(SAID)
        if len(two_paced.said) > 2 + len(heard_at):
            heard_at.append(second)
    # at 0 the word of local rank 1 was still to be used; at 1 something was new again
    assert heard_at == [0, *range(1 + int(module.PATIENCE), 10)]
    now += 1.0
    await two_paced.tell(replace(SAID, local_rank=1))  # it is there again, and so it is waited for
    now += 1.0
    assert len(two_paced.said) == 2 + len(heard_at)
    await two_paced.tell(SAID)
    assert len(two_paced.said) == 3 + len(heard_at)


async def test_what_a_busy_link_does_not_take_is_in_the_next_report(ear: Ear) -> None:
    ear.busy = True
    for step in range(1, 5):
        await ear.tell(replace(SAID, step=step))
    ear.busy = False
    await ear.tell(replace(SAID, step=5))
    assert [(one.step, one.steps) for one in ear.said] == [(5, 5)]


async def test_whatever_ranks_tell_can_be_sent_to_the_master(ear: Ear) -> None:
    """A number that no message can carry would end the link."""
    most = RankSteps(0, 2**63 - 1, 2**32 - 1, 1e7, 1e7, 1e7, Own.KNOWN)
    await ear.tell(replace(SAID, step=-1), most, replace(most, step=0, steps=1, seconds=0.0))
    sizes = [len(report_to_wire(report)) for report in ear.said]
    assert len(sizes) == 2
    assert max(sizes) < 1000


async def test_what_rank_0_says_of_its_steps_goes_to_the_master(two: Ear) -> None:
    """What of the link is busy is kept; the end of the ranks waits for nothing."""
    at = time.time() - 5.0
    two.progress.round_began(start(first_rank=0))
    rows = tuple((step, at, ("0.25", "" if step else "nan")) for step in range(MAX_METRIC_ROWS))
    said = RankRows(0, ("loss", "acc"), rows, dropped=3)
    two.busy = True
    await two.tell(said, replace(said, local_rank=1))
    assert two.rows == []
    await two.tell(replace(said, rows=((99, at, ("inf", "")),)))
    two.progress.flush()
    first, last = two.rows
    assert (first.names, last.names, first.dropped) == (("loss", "acc"), ("loss",), 3)
    assert [row.values for row in first.rows[:2]] == [("0.25", "nan"), ("0.25", "")]
    assert 4.9 < first.rows[0].age < 60.0
    assert [(row.step, row.values) for row in last.rows] == [(99, ("inf",))]
    assert two.progress.newest == 99, "a step that perhaps no other datagram has"
    two.busy = False
    names = tuple(f"{number:064}" for number in range(32))
    await two.tell(RankRows(0, names, ((2**62, at, ("9" * 24,) * 32),) * 64))
    two.progress.flush()
    assert len(report_to_wire(two.rows[2])) < MAX_MESSAGE_BYTES


async def test_a_rank_of_an_older_life_reaches_nobody(ear: Ear) -> None:
    old = ear.name
    ear.progress.round_began(start(round=RoundName(7, 4, "m")))
    with pytest.raises(ConnectionRefusedError):
        ear._socket.sendto(encode(SAID), address(old))
    await ear.tell(SAID)
    assert [one.round.number for one in ear.said] == [4]
    ear.progress.close()
    assert ear.progress.place(0) == ""


async def test_what_is_no_report_of_a_local_rank_is_ignored(two: Ear) -> None:
    good = encode(SAID)
    rows = RankRows(0, ("loss",), ((1, 1.0, ("1",)),))
    wrong = [
        b"",
        b"x" * 5000,
        good + b"\0",
        good[:-1],
        b"\x09" + good[1:],  # another version
        good[:1] + b"\x63" + good[2:],  # no Own
        encode(replace(SAID, local_rank=2)),
        encode(replace(SAID, steps=0)),
        encode(replace(SAID, step=-1)),
        encode(replace(SAID, seconds=float("nan"))),
        encode(replace(SAID, seconds=-1.0)),
        encode(replace(SAID, own=float("inf"))),
        encode(replace(SAID, waited=-0.1)),
        b"{}",
        encode(replace(rows, rows=((1, 1.0, ("9" * 25,)),))),
        encode(replace(rows, rows=((1, 1.0, ()),))),
        encode(replace(rows, names=("a\nb",))),
        encode(replace(rows, rows=rows.rows * 65)),
        encode(replace(rows, rows=((-1, 1.0, ("1",)),))),
        encode(replace(rows, local_rank=7)),
    ]
    await two.tell(*wrong)
    assert (two.said, two.rows) == ([], [])
    await two.tell(good)
    assert len(two.said) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can send as somebody else")
async def test_another_user_of_the_host_is_not_believed(ear: Ear, capfd) -> None:
    """The names of abstract sockets are there for all to read."""
    code = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "s.sendto(bytes.fromhex(sys.argv[2]), '\\0' + sys.argv[1])\n"
    )
    names = Path("/proc/net/unix").read_text()
    assert f"@{ear.name}" in names
    for user in (65534, 0):
        await asyncio.to_thread(
            subprocess.run,
            ["/usr/bin/env", "python3", "-S", "-c", code, ear.name, encode(SAID).hex()],
            user=user,
            check=True,
            cwd="/",
        )
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(ear.said) == (user == 0)


async def test_a_passed_file_descriptor_is_not_kept(ear: Ear, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file.fileno()))]
        for _ in range(5):
            ear._socket.sendmsg([encode(SAID)], rights, 0, address(ear.name))
            for _ in range(3):
                await asyncio.sleep(0)
        assert descriptors_of(file.fileno()) == 1


async def test_a_rank_that_floods_is_read_so_often_a_second(ear: Ear, monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    for second in range(1, 4):
        for _ in range(2 * MOST_PER_RANK):
            with contextlib.suppress(BlockingIOError):
                while True:
                    ear._socket.sendto(encode(SAID), address(ear.name))
            await asyncio.sleep(0)
        assert len(ear.said) == second * MOST_PER_RANK
        now += 1.0


def node_words(port: int) -> tuple[str, ...]:
    return (
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--local-addr=127.0.0.1",
    )


@further(
    "health/test_slow_nodes::test_a_straggler_is_swapped_for_a_spare",
    "core/scripts/straggler_replaced_by_spare.txt",
)
def test_the_master_hears_which_of_two_nodes_is_slow(world: World, tmp_path: Path) -> None:
    """Real agents, ranks on gloo; the reports as they stand in the master's trace."""
    port = free_port()
    script = os.fspath(SCRIPTS / "tells_steps.py")
    jobs = [
        world.launch(
            ELASTICRUN,
            *node_words(port),
            f"--node-id=n{number}",
            script,
            *("100000", "0.02", "1=0.3"),  # so much more that a busy machine does not hide it
            env={
                "ELASTICRUN_TRACE_DIR": os.fspath(tmp_path / "traces"),
                "OMP_NUM_THREADS": "1",
                **PATIENT,
            },
        )
        for number in range(2)
    ]

    def knowing() -> dict[str, list[dict[str, float]]]:
        assert not any(job.ended() for job in jobs), [job.stderr for job in jobs]
        found = reports(tmp_path / "traces")
        return {node: [one for one in said if one["own"] > 0.0] for node, said in found.items()}

    def enough() -> bool:
        return sorted(node for node, said in knowing().items() if len(said) >= 5) == ["n0", "n1"]

    await_true(enough, "five reports of each node")
    # Of all reports the middle one: a pause of the machine spoils one or two.
    middle = [
        tuple(median(one[name] for one in said) for name in ("own", "waited"))
        for said in knowing().values()
    ]
    for job in jobs:
        job.signal(signal.SIGTERM)
    for job in jobs:
        job.wait()
    (own, waited), (slow_own, slow_waited) = sorted(middle)
    assert slow_own > 1.5 * own > 0.0
    assert slow_waited < waited


def reports(traces: Path) -> dict[str, list[dict[str, float]]]:
    """What each node has told of its steps by now."""
    said: dict[str, list[dict[str, float]]] = {}
    nodes: dict[int, str] = {}
    for trace in traces.rglob("trace*"):
        for line in trace.read_text().rpartition("\n")[0].splitlines():
            event = json.loads(line).get("e", {})
            if "Attached" in event:
                attached = event["Attached"]
                nodes[attached["session"]] = attached["hello"]["node"]
            report = event.get("Heard", {}).get("report", {})
            if "Steps" in report:
                node = nodes[event["Heard"]["session"]]
                said.setdefault(node, []).append(report["Steps"])
    return said
