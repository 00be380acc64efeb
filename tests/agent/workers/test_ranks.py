"""Ranks between the brain and a spawner: what they are given (tests/compat compares that with a
real torchrun), and what the real processes of test_deaths hardly show.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from elasticrun.agent.logs.output import RankLogs, RankOutput
from elasticrun.agent.runtime import NodeContext, NoThread
from elasticrun.agent.spawner import Child, Owner, Spawner, Spawners
from elasticrun.agent.workers import ranks as ranks_module
from elasticrun.agent.workers.ranks import BadEnvironment, Ranks, rank_entry, rank_environment
from elasticrun.config import LogPlan, MasterPlace
from elasticrun.core.events import AgentEvent, RankExited, RankSpawned, RanksSwept, SpawnRanks
from elasticrun.wire.env import RANK_VARIABLES
from elasticrun.wire.messages import FailureKind
from elasticrun.wire.spawning import Exited, Spawned, SpawnFailed, SpawnRank, SweepOrder, Swept
from elasticrun.wire.types import Endpoint, EntryKind, Entrypoint
from tests.agent.configs import agent_config, start
from tests.harness import LIMIT


class Orders:
    """In the place of the spawners and of the one that they have: keeps what it is told."""

    def __init__(self, told: Callable[[], None]) -> None:
        self.told = told
        self.given: list[Any] = []
        self.children: list[Child] = []
        self.ended = asyncio.Event()

    def start(self, order: SpawnRank, owner: Owner) -> Child:
        child = Child(len(self.given) + 1, owner, cast(Spawner, self))
        self.children.append(child)
        self.given.append(order)
        self.told()
        return child

    def send(self, order: Any) -> None:
        self.given.append(order)

    def expect(self) -> None: ...

    def forget(self, *children: Child) -> None: ...


class HungDisk(RankOutput):
    """Log folders on a file system that does not answer until it is let go."""

    def __init__(self) -> None:
        super().__init__(LogPlan(log_dir="/dev/null"), "job", "default", 2)
        self.go = threading.Event()

    def open_attempt(self, attempt: int, envs: Mapping[int, dict[str, str]]) -> dict[int, RankLogs]:
        self.go.wait(LIMIT)
        return super().open_attempt(attempt, envs)


class Stage:
    """Ranks with everything around them."""

    def __init__(self, output: RankOutput) -> None:
        self.events: list[AgentEvent] = []
        self._changed = asyncio.Event()
        self.orders = Orders(self._changed.set)
        self.ranks = Ranks(
            NodeContext(agent_config(), self._deliver, pytest.fail, host="host"),
            cast(Spawners, self.orders),
            output,
        )

    def _deliver(self, event: AgentEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, good: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not good():
                self._changed.clear()
                await self._changed.wait()


def play(body: Callable[[Stage], Awaitable[None]], output: RankOutput | None = None) -> None:
    async def main() -> None:
        plan = LogPlan(log_dir="/dev/null")
        stage = Stage(output or RankOutput(plan, "job", "default", 2))
        try:
            await body(stage)
        finally:
            stage.ranks.close()

    asyncio.run(main())


async def spawned(stage: Stage) -> list[Child]:
    stage.ranks.spawn(SpawnRanks(start(), 2), {})
    await stage.until(lambda: len(stage.orders.given) == 2)
    for pid, child in enumerate(stage.orders.children, start=100):
        stage.ranks.heard(child, Spawned(child.key, pid, True))
    return stage.orders.children


def end(stage: Stage, child: Child, code: int) -> None:
    stage.ranks.heard(child, Exited(child.key, 99 + child.key, code, 5))


def test_a_life_from_birth_to_sweep() -> None:
    async def body(stage: Stage) -> None:
        children = await spawned(stage)
        assert [order.env["RANK"] for order in stage.orders.given] == ["2", "3"]
        assert stage.events == [RankSpawned(0, 100), RankSpawned(1, 101)]
        for child, code in zip(children, (0, -11), strict=True):
            end(stage, child, code)
        await stage.until(lambda: len(stage.events) == 4)
        good, bad = stage.events[2:]
        assert good == RankExited(0, 0, None)
        assert isinstance(bad, RankExited)
        assert bad.failure is not None
        assert (bad.failure.rank, bad.failure.exitcode, bad.failure.pid) == (3, -11, 101)
        assert bad.failure.kind is FailureKind.SIGNAL
        stage.ranks.sweep(1.5)
        keys = tuple(child.key for child in children)
        assert stage.orders.given[-1] == SweepOrder(keys, 1.5)
        stage.ranks.heard(children[0], Swept(keys, (7,)))
        assert stage.events[-1] == RanksSwept((7,))

    play(body)


def test_a_rank_that_cannot_be_started_is_a_failure_of_its_own_kind() -> None:
    async def body(stage: Stage) -> None:
        stage.ranks.spawn(SpawnRanks(start(), 2), {})
        await stage.until(lambda: len(stage.orders.given) == 2)
        child = stage.orders.children[1]
        stage.ranks.heard(child, SpawnFailed(child.key, "no such file"))
        await stage.until(lambda: bool(stage.events))
        (event,) = stage.events
        assert isinstance(event, RankExited)
        assert event.failure is not None
        assert (event.failure.kind, event.failure.message) == (FailureKind.SPAWN, "no such file")

    play(body)


def test_ranks_that_wait_for_a_disk_can_be_called_off() -> None:
    disk = HungDisk()

    async def body(stage: Stage) -> None:
        stage.ranks.spawn(SpawnRanks(start(), 2), {})
        stage.ranks.call_off()
        stage.ranks.call_off()
        kinds = [e.failure.kind for e in stage.events if isinstance(e, RankExited) and e.failure]
        assert kinds == [FailureKind.STOPPED, FailureKind.STOPPED]
        disk.go.set()
        stage.ranks.spawn(SpawnRanks(start(), 3), {})  # the next life is not disturbed by the first
        await stage.until(lambda: len(stage.orders.given) == 2)

    play(body, disk)


def test_an_error_file_that_cannot_be_read_holds_up_neither_the_exit_nor_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    really = ranks_module.describe

    def slow_for_rank_2(**known: Any) -> Any:
        if known["rank"] == 2 and known["error_file"]:
            hung.wait(LIMIT)
        return really(**known)

    monkeypatch.setattr(ranks_module, "describe", slow_for_rank_2)
    output = RankOutput(LogPlan(log_dir=str(tmp_path)), "job", "default", 2)

    async def body(stage: Stage) -> None:
        for child in await spawned(stage):
            end(stage, child, 1)
        await stage.until(lambda: len(stage.events) == 4)
        exits = [event for event in stage.events if isinstance(event, RankExited)]
        assert [event.local_rank for event in exits] == [0, 1]
        assert all(event.failure is not None for event in exits)

    play(body, output)
    hung.set()
    assert os.path.isdir(output.run_dir)


@pytest.mark.parametrize("error", [KeyError("defect"), NoThread("too many processes")])
def test_a_death_is_reported_whatever_becomes_of_its_cause(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Neither a defect of ours nor a limit of processes keeps the brain from hearing of it."""

    async def no_thread(*_: object, **__: object) -> None:
        raise error

    async def body(stage: Stage) -> None:
        children = await spawned(stage)
        monkeypatch.setattr(ranks_module, "in_thread", no_thread)
        for child in children:
            end(stage, child, 1)
        await stage.until(lambda: len(stage.events) == 4)
        for event in stage.events[2:]:
            assert isinstance(event, RankExited)
            assert event.failure is not None
            assert event.failure.exitcode == 1

    play(body)


def test_ranks_of_a_lost_spawner_are_heard_of_no_more() -> None:
    async def body(stage: Stage) -> None:
        children = await spawned(stage)
        end(stage, children[0], -9)
        stage.ranks.all_lost()
        stage.ranks.heard(children[1], Spawned(2, 1, True))
        end(stage, children[1], -9)
        stage.ranks.sweep(1.0)
        assert stage.events[2:] == [RanksSwept(())]

    play(body)


def test_every_variable_of_the_table() -> None:
    made = rank_environment(
        agent_config(), start(), 1, {}, {"TORCHELASTIC_ERROR_FILE": "/logs/error.json"}
    )
    assert made == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "the-job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_nothing_that_says_which_rank_this_is_is_inherited() -> None:
    """Operators of Kubernetes use RANK, WORLD_SIZE and MASTER_ADDR for nodes."""
    operators = dict.fromkeys(RANK_VARIABLES, "the operator's")
    made = operators | rank_environment(agent_config(), start(), 1, operators, {})
    assert "the operator's" not in made.values()


def test_what_the_user_has_set_stands() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "OMP_NUM_THREADS": "8"}
    made = rank_environment(agent_config(), start(), 0, environ, {})
    assert made["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "OMP_NUM_THREADS" not in made  # inherited


def test_omp_is_one_where_the_command_line_decided_so() -> None:
    made = rank_environment(agent_config(set_omp_threads=True), start(), 0, {}, {})
    assert made["OMP_NUM_THREADS"] == "1"


def test_a_static_job_sees_the_port_that_was_named() -> None:
    config = agent_config(rendezvous=MasterPlace("static", "head", 29612), node_rank=1)
    made = rank_environment(config, start(store=Endpoint("10.0.0.9", 40000)), 0, {}, {})
    assert (made["MASTER_ADDR"], made["MASTER_PORT"]) == ("head", "29612")


@pytest.mark.parametrize(
    ("visible", "device"), [(None, "1"), ("4, 5", "5"), ("GPU-a,GPU-b", "GPU-b")]
)
def test_virtual_local_rank(visible: str | None, device: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    made = rank_environment(agent_config(virtual_local_rank=True), start(), 1, environ, {})
    assert (made["LOCAL_RANK"], made["CUDA_VISIBLE_DEVICES"]) == ("0", device)
    assert made["RANK"] == "3"


def test_virtual_local_rank_without_a_device_is_a_sentence() -> None:
    config = agent_config(virtual_local_rank=True)
    with pytest.raises(BadEnvironment, match="local rank 1 has no device"):
        rank_environment(config, start(), 1, {"CUDA_VISIBLE_DEVICES": "3"}, {})


def test_local_rank_in_arguments() -> None:
    entry = Entrypoint(
        EntryKind.SCRIPT, "t${local_rank}.py", ("--d=${local_rank}", "$HOME", "$$", "$")
    )
    made = rank_entry(entry, 5)
    assert (made.target, made.args) == ("t5.py", ("--d=5", "$HOME", "$", "$"))


def test_a_command_is_taken_as_it_is() -> None:
    made = rank_entry(Entrypoint(EntryKind.COMMAND, "./${local_rank}", ("${local_rank}",)), 2)
    assert (made.target, made.args) == ("./${local_rank}", ("2",))
