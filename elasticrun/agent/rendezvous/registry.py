"""What a registry is: where the nodes of a job agree on who hosts the master.

Three exist. `endpoint`: an address that every node is given; whoever binds it is the host.
`shared_file`: a claim file in a folder that the nodes share. `etcd`: a leader key under a lease.
`rendezvous` does everything that does not depend on which one it is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

from elasticrun.agent.link.master_process import InEtcd
from elasticrun.agent.rendezvous.place import HostError
from elasticrun.wire.messages import End
from elasticrun.wire.types import Endpoint


@dataclass(frozen=True, slots=True)
class Leader:
    """The master of another node serves, or is expected to serve, at this address."""

    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class Vacant:
    """Nobody leads, so this node may be a candidate."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The job has ended, and its master with it."""

    end: End


Seen = Leader | Vacant | Ended

VACANT: Final = Vacant()


@dataclass(frozen=True, slots=True)
class Lease:
    """This node hosts the master. `bind`: where the master listens. `proxy`: where the port proxy
    of a static job listens. `in_etcd`: what the master publishes in etcd, where it still has to
    campaign; None with another registry."""

    bind: Endpoint
    proxy: Endpoint | None = None
    in_etcd: InEtcd | None = None


class Registry(Protocol):
    """One registry, as one node uses it. HostError from any method ends the node."""

    pushes: bool
    """Whether `read` returns each change as it happens. Otherwise it polls, so it is called only
    while no master answers or this node holds the lease."""
    address: str
    """The address at which other nodes reach this one; "" until `read` has returned."""

    async def read(self, *, served: bool) -> Seen:
        """Wait for news about who leads. While this node holds the lease, this returns only when
        the lease is lost, and the caller has to kill its master, or when the job is over. May be
        cancelled and called again. `served`: a master has answered this node before."""

    async def take(self) -> Lease | None:
        """After Vacant: take the lease. None if another node was faster: then `read` again."""

    async def move(self, lease: Lease, why: str) -> Seen:
        """Our master has exited and does not serve there any more, for this reason. Returns who
        leads; Vacant if `take` may give another place."""

    async def leave(self, *, job_over: bool, master_stays: bool) -> None:
        """Release everything, because the node ends. `master_stays`: its master still serves the
        other nodes."""

    def why_no_leader(self) -> str:
        """Why no leader is known so far, as the start of a sentence."""


class NoRegistry:
    """Replaces a registry that cannot be used: `read`, `take` and `move` end the node, or wait
    forever if a death signal is about to end it."""

    pushes = False
    address = ""

    def __init__(self, wrong: str) -> None:
        """`wrong`: why, in a sentence; "": a death signal arrived first, which ends the node."""
        self._wrong = wrong

    async def read(self, *, served: bool) -> NoReturn:
        await self._fail()

    async def take(self) -> NoReturn:
        await self._fail()

    async def move(self, lease: Lease, why: str) -> NoReturn:
        await self._fail()

    async def leave(self, *, job_over: bool, master_stays: bool) -> None:
        """No-op."""

    def why_no_leader(self) -> str:
        return self._wrong

    async def _fail(self) -> NoReturn:
        if not self._wrong:
            await asyncio.get_running_loop().create_future()
        raise HostError(self._wrong)
