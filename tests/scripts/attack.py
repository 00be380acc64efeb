"""Strangers and one insider at a job's master, all at once, until standard input ends.

    attack.py PORT TOKEN VICTIM

Prints one JSON object at the end: how often each of them tried. VICTIM is the id of a living node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from elasticrun.wire import messages as m
from elasticrun.wire.auth import AuthClient
from elasticrun.wire.rpc import channel as c
from elasticrun.wire.types import Endpoint, mint_incarnation
from tests.master import raw
from tests.master.people import SPEC, hello

PORT, TOKEN, VICTIM = int(sys.argv[1]), sys.argv[2], sys.argv[3]
MASTER = Endpoint("127.0.0.1", PORT)
CHANCE = random.Random(4711)
JOB = "agents"
BEFORE = (raw.PREFACE + raw.settings() + raw.call(c.ATTEND), raw.PREFACE, b"")
TRIES: Counter[str] = Counter()


def insider(node: str) -> m.Hello:
    """A Hello that is right in all but its purpose."""
    from msgspec.structs import replace

    spec = replace(SPEC, job_id=JOB)
    return replace(hello(node, spec=spec), incarnation=mint_incarnation())


async def noise() -> None:
    """Random bytes, bare or where a message should be."""
    _, writer = await asyncio.open_connection("127.0.0.1", PORT)
    size = CHANCE.choice((1, 9, 100, 5000, 70_000))
    writer.write(CHANCE.choice(BEFORE) + CHANCE.randbytes(size))
    await writer.drain()
    writer.close()


async def dribble() -> None:
    """Half a message, a byte now and then."""
    _, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(BEFORE[0] + raw.message(b"", says=1000)[:12])
    for _ in range(8):
        await asyncio.sleep(0.3)
        writer.write(b"\x0a")
    writer.close()


async def silence() -> None:
    """Streams that say nothing, held for as long as they are let."""
    async with c.open_channel(MASTER) as channel:
        calls = [channel.stream_stream(c.ATTEND)() for _ in range(3)]
        await asyncio.gather(*(call.read() for call in calls))


async def giant() -> None:
    """A message of sixteen times what is allowed."""
    async with c.open_channel(MASTER) as channel:
        call = channel.stream_stream(c.ATTEND)()
        await call.write(b"\0" * (16 * m.MAX_MESSAGE_BYTES))
        await call.read()


async def guess() -> None:
    """A wrong token, as an agent and as a reader."""
    with contextlib.suppress(c.LinkError):
        await c.get_status(MASTER, 5.0, token="guess")
    async with c.open_channel(MASTER) as channel:
        await c.attend(channel).enter(insider(VICTIM), "guess")


async def thief() -> None:
    """Somebody who has the token, proves one node and says that it is another."""
    said = insider("thief")
    async with c.open_channel(MASTER) as channel:
        stream = c.attend(channel)
        who = AuthClient(
            TOKEN, "1", m.Role.AGENT, job_id=JOB, node="thief", incarnation=said.incarnation
        )
        await stream.send(who.knock)
        challenge = await stream.receive()
        assert isinstance(challenge, m.Challenge)
        await stream.send(who.answer(challenge))
        await stream.send(insider(VICTIM))
        await stream.receive()


async def twin() -> None:
    """The same, as the victim itself in a new life."""
    async with c.open_channel(MASTER) as channel:
        await c.attend(channel).enter(insider(VICTIM), TOKEN)


async def flood() -> None:
    """Somebody who has the token and sends as much as goes through."""
    async with c.open_channel(MASTER) as channel:
        stream = c.attend(channel)
        await stream.enter(insider("flood"), TOKEN)

        async def drain() -> None:
            while await stream.receive() is not None:
                pass

        draining = asyncio.create_task(drain())
        for number in range(10**9):
            await stream.send(m.Beat(number))
        await draining


async def again_and_again(attack: Callable[[], Awaitable[Any]]) -> None:
    while True:
        TRIES[attack.__name__] += 1
        with contextlib.suppress(c.LinkError, c.grpc.aio.AioRpcError, OSError, TimeoutError):
            await asyncio.wait_for(attack(), 20)
        await asyncio.sleep(0)


async def main() -> None:
    print("ready", flush=True)
    crowd = [noise, noise, dribble, dribble, silence, silence, giant, guess, guess, thief, flood]
    if len(sys.argv) > 4:
        crowd.append(twin)
    attacks = [asyncio.create_task(again_and_again(attack)) for attack in crowd]
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, over.set)
    await over.wait()
    print(json.dumps(TRIES), flush=True)
    assert attacks
    os._exit(0)  # in the middle of everything, as strangers do


if __name__ == "__main__":
    asyncio.run(main())
