"""Whom an agent follows: a master that proves the token, over TLS that fits; and nobody else, but
for that no running job ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticrun.agent.link import answering
from elasticrun.agent.link.trust import Trust, trust_of, why_unusable, with_token
from elasticrun.config import EXIT_FAILED, Identity, Place, Tls
from elasticrun.core.events import LinkBack, LinkLost
from elasticrun.wire import messages as m
from elasticrun.wire.auth import AuthClient
from elasticrun.wire.rpc import channel as c, protobuf
from elasticrun.wire.types import Endpoint
from tests import aio
from tests.agent.configs import JOB, launched
from tests.agent.link.test_link import Heard, linked, rude
from tests.certificates import Authority
from tests.master import people
from tests.master.people import LIMIT, serving
from tests.wire.test_channel import held_port
from tests.wire.test_tls import raw

TOKEN = "what all nodes of the job know"
Files = Mapping[str, Tls]


@contextlib.asynccontextmanager
async def trusting(endpoint: Endpoint, trust: Trust) -> AsyncIterator[Heard]:
    async with linked(endpoint, people.hello(), trust=trust) as (_, heard):
        yield heard


async def refusal(endpoint: Endpoint, trust: Trust) -> m.Refused:
    async with trusting(endpoint, trust) as heard:
        await heard.until(lambda _: bool(heard.orders(m.Refused)))
        assert heard.count(LinkBack) == 0
        return heard.orders(m.Refused)[0]


# ---------------------------------------------------------------- the token


async def test_a_master_that_knows_the_token_is_followed() -> None:
    async with serving(token=TOKEN) as served, trusting(served.endpoint, Trust(TOKEN)) as heard:
        await heard.until(lambda events: LinkBack() in events)


@pytest.mark.parametrize(
    ("masters", "ours", "said"),
    [
        (TOKEN, "", "set ELASTICRUN_TOKEN or --token-file"),
        ("", TOKEN, "the master has none, so it is not followed"),
        ("another", TOKEN, "does not know this job's token"),
    ],
)
async def test_at_first_contact_it_is_one_sentence(masters: str, ours: str, said: str) -> None:
    async with serving(token=masters) as served:
        refused = await refusal(served.endpoint, Trust(ours))
        assert refused.exit_code == EXIT_FAILED
        assert said in refused.reason
        assert TOKEN not in refused.reason
        assert not served.brain.events


WELCOME = m.Welcome(m.PROTOCOL_VERSION, "1", "job", 99, 1.0, 600.0, "")
IMPOSTURES: Mapping[str, m.Order] = {
    "refuses": m.Refused("give up", 1),
    "challenges": m.Challenge(m.PROTOCOL_VERSION, "1", 1, b"n" * 32, b"x" * 32),
    "has-no-token": m.Challenge(m.PROTOCOL_VERSION, "1", 1, b"n" * 32, b""),
    "welcomes": WELCOME,
    "ends-the-job": m.End(0, "all is well", ()),
}


async def _impostor(port: int, answer: m.Order, tries: int) -> list[m.Report]:
    """Somebody on the master's port who answers all that is said so, until that many messages came:
    these."""
    said: list[m.Report] = []
    enough = asyncio.Event()

    async def attend(context: Any) -> None:
        while (data := await context.read()) is not c.grpc.aio.EOF:
            said.append(protobuf.report_from_wire(data))
            await context.write(protobuf.order_to_wire(answer))
            if len(said) >= tries:
                enough.set()

    server = c.make_server(attend, attend, max_calls=100)
    c.listen(server, "127.0.0.1", port)
    await server.start()
    await asyncio.wait_for(enough.wait(), LIMIT)
    await server.stop(None)
    return said


@pytest.mark.parametrize("answer", IMPOSTURES.values(), ids=IMPOSTURES)
def test_a_running_job_is_not_ended_by_who_takes_the_masters_port(answer: m.Order, caplog) -> None:
    """Nor is it told anything but knocks: no proof, no Hello. When the master is back, all is."""

    async def run(port: int) -> None:
        async with serving(token=TOKEN, port=port) as served:
            started = trusting(served.endpoint, Trust(TOKEN))
            heard = await started.__aenter__()
            await heard.until(lambda events: LinkBack() in events)
        await heard.until(lambda _: heard.count(LinkLost) == 1)
        said = await _impostor(port, answer, tries=3)
        async with serving(token=TOKEN, port=port):
            await heard.until(lambda _: heard.count(LinkBack) == 2)
            await started.__aexit__(None, None, None)
        assert {type(report) for report in said} == {m.Knock}
        assert not heard.orders(m.Refused)
        assert not heard.orders(m.End)
        assert all(welcome.term != WELCOME.term for welcome in heard.orders(m.Welcome))

    with caplog.at_level(logging.WARNING, "elasticrun"), held_port() as port:
        aio.run(run(port))
    assert len([line for line in caplog.messages if "the ranks keep running" in line]) == 1


@pytest.mark.parametrize(
    "page", [m.JobStatus("j", "running", "", None, 0, 0, 0, 0, 1, 1, (), "", ""), None]
)
async def test_a_page_that_comes_without_a_proof_is_not_shown(page: m.JobStatus | None) -> None:
    async def show(context: Any) -> None:
        await context.read()
        challenge = m.Challenge(m.PROTOCOL_VERSION, "1", 1, b"n" * 32, b"x" * 32)
        await context.write(protobuf.answer_to_wire(page or challenge))

    server = c.make_server(show, show, max_calls=4)
    port = c.listen(server, "127.0.0.1", 0)
    await server.start()
    with pytest.raises(c.Unproved):
        await c.get_status(Endpoint("127.0.0.1", port), LIMIT, token=TOKEN)
    await server.stop(None)


def test_an_agent_knocks_with_a_new_nonce_each_time() -> None:
    assert AuthClient(TOKEN, "1").knock.nonce != AuthClient(TOKEN, "1").knock.nonce


# ---------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    ours, theirs = Authority(folder).create(), Authority(folder, "other").create()
    good = ours.sign("good", "IP:127.0.0.1")
    return {
        "good": good,
        "elsewhere": ours.sign("elsewhere", "DNS:elsewhere"),
        "expired": ours.sign("expired", "IP:127.0.0.1", expired=True),
        "foreign": theirs.sign("foreign", "IP:127.0.0.1"),
        "ca-only": Tls(ca=good.ca),
    }


async def test_a_master_over_tls_is_followed_by_its_name(files: Files) -> None:
    async with serving(token=TOKEN, tls=raw(files["elsewhere"])) as served:
        trust = Trust(TOKEN, files["good"], "elsewhere")
        async with trusting(served.endpoint, trust) as heard:
            await heard.until(lambda events: LinkBack() in events)


@pytest.mark.parametrize(
    ("master", "ours", "said"),
    [
        ("good", None, answering.THEY_WANT_TLS),
        (None, "good", answering.THEY_HAVE_NO_TLS),
        ("good", "ca-only", answering.THEY_REFUSE_US),
        ("foreign", "good", "the master's certificate is refused: unable to get local issuer"),
        ("elsewhere", "good", "certificate is not valid for '127.0.0.1'"),
        ("expired", "good", "the master's certificate is refused: certificate has expired"),
    ],
)
async def test_tls_that_does_not_fit_is_one_sentence(
    files: Files, master: str | None, ours: str | None, said: str
) -> None:
    async with serving(tls=raw(files[master] if master else None)) as served:
        mine = files[ours] if ours else None
        refused = await refusal(served.endpoint, Trust(files=mine))
        assert said in refused.reason
        assert refused.exit_code == EXIT_FAILED
        found, why = await answering.probe(served.endpoint, LIMIT, mine)
        assert found is answering.PortAnswer.INSECURE
        assert said in why


def test_the_probe_knows_a_master_over_tls_and_nobody(files: Files) -> None:
    async def run(port: int) -> None:
        async with serving(tls=raw(files["good"]), port=port) as served:
            where = served.endpoint
            found = await answering.probe(where, LIMIT, files["good"])
            assert found == (answering.PortAnswer.HTTP2, "")
        assert await answering.probe(where, LIMIT, files["good"]) == (
            answering.PortAnswer.NOBODY,
            "",
        )

    with held_port() as port:
        aio.run(run(port))


async def test_the_probe_knows_a_stranger_who_speaks_no_tls(files: Files) -> None:
    server = await asyncio.start_server(rude, "127.0.0.1", 0)
    where = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    assert await answering.probe(where, LIMIT, files["good"]) == (answering.PortAnswer.FOREIGN, "")
    server.close()
    await server.wait_closed()


@pytest.mark.slow
def test_a_renewed_certificate_is_used_by_new_connections(files: Files, tmp_path: Path) -> None:
    """The first one has expired: the agent waits for a better one instead of ending, since it has
    been in before."""
    good = files["good"]
    own = Tls(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"), good.ca)

    def put(which: Tls) -> None:
        for source, target in ((which.cert, own.cert), (which.key, own.key)):
            Path(target).write_bytes(Path(source).read_bytes())

    async def run(port: int) -> None:
        put(good)
        async with serving(tls=raw(good), port=port) as served:
            started = trusting(served.endpoint, Trust(files=own))
            heard = await started.__aenter__()
            await heard.until(lambda events: LinkBack() in events)
            put(files["expired"])  # before there is anything to dial again for
        async with serving(tls=raw(good), port=port) as served:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.0):  # several attempts
                    await heard.until(lambda _: heard.count(LinkBack) == 2)
            put(good)
            await heard.until(lambda _: heard.count(LinkBack) == 2)
            await started.__aexit__(None, None, None)

    with held_port() as port:
        aio.run(run(port))


# ---------------------------------------------------------------- what an agent makes of its config


def at(kind: str) -> Place:
    return Place(kind, host="10.0.0.1", port=29500)


def of(kind: str, nodes: int = 1, given: Identity = JOB) -> Identity:
    """What an agent makes of this identity."""
    return with_token(launched({"max_nodes": nodes}), at(kind), given)


@pytest.mark.parametrize(("kind", "nodes"), [("standalone", 1), ("static", 1)])
def test_a_job_of_one_node_has_a_token_of_its_own(kind: str, nodes: int) -> None:
    one, other = of(kind, nodes), of(kind, nodes)
    assert len(one.token) == 64
    assert one.token != other.token
    assert one.token not in repr(one)
    given = Identity("the-job", token=TOKEN)
    assert of(kind, nodes, given) == given


@pytest.mark.parametrize(
    ("kind", "nodes"), [("static", 2), ("elastic", 1), ("elastic", 4), ("external", 1), ("etcd", 2)]
)
def test_where_others_have_to_know_it_none_is_minted(kind: str, nodes: int) -> None:
    assert of(kind, nodes) == JOB


def test_a_standalone_master_needs_no_tls(files: Files) -> None:
    given = Identity("the-job", tls=files["good"])
    assert of("standalone", given=given).tls is None
    assert of("static", given=given).tls == files["good"]


def test_the_master_bears_the_name_that_the_user_gave() -> None:
    assert trust_of(at("elastic"), JOB).name == "10.0.0.1"
    assert trust_of(at("etcd"), JOB).name == ""


def test_files_that_cannot_serve_end_the_agent_with_a_sentence(files: Files) -> None:
    assert "has expired" in why_unusable(files["expired"])
    assert why_unusable(files["good"]) == ""
