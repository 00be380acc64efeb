"""A job trains on while strangers, and one insider, do at its master what they can."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elasticrun.agent.link.link import Link
from elasticrun.agent.link.trust import Trust
from elasticrun.core.events import LinkLost
from elasticrun.master.server import LOG_EVERY
from elasticrun.wire import messages as m
from elasticrun.wire.auth import reader_token
from elasticrun.wire.rpc import channel as c
from elasticrun.wire.types import Endpoint
from tests.agent.link.test_link import Heard
from tests.aio import run
from tests.compat.live import agents, finish, summing
from tests.further import further
from tests.harness import ELASTICRUN, SCRIPTS, World, free_port
from tests.master.people import LIMIT, SPEC, enter, hear, hello

pytestmark = pytest.mark.slow

TOKEN = "known to the nodes and to one insider"
STEPS = 300


@contextmanager
def attacked(world: World, port: int, victim: str, *more: str) -> Iterator[dict[str, int]]:
    """The attack for as long as the block runs; afterwards the counts of what was tried."""
    tried: dict[str, int] = {}
    command = [sys.executable, str(SCRIPTS / "attack.py"), str(port), TOKEN, victim, *more]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=world.environment()
    ) as attack:
        assert attack.stdin is not None
        assert attack.stdout is not None
        assert attack.stdout.readline() == "ready\n"
        try:
            yield tried
        finally:
            attack.stdin.close()
            tried.update(json.loads(attack.stdout.readline() or "{}"))


def job_hello(node: str) -> m.Hello:
    from msgspec.structs import replace

    return hello(node, spec=replace(SPEC, job_id="agents"))


async def watch(port: int, done: asyncio.Event) -> list[m.JobStatus]:
    """Every page until `done`, while each beat of one more node has its echo."""
    endpoint, pages = Endpoint("127.0.0.1", port), []
    async with c.open_channel(endpoint) as channel:
        stream = c.attend(channel)
        assert isinstance(await enter(stream, job_hello("observer"), TOKEN), m.Welcome)
        number = 0
        while not done.is_set():
            number += 1
            await stream.send(m.Beat(number))
            while await hear(stream) != m.Echo(number):
                pass
            pages.append(await c.get_status(endpoint, LIMIT, token=reader_token(TOKEN)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), 0.1)
    return pages


def test_a_job_trains_on_under_attack(world: World) -> None:
    port = free_port()
    env = {"ELASTICRUN_TOKEN": TOKEN}
    nodes = ("--node-id=a", "--node-id=b")
    jobs = [agents(world, ELASTICRUN, 1, "2", port, node, env=env)[0] for node in nodes]
    peers = summing(world, 2)

    async def train() -> list[m.JobStatus]:
        done = asyncio.Event()
        watching = asyncio.create_task(watch(port, done))
        for peer in peers:
            peer.order("steps", count=STEPS, text=".")
        for peer in peers:
            await asyncio.to_thread(world.hub.word, peer, "done", 2 * LIMIT, what="steps")
        done.set()
        return await watching

    began = time.monotonic()
    with attacked(world, port, "a") as tried:
        pages = run(train())
    tellings = 1 + int((time.monotonic() - began) / LOG_EVERY)
    assert all(count > 0 for count in tried.values())
    assert len(tried) == 7
    # No node of the job was ever doubted, no round began, nothing was charged.
    seen = {(n.node, n.state) for page in pages for n in page.nodes if n.node in ("a", "b")}
    assert seen == {("a", "alive"), ("b", "alive")}
    assert {(page.phase, page.restart_count) for page in pages} == {("running", 0)}
    assert len({page.round for page in pages}) == 1
    assert sum(job.stdout.count(".") for job in jobs) == 2 * STEPS
    finish(peers, *jobs)
    assert len(world.hub.peers) == 2
    console = "".join(launched.stderr for launched in jobs)
    assert console.count("refused a") <= 4 * tellings  # whatever the attempts
    assert "defect" not in console
    assert TOKEN not in console


@further(
    "test_a_job_trains_on_under_attack",
    "master/test_strangers::test_a_thousand_streams_that_say_nothing_hold_up_nobody",
)
def test_an_honest_link_under_attack_is_never_lost(world: World) -> None:
    """The link of an agent, beats and all, from before the attack to after it."""
    port = free_port()
    (launched,) = agents(world, ELASTICRUN, 1, "1", port, env={"ELASTICRUN_TOKEN": TOKEN})
    (peer,) = world.hub.ranks(1)

    async def live() -> Heard:
        heard = Heard(Endpoint("127.0.0.1", port), lambda: job_hello("spare"))
        link = Link(heard, Trust(TOKEN))
        link.start()
        await asyncio.wait_for(link.connected.wait(), LIMIT)
        with attacked(world, port, "spare", "twin"):
            peer.order("steps", count=100)
            await asyncio.to_thread(world.hub.word, peer, "done", what="steps")
        await link.close(5.0)
        return heard

    heard = run(live())
    assert heard.count(LinkLost) == 0
    assert not heard.orders(m.Refused)
    finish([peer], launched)
