"""Ranks between the brain and a spawner: what they are given (tests/compat compares that with a
real torchrun), and what the real processes of test_deaths hardly show.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, cast

import pytest

from elasticrun.agent.context import NodeContext
from elasticrun.agent.logs.output import RankLogs, RankOutput
from elasticrun.agent.workers import ranks as ranks_module
from elasticrun.agent.workers.ranks import BadEnvironment, Ranks, rank_entry, rank_environment
from elasticrun.agent.workers.recoverable import Recoverables
from elasticrun.agent.workers.spawner import Child, Owner, Spawner, Spawners
from elasticrun.config import LogPlan, Place
from elasticrun.core.events import (
    AgentEvent,
    RankArmed,
    RankExited,
    RankLeft,
    RankRaised,
    RankSpawned,
    RanksSwept,
    SpawnRanks,
)
from elasticrun.host.system.sandbox import NoThread
from elasticrun.wire.env import RANK_VARIABLES
from elasticrun.wire.messages import FailureKind
from elasticrun.wire.snapshots import EnterRound, LeaveRound, Left, Raised, RecoverableHere
from elasticrun.wire.spawning import (
    Exited,
    SendSignal,
    Spawned,
    SpawnFailed,
    SpawnRank,
    SweepOrder,
    Swept,
)
from elasticrun.wire.types import EntryKind, Entrypoint
from tests.agent.configs import Waiting, launched, node_context, start
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

    def expect_answer(self) -> None: ...

    def forget(self, *children: Child) -> None: ...


class HungDisk(RankOutput):
    """Log folders on a file system that does not answer until it is let go."""

    def __init__(self) -> None:
        super().__init__(LogPlan(log_dir="/dev/null"), "job", "default", 2)
        self.go = threading.Event()

    def open_attempt(self, attempt: int, envs: Mapping[int, dict[str, str]]) -> dict[int, RankLogs]:
        self.go.wait(LIMIT)
        return super().open_attempt(attempt, envs)


class Stage(Waiting):
    """Ranks with everything around them."""

    def __init__(self, output: RankOutput) -> None:
        super().__init__()
        self.events: list[AgentEvent] = []
        self.orders = Orders(self.changed.set)
        node = node_context(deliver=self._deliver, host="host")
        self.recoverables = Recoverables(node)
        self.ranks = Ranks(node, cast(Spawners, self.orders), self.recoverables, output)

    def _deliver(self, event: AgentEvent) -> None:
        self.events.append(event)
        self.changed.set()


@contextlib.asynccontextmanager
async def staged(output: RankOutput) -> AsyncIterator[Stage]:
    stage = Stage(output)
    yield stage
    stage.ranks.close()


@pytest.fixture
def stage() -> AbstractAsyncContextManager[Stage]:
    return staged(RankOutput(LogPlan(log_dir="/dev/null"), "job", "default", 2))


async def ordered(stage: Stage) -> list[Child]:
    stage.ranks.spawn(SpawnRanks(start(), 2), {}, {})
    await stage.until(lambda: len(stage.orders.given) == 2)
    return stage.orders.children


async def spawned(stage: Stage) -> list[Child]:
    await ordered(stage)
    for pid, child in enumerate(stage.orders.children, start=100):
        stage.ranks.on_child_message(child, Spawned(child.key, pid, True))
    return stage.orders.children


def end(stage: Stage, child: Child, code: int) -> None:
    stage.ranks.on_child_message(child, Exited(child.key, 99 + child.key, code, 5))


async def test_a_life_from_birth_to_sweep(stage: Stage) -> None:
    children = await spawned(stage)
    assert [order.env["RANK"] for order in stage.orders.given] == ["2", "3"]
    assert stage.events == [RankSpawned(0, 100), RankSpawned(1, 101)]
    for child, code in zip(children, (0, -11), strict=True):
        end(stage, child, code)
    await stage.until(lambda: len(stage.events) == 4)
    good, bad = stage.events[2:]
    assert good == RankExited(0, 0, None)
    assert isinstance(bad, RankExited)
    assert (bad.failure.rank, bad.failure.exitcode, bad.failure.pid) == (3, -11, 101)
    assert bad.failure.kind is FailureKind.SIGNAL
    stage.ranks.sweep(1.5)
    keys = tuple(child.key for child in children)
    assert stage.orders.given[-1] == SweepOrder(keys, 1.5)
    stage.ranks.on_child_message(children[0], Swept(keys, (7,)))
    assert stage.events[-1] == RanksSwept((7,))


class RankPeer:
    """The connection of a rank that runs a recoverable function."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.closed = False
        self.told: list[object] = []

    def send(self, message: object) -> None:
        self.told.append(message)

    def break_off(self, why: str) -> None:
        self.told.append(why)


async def waiting(stage: Stage) -> tuple[list[Child], RankPeer]:
    """Rank 0 has exited, rank 1 waits for the next round."""
    children = await spawned(stage)
    peer = RankPeer(101)
    stage.recoverables.on_message(peer, RecoverableHere(1))
    stage.ranks.recall((1,))
    assert peer.told == [LeaveRound()]
    end(stage, children[0], 1)
    stage.recoverables.on_message(peer, Left())
    await stage.until(lambda: isinstance(stage.events[-1], RankExited))
    assert stage.events[2:4] == [RankArmed(1, True), RankLeft(1)]
    stage.ranks.sweep(1.5)
    assert stage.orders.given[-1] == SweepOrder((children[0].key,), 1.5), "it is not swept"
    stage.ranks.on_child_message(children[0], Swept((children[0].key,), ()))
    return children, peer


async def test_a_rank_that_waits_enters_the_next_round_in_its_process(stage: Stage) -> None:
    children, peer = await waiting(stage)
    stage.ranks.spawn(SpawnRanks(start(), 3, kept=(1,)), {1: {"OWN": "x"}}, {})
    assert stage.events[-1] == RankSpawned(1, 101)
    await stage.until(lambda: len(peer.told) == 2)
    entry = peer.told[1]
    assert isinstance(entry, EnterRound)
    assert (entry.environ["RANK"], entry.environ["OWN"]) == ("3", "x")
    (fresh,) = (order for order in stage.orders.given[3:] if isinstance(order, SpawnRank))
    assert fresh.env["RANK"] == "2"
    end(stage, children[1], 0)
    await stage.until(lambda: stage.events[-1] == RankExited(1, 0, None))


async def test_a_waiting_rank_that_cannot_be_reached_is_killed(stage: Stage) -> None:
    children, peer = await waiting(stage)
    stage.recoverables.lost(peer)
    stage.ranks.spawn(SpawnRanks(start(), 3, kept=(1,)), {}, {})
    await stage.until(lambda: stage.orders.given[-1] == SendSignal(children[1].key, 9, False))


async def test_only_the_process_of_a_rank_speaks_for_it(stage: Stage) -> None:
    await spawned(stage)
    peer = RankPeer(4711)
    stage.recoverables.on_message(peer, RecoverableHere(1))
    assert peer.told == ["it is not the process of that rank"]
    stage.recoverables.on_message(peer, Left())
    assert len(stage.events) == 2


async def test_what_a_rank_has_raised_is_told_with_its_kind(stage: Stage) -> None:
    await spawned(stage)
    peer = RankPeer(101)
    stage.recoverables.on_message(peer, RecoverableHere(1))
    lost = "RuntimeError: Connection closed by peer"
    stage.recoverables.on_message(peer, Raised(lost, "Traceback", 5))
    raised = stage.events[-1]
    assert isinstance(raised, RankRaised)
    found = raised.failure
    assert (found.rank, found.pid, found.exitcode, found.time_us) == (3, 101, 1, 5)
    assert (found.kind, found.traceback) == (FailureKind.PEER_LOST, "Traceback")


class Memory:
    """In the place of the watch of devices: memory is free when it is let go."""

    def __init__(self, told: Callable[[], None]) -> None:
        self.told = told
        self.asked: list[set[int]] = []
        self.free = asyncio.Event()

    async def wait_until_free(self, exited: Collection[int]) -> None:
        self.asked.append(set(exited))
        self.told()
        await self.free.wait()


async def test_ranks_start_once_the_memory_of_the_last_ones_is_free(stage: Stage) -> None:
    """Nobody is asked before the first ones. Ranks that are called off meanwhile never start."""
    memory = stage.ranks._node.memory = Memory(stage.changed.set)
    await spawned(stage)
    assert memory.asked == []
    stage.ranks.spawn(SpawnRanks(start(), 3), {}, {})
    await stage.until(lambda: memory.asked)
    assert memory.asked == [{100, 101}]
    assert len(stage.orders.given) == 2
    memory.free.set()
    await stage.until(lambda: len(stage.orders.given) == 4)
    memory.free.clear()
    stage.ranks.drop_all()  # before one of the second ones was reported
    stage.ranks.spawn(SpawnRanks(start(), 4), {}, {})
    await stage.until(lambda: len(memory.asked) == 2)
    assert memory.asked[1] == {100, 101}
    stage.ranks.call_off()
    memory.free.set()
    assert len([event for event in stage.events if isinstance(event, RankExited)]) == 2
    stage.ranks._tasks.close()
    assert len(stage.orders.given) == 4


async def test_a_rank_that_died_before_our_signal_was_not_stopped_by_it(stage: Stage) -> None:
    """Its peers notice some milliseconds before it can be reaped."""
    children = await spawned(stage)
    peer = RankPeer(101)
    stage.recoverables.on_message(peer, RecoverableHere(1))
    stage.recoverables.lost(peer)
    stage.ranks.signal((1,), 9)
    reaped = Exited(children[1].key, 101, -9, time.time_ns() // 1000)
    stage.ranks.on_child_message(children[1], reaped)
    await stage.until(lambda: isinstance(stage.events[-1], RankExited))
    (failure,) = (e.failure for e in stage.events if isinstance(e, RankExited))
    assert failure is not None
    assert failure.kind is FailureKind.SIGNAL


async def test_a_rank_that_cannot_be_started_is_a_failure_of_its_own_kind(stage: Stage) -> None:
    _, child = await ordered(stage)
    stage.ranks.on_child_message(child, SpawnFailed(child.key, "no such file"))
    await stage.until(lambda: bool(stage.events))
    (event,) = stage.events
    assert isinstance(event, RankExited)
    assert (event.failure.kind, event.failure.message) == (FailureKind.SPAWN, "no such file")


async def test_standbys_are_foreseen_once_the_ranks_are_ordered() -> None:
    """The spawner would take a standby that it starts before the ranks for one of theirs."""
    disk = HungDisk()
    async with staged(disk) as stage:
        stage.ranks.spawn(SpawnRanks(start(), 2), {}, {})
        asyncio.get_running_loop().call_later(0.1, disk.go.set)
        await stage.ranks.foresee(start(), {0: {}, 1: {}}, {0: "", 1: ""})
        assert len(stage.orders.given) == 2


async def test_ranks_that_wait_for_a_disk_can_be_called_off() -> None:
    disk = HungDisk()
    async with staged(disk) as stage:
        stage.ranks.spawn(SpawnRanks(start(), 2), {}, {})
        stage.ranks.call_off()
        stage.ranks.call_off()
        kinds = [e.failure.kind for e in stage.events if isinstance(e, RankExited) and e.failure]
        assert kinds == [FailureKind.STOPPED, FailureKind.STOPPED]
        disk.go.set()
        stage.ranks.spawn(
            SpawnRanks(start(), 3), {}, {}
        )  # the next life is not disturbed by the first
        await stage.until(lambda: len(stage.orders.given) == 2)


async def test_an_error_file_that_hangs_holds_up_no_exit(tmp_path: Path, monkeypatch) -> None:
    hung = threading.Event()
    really = ranks_module.describe

    def slow_for_rank_2(**known: Any) -> Any:
        if known["rank"] == 2 and known["error_file"]:
            hung.wait(LIMIT)
        return really(**known)

    monkeypatch.setattr(ranks_module, "describe", slow_for_rank_2)
    output = RankOutput(LogPlan(log_dir=str(tmp_path)), "job", "default", 2)
    async with staged(output) as stage:
        for child in await spawned(stage):
            end(stage, child, 1)
        await stage.until(lambda: len(stage.events) == 4)
        exits = [event for event in stage.events if isinstance(event, RankExited)]
        assert [event.local_rank for event in exits] == [0, 1]
        assert all(event.failure is not None for event in exits)
    hung.set()
    assert os.path.isdir(output.run_dir)


@pytest.mark.parametrize("error", [KeyError("defect"), NoThread(RuntimeError("too many"))])
async def test_a_death_is_told_without_a_cause(stage: Stage, monkeypatch, error: Exception) -> None:
    """Neither a defect of ours nor a limit of processes keeps the brain from hearing of it."""

    async def no_thread(*_: object, **__: object) -> None:
        raise error

    children = await spawned(stage)
    monkeypatch.setattr(ranks_module, "in_thread", no_thread)
    for child in children:
        end(stage, child, 1)
    await stage.until(lambda: len(stage.events) == 4)
    for event in stage.events[2:]:
        assert isinstance(event, RankExited)
        assert event.failure.exitcode == 1


async def test_ranks_of_a_lost_spawner_are_heard_of_no_more(stage: Stage) -> None:
    children = await spawned(stage)
    end(stage, children[0], -9)
    stage.ranks.drop_all()
    stage.ranks.on_child_message(children[1], Spawned(2, 1, True))
    end(stage, children[1], -9)
    stage.ranks.sweep(1.0)
    assert stage.events[2:] == [RanksSwept(())]


def test_every_variable_of_the_table() -> None:
    made = rank_environment(
        node_context(), start(), 1, {}, {"TORCHELASTIC_ERROR_FILE": "/logs/error.json"}
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
    made = operators | rank_environment(node_context(), start(), 1, operators, {})
    assert "the operator's" not in made.values()


VIRTUAL = node_context(launched(virtual_local_rank=True))
AS_RANK_0 = {"LOCAL_RANK": "0", "RANK": "3"}
STATIC = node_context(launched(node_rank=1), place=Place("static", "head", 29612))


@pytest.mark.parametrize(
    ("node", "environ", "expected"),
    [
        # what the user has set stands, or is inherited
        (node_context(), {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "OMP_NUM_THREADS": "8"},
         {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "OMP_NUM_THREADS": None}),
        (node_context(launched(set_omp_threads=True)), {}, {"OMP_NUM_THREADS": "1"}),
        # the port that was named, not the store's
        (STATIC, {}, {"MASTER_ADDR": "head", "MASTER_PORT": "29612"}),
        (VIRTUAL, {}, AS_RANK_0 | {"CUDA_VISIBLE_DEVICES": "1"}),
        (VIRTUAL, {"CUDA_VISIBLE_DEVICES": "4, 5"}, AS_RANK_0 | {"CUDA_VISIBLE_DEVICES": "5"}),
        (VIRTUAL, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"},
         AS_RANK_0 | {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        (VIRTUAL, {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "6, 7"},
         AS_RANK_0 | {"CUDA_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": "7"}),
        (VIRTUAL, {"CUDA_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": ""},
         AS_RANK_0 | {"CUDA_VISIBLE_DEVICES": "5", "HIP_VISIBLE_DEVICES": None}),
        # HIP's numbers count within ROCR's devices
        (VIRTUAL, {"ROCR_VISIBLE_DEVICES": "4,5"},
         AS_RANK_0 | {"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": None}),
        (VIRTUAL, {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1,0"},
         AS_RANK_0 | {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": None}),
        # names and MIG instances do not depend on the order of devices
        (VIRTUAL, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"},
         AS_RANK_0 | {"CUDA_VISIBLE_DEVICES": "MIG-b", "CUDA_DEVICE_ORDER": None}),
    ],
)  # fmt: skip
def test_what_changes_a_variable(
    node: NodeContext, environ: dict[str, str], expected: dict[str, str | None]
) -> None:
    made = rank_environment(node, start(), 1, environ, {})
    assert {name: made.get(name) for name in expected} == expected


def test_virtual_local_rank_without_a_device_is_a_sentence() -> None:
    with pytest.raises(BadEnvironment, match="local rank 1 has no device"):
        rank_environment(VIRTUAL, start(), 1, {"CUDA_VISIBLE_DEVICES": "3"}, {})
    with pytest.raises(BadEnvironment, match="HIP_VISIBLE_DEVICES=3"):
        rank_environment(VIRTUAL, start(), 1, {"HIP_VISIBLE_DEVICES": "3"}, {})


@pytest.mark.parametrize(
    ("entry", "made"),
    [
        (
            Entrypoint(
                EntryKind.SCRIPT, "t${local_rank}.py", ("--d=${local_rank}", "$HOME", "$$", "$")
            ),
            ("t5.py", ("--d=5", "$HOME", "$", "$")),
        ),
        (
            Entrypoint(EntryKind.COMMAND, "./${local_rank}", ("${local_rank}",)),
            ("./${local_rank}", ("5",)),
        ),
    ],
    ids=["a-script", "a-command"],
)
def test_local_rank_in_words(entry: Entrypoint, made: tuple[str, tuple[str, ...]]) -> None:
    found = rank_entry(entry, 5)
    assert (found.target, found.args) == made
