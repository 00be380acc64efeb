"""The registry in a shared folder: the node that claims a file hosts the master.

The claim has the master's address, the job's name and its token (`--rdzv-endpoint=file://...`). It
is valid as long as the master at its address authenticates itself, or its holder renews it. If
neither is true, one of the nodes takes it over with the job's name and token and starts the next
master, which adopts the round that the agents report; all agents follow the file to it. A holder
whose claim was taken over stops its own master and follows too. The claim is removed when the job
ends. A holder that leaves earlier marks the claim, and a node that is there at the end removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from elasticrun.agent.claims.claim_file import (
    FILE_LIMIT,
    READ_EVERY,
    Claim,
    ClaimError,
    ClaimFile,
    ClaimRenewer,
    Renewals,
    new_claim,
    on_disk,
    timed_read,
)
from elasticrun.agent.job_log import directed
from elasticrun.agent.link.identity import offered_address
from elasticrun.agent.link.trust import TOKEN_BYTES
from elasticrun.agent.rendezvous.place import HostError, free_port, own_address
from elasticrun.agent.rendezvous.registry import VACANT, Leader, Lease, Vacant
from elasticrun.agent.runtime import in_thread, threadsafe
from elasticrun.config import Identity, Launch, Place
from elasticrun.host.log import logger
from elasticrun.wire import auth
from elasticrun.wire.rpc.channel import LinkError, get_status
from elasticrun.wire.types import Endpoint

T = TypeVar("T")

FORMAT: Final = 1

ASK_LIMIT: Final = 3.0
"""Seconds for a master to answer."""

CLOSE_LIMIT: Final = 5.0
"""Seconds for updating or removing the file at the end."""


class SharedFile:
    """The claim file of a job. Until the first Leader or lease, `read` and `take` raise ClaimError
    as well as HostError; afterwards they log what is wrong with the file and try again."""

    pushes = False

    def __init__(self, launch: Launch, where: Place, identity: Identity) -> None:
        self._local_addr = launch.local_addr
        self._where = where
        self._given = identity
        self._file = ClaimFile(self._where.path)
        self._renewer: ClaimRenewer | None = None
        self._claim: Claim | None = None  # the one that this node follows, or holds
        self._replaced: Claim | None = None  # the one that `take` replaces
        self._port = self._where.port  # the first one that `take` tries
        self._renewals = Renewals()
        self._has_read = False
        self._loss: asyncio.Future[Claim] | None = None
        self._last_news = ""
        self._left = False
        self.identity = identity
        """Includes the job's name and token from the first Leader or Lease on."""
        self.address = ""

    async def read(self, *, served: bool) -> Leader | Vacant:
        if self._loss is not None:
            leader = self._succeeded(await asyncio.shield(self._loss))
            if leader is not None:
                return leader
        while True:
            if self._has_read:
                await asyncio.sleep(READ_EVERY * random.uniform(1.0, 1.25))
            self._has_read = True
            seen = await (self._find() if self._claim is None else self._follow(self._claim))
            if seen is not None:
                return seen

    async def take(self) -> Lease | None:
        moves = self._loss is not None
        try:
            return await self._take()
        except (HostError, ClaimError) as wrong:
            if moves:
                raise HostError(str(wrong)) from None
            if self._claim is None:
                raise
            self._warn(str(wrong))
            return None

    async def move(self, lease: Lease, why: str) -> Leader | Vacant:
        if self._loss is None:  # the claim is another job's
            return await self.read(served=True)
        logger.info("%s; trying the next free port", why)
        self._replaced, self._port = self._file.mine, lease.bind.port + 1
        return VACANT

    async def leave(self, *, job_over: bool, master_stays: bool) -> None:
        self._left = True
        with contextlib.suppress(TimeoutError, ClaimError):
            work = partial(self._leave, job_over=job_over, master_stays=master_stays)
            await in_thread(work, limit=CLOSE_LIMIT, name="claim")

    def why_no_leader(self) -> str:
        return self._last_news or "no job was found"

    def close(self) -> None:
        """Remove our claim if `leave` was never called."""
        if not self._left and self._file.mine is not None:
            self._leave(job_over=True, master_stays=False)

    # ------------------------------------------------------------ the first claim

    async def _find(self) -> Leader | Vacant | None:
        """Before the first Leader or Lease: Leader if the claim's master answers, Vacant if this
        node may take the file, None to look again."""
        path = self._file.path
        claim, took = await self._timed()
        may_host = self._where.is_host is not False
        self._replaced = claim
        if claim is None:
            if may_host:
                return VACANT
            sentence = f"{path} does not exist yet, and is_host=0 waits for another node"
            if self._is_news(sentence):
                logger.warning("%s", sentence)
            return None
        self._check(claim)
        where, host = place_of(claim), claim.text("host")
        if await self._master_answers(claim):
            self._check_job(claim)
            logger.info("joined job %s at %s, the address in %s", claim.text("job"), where, path)
            self.identity = inherit(self._given, claim)
            self._claim = claim
            self.address = offered_address(self._local_addr, where.host, where.host)
            return Leader(where)
        self._renewals.observe(claim, took)
        if may_host and self._renewals.is_stale(claim):
            logger.warning(
                "the job master at %s (%s), which %s names, does not answer, and that file is no "
                "longer "
            "renewed: this node takes over",
                where, host, path,
            )  # fmt: skip
            return VACANT
        sentence = (
            f"{path} names the job master at {where} ({host}), which does not answer this node; "
            "retrying until it does, or until its host stops renewing that file"
        )
        if self._is_news(sentence):
            if self._renewals.same > 2:
                logger.warning("%s", directed(sentence, "master", where))
            else:
                logger.info("%s", sentence)
        return None

    def _check(self, claim: Claim) -> None:
        """Raise HostError if another release made the claim, or if the user must give the token and
        has not."""
        where = place_of(claim)
        named = bool(claim.text("job") and where.host and 0 < where.port < 65536)
        if claim.number("format") != FORMAT or not named:
            raise HostError(
                f"{self._file.path} belongs to another release of elasticrun: end its job, or use "
                "another file"
            )
        if claim.words.get("given") is True and not self._given.token:
            raise HostError(
                f"the job of {self._file.path} has a token that is not in the file: set "
                "ELASTICRUN_TOKEN or --token-file to it"
            )

    def _check_job(self, claim: Claim) -> None:
        """Raise HostError if the job there is not the one that the user named."""
        expected, job = self._given.job_id, claim.text("job")
        if self._given.named and job != expected:
            raise HostError(
                f"{self._file.path} is of job {job}, which runs at {place_of(claim)}, and "
                f"--rdzv-id={expected} asks for another: leave it out, or name another file"
            )

    # ------------------------------------------------------------ following a claim

    async def _follow(self, followed: Claim) -> Leader | Vacant | None:
        """Another master, to which the file has moved; Vacant once the claim is stale and its
        master does not answer; None to look again."""
        try:
            claim, took = await self._timed()
        except ClaimError as wrong:
            self._warn(str(wrong))
            return None
        if claim is None:
            self._warn(f"{self._file.path} was removed: its holder has ended or left the job")
            return None
        if claim.holder != followed.holder:
            return self._switch_to(claim)
        self._renewals.observe(claim, took)
        if self._where.is_host is False or not self._renewals.is_stale(claim):
            return None
        self._replaced = claim
        return None if await self._master_answers(claim) else VACANT

    def _switch_to(self, claim: Claim) -> Leader | None:
        """Follow this claim and return its master; None, with a warning, if it is of another
        job."""
        token, job = claim.text("token"), claim.text("job")
        if job != self.identity.job_id or (token and token != self.identity.token):
            self._warn(f"another job has started with that file ({job})")
            return None
        self._claim = claim
        return Leader(place_of(claim))

    def _warn(self, sentence: str) -> None:
        if self._is_news(sentence):
            logger.warning("%s; this node keeps reconnecting", sentence)

    def _is_news(self, sentence: str) -> bool:
        before, self._last_news = self._last_news, sentence
        return sentence != before

    async def _master_answers(self, claim: Claim) -> bool:
        """Whether this job's master answers at the claim's address and authenticates itself. Raises
        HostError if our TLS files cannot be used."""
        token = auth.reader_token(self._given.token or claim.text("token"))
        files, pem = self._given.tls, None
        try:
            if files is not None:
                pem = await in_thread(partial(auth.read_pem, files), limit=ASK_LIMIT, name="tls")
            page = await get_status(place_of(claim), ASK_LIMIT, token=token, tls=pem)
        except (LinkError, TimeoutError):
            return False
        except auth.TlsError as wrong:
            raise HostError(str(wrong)) from None
        return page.job_id == claim.text("job")

    async def _timed(self) -> tuple[Claim | None, float]:
        return await self._on_disk(partial(timed_read, self._file))

    # ------------------------------------------------------------ holding a claim

    async def _take(self) -> Lease | None:
        """Claim the file, in place of the claim that was there; None if another node was
        faster."""
        before = self._replaced
        succeeds = self._claim is not None and self._loss is None
        if self._claim is None:
            self.identity = inherit(self._given, before)
        host = await in_thread(partial(own_address, self._local_addr), name="resolve")
        port = await in_thread(partial(free_port, host, self._port), name="resolve")
        self._port = self._where.port
        if self._renewer is not None:
            await in_thread(self._renewer.close, name="claim")
            self._renewer = self._loss = None
        mine = self._claim_of(Endpoint(host, port))
        if not await self._on_disk(partial(self._file.take, mine, before)):
            self._file.release()
            return None
        if succeeds and before is not None:
            logger.warning(
                "no job master at %s any longer, and %s is not renewed: this agent starts one",
                place_of(before), self._file.path,
            )  # fmt: skip
        self._claim, self.address = mine, self._local_addr or host
        loop = asyncio.get_running_loop()
        self._loss = loss = loop.create_future()
        self._renewer = ClaimRenewer(self._file)
        self._renewer.attach(
            lambda other: threadsafe(loop, _settle, loss, other),
            lambda sentence: threadsafe(loop, self._trouble, sentence),
        )
        return Lease(Endpoint(host, port))

    def _claim_of(self, where: Endpoint) -> Claim:
        """A new claim for a master there; a token that the user gave is not stored in the file."""
        given = bool(self._given.token)
        words = {
            "format": FORMAT,
            "job": self.identity.job_id,
            "host": os.uname().nodename,
            "address": where.host,
            "port": where.port,
            "token": "" if given else self.identity.token,
            "given": given,
        }
        return new_claim(words)

    def _trouble(self, sentence: str) -> None:
        if sentence:
            logger.warning("%s; other nodes may declare the job master lost", sentence)
        else:
            logger.warning("the rendezvous file is renewed again")

    def _succeeded(self, claim: Claim) -> Leader | None:
        """Release our claim, which another host has taken over because it saw no renewal. Returns
        that host's master, if it is of this job."""
        self._file.release()
        self._renewer = self._loss = None
        leader = self._switch_to(claim)
        if leader is not None:
            logger.warning(
                "%s has taken this job over in %s: the job master here ends, and this node follows "
                "the new one",
                claim.text("host"), self._file.path,
            )  # fmt: skip
        return leader

    def _leave(self, *, job_over: bool, master_stays: bool) -> None:
        if self._renewer is not None:
            self._renewer.close()
        if self._file.mine is not None and master_stays:
            self._file.leave()
        elif self._file.mine is not None:
            self._file.remove()
        elif job_over and self._claim is not None:
            current = self._file.read()
            if current is not None and current.left and current.holder == self._claim.holder:
                self._file.remove(current.holder)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        """Run `work`, which blocks on the shared folder, in a thread. Raises ClaimError, also if it
        takes too long."""
        try:
            return await on_disk(work)
        except TimeoutError:
            raise ClaimError(
                f"{self._file.path}: its file system has not answered for {FILE_LIMIT:g} s"
            ) from None


def inherit(identity: Identity, claim: Claim | None) -> Identity:
    """The identity with the name and token of the claim's job; without any token, with a new
    one."""
    token = identity.token or (claim.text("token") if claim is not None else "")
    job_id = identity.job_id
    if claim is not None and not identity.named:
        job_id = claim.text("job")
    return replace(identity, job_id=job_id, token=token or secrets.token_hex(TOKEN_BYTES))


def place_of(claim: Claim) -> Endpoint:
    """The address of the claim's master."""
    return Endpoint(claim.text("address"), claim.number("port"))


def _settle(loss: asyncio.Future[Claim], other: Claim) -> None:
    if not loss.done():
        loss.set_result(other)
