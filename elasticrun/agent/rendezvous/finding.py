"""Finds a job whose host nobody has named: in the rendezvous file, or this node starts it.

This runs before the node's parts are built, because they need the job's name and token from the
file. A claim is valid as long as the master at its address proves itself, or its holder renews it.
If neither is true, this node takes it over with the job's name and token; nodes that look for their
master then find the new one. `file` handles everything after that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from elasticrun.agent.boot import SignalInbox
from elasticrun.agent.link.trust import TOKEN_BYTES
from elasticrun.agent.rendezvous.claims import (
    FILE_LIMIT,
    LOOK_EVERY,
    Claim,
    ClaimError,
    ClaimFile,
    ClaimRenewer,
    Looks,
    fresh,
    on_disk,
    timed,
)
from elasticrun.agent.rendezvous.place import LOOPBACK, Bind, HostError, NotYet, bind_test, resolve
from elasticrun.agent.runtime import first_of, in_thread, threadsafe
from elasticrun.agent.story import directed
from elasticrun.config import Identity, Launch, Place
from elasticrun.core.reasons import Whom
from elasticrun.host.log import logger
from elasticrun.host.system.network import is_loopback, is_ours, routed_address
from elasticrun.wire import auth
from elasticrun.wire.auth import reader_token
from elasticrun.wire.rpc.channel import LinkError, get_status
from elasticrun.wire.types import Endpoint

FORMAT: Final = 1

ASK_LIMIT: Final = 3.0
"""Seconds for a master to answer."""

MOST_PORTS: Final = 200
"""Ports to try, starting at the first one."""


@dataclass
class FoundJob:
    """The result. `file` and `renewer`: our claim; `claim`: the claim of the job; `wrong`: why the
    job cannot be found, in a sentence; `interrupted`: a signal came first."""

    file: ClaimFile | None = None
    renewer: ClaimRenewer | None = None
    claim: Claim | None = None
    wrong: str = ""
    interrupted: bool = False
    given: bool = False  # the user has given the token

    @property
    def ours(self) -> bool:
        """Whether this agent starts the master."""
        return self.file is None or self.file.mine is not None

    def close(self) -> None:
        """Remove our claim, unless it has been released."""
        if self.renewer is not None and self.file is not None and self.file.mine is not None:
            self.renewer.remove()


async def find(
    launch: Launch, place: Place, identity: Identity, inbox: SignalInbox
) -> tuple[Place, Identity, FoundJob]:
    """The place with the master's address, the identity with the job's name and token. A death
    signal ends the search; the inbox delivers it again to the next `attach`."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def signalled(signum: int, death: bool) -> None:
        caught.append(signum)
        if death:
            threadsafe(loop, stop.set)

    caught: list[int] = []
    inbox.attach(signalled, lambda: None)
    try:
        search, _ = await first_of(_find(launch, place, identity), stop.wait())
        if search is None:
            return place, identity, FoundJob(interrupted=True)
        return search.result()  # type: ignore[no-any-return]
    except (HostError, ClaimError, auth.TlsError) as wrong:
        return place, identity, FoundJob(wrong=str(wrong))
    finally:
        inbox.detach(caught)


async def _find(
    launch: Launch, where: Place, identity: Identity
) -> tuple[Place, Identity, FoundJob]:
    address = await in_thread(partial(own_address, launch.local_addr), name="resolve")
    if where.kind == "file":
        file = ClaimFile(where.path)
        try:
            return await _Search(launch, where, identity, file, address).run()
        except ClaimError as wrong:
            if not where.found:
                raise
            # The user has not named this file, so the job works without it.
            logger.warning("%s; this job begins here, and others join it by its address", wrong)
            where = dataclasses.replace(where, kind="open", path="", found="")
    if is_loopback(address) and launch.spec.max_nodes > 1:
        logger.warning("this host has no address but loopback: no other host can join")
    place = dataclasses.replace(where, host=address)
    return place, inherit(identity, None), FoundJob(given=bool(identity.token))


class _Search:
    """Reads the file until it names a job, or this node may start one."""

    def __init__(
        self, launch: Launch, where: Place, identity: Identity, file: ClaimFile, address: str
    ) -> None:
        self._join_timeout = launch.spec.join_timeout
        self._where = where
        self._identity = identity
        self._file = file
        self._address = address
        self._looks = Looks()
        self._told = ""

    async def run(self) -> tuple[Place, Identity, FoundJob]:
        loop = asyncio.get_running_loop()
        limit = self._join_timeout
        end = loop.time() + limit
        while True:
            found = await self._look()
            if found is not None:
                return found
            if loop.time() >= end:
                raise HostError(f"{self._told or 'no job was found'}, for {limit:g} s")
            await asyncio.sleep(LOOK_EVERY * random.uniform(1.0, 1.25))

    async def _look(self) -> tuple[Place, Identity, FoundJob] | None:
        claim, took = await on_file(partial(timed, self._file), self._file)
        may_host = self._where.is_host is not False
        if claim is None:
            if may_host:
                return await self._claim(None)
            self._tell(
                f"nobody has written {self._file.path} yet, and is_host=0 leaves it to others",
                at_once=True,
            )
            return None
        check(claim, self._file, self._identity)
        if await answers(claim, self._identity):
            check_job(claim, self._file, self._identity)
            return self._joined(claim)
        self._looks.look(claim, took)
        if may_host and self._looks.is_stale(claim):
            logger.warning(
                "the job master at %s (%s), which %s names, does not answer, and nobody renews "
                "that file: this node takes it over",
                place_of(claim), claim.text("host"), self._file.path,
            )  # fmt: skip
            return await self._claim(claim)
        self._tell(
            f"{self._file.path} names the job master at {place_of(claim)} ({claim.text('host')}), "
            "which does not answer this node; it is asked again until it does, or until its host "
            "renews that file no more",
            unanswered=place_of(claim),
        )
        return None

    def _tell(
        self, sentence: str, *, unanswered: Endpoint | None = None, at_once: bool = False
    ) -> None:
        """`unanswered`: a master that does not answer. `at_once`: the problem will not pass by
        itself."""
        if sentence != self._told:
            self._told = sentence
            if self._looks.same > 2 or at_once:
                whom: Whom = "master" if unanswered is not None else ""
                logger.warning("%s", directed(sentence, whom, unanswered or ""))
            else:
                logger.info("%s", sentence)

    async def _claim(self, before: Claim | None) -> tuple[Place, Identity, FoundJob] | None:
        identity, given = inherit(self._identity, before), bool(self._identity.token)
        port = await in_thread(partial(free_port, self._address, self._where.port))
        mine = claim_of(identity, self._address, port, given=given)
        if not await on_file(partial(self._file.take, mine, before), self._file):
            return None
        place = dataclasses.replace(self._where, host=self._address, port=port)
        found = FoundJob(self._file, ClaimRenewer(self._file), mine, given=given)
        return place, identity, found

    def _joined(self, claim: Claim) -> tuple[Place, Identity, FoundJob]:
        where = place_of(claim)
        logger.info(
            "job %s is joined at %s, which %s names", claim.text("job"), where, self._file.path
        )
        place = dataclasses.replace(self._where, host=where.host, port=where.port)
        found = FoundJob(self._file, None, claim, given=bool(self._identity.token))
        return place, inherit(self._identity, claim), found


# ---------------------------------------------------------------- the content of a claim


def claim_of(identity: Identity, address: str, port: int, *, given: bool) -> Claim:
    """A new claim for a master at this address; a token that the user gave is not stored in the
    file."""
    words = {
        "format": FORMAT,
        "job": identity.job_id,
        "host": os.uname().nodename,
        "address": address,
        "port": port,
        "token": "" if given else identity.token,
        "given": given,
    }
    return fresh(words)


def inherit(identity: Identity, claim: Claim | None) -> Identity:
    """The identity with the name and token of the claim's job; without any token, with a new
    one."""
    token = identity.token or (claim.text("token") if claim is not None else "")
    token = token or secrets.token_hex(TOKEN_BYTES)
    job_id = identity.job_id
    if claim is not None and not identity.named:
        job_id = claim.text("job")
    return dataclasses.replace(identity, job_id=job_id, token=token)


def place_of(claim: Claim) -> Endpoint:
    """The address of its master."""
    return Endpoint(claim.text("address"), claim.number("port"))


def check(claim: Claim, file: ClaimFile, identity: Identity) -> None:
    """Raises HostError for a claim of an incompatible release, or if the user must give the token
    and has not."""
    where = place_of(claim)
    named = bool(claim.text("job") and where.host and 0 < where.port < 65536)
    if claim.number("format") != FORMAT or not named:
        raise HostError(
            f"{file.path} is of another release of elasticrun: end its job, or name another file"
        )
    if claim.words.get("given") is True and not identity.token:
        raise HostError(
            f"the job of {file.path} has a token that is not in the file: set ELASTICRUN_TOKEN or "
            "--token-file to it"
        )


def check_job(claim: Claim, file: ClaimFile, identity: Identity) -> None:
    """Raises HostError if the job there is not the one that the user wants."""
    if identity.named and claim.text("job") != identity.job_id:
        raise HostError(
            f"{file.path} is of job {claim.text('job')}, which runs at {place_of(claim)}, and "
            f"--rdzv-id={identity.job_id} asks for another: leave it out, or name another file"
        )


async def answers(claim: Claim, identity: Identity) -> bool:
    """Whether the master of this job answers at the claim's address and proves itself."""
    pem = None
    if identity.tls is not None:
        files = identity.tls
        pem = await in_thread(lambda: auth.read_pem(files), limit=ASK_LIMIT, name="tls")
    token = reader_token(identity.token or claim.text("token"))
    try:
        page = await get_status(place_of(claim), ASK_LIMIT, token=token, tls=pem)
    except LinkError:
        return False
    return page.job_id == claim.text("job")


# ---------------------------------------------------------------- this host


def own_address(given: str | None) -> str:
    """The numeric address of this host for others: --local-addr, else that of its default route,
    else the first one that is not loopback, else loopback. NotYet, HostError. Blocks."""
    if given:
        try:
            return resolve(given, 0)[0]
        except NotYet as wrong:
            raise HostError(f"--local-addr={given}: {wrong}") from None
    if routed := routed_address():
        return routed
    import psutil

    for family in ("AF_INET", "AF_INET6"):
        for addresses in psutil.net_if_addrs().values():
            for one in addresses:
                if one.family.name == family and not _useless(one.address):
                    return str(one.address)
    return LOOPBACK


def _useless(address: str) -> bool:
    return "%" in address or is_loopback(address) or not is_ours(address)


def free_port(address: str, first: int) -> int:
    """The first port from `first` on that is free at this address. HostError. Blocks."""
    for port in range(first, min(first + MOST_PORTS, 65536)):
        there = bind_test(address, port)
        if there is Bind.OURS:
            return port
        if there is Bind.ELSEWHERE:
            raise HostError(
                f"{address} is no address of this host: give one by --local-addr, or name the "
                "master's place by --rdzv-endpoint"
            )
    raise HostError(
        f"no port from {first} to {first + MOST_PORTS - 1} is free here: name another by "
        "--rdzv-endpoint=HOST:PORT"
    )


async def on_file(work: Callable[[], Any], file: ClaimFile) -> Any:
    """The result of work on the shared folder. ClaimError, also if it takes too long."""
    try:
        return await on_disk(work)
    except TimeoutError:
        raise ClaimError(
            f"{file.path}: its file system has not answered for {FILE_LIMIT:g} s"
        ) from None
