"""The agent's part of --health-cmd: when it runs, and what the master learns."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from elasticrun.agent.checkup import Checkup
from elasticrun.config import HealthCommandPlan
from elasticrun.wire.messages import NodeHealth
from tests.agent.configs import Waiting, launched, node_context, reaping
from tests.harness import LIMIT


class Heard(Waiting):
    """A link that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[NodeHealth] = []

    def send(self, report: NodeHealth) -> None:
        self.reports.append(report)
        self.changed.set()


@contextlib.asynccontextmanager
async def watching(
    text: str, interval: float = 0.01, timeout: float = LIMIT
) -> AsyncIterator[tuple[Checkup, Heard]]:
    """An agent with this command; only the command runs, and its children are gone afterwards."""
    async with reaping() as reaper:
        link = Heard()
        plan = HealthCommandPlan(text, interval, timeout)
        mine = Checkup(node_context(launched(health_command=plan), link, reaper=reaper))
        mine.command.start()
        try:
            yield mine, link
        finally:
            mine.close()


async def test_a_node_that_is_unhealthy_at_the_start_does_not_join(caplog) -> None:
    async with watching("echo no driver; exit 1") as (mine, _):
        assert await mine.why_unfit() == (
            "this node is unhealthy: its health command reports: no driver (exit code 1)"
        )
    (told,) = [line for line in caplog.messages if "unfit" in line]
    assert told == "this machine is unfit: its health command reports: no driver (exit code 1)"


@pytest.mark.parametrize("code", [0, 2, 127])
async def test_otherwise_it_joins(code: int) -> None:
    async with watching(f"exit {code}", interval=LIMIT) as (mine, _):
        assert await mine.why_unfit() == ""


async def test_without_a_command_nothing_is_waited_for() -> None:
    async with watching("") as (mine, link):
        assert await mine.why_unfit() == ""
        assert link.reports == []


async def test_what_changes_is_sent_and_a_fault_is_the_last_word(tmp_path: Path) -> None:
    """Runs 1 and 2 are well, 3 and 4 without a result, 5 is well, 6 is bad; no seventh."""
    runs = tmp_path / "runs"
    codes = "0 0 2 2 0 7"
    text = f"echo x >> {runs}; n=$(wc -l < {runs}); set -- {codes}; eval exit \\${{$n}}"
    async with watching(text) as (mine, link):
        await link.until(lambda: link.reports and link.reports[-1].fault)
        assert link.reports == [
            NodeHealth(notices=("its health command has no result: no output (exit code 2)",)),
            NodeHealth(),
            NodeHealth("its health command reports: no output (exit code 7)"),
        ]
        mine.reporter.resend()  # a new master knows nothing
        assert link.reports[-2] == link.reports[-1]
        await mine.command._tasks.wait(LIMIT)
    assert runs.read_text() == 6 * "x\n"


async def test_a_rank_that_fails_starts_a_run_at_once(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    async with watching(f"test -e {mark} && exit 1; exit 0", interval=86400.0) as (mine, link):
        assert await mine.why_unfit() == ""
        mark.touch()
        mine.command.ranks_stopping()
        await link.until(lambda: link.reports)
    assert link.reports[0].fault


async def test_three_timeouts_are_a_fault_and_runs_never_overlap(tmp_path: Path) -> None:
    """Each run locks a file; one that finds it locked says so."""
    overlaps = tmp_path / "overlaps"
    text = f"exec 9>{tmp_path}/lock; flock -n 9 || echo overlap >> {overlaps}; sleep 1000"
    async with watching(text, timeout=1.0) as (_, link):
        await link.until(lambda: link.reports and link.reports[-1].fault)
        assert [len(report.notices) for report in link.reports] == [1, 1, 0]
        assert link.reports[-1].fault.endswith("did not finish within 1 s, 3 times in a row")
    assert not overlaps.exists()
