"""A master that is elsewhere now: neither a dial that hangs nor a session that stands keeps the
link from it."""

from __future__ import annotations

import asyncio
import socket

from elasticrun.core.events import LinkLost, Ordered
from elasticrun.wire.messages import Welcome
from elasticrun.wire.types import Endpoint
from tests.agent.link.test_link import hello, linked
from tests.harness import LIMIT
from tests.master.people import SPEC, serving

OURS = hello(spec=SPEC)


async def test_a_dial_that_hangs_is_given_up_for_the_new_place(monkeypatch) -> None:
    """A host that is frozen takes connections and never answers: nobody waits for it."""
    monkeypatch.setattr("elasticrun.agent.link.link.WELCOME_LIMIT", 10 * LIMIT)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = Endpoint(*mute.getsockname())
        async with linked(where, OURS) as (link, heard), serving() as master:
            await asyncio.to_thread(mute.accept)  # it has dialled
            heard.dial = master.endpoint
            link.nudge()
            await heard.until(lambda _: bool(heard.orders(Welcome)))


async def test_a_session_that_stands_is_left_for_the_new_place(monkeypatch) -> None:
    monkeypatch.setattr("elasticrun.agent.link.session.ECHO_LIMIT", LIMIT)
    async with serving() as old, serving() as new:
        where = old.endpoint
        async with linked(where, OURS) as (link, heard):
            await heard.until(lambda _: len(heard.orders(Welcome)) == 1)
            heard.dial = new.endpoint
            link.nudge()
            await heard.until(lambda _: len(heard.orders(Welcome)) == 2)
            assert heard.count(LinkLost) == 0
            assert isinstance(heard.events[-2], Ordered)
            assert new.servicer.attached == 1


async def test_a_nudge_without_a_new_place_changes_nothing(monkeypatch) -> None:
    monkeypatch.setattr("elasticrun.agent.link.session.ECHO_LIMIT", LIMIT)
    async with serving() as master, linked(master.endpoint, OURS) as (link, heard):
        await heard.until(lambda _: len(heard.orders(Welcome)) == 1)
        link.nudge()
        await master.is_well()
        assert len(heard.orders(Welcome)) == 1
        assert heard.count(LinkLost) == 0
