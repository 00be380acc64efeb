"""`Join`: who has a join code gets what a node needs, and nobody else."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from elasticrun.config import JoinCommand
from elasticrun.master import joining
from elasticrun.wire import auth, messages as m
from elasticrun.wire.auth import (
    CODE_EXPIRED,
    CODE_WRONG,
    JOIN_CODE_LIFE,
    NO_CODES,
    AuthClient,
    JoinAnswer,
    JoinCode,
    code_secret,
    join_code,
    operator_token,
    parse_code,
    unseal,
)
from elasticrun.wire.rpc.channel import LinkError, ask_for, ask_to_join
from elasticrun.wire.types import loads
from tests.master.people import LIMIT, Served, serving

TOKEN = "a secret of the job that nobody guesses"
COMMAND = JoinCommand(("--nnodes=1:4", "--tee", "3", "train.py", "--lr", "1"), 3, "/code")


@asynccontextmanager
async def job(token: str = TOKEN, command: JoinCommand | None = COMMAND) -> AsyncIterator[Served]:
    made = joining.Joining("job", token, command)
    operator = operator_token(token or "minted")
    async with serving(token=token, operator=operator, joining=made) as served:
        yield served


async def joined(served: Served, code: JoinCode) -> JoinAnswer:
    guest = AuthClient.with_code(code, "1")
    reply = await ask_to_join(served.endpoint, LIMIT, guest)
    assert reply.ok, reply.reason
    assert TOKEN not in reply.body
    answer: JoinAnswer = loads(unseal(code.secret, guest.nonces, reply.body), JoinAnswer)
    return answer


async def refused(served: Served, code: JoinCode) -> str:
    with pytest.raises(LinkError) as told:
        await ask_to_join(served.endpoint, LIMIT, AuthClient.with_code(code, "1"))
    return str(told.value)


async def test_a_code_yields_what_a_node_needs(caplog: pytest.LogCaptureFixture) -> None:
    async with job() as served:
        with caplog.at_level(logging.WARNING, "elasticrun"):
            answer = await joined(served, join_code(TOKEN, time.time()))
        assert answer == JoinAnswer("job", TOKEN, COMMAND.words, 3, "/code")
        assert "127.0.0.1 used a join code and received the job's token" in caplog.text
        assert TOKEN not in caplog.text
        await served.is_well(TOKEN)


async def test_the_next_master_of_the_job_knows_the_code_too() -> None:
    code = join_code(TOKEN, time.time())
    for _ in range(2):
        async with job() as served:
            assert (await joined(served, code)).token == TOKEN


async def test_other_codes_and_old_ones_are_refused() -> None:
    now = time.time()
    async with job() as served:
        assert await refused(served, join_code("another token", now)) == CODE_WRONG
        good = join_code(TOKEN, now)
        # A longer life would take the secret of that time, which only the token yields.
        assert await refused(served, JoinCode(good.until + 60, good.secret)) == CODE_WRONG
        assert await refused(served, join_code(TOKEN, now - JOIN_CODE_LIFE - 1)) == CODE_EXPIRED
        assert (await joined(served, good)).token == TOKEN


async def test_a_job_without_a_token_and_a_master_without_a_command() -> None:
    async with job(token="") as served:
        assert await refused(served, join_code("", time.time())) == NO_CODES
    async with job(command=None) as served:
        guest = AuthClient.with_code(join_code(TOKEN, time.time()), "1")
        reply = await ask_to_join(served.endpoint, LIMIT, guest)
        assert (reply.ok, reply.reason) == (False, joining.NO_COMMAND)


async def test_an_operator_mints_a_code_and_a_reader_does_not() -> None:
    async with job() as served:
        asked = (served.endpoint, LIMIT, m.Request("invite"))
        reply = await ask_for(*asked, token=operator_token(TOKEN), role=m.Role.OPERATOR)
        assert (await joined(served, parse_code(reply.body))).token == TOKEN
        with pytest.raises(LinkError, match="only holders of the job"):
            await ask_for(*asked, token=auth.reader_token(TOKEN))


async def test_a_flood_of_tries_is_refused_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "MAX_TRIES", 3.0)
    monkeypatch.setattr(joining, "TRIES_PER_SECOND", 0.0)
    wrong = JoinCode(int(time.time()) + 60, code_secret("guessed", 1))
    async with job() as served:
        for _ in range(3):
            assert await refused(served, wrong) == CODE_WRONG
        good = join_code(TOKEN, time.time())
        assert "too many machines have tried" in await refused(served, good)
        monkeypatch.setattr(joining, "TRIES_PER_SECOND", 1e6)
        assert (await joined(served, good)).token == TOKEN
