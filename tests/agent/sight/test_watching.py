"""A node's looks at real ranks of a real fork server; what is said is caught before the link."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticrun.agent.sight import pulse, watching
from elasticrun.agent.sight.activity import Activities
from elasticrun.agent.sight.watching import LocalSight
from elasticrun.host.system import processes
from elasticrun.wire import messages as m
from elasticrun.wire.rpc.protobuf import report_from_wire, report_to_wire
from elasticrun.wire.spawning import SendSignal
from elasticrun.wire.types import Endpoint, EntryKind, Entrypoint, RoundName
from tests.forkserver.driver import Driver, script
from tests.training.monitor.test_monitor import LIMIT, TRAINS

ROUND = RoundName(3, 1, "nonce")
START = m.Start(m.RoundInfo(ROUND, 6, 0), 0, 1, 4, 4, 6, Endpoint("host", 1), False)


class Said:
    """The link, as far as reports go: over the wire and back."""

    def __init__(self) -> None:
        self.all: list[m.Report] = []
        self.more = asyncio.Event()

    def send(self, report: m.Report) -> None:
        self.all.append(report_from_wire(report_to_wire(report)))
        self.more.set()

    def offer(self, report: m.Report) -> bool:
        self.send(report)
        return True

    async def until(self, there: Callable[[m.Report], bool]) -> Any:
        while not (found := [report for report in self.all if there(report)]):
            self.more.clear()
            await self.more.wait()
        return found[-1]


def test_a_node_whose_rank_reads_a_pipe_for_ever(
    server: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer waits in a collective. Quiet says so, a look says where both are, and of one that is
    stopped that it is."""
    for module in (pulse, watching):
        monkeypatch.setattr(module, "PULSE_EVERY", 0.1)
    monkeypatch.setattr(pulse, "QUIET_AFTER", 0.5)
    monkeypatch.setattr(watching, "SAMPLE_LIMIT", LIMIT)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    args = (f"file://{tmp_path / 'store'}", str(pipe))
    entry = Entrypoint(EntryKind.SCRIPT, script(tmp_path / "train.py", TRAINS).target, args)

    async def work() -> None:
        said = Said()
        texts = {0: "step 3\nloss 2.5", 1: "step 4\nloss 2.7"}
        forked = frozenset({0, 1})
        ranks = SimpleNamespace(kept_monitors={}, pids={}, forked=forked, last_lines=lambda: texts)
        spec = SimpleNamespace(watch=m.WatchSpec())
        node = SimpleNamespace(
            launch=SimpleNamespace(nproc_per_node=2, spec=spec, accelerator=""),
            fatal=pytest.fail,
            link=said,
        )
        flushed: list[bool] = []
        progress = SimpleNamespace(
            flush=lambda: flushed.append(True),
            seen=lambda rank: (7, 0.5) if rank else (-1, 0.0),
            quiet_phase=lambda rank: ("judge", 60.0) if rank else ("", 0.0),
        )
        sight = LocalSight(cast(Any, node), cast(Any, ranks), cast(Any, progress))
        sight.round_began(START)
        places = sight.places
        keys = [
            server.start(entry, env={"RANK": str(rank)}, monitor=places[rank]) for rank in (0, 1)
        ]
        try:
            ranks.pids = {rank: server.spawned(key).pid for rank, key in enumerate(keys)}
            await said.until(lambda one: isinstance(one, m.Quiet) and one.first > 0.0)
            quiet = await said.until(lambda one: isinstance(one, m.Quiet) and one.waiting == 1)
            assert quiet.counted
            assert quiet.seconds >= 0.5
            assert flushed, "the newest steps are told when nothing follows them"
            sight.obey(m.Inspect(ROUND, 1, stacks=True))
            _look(await said.until(lambda one: isinstance(one, m.Inspected)))
            stacks = await said.until(lambda one: isinstance(one, m.Stacks))
            assert {group.ranks for group in stacks.groups if not group.thread} == {"4", "5"}
            assert stacks.missing == ""
            monkeypatch.setattr(watching, "SAMPLE_LIMIT", 5.0)
            os.kill(ranks.pids[0], signal.SIGSTOP)
            while processes.state(ranks.pids[0]) != "T":
                pass  # the kernel does not keep us waiting
            sight.obey(m.Inspect(ROUND, 2, stacks=True, lines=True))
            late = await said.until(lambda one: isinstance(one, m.Inspected) and one.number == 2)
            stopped = late.ranks[0]
            assert [one.text for one in late.said] == ["step 3", "step 4", "loss ~2.5"]
            assert (stopped.being, stopped.answers, stopped.holds) == ("stopped", False, False)
            stacks = await said.until(lambda one: isinstance(one, m.Stacks) and one.number == 2)
            assert stacks.missing == "rank 4 does not answer: stopped"
        finally:
            sight.close()
            for key in keys:
                server.tell(SendSignal(key, signal.SIGKILL))
                server.exited(key)
        seen = Activities().sample(ranks.pids.values())
        assert {one.being for one in seen.values()} == {m.Being.ENDED}

    asyncio.run(asyncio.wait_for(work(), LIMIT))


def _look(report: m.Inspected) -> None:
    assert report.left == 0
    waits, reads = report.ranks
    assert (waits.rank, waits.answers, waits.forked, waits.holds) == (4, True, True, False)
    (open_one,) = [at for at in waits.at if at.call]
    assert (open_one.call, open_one.entered, open_one.done) == ("all_reduce [4] float32", 4, 3)
    group = report.groups[open_one.group]
    assert (group.name, group.title, group.members) == ("0", "default_pg", "0-1")
    assert (reads.place, reads.step, reads.step_seconds) == ("train.py:19 load_shard", 7, 0.5)
    assert [(one.says, one.says_left) for one in report.ranks] == [("", 0.0), ("judge", 60.0)]
    assert waits.place == "train.py:16 main"
    assert reads.being == "sleeps"
    assert waits.rss > 10
    assert waits.cpu < 0.5
