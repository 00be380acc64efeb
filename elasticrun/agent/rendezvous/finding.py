"""Finds a job when no host is given: looks it up in the rendezvous file, or starts it on this node.

This runs before the node's parts are built, because they need the job's name and token from the
file.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from elasticrun.agent.boot import SignalInbox
from elasticrun.agent.claims.claim_file import ClaimError
from elasticrun.agent.rendezvous.place import HostError, own_address
from elasticrun.agent.rendezvous.registry import Leader, Lease, NoRegistry
from elasticrun.agent.rendezvous.shared_file import SharedFile, inherit
from elasticrun.agent.runtime import first_of, in_thread, threadsafe
from elasticrun.config import Identity, Launch, Place
from elasticrun.host.log import logger
from elasticrun.host.system.network import is_loopback


@dataclass(frozen=True)
class FoundJob:
    """The job that this node belongs to: its name and token, and the master's address. `given`: the
    user gave the token. `registry`: where all this was found; None if this node starts the job
    without a file. `seen`: the leader found there, or the lease that this node took."""

    place: Place
    identity: Identity
    given: bool
    registry: SharedFile | NoRegistry | None = None
    seen: Leader | Lease | None = None

    def close(self) -> None:
        """Remove our claim, unless the rendezvous has released it."""
        if isinstance(self.registry, SharedFile):
            self.registry.close()


async def find_job(
    launch: Launch, place: Place, identity: Identity, inbox: SignalInbox
) -> FoundJob:
    """Find the job at this place. After an error or a death signal, which ends the search, the
    result's registry ends the node. The inbox delivers the caught signals again to the next
    `attach`."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def signalled(signum: int, death: bool) -> None:
        caught.append(signum)
        if death:
            threadsafe(loop, stop.set)

    caught: list[int] = []
    inbox.attach(signalled, lambda: None)
    wrong = ""
    try:
        search, _ = await first_of(_find(launch, place, identity), stop.wait())
        if search is not None:
            return search.result()  # type: ignore[no-any-return]
    except (HostError, ClaimError) as error:
        wrong = str(error)
    finally:
        inbox.detach(caught)
    return FoundJob(place, identity, bool(identity.token), NoRegistry(wrong))


async def _find(launch: Launch, where: Place, identity: Identity) -> FoundJob:
    address = await in_thread(partial(own_address, launch.local_addr), name="resolve")
    if where.kind == "file":
        try:
            return await _look_up(launch, where, identity)
        except ClaimError as wrong:
            if not where.found:
                raise
            # The user has not named this file, so the job works without it.
            logger.warning("%s; this job starts here, and others join by its address", wrong)
    if is_loopback(address) and launch.spec.max_nodes > 1:
        logger.warning("this host has only loopback addresses: no other host can join")
    place = replace(where, kind="open", path="", found="", host=address)
    return FoundJob(place, inherit(identity, None), bool(identity.token))


async def _look_up(launch: Launch, where: Place, identity: Identity) -> FoundJob:
    """The file's job, once its master answers or the file is ours. Raises HostError after
    join_timeout, and ClaimError if the file cannot be used."""
    registry, limit = SharedFile(launch, where, identity), launch.spec.join_timeout
    seen: Leader | Lease | None = None
    try:
        async with asyncio.timeout(limit):
            while seen is None:
                found = await registry.read(served=False)
                seen = found if isinstance(found, Leader) else await registry.take()
    except TimeoutError:
        raise HostError(f"{registry.why_no_leader()}, for {limit:g} s") from None
    finally:
        if seen is None:
            registry.close()
    at = seen.endpoint if isinstance(seen, Leader) else seen.bind
    place = replace(where, host=at.host, port=at.port)
    return FoundJob(place, registry.identity, bool(identity.token), registry, seen)
