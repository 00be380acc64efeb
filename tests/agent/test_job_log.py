"""What a user reads while a job runs: restarts, waits, and who looks for the cause."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec import structs

from elasticrun.agent import job_log
from elasticrun.agent.job_log import NOTHING, OperatorMessages, RoundLog, directed
from elasticrun.agent.shutdown import outcome_sentence
from elasticrun.config import EXIT_FAILED, EXIT_SAVED
from elasticrun.core.events import Exit, Note
from elasticrun.core.reasons import (
    Dead,
    LostContact,
    MasterUnmet,
    MoreMayJoin,
    NodeLost,
    NodesNeeded,
    NoMaster,
    NoMasterFor,
    RankFailed,
    Said,
    StoreComing,
    text,
    text_and_code as by_master,
    unreachable_side,
)
from elasticrun.core.worker.leaving import ending
from elasticrun.core.worker.states import GroupStatus, State
from elasticrun.wire.messages import Recovery, RoundInfo, Start
from elasticrun.wire.types import Endpoint, RoundName
from tests.agent.configs import STANDALONE, launched
from tests.starts import changed

FIRST = Start(
    RoundInfo(RoundName(1, 1, "n"), 2, 0), 0, 1, 0, 0, 2, Endpoint("h", 1), host_store=False
)
DEAD = "node b is dead: its connection broke and ranks of other nodes lost it"
BAD_LUCK = "rank 3 on node b: ValueError: bad luck"


class Told:
    """A log of rounds, and its lines."""

    def __init__(self, *, several: bool = True, first: Start | None = FIRST) -> None:
        self.lines: list[str] = []
        self.log = RoundLog(most=3, several=several, log=self.lines.append)
        if first is not None:
            self.log.log_start(first)

    def restart(self, start: Start, *, step: int | None = None, repeated: int = -1) -> list[str]:
        """Ranks run again after 0.41 s and train after 1.2 s; the lines of that."""
        self.lines.clear()
        self.log.log_start(start)
        self.recovers(start)
        if step is not None:
            for _ in range(2):  # ranks
                self.log.resumed(step, "memory" if step else NOTHING)
        self.recovers(start, 1.2, repeated)
        self.recovers(start, 1.2, repeated)  # told again
        return self.lines

    def recovers(self, start: Start, first_step: float = 0.0, repeated: int = -1) -> None:
        self.log.recovered(Recovery(start.round, 0.41, first_step, repeated))


def after(start: Start, **more: object) -> Start:
    """The next round."""
    number = start.round.number + 1
    return changed(start, RoundName(1, number, "n"), **more)


def test_a_job_of_one_node_begins_without_a_word() -> None:
    assert Told(several=False).lines == []
    assert Told().lines == ["the job starts: 1 node, world size 2"]


def test_a_join() -> None:
    both = after(FIRST, group_world_size=2, world_size=4, why="node b joined")
    assert Told().restart(both) == [
        "node b joined; restarting the ranks with 2 nodes, world size 4 (no restart used)",
        "restarted in 0.41 s",
        "first step after 1.20 s",
    ]
    newcomer = Told(first=None)
    newcomer.log.log_start(both)
    newcomer.recovers(both)
    newcomer.log.resumed(230, "memory")
    newcomer.recovers(both, 1.2, 3)
    assert newcomer.lines == ["this node joined: 2 nodes, world size 4", "resumed at step 230"]


def test_a_lost_node() -> None:
    told = Told(first=changed(FIRST, group_world_size=2, world_size=4))
    assert told.restart(after(FIRST, why=DEAD), step=1200, repeated=4) == [
        f"{DEAD}; restarting the ranks with 1 node, world size 2 (no restart used)",
        "restarted in 0.41 s",
        "first step after 1.20 s, resumed at step 1200, 4 steps repeated",
    ]


def test_a_failure() -> None:
    told = Told()
    told.log.resumed(0, NOTHING)
    again = after(FIRST, restart_count=1, why=BAD_LUCK)
    assert told.restart(again, step=1200, repeated=0) == [
        f"restarted in 0.41 s: restart 1 of 3 ({BAD_LUCK})",
        "first step after 1.20 s, resumed at step 1200, 0 steps repeated",
    ]
    more = after(again, restart_count=2, group_world_size=2, world_size=4, why="")
    assert told.restart(more, step=0, repeated=1) == [
        "restarted in 0.41 s: restart 2 of 3, with 2 nodes, world size 4",
        "first step after 1.20 s, from the beginning, 1 step repeated",
    ]


def test_a_rank_that_goes_on_after_the_master_has_heard_of_a_first_step() -> None:
    """A rank of another node was sooner."""
    told = Told()
    again = after(FIRST, restart_count=1, why=BAD_LUCK)
    told.restart(again, repeated=5)
    told.log.resumed(1200, "storage")
    assert told.lines[1:] == ["first step after 1.20 s, 5 steps repeated", "resumed at step 1200"]


def test_a_restart_whose_master_dies_is_told_without_figures() -> None:
    """The next master has not seen its beginning."""
    told = Told()
    told.log.linked_again()
    again = after(FIRST, restart_count=1, why=BAD_LUCK)
    told.lines.clear()
    told.log.log_start(again)
    told.log.linked_again()
    told.log.linked_again()
    assert told.lines == [f"restarted: restart 1 of 3 ({BAD_LUCK})"]


def test_ranks_that_die_before_they_train_have_no_first_step() -> None:
    again = after(FIRST, restart_count=1, why="rank 0: exit code 7")
    told = Told()
    told.lines.clear()
    told.log.log_start(again)
    told.recovers(again)
    told.log.resumed(5, "memory")
    assert told.lines == ["restarted in 0.41 s: restart 1 of 3 (rank 0: exit code 7)"]
    more = after(again, restart_count=2, why="rank 0: exit code 7")
    assert told.restart(more) == [
        "restarted in 0.41 s: restart 2 of 3 (rank 0: exit code 7)",
        "first step after 1.20 s",
    ]


NEEDED = NodesNeeded(1, 2, None)
ALONE = GroupStatus(State.JOINED, text(NEEDED), None, (), 0, None, "", 700.0, NEEDED)
ONE_DIED = NodesNeeded(1, 2, Said("node b is dead"))
LAST_CALL = MoreMayJoin(4)
SPARE = "spare: the round is full, with 2 nodes; replaces a lost node"

LEAVES = replace(
    ALONE,
    state=State.RUNNING,
    reason="received SIGINT: this node leaves when its ranks have saved a step",
    wait_ends=131.0,
)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (ALONE, "rendezvous host:29400: 1 of 2 nodes, 593 s left"),
        (replace(ALONE, wait_ends=None), "rendezvous host:29400: 1 of 2 nodes"),
        (
            replace(ALONE, reason=text(ONE_DIED), why=ONE_DIED),
            "rendezvous host:29400: 1 of 2 nodes (node b is dead), 593 s left",
        ),
        (
            replace(ALONE, reason=text(LAST_CALL), why=LAST_CALL, wait_ends=110.0),
            "rendezvous host:29400: last call: up to 4 nodes may join, 3 s left",
        ),
        (replace(ALONE, reason=SPARE, why=Said(SPARE), wait_ends=None), SPARE),
        (
            replace(ALONE, state=State.ENDING, reason="received SIGTERM", wait_ends=135.0),
            "received SIGTERM: waiting for the ranks to exit; they are killed in 28 s",
        ),
        (
            replace(ALONE, state=State.STOPPING, reason="node c joined", wait_ends=None),
            "node c joined: waiting for the ranks to exit",
        ),
        (LEAVES, f"{LEAVES.reason}, in 24 s at most; a second signal ends it at once"),
        (
            replace(LEAVES, reason="no master answers", master_lost="no master answers"),
            "no master answers; this node leaves, in 24 s at most; a second signal ends it at once",
        ),
    ],
)
def test_in_words(status: GroupStatus, said: str) -> None:
    assert job_log.in_words(status, "host:29400", 107.0) == said


async def test_a_wait_is_told_again_and_a_short_one_never(monkeypatch) -> None:
    for name in ("LOG_SOON_AFTER", "LOG_AGAIN_AFTER"):
        monkeypatch.setattr(job_log, name, 0.0)
    monkeypatch.setattr(job_log, "LOG_LATE_AFTER", 3600.0)
    said: list[str] = []
    twice = asyncio.Event()

    def say(status: GroupStatus) -> None:
        said.append(job_log.in_words(status, "host:1", 0.0))
        if len(said) == 2:
            twice.set()

    waits = job_log.LongWaits(say)
    waits.update(
        replace(ALONE, reason="the store for the next round is being prepared", why=StoreComing())
    )
    waits.update(ALONE)
    waits.update(replace(ALONE, wait_ends=3.0))  # the same wait
    await twice.wait()
    waits.update(replace(ALONE, state=State.RUNNING))
    told = len(said)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(said) == told
    assert said[:2] == ["rendezvous host:1: 1 of 2 nodes, 3 s left"] * 2


@pytest.mark.parametrize(("seconds", "told"), [(1.0, []), (0.0, [LEAVES])])
async def test_a_node_that_has_left_within_a_second_says_nothing_before(
    seconds: float, told: list[GroupStatus], monkeypatch
) -> None:
    monkeypatch.setattr(job_log, "LOG_AGAIN_AFTER", 3600.0)
    monkeypatch.setattr(job_log, "LOG_LEAVING_AFTER", seconds)
    said: list[GroupStatus] = []
    waits = job_log.LongWaits(said.append)
    waits.update(LEAVES)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waits.update(replace(ALONE, state=State.ENDING, reason="received SIGINT"))
    waits.close()
    assert said == told


@pytest.mark.parametrize("stays", [True, False])
async def test_a_master_is_missed_only_where_it_stays_away(
    *, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "LOG_SOON_AFTER", 0.0)
    said: list[Note] = []
    lost = replace(ALONE, state=State.RUNNING, master_lost="no master answers: reset")
    note = Note("no master answers (reset)", "warning", why=NoMaster("reset"))
    waits = job_log.LongWaits(lambda _: None)
    waits.noted(note, lost, said.append)
    waits.update(lost)
    assert said == []
    if not stays:
        waits.update(replace(lost, master_lost=""))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert said == [note] * stays
    back = Note("the master answers again", "warning")
    waits.noted(back, lost, said.append)
    waits.noted(note, replace(lost, state=State.HOLDING), said.append)
    assert said[-2:] == [back, note], "it ends for it"


def test_who_is_told_to_leave_reads_what_was_saved_and_how_to_go_on() -> None:
    saved = Exit(EXIT_SAVED, "received SIGINT", (), 2, 1180)
    ended = "ended by SIGINT (2); the ranks have been shut down"
    again = "run the same command again to continue from it"
    assert outcome_sentence(saved, "/ckpt") == f"{ended}; step 1180 is saved in /ckpt: {again}"
    assert (
        outcome_sentence(structs.replace(saved, saved=-1))
        == f"{ended}; the last step is saved: {again}"
    )
    lost = structs.replace(saved, code=EXIT_FAILED, saved=-1)
    assert outcome_sentence(lost) == ended, "without a Checkpointer"
    assert outcome_sentence(lost, "/ckpt") == (
        f"{ended}; the last steps may not be saved: the same command continues from the newest "
        "checkpoint in /ckpt"
    )


def test_a_master_that_does_not_answer() -> None:
    unmet = MasterUnmet("h:1", 60.0, "reset")
    assert directed(text(unmet), unreachable_side(unmet), "h:1").endswith(
        ": elasticrun doctor --rdzv-endpoint=h:1"
    )
    lost = ending(EXIT_FAILED, NoMasterFor(600.0))
    assert lost.reason == "no master answered for 600 s"
    assert outcome_sentence(lost) == f"{lost.reason}; to find out why, run here: elasticrun doctor"

    luck = RankFailed(3, "b", "ValueError: bad luck")
    assert directed(text(luck), unreachable_side(luck)) == BAD_LUCK, "other ends name no doctor"


def test_the_brains_own_warning_is_directed_where_it_is_printed() -> None:
    """What is for people alone: scripts and pages have the brain's sentence as it is."""
    messages = OperatorMessages(launched(), STANDALONE, SimpleNamespace(dial="h:1"))
    said = "no master answers (reset); this node goes on for 60 s"
    assert messages.directed(Note(said, "warning", why=NoMaster("reset"))) == (
        f"{said}; to find out why, run here: elasticrun doctor --rdzv-endpoint=h:1"
    )
    assert messages.directed(Note(said)) == said


def test_a_node_that_is_not_heard() -> None:
    told = Told(first=changed(FIRST, group_world_size=2, world_size=4))
    why, code = by_master(NodeLost("b", Dead(LostContact("broken", 5.0))))
    assert why == "node b is dead: its connection broke and it sent nothing for 5.0 s"
    assert told.restart(after(FIRST, why=why, code=code))[0] == (
        f"{why}; restarting the ranks with 1 node, world size 2 (no restart used); to find out why,"
        " run on that node: elasticrun doctor"
    )
