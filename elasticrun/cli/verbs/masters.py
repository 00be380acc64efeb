"""Queries the masters of running jobs for their status: finds their endpoints and the user's
credentials for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from elasticrun import __version__
from elasticrun.config import Tls
from elasticrun.host.user_folder import Published, published, user_folder
from elasticrun.wire.auth import reader_token
from elasticrun.wire.messages import JobStatus
from elasticrun.wire.types import Endpoint


class NoStatus(Exception):
    """The status cannot be shown; the message is a sentence."""


ANSWER_LIMIT: Final = 5.0
"""Seconds to wait for a master. A master on another continent answers within one."""

DEFAULT_PORT: Final = 29400
"""torchrun's port for a rendezvous endpoint without one."""


@dataclass(frozen=True, slots=True)
class MasterQuery:
    """A master to query, our reader token for it, and the run folder of its job ("" if unknown)."""

    endpoint: Endpoint
    reader: str = field(default="", repr=False)
    files: Tls | None = None
    run: str = ""


def parse_endpoint(text: str) -> Endpoint:
    """Parse `host`, `host:port`, `[ipv6]:port` or `[ipv6]`. Raises NoStatus."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise NoStatus(f"{text!r} is not an endpoint: write host:port")
    return Endpoint(host, int(port))


def published_here() -> list[Published]:
    """The masters of this user on this host. Raises NoStatus."""
    try:
        return published(user_folder(os.environ))
    except OSError as wrong:
        raise NoStatus(f"the user's folder cannot be read: {wrong}") from None


def query_with(endpoint: Endpoint, token: str, files: Tls | None) -> MasterQuery:
    """The query to a master, with the job's token, else with the reader token that one of this
    user's masters with this port published here. Sending a proof of that reader token to another
    job's master leaks nothing, because only the publishing master accepts it."""
    if token:
        return MasterQuery(endpoint, reader_token(token), files)
    with contextlib.suppress(NoStatus):
        for master in published_here():
            if master.port == endpoint.port:
                run = master.run if is_here(endpoint.host) else ""
                return MasterQuery(endpoint, master.reader, files, run)
    return MasterQuery(endpoint, "", files)


def query_to(master: Published, token: str, files: Tls | None) -> MasterQuery:
    """The query to one of this user's masters on this host."""
    given = master.reader or reader_token(token)
    return MasterQuery(master.endpoint, given, files if master.tls else None, master.run)


def is_here(host: str) -> bool:
    """Whether this address belongs to this host."""
    from elasticrun.host.system.network import is_ours, is_this_host

    return is_this_host(host) or is_ours(host)


NO_JOBS: Final = (
    "you have no jobs on this host; `elasticrun train.py` starts one (for a job whose master is "
    "elsewhere, give HOST:PORT)"
)


class NoReply(NamedTuple):
    """A master that did not answer, and why, as a sentence."""

    where: Endpoint
    sentence: str


def query_all(
    queries: list[MasterQuery], runner: asyncio.Runner
) -> tuple[list[tuple[Endpoint, JobStatus]], list[NoReply]]:
    """Query all at once. Returns the endpoints and statuses of the masters that answer, and those
    that do not or refuse. Raises NoStatus for unusable TLS files."""
    # Late import: grpc takes longer to import than everything else here together.
    from elasticrun.agent.link.answering import PortAnswer, probe
    from elasticrun.wire import auth
    from elasticrun.wire.rpc.channel import LinkError, get_status

    async def ask_one(query: MasterQuery) -> JobStatus:
        pem = None if query.files is None else auth.read_pem(query.files)
        where = query.endpoint
        try:
            return await get_status(
                where, ANSWER_LIMIT, token=query.reader, tls=pem, version=__version__
            )
        except LinkError as error:
            if error.rejected:
                raise
            found, why = await probe(where, ANSWER_LIMIT, query.files)
            if found is PortAnswer.INSECURE:
                raise LinkError(why, rejected=True) from None
            raise

    async def ask_all() -> list[JobStatus | BaseException]:
        return await asyncio.gather(*map(ask_one, queries), return_exceptions=True)

    pages: list[tuple[Endpoint, JobStatus]] = []
    silent: list[NoReply] = []
    for query, answer in zip(queries, runner.run(ask_all()), strict=True):
        where = query.endpoint
        if isinstance(answer, LinkError):
            sentence = f"the master at {where} refuses to answer: {answer}"
            if not answer.rejected:
                sentence = unanswered(where, str(answer), query.run)
            silent.append(NoReply(where, sentence))
        elif isinstance(answer, auth.TlsError):
            raise NoStatus(str(answer))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            pages.append((where, answer))
    return pages, silent


def unanswered(where: Endpoint, why: str, run: str = "") -> str:
    """A sentence saying that the master does not answer, and what to run. `run`: the run folder of
    its job, if known: its ranks may then still train."""
    ranks_note = "; its ranks may keep training without it" if run else ""
    advice = f"to find out why, run here: elasticrun doctor --rdzv-endpoint={where}"
    return f"the master at {where} does not answer ({why}){ranks_note}; {advice}"
