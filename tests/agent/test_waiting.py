"""What users are told of a wait: what for, and how long it may last."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from elasticrun.agent import node as waiting
from elasticrun.core.worker.states import GroupStatus, State

ALONE = GroupStatus(State.JOINED, "waiting for nodes: 1 of 2 nodes", None, (), 0, None, "", 700.0)
DEAD = "waiting for nodes: 1 of 2 nodes (node b is dead)"
SPARE = "spare: the round is full, with 2 nodes; takes the place of a node that is lost"

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
            replace(ALONE, reason=DEAD),
            "rendezvous host:29400: 1 of 2 nodes (node b is dead), 593 s left",
        ),
        (
            replace(ALONE, reason="last call: up to 4 nodes may join", wait_ends=110.0),
            "rendezvous host:29400: last call: up to 4 nodes may join, 3 s left",
        ),
        (replace(ALONE, reason=SPARE, wait_ends=None), SPARE),
        (
            replace(ALONE, state=State.ENDING, reason="received SIGTERM", wait_ends=135.0),
            "received SIGTERM: waiting for the ranks to end; killed in 28 s",
        ),
        (
            replace(ALONE, state=State.STOPPING, reason="node c joined", wait_ends=None),
            "node c joined: waiting for the ranks to end",
        ),
        (LEAVES, f"{LEAVES.reason}, in 24 s at most; a second signal ends it at once"),
        (
            replace(LEAVES, reason="no master answers", master_lost="no master answers"),
            "no master answers; this node leaves, in 24 s at most; a second signal ends it at once",
        ),
    ],
)
def test_in_words(status: GroupStatus, said: str) -> None:
    assert waiting.in_words(status, "host:29400", 107.0) == said


def test_a_wait_is_told_again_and_a_short_one_never(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOON", "AGAIN"):
        monkeypatch.setattr(waiting, name, 0.0)
    monkeypatch.setattr(waiting, "LATE", 3600.0)

    async def waits() -> list[str]:
        said: list[str] = []
        twice = asyncio.Event()

        def say(line: str) -> None:
            said.append(line)
            if len(said) == 2:
                twice.set()

        waits = waiting.LongWaits(lambda: "host:1", say, lambda: 0.0)
        waits.look(replace(ALONE, reason="the store for the next round is being made ready"))
        waits.look(ALONE)
        waits.look(replace(ALONE, wait_ends=3.0))  # the same wait
        await twice.wait()
        waits.look(replace(ALONE, state=State.RUNNING))
        told = len(said)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(said) == told
        return said[:2]

    assert asyncio.run(waits()) == ["rendezvous host:1: 1 of 2 nodes, 3 s left"] * 2


def test_a_node_that_has_left_within_a_second_says_nothing_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "AGAIN", 3600.0)

    async def told(seconds: float) -> list[str]:
        monkeypatch.setattr(waiting, "LEAVING", seconds)
        said: list[str] = []
        waits = waiting.LongWaits(lambda: "host:1", said.append, lambda: 107.0)
        waits.look(LEAVES)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waits.look(replace(ALONE, state=State.ENDING, reason="received SIGINT"))
        waits.close()
        return said

    assert asyncio.run(told(1.0)) == []
    assert asyncio.run(told(0.0)) == [waiting.in_words(LEAVES, "host:1", 107.0)]
