"""What becomes of snapshots while no slot is free, and of what torch still writes at the end."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticrun.snapshots.shm.segment import NONE
from elasticrun.training import Checkpointer
from elasticrun.training.checkpointing.agent_connection import AgentConnection, agent_address
from elasticrun.wire import snapshots as s
from tests.agent.snapshots.test_snapshots import at_most
from tests.further import cases
from tests.harness import program
from tests.training.checkpointing.played import PlayedAgent

New = Callable[..., Checkpointer]


def test_a_snapshot_waits_for_the_agents_word(agent: PlayedAgent, new: New) -> None:
    agent.watermark = False
    ckpt = new(n={"x": 1}, every_steps=1, persist_every_seconds=None, on_busy="wait")
    ckpt.step(1)
    ckpt.step(2)

    def free() -> None:
        agent.until(s.AwaitRoom)
        agent.current[0].segment.watermark = 2
        agent.look()

    thread = threading.Thread(target=free)
    thread.start()
    ckpt.step(3)
    thread.join(240)
    assert (ckpt.stats.snapshots, ckpt.stats.skipped) == (3, 0)
    assert len(agent.of(s.AwaitRoom)) == 1  # asked once, not again and again


def test_a_word_that_comes_too_late_is_no_answer_to_the_next_question(agent: PlayedAgent) -> None:
    agent.watermark = False
    ckpt = Checkpointer("/nowhere", n={"x": 1}, every_steps=1, persist_every_seconds=None)
    ckpt.step(1)
    ckpt.step(2)
    way: Any = ckpt._backend
    line: AgentConnection = way._connection
    assert not line.wait_for_slot(NONE, 0.05)
    agent.current[0].segment.watermark = 2
    agent.look()
    assert line.request(agent.of(s.RankHere)[0], s.Resume)[0].step == -1
    ckpt.close()


def test_children_of_a_rank_know_no_agent(agent: PlayedAgent, tmp_path: Path) -> None:
    for number in (1, 2):  # a later Checkpointer of the same process knows it
        ckpt = Checkpointer(tmp_path, n={"x": 1}, every_steps=1, persist_every_seconds=None)
        ckpt.step(number)
        assert ckpt.stats.snapshots == 1
        assert "ELASTICRUN_SNAPSHOTS" not in os.environ
        ckpt.close()
    assert agent_address() == agent.place(0)
    child = os.fork()
    if not child:
        os._exit(len(agent_address()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_rank_without_room_to_map_a_snapshot_says_so_and_spoils_nothing(
    agent: PlayedAgent, tmp_path: Path
) -> None:
    state = {"x": torch.ones(10 << 20)}
    every: dict[str, Any] = {"every_steps": 1, "persist_every_seconds": None, "on_busy": "wait"}
    ckpt = Checkpointer(tmp_path, state=state, **every)
    ckpt.step(1)
    ckpt.close()
    agent.next_life(1, 1)
    del ckpt
    gc.collect()
    again = Checkpointer(tmp_path, state=state, **every)
    with at_most(64 << 20), pytest.raises(RuntimeError) as caught:
        again.restore()
    assert "step 1 is complete in memory, but this process cannot map" in str(caught.value)
    again.close()
    assert agent.of(s.CannotRestore) == []


def test_what_was_skipped_is_told_once(agent: PlayedAgent, new: New) -> None:
    agent.watermark = False
    ckpt = new(n={"x": 1}, every_steps=1, persist_every_steps=5, slots=2)
    for step in range(1, 5):
        ckpt.step(step)
    agent.until(s.Committed, 2)
    agent.watermark = True
    agent.current[0].segment.watermark = 2
    ckpt.step(5)
    assert (ckpt.stats.skipped, ckpt.stats.persists) == (2, 1)
    assert "skipped 2 snapshots before step 5: " in agent.until(s.Remark)[0].text
    assert [one.count for one in agent.until(s.Skipped, 2)] == [1, 2]


LARGE = 4 << 20
"""Numbers of a tensor whose segment is too large to be allocated within a step."""


def test_training_goes_on_while_memory_for_the_first_snapshot_is_prepared(
    agent: PlayedAgent, new: New
) -> None:
    """With steps that waited for the agent, this test would wait for ever."""
    agent.may_give.clear()
    x = torch.zeros(LARGE)
    ckpt = new(state={"x": x}, every_steps=10, persist_every_seconds=None)
    for step in range(1, 11):
        ckpt.step(step)
    assert (ckpt.stats.snapshots, ckpt.stats.skipped, ckpt.stats.failed) == (0, 0, 0)
    assert len(agent.until(s.NeedSegment)) == 1
    assert not agent.of(s.AwaitSegment)
    agent.may_give.set()
    step = 10
    while not ckpt.stats.snapshots:  # the pages are mapped between two due steps, too
        step += 1
        x.fill_(step)
        ckpt.step(step)
    assert step % 10 == 0
    assert [one.step for one in agent.until(s.Committed)] == [step]
    assert agent.of(s.Skipped) == agent.of(s.Remark) == []
    ckpt.step(step + 10)
    assert ckpt.stats.snapshots == 2


def test_what_must_be_saved_waits_for_the_memory(agent: PlayedAgent, new: New) -> None:
    agent.may_give.clear()
    ckpt = new(state={"x": torch.zeros(LARGE)}, every_steps=1, persist_every_seconds=None)
    ckpt.step(1)
    assert not ckpt.stats.snapshots
    thread = threading.Thread(target=lambda: (agent.until(s.NeedSegment), agent.may_give.set()))
    thread.start()
    assert ckpt.save_now(2)
    thread.join(240)
    assert len(agent.of(s.NeedSegment)) == len(agent.of(s.AwaitSegment)) == 1
    assert [(one.step, one.persist) for one in agent.until(s.Committed)] == [(2, True)]


def test_state_that_changes_while_memory_is_prepared_gets_a_segment_of_its_own(
    agent: PlayedAgent, new: New
) -> None:
    agent.may_give.clear()
    state = {"x": torch.zeros(LARGE)}
    ckpt = new(state=state, every_steps=1, persist_every_seconds=None)
    ckpt.step(1)
    state["y"] = torch.ones(LARGE)
    ckpt.step(2)
    assert len(agent.until(s.NeedSegment)) == 1, "one request at a time"
    agent.may_give.set()
    assert ckpt.save_now(3)
    first, second = agent.of(s.NeedSegment)
    assert second.slot_bytes > first.slot_bytes
    assert agent.until(s.Committed)[0].step == 3


def test_without_memory_training_goes_on(agent: PlayedAgent, new: New) -> None:
    agent.no_segment = "there is no memory"
    ckpt = new(state={"x": torch.zeros(LARGE)}, every_steps=1, persist_every_seconds=None)
    step = 0
    while not ckpt.stats.failed:
        step += 1
        ckpt.step(step)
    ckpt.step(step + 1)
    assert "there is no memory" in ckpt.stats.error
    assert all("there is no memory" in one.reason for one in agent.until(s.SaveFailed, 2))
    assert agent.of(s.Remark) == [], "the master names all ranks in one line"
    assert len(agent.of(s.NeedSegment)) == 1


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"persist_every_seconds": None}, (2, 0)),
        ({}, (3, 2)),
        ({"persist_every_seconds": None, "replicas": 1}, (3, 2)),
        ({"slots": 2}, (2, 0)),
        ({"slots": 4}, (4, 0)),
    ],
)
def test_slots_are_three_where_something_takes_its_time(
    agent: PlayedAgent, new: New, options: dict[str, Any], asked: tuple[int, int]
) -> None:
    ckpt = new(n={"x": 1}, every_steps=1, **options)
    ckpt.step(1)
    need = agent.of(s.NeedSegment)[0]
    assert (need.slots, need.least) == asked


LAST = """
import os, sys, torch, torch.distributed as dist
from elasticrun.training import Checkpointer
folder, wait = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
state = {f"t{i}": torch.ones(1 << 10) for i in range(300)}
ckpt = Checkpointer(f"{folder}/ckpt", state=state, persist_every_steps=1)
ckpt.step(1)
if wait == "close":
    ckpt.close()
if wait != "end":
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("wait", cases(["close", "end", "neither"], kept=["end"]))
def test_the_last_save_of_torch_is_there_or_its_lack_is_said(tmp_path: Path, wait: str) -> None:
    done = program("-c", LAST, str(tmp_path), wait)
    assert not done.returncode, done.stderr
    there = (tmp_path / "ckpt" / "step-000000001" / ".metadata").exists()
    said = "the checkpoint of step 1 was not finished" in done.stderr
    assert there is not said, done.stderr
    assert there or wait == "neither", done.stderr
