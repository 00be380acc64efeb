"""Requests of readers and operators: who is answered, and what the loop does with what it waits
for."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import msgspec
import pytest

from elasticrun.core.events import JobEffect, JobEvent, Replied, Requested
from elasticrun.core.sight.picture import Picture
from elasticrun.master import loop as loops
from elasticrun.wire import messages as m
from elasticrun.wire.auth import (
    MASTER_WRONG,
    OPERATOR_WANTED,
    TOKEN_WANTED,
    operator_token,
    reader_token,
)
from elasticrun.wire.rpc.channel import LinkError, ask_for
from tests.master.people import LIMIT, Recorder, Served, serving, status

TOKEN = "a secret of the job that nobody guesses"
MINTED = operator_token("what a master without a token has minted")
READER, OPERATOR = m.Role.READER, m.Role.OPERATOR


def answering() -> Recorder:
    brain = Recorder()

    def on(event: JobEvent) -> list[JobEffect]:
        if not isinstance(event, Requested):
            return []
        reply = m.Reply(True, f"{event.request.verb} for {event.request.who}")
        return [Replied(event.number, reply), Replied(event.number + 1000, reply)]

    brain.on = on
    return brain


async def _ask(served: Served, verb: str, token: str, role: m.Role) -> str:
    asked = m.Request(verb, who="me@here")
    try:
        reply = await ask_for(served.endpoint, LIMIT, asked, token=token, role=role)
    except LinkError as refused:
        return f"{refused}" if refused.rejected else f"{refused} for the moment"
    return reply.reason


@pytest.mark.parametrize(
    ("job", "verb", "token", "role", "told"),
    [
        (TOKEN, "stacks", reader_token(TOKEN), READER, ""),
        (TOKEN, "stop", operator_token(TOKEN), OPERATOR, ""),
        (TOKEN, "picture", operator_token(TOKEN), OPERATOR, ""),
        ("", "stop", MINTED, OPERATOR, ""),
        ("", "picture", MINTED, OPERATOR, ""),
        (TOKEN, "stop", reader_token(TOKEN), READER, OPERATOR_WANTED),
        (TOKEN, "stop", reader_token(TOKEN), OPERATOR, MASTER_WRONG),
        (TOKEN, "stop", TOKEN, OPERATOR, MASTER_WRONG),
        (TOKEN, "stop", "", OPERATOR, OPERATOR_WANTED),
        (TOKEN, "picture", "", READER, TOKEN_WANTED),
        (TOKEN, "picture", operator_token(TOKEN), READER, MASTER_WRONG),
        ("", "stop", "", OPERATOR, OPERATOR_WANTED),
        ("", "stop", operator_token(""), OPERATOR, MASTER_WRONG),
        ("", "stop", "", READER, OPERATOR_WANTED),
        ("", "stacks", "", READER, OPERATOR_WANTED),
    ],
)
async def test_who_is_answered(job: str, verb: str, token: str, role: m.Role, told: str) -> None:
    brain = answering()
    operator = operator_token(job) if job else MINTED
    async with serving(brain, token=job, operator=operator) as served:
        assert await _ask(served, verb, token, role) == (told or f"{verb} for me@here")
        heard = [event for event in brain.events if isinstance(event, Requested)]
        assert bool(heard) is not bool(told)


async def test_an_answer_has_a_limit_and_so_has_the_number_of_those_who_wait() -> None:
    async with serving() as served:
        with patch.object(loops, "REQUEST_LIMIT", 0.01):
            late = await served.loop.request(m.Request("picture"))
        assert not late.ok
        assert "did not answer within" in late.reason
        waiting = [
            asyncio.ensure_future(served.loop.request(m.Request("picture")))
            for _ in range(loops.MAX_REQUESTS)
        ]
        await asyncio.sleep(0)
        assert "try again" in (await served.loop.request(m.Request("picture"))).reason
        waiting[0].cancel()  # its reader has gone, and leaves its place to another
        await asyncio.gather(waiting[0], return_exceptions=True)
        waiting.append(asyncio.ensure_future(served.loop.request(m.Request("picture"))))
        await asyncio.sleep(0)
        served.loop.stop_sending()
        assert all("another master" in one.reason for one in await asyncio.gather(*waiting[1:]))


async def test_a_picture_has_the_status_with_what_the_loop_counts() -> None:
    brain = Recorder()
    picture = msgspec.json.encode(Picture(status())).decode()
    brain.on = lambda event: (
        [Replied(event.number, m.Reply(True, "", picture))] if isinstance(event, Requested) else []
    )
    async with serving(brain) as served:
        served.loop.figures.began -= 100.0
        reply = await served.loop.request(m.Request("picture"))
        assert msgspec.json.decode(reply.body, type=Picture).status.age >= 100.0


async def test_a_request_that_the_brain_cannot_take_is_answered() -> None:
    brain = Recorder()

    def on(event: JobEvent) -> list[JobEffect]:
        if isinstance(event, Requested):
            raise KeyError("nobody")
        return []

    brain.on = on
    async with serving(brain) as served:
        reply = await asyncio.wait_for(served.loop.request(m.Request("exclude", "b")), LIMIT)
    assert not reply.ok
    assert "a bug in elasticrun" in reply.reason
