"""Where the job's master is, and whether this agent is the one to start it (decision 021).

standalone  we start one on loopback, on a free port
elastic     the agent that can bind the very address which the endpoint's name resolves to starts
            it; to whom the address is another host's, or taken, the master is somebody else's
static      node rank 0 starts it behind a proxy on the port that the user named (decision 008)
external    somebody has started it
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import secrets
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from elasticrun.agent.boot import Reaper
from elasticrun.agent.link import port_proxy_child
from elasticrun.agent.link.identity import offered_address
from elasticrun.agent.link.master_process import (
    LEAVE_LIMIT,
    RESTARTS,
    MasterHost,
    MasterProcess,
    new_record,
    shielded,
    sweep_records,
)
from elasticrun.agent.runtime import NodeContext, Tasks, in_thread
from elasticrun.config import AgentConfig
from elasticrun.core.events import AgentEvent, LinkBack, LinkLost, Ordered
from elasticrun.host import user_folder
from elasticrun.host.log import logger
from elasticrun.host.system.network import (
    is_loopback,
    is_ours,
    names_this_host_only,
    routed_address,
)
from elasticrun.wire import debugger
from elasticrun.wire.messages import End, Refused
from elasticrun.wire.types import Endpoint

if TYPE_CHECKING:
    from elasticrun.agent.rendezvous.etcd import EtcdRendezvous
    from elasticrun.agent.rendezvous.file import FileRendezvous
    from elasticrun.agent.rendezvous.finding import FoundJob

LOOPBACK: Final = "127.0.0.1"
ANYWHERE: Final = ("::", "0.0.0.0")

DIAL_LIMIT: Final = 2.0
"""Seconds for a dial to an address of our own, which takes microseconds."""

NONCE_BYTES: Final = 16

RESOLVE_AGAIN: Final = 1.0
"""Seconds until a name that is needed to meet is tried again for the first time: pods get theirs
late."""

RESOLVE_CAP: Final = 5.0
"""The longest such wait: name servers remember for some seconds that a name was not there."""

HEIR_AFTER: Final = 3.0
"""Seconds without a master after which an agent of its host starts one: the agent to which it
belonged, if it lives, has done so long before."""


class HostError(Exception):
    """The master can neither be started nor found; the text is one sentence."""


class NotYet(Exception):
    """The endpoint's name does not resolve (yet: pods get their names late)."""


class Bind(Enum):
    """What came of binding an address."""

    OURS = "ours"
    TAKEN = "taken"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class SettledPlace:
    """Where the master is to be.

    `dial`: what this agent dials, `address` the same in numbers (for the choice of our own
    address). `bind`: where to start it, None if that is not our part. `proxy`: where the static
    job's port proxy listens, None without one."""

    dial: Endpoint
    address: str
    bind: Endpoint | None = None
    proxy: Endpoint | None = None


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name in numbers, IPv4 loopback before IPv6's. NotYet. Blocks."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise NotYet(f"the name {host} does not resolve: {error.strerror}") from None
    except UnicodeError:
        raise HostError(f"{host!r} is no host name") from None
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    return sorted(addresses, key=lambda address: is_loopback(address) and ":" in address)


def bind_test(address: str, port: int) -> Bind:
    """Whether this host may listen at exactly this address and port. HostError if it must not.

    No SO_REUSEPORT, and no wildcard: both would succeed anywhere and prove nothing."""
    try:  # a port in TIME_WAIT is free; a listening one is not
        _listen(address, port, backlog=1).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Bind.TAKEN
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return Bind.ELSEWHERE
        where = Endpoint(address, port)
        raise HostError(f"cannot listen on {where}: {os.strerror(error.errno or 0)}") from None
    # `ip_nonlocal_bind` lets any address be bound.
    return Bind.OURS if is_ours(address) and leads_here(address) else Bind.ELSEWHERE


def leads_here(address: str) -> bool:
    """Whether a dial to this address comes out at this host: what answers shows our own nonce.

    On a port that nobody else knows: at the endpoint's, other nodes may be dialling already."""
    if is_loopback(address):
        return True
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        with _socket_for(address) as listener, _socket_for(address) as dialled:
            listener.bind((address, 0))
            listener.listen(1)
            dialled.connect(listener.getsockname())
            answering, _ = listener.accept()
            with answering:
                answering.sendall(nonce)
                return dialled.recv(NONCE_BYTES, socket.MSG_WAITALL) == nonce
    except OSError:
        return False


def _socket_for(address: str) -> socket.socket:
    made = socket.socket(_family(address), socket.SOCK_STREAM)
    made.settimeout(DIAL_LIMIT)
    return made


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listen(address: str, port: int, backlog: int) -> socket.socket:
    """OSError. One of IPv6 is for IPv4 as well, as a master's is: `::`, or `::ffff:10.0.0.1`."""
    both = ":" in address and socket.has_dualstack_ipv6()
    return socket.create_server(
        (address, port), family=_family(address), backlog=backlog, dualstack_ipv6=both
    )


def settle(config: AgentConfig) -> SettledPlace:
    """Where the master is to be, as far as this host can say now. NotYet, HostError. Blocks."""
    where = config.rendezvous
    if where.kind == "standalone":
        return SettledPlace(Endpoint(LOOPBACK, 0), LOOPBACK, bind=Endpoint(LOOPBACK, 0))
    addresses = resolve(where.host, where.port)
    if where.kind == "static" and config.node_rank <= 0:
        proxy = Endpoint(_proxy_address(where.host, addresses), where.port)
        here = Endpoint(LOOPBACK, 0)
        return SettledPlace(here, addresses[0], bind=here, proxy=proxy)
    if where.kind == "elastic" and where.is_host is not False:
        place = _elastic(config, addresses)
        if place is not None:
            return place
    return SettledPlace(Endpoint(where.host, where.port), addresses[0])


def _elastic(config: AgentConfig, addresses: list[str]) -> SettledPlace | None:
    """Our part of the bind test; None if the master is another host's."""
    where = config.rendezvous
    several = config.spec.max_nodes > 1 and not names_this_host_only(where.host)
    for address in addresses:
        at = address
        if several and is_loopback(address):
            # Debian's `127.0.1.1 hostname`: it proves that the name is ours, but nobody else
            # could reach a master there.
            at = routed_address() or address
        result = bind_test(at, where.port)
        if result is Bind.OURS:
            here = Endpoint(at, where.port)
            return SettledPlace(here, at, bind=here)
        if result is Bind.TAKEN:
            return SettledPlace(Endpoint(at, where.port), at)
    if where.is_host:
        # The user says so although no address is ours: behind NAT, or a Service of Kubernetes.
        return SettledPlace(
            Endpoint(LOOPBACK, where.port), addresses[0], bind=Endpoint("::", where.port)
        )
    return None


def _proxy_address(host: str, addresses: list[str]) -> str:
    """The address at which node rank 0 of a static job listens: the named one where it is ours,
    else all of them, as torchrun does."""
    if names_this_host_only(host):
        return addresses[0]
    local = [a for a in addresses if not is_loopback(a) and is_ours(a)]
    return local[0] if local else everywhere()


def everywhere() -> str:
    """The address at which one listens on all of this host's."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def listen_proxy(where: Endpoint) -> socket.socket:
    """The port proxy's listening socket. HostError with a sentence when the port is taken."""
    try:
        return _listen(where.host, where.port, backlog=1024)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        text = os.strerror(error.errno or 0)
        if taken:
            text = (
                "another process listens there; if it is the first node of this job, give this "
                "one its --node-rank or all of them --rdzv-backend=c10d, else take another port"
            )
        raise HostError(f"cannot listen on the master port {where}: {text}") from None


def resolve_again(tries: int) -> float:
    """Seconds until a name that did not resolve is tried again, after so many tries."""
    return float(min(RESOLVE_CAP, RESOLVE_AGAIN * 2.0 ** min(tries - 1, 10)))


def rendezvous_of(
    node: NodeContext, met: Callable[[], None], found: FoundJob | None
) -> C10dRendezvous | EtcdRendezvous | FileRendezvous:
    """The way in which the nodes of this job meet. `met` is called when the master's place is known
    and whenever one serves there anew; `found`: see `finding`. What is not needed is not
    imported."""
    if found is not None:
        from elasticrun.agent.rendezvous.file import FileRendezvous

        return FileRendezvous(node, met, found)
    if node.config.rendezvous.kind == "etcd":
        from elasticrun.agent.rendezvous.etcd import EtcdRendezvous

        return EtcdRendezvous(node, met)
    return C10dRendezvous(node, met)


class PortProxy:
    """The port proxy of a static job as a process that its agent keeps alive (decision 008): the
    listening socket itself is ours."""

    def __init__(self, listener: socket.socket, reaper: Reaper) -> None:
        self._listener = listener
        self._reaper = reaper
        self._said: dict[str, str | None] = {}
        self._closing = False
        self._deaths = 0
        self._control: socket.socket | None = None
        self._gone = asyncio.Event()
        self._start()

    def say(self, target: str, where: Endpoint | None) -> None:
        """Name the `master` or the `store` behind it."""
        self._said[target] = None if where is None else str(where)
        self._tell({target: self._said[target]})

    async def close(self, limit: float) -> None:
        """End it and give the port back."""
        self._closing = True
        self._listener.close()
        if self._control is not None:
            self._control.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), limit)

    def _start(self) -> None:
        if self._closing:
            return
        ours, theirs = socket.socketpair()
        fds = (self._listener.fileno(), theirs.fileno())
        try:
            with theirs, shielded(), debugger.escaped():
                process = subprocess.Popen(
                    port_proxy_child.command(*fds),
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            self._again(f"the port proxy of the master port cannot be started: {error.strerror}")
            return
        ours.setblocking(False)
        self._control = ours
        self._reaper.watch(process, self._ended)
        self._reaper.spared.add(process.pid)
        self._tell(self._said)

    def _tell(self, what: dict[str, str | None]) -> None:
        if self._control is not None and what:
            with contextlib.suppress(OSError):  # it has died; its successor is told everything
                self._control.send(json.dumps(what).encode() + b"\n")

    def _ended(self, code: int) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        self._gone.set()
        if self._closing:
            return
        self._again(f"the port proxy of the master port ended ({code})")

    def _again(self, sentence: str) -> None:
        logger.warning("%s; another one is started", sentence)
        wait = RESTARTS[min(self._deaths, len(RESTARTS) - 1)]
        self._deaths += 1
        asyncio.get_running_loop().call_later(wait, self._start)


class C10dRendezvous:
    """By way of an endpoint that every node was given.

    An agent that found the endpoint of its own host taken attaches to the master there. Should that
    one end while nobody starts it again (the agent it belonged to is gone), or should it be no
    master at all (a connection of somebody's holds the port for a moment), this agent is the next
    that can: it tries to take the endpoint whenever no master has answered for HEIR_AFTER
    seconds."""

    def __init__(self, node: NodeContext, met: Callable[[], None]) -> None:
        self._node = node
        self._met = met
        self._config = node.config
        self._tasks = Tasks(node.fatal)
        self._master: MasterHost | None = None
        self._proxy: PortProxy | None = None
        self._heir: asyncio.Task[None] | None = None
        self._over = False
        self.dial = Endpoint(self._config.rendezvous.host, self._config.rendezvous.port)
        """What the link dials."""
        self.address = ""
        """What other nodes dial to reach a store here, or a master; "" until settled."""

    async def settle(self, early: MasterProcess | None) -> None:
        """Find the place, and start what is ours; `early` is a master that already runs. HostError
        with a sentence when the endpoint can never be met."""
        place = await self._place()
        where = self._config.rendezvous
        self.address = offered_address(
            self._config.local_addr,
            LOOPBACK if self._config.spec.max_nodes == 1 else where.host,
            place.address,
        )
        self.dial = place.dial
        if place.proxy is not None:
            if place.proxy.host in ANYWHERE and self._config.spec.max_nodes > 1:
                logger.warning(
                    "this node has rank 0 and starts the job master, but %s is no address of this "
                    "host; give every node a --node-rank of its own, or all --rdzv-backend=c10d",
                    where.host,
                )
            self._proxy = PortProxy(listen_proxy(place.proxy), self._node.reaper)
        if place.bind is None:
            self._met()
            # No master has answered us yet, so none that we know of has ended the job.
            self._look_after(may_succeed=True)
            return
        await self._host(place.bind, early)

    async def _host(self, bind: Endpoint, early: MasterProcess | None = None) -> None:
        sweep_records()
        record = None if early is not None else await in_thread(new_record, name="record")
        self._master = MasterHost(self._node, self, bind, record)
        self._master.start(early)

    def heard(self, event: AgentEvent) -> None:
        """What the link says."""
        if isinstance(event, LinkLost):
            self._look_after(may_succeed=False)
        elif isinstance(event, LinkBack):
            self._forget_heir()
        elif isinstance(event, Ordered) and isinstance(event.order, End | Refused):
            self._over = True

    def _look_after(self, *, may_succeed: bool) -> None:
        where = self._config.rendezvous
        mine = where.kind == "elastic" and where.is_host is None
        if mine and self._master is None and self._heir is None and not self._over:
            work = self._succeed(may_succeed)
            self._heir = self._tasks.start(work, "looking after the job master")

    async def _succeed(self, may_succeed: bool) -> None:
        """Host the master, once its place on this host is free and nobody else has taken it. One
        that ended by itself had seen the end of the job, which must not begin again: so a free
        place is taken only where one was killed, or with `may_succeed`: none has served us."""
        while True:
            # At once, too: whoever lists the masters of this host removes what shows it.
            may_succeed = may_succeed or await in_thread(self._was_killed, name="resolve")
            await asyncio.sleep(HEIR_AFTER * random.uniform(1.0, 1.5))
            may_succeed = may_succeed or await in_thread(self._was_killed, name="resolve")
            bind = await in_thread(self._free_place, name="resolve") if may_succeed else None
            if bind is not None and not self._over:
                logger.warning("no job master is left at %s: this agent starts one", bind)
                self._heir = None
                await self._host(bind)
                return

    def _was_killed(self) -> bool:
        try:
            folder = user_folder.user_folder(os.environ)
            return user_folder.was_killed(folder, self._config.spec.job_id, self.dial.port)
        except (OSError, RuntimeError):  # RuntimeError: nobody knows our home
            return False

    def _free_place(self) -> Endpoint | None:
        """The endpoint, where it is this host's and nobody listens there."""
        try:
            return settle(self._config).bind
        except (NotYet, HostError):
            return None

    def _forget_heir(self) -> None:
        if self._heir is not None:
            self._heir.cancel()
            self._heir = None

    def store(self, where: Endpoint | None) -> None:
        """The store behind the proxy; None between rounds."""
        if self._proxy is not None:
            self._proxy.say("store", where)

    async def close(self, *, job_over: bool) -> None:
        """Let the master go and give the port back."""
        self._over = True
        self._forget_heir()
        if self._master is not None:
            await self._master.close(job_over=job_over)
        if self._proxy is not None:
            await self._proxy.close(LEAVE_LIMIT)

    async def _place(self) -> SettledPlace:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.spec.join_timeout
        tries = 0
        while True:
            try:
                return await in_thread(lambda: settle(self._config), name="resolve")
            except NotYet as error:
                if loop.time() >= end:
                    limit = self._config.spec.join_timeout
                    raise HostError(f"{error}, for {limit:g} s") from None
                tries += 1
                if tries == 1:
                    logger.warning("%s; trying again until it does", error)
            # No event tells of a new name. Not all pods of a job ask in the same moment.
            wait = resolve_again(tries) * random.uniform(0.75, 1.25)
            await asyncio.sleep(min(wait, max(0.0, end - loop.time())))

    # ------------------------------------------------------------ the master that is hosted

    def master_serves(self, endpoint: Endpoint) -> None:
        self.dial = endpoint
        if self._proxy is not None:
            self._proxy.say("master", endpoint)
        self._met()

    def master_taken(self, sentence: str) -> None:
        if self._config.rendezvous.kind == "elastic" and self._config.rendezvous.is_host is None:
            # Another agent of this host was faster: the master there is the job's.
            logger.info("%s; the job master is looked for there", sentence)
            self._master = None
            self._met()
        else:
            self._node.fatal(sentence)
