"""Finds this host's addresses and, as far as this host can tell, the place of the job's master.

standalone  on loopback, on a free port
open        on this host, on the first free port
elastic     on the host that can bind the address that the endpoint's name resolves to
static      on node rank 0, behind a proxy on the port that the user named (decision 008)
external    where the user says
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from dataclasses import dataclass
from enum import Enum
from typing import Final

from elasticrun.config import Launch, Place
from elasticrun.host.system.network import (
    is_loopback,
    is_ours,
    names_this_host_only,
    routed_address,
)
from elasticrun.wire.types import Endpoint

LOOPBACK: Final = "127.0.0.1"
ANYWHERE: Final = ("::", "0.0.0.0")

MOST_PORTS: Final = 200
"""Maximum number of ports to try, starting at the first one."""

DIAL_LIMIT: Final = 2.0
"""Seconds for connecting to an address of our own, which normally takes microseconds."""

NONCE_BYTES: Final = 16

RESOLVE_RETRY: Final = 1.0
"""Seconds before the first retry of a name that does not resolve: pods get their names late."""

RESOLVE_CAP: Final = 5.0
"""Maximum seconds between retries: name servers cache a missing name for some seconds."""


class HostError(Exception):
    """The master can neither be started nor found; the text is one sentence."""


class NotYet(Exception):
    """The endpoint's name does not resolve (yet: pods get their names late)."""


class Bind(Enum):
    """The result of binding an address."""

    OURS = "ours"
    TAKEN = "taken"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class SettledPlace:
    """The place of the master.

    `dial`: what this agent dials; `address`: its numeric address, for choosing our own address.
    `bind`: where to start the master, None if another node does. `proxy`: where the static job's
    port proxy listens, None without a proxy."""

    dial: Endpoint
    address: str
    bind: Endpoint | None = None
    proxy: Endpoint | None = None


def resolve(host: str, port: int) -> list[str]:
    """The numeric addresses of a name, IPv4 loopback before IPv6 loopback. Raises NotYet and
    HostError. Blocks."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise NotYet(f"the name {host} does not resolve: {error.strerror}") from None
    except UnicodeError:
        raise HostError(f"{host!r} is not a host name") from None
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    return sorted(addresses, key=lambda address: is_loopback(address) and ":" in address)


def bind_test(address: str, port: int) -> Bind:
    """Try to listen on exactly this address and port. Raises HostError if that is not permitted.

    Uses neither SO_REUSEPORT nor a wildcard: with them binding would succeed on any host and prove
    nothing."""
    try:  # a port in TIME_WAIT is free; a listening one is not
        _listen(address, port, backlog=1).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Bind.TAKEN
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return Bind.ELSEWHERE
        where = Endpoint(address, port)
        raise HostError(f"cannot listen on {where}: {os.strerror(error.errno or 0)}") from None
    # With `ip_nonlocal_bind` any address can be bound.
    return Bind.OURS if is_ours(address) and reaches_this_host(address) else Bind.ELSEWHERE


def reaches_this_host(address: str) -> bool:
    """Whether a connection to this address reaches this host: the answer must be our own nonce.

    It uses a port that nobody else knows: at the endpoint's port other nodes may already
    connect."""
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
    """Listen there. Raises OSError. An IPv6 socket also accepts IPv4, as a master's does: `::`, or
    `::ffff:10.0.0.1`."""
    both = ":" in address and socket.has_dualstack_ipv6()
    return socket.create_server(
        (address, port), family=_family(address), backlog=backlog, dualstack_ipv6=both
    )


def settle(launch: Launch, where: Place) -> SettledPlace:
    """The place of the master, as far as this host can tell now. Raises NotYet and HostError.
    Blocks."""
    if where.kind == "standalone":
        return SettledPlace(Endpoint(LOOPBACK, 0), LOOPBACK, bind=Endpoint(LOOPBACK, 0))
    if where.kind == "open":
        here = Endpoint(where.host, where.port)
        return SettledPlace(here, where.host, bind=here)
    addresses = resolve(where.host, where.port)
    if where.kind == "static" and launch.node_rank <= 0:
        proxy = Endpoint(_proxy_address(where.host, addresses), where.port)
        here = Endpoint(LOOPBACK, 0)
        return SettledPlace(here, addresses[0], bind=here, proxy=proxy)
    if where.kind == "elastic" and where.is_host is not False:
        place = _elastic(launch, where, addresses)
        if place is not None:
            return place
    return SettledPlace(Endpoint(where.host, where.port), addresses[0])


def _elastic(launch: Launch, where: Place, addresses: list[str]) -> SettledPlace | None:
    """The place according to the bind test on this host; None if the master belongs to another
    host."""
    several = launch.spec.max_nodes > 1 and not names_this_host_only(where.host)
    for address in addresses:
        at = address
        if several and is_loopback(address):
            # Debian's `127.0.1.1 hostname`: it proves that the name is ours, but no other host
            # could reach a master there.
            at = routed_address() or address
        result = bind_test(at, where.port)
        if result is Bind.OURS:
            here = Endpoint(at, where.port)
            return SettledPlace(here, at, bind=here)
        if result is Bind.TAKEN:
            return SettledPlace(Endpoint(at, where.port), at)
    if where.is_host:
        # The user says that the master is here, although none of the addresses is ours: behind NAT,
        # or a Kubernetes Service.
        return SettledPlace(
            Endpoint(LOOPBACK, where.port), addresses[0], bind=Endpoint("::", where.port)
        )
    return None


def _proxy_address(host: str, addresses: list[str]) -> str:
    """The address at which node rank 0 of a static job listens: the named one if it is ours, else
    all addresses, as under torchrun."""
    if names_this_host_only(host):
        return addresses[0]
    local = [a for a in addresses if not is_loopback(a) and is_ours(a)]
    return local[0] if local else wildcard_address()


def wildcard_address() -> str:
    """The wildcard address."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def listen_proxy(where: Endpoint) -> socket.socket:
    """The port proxy's listening socket. Raises HostError, with a hint if the port is taken."""
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


def retry_delay(tries: int) -> float:
    """Seconds before the next retry of a name that did not resolve, after `tries` tries."""
    return float(min(RESOLVE_CAP, RESOLVE_RETRY * 2.0 ** min(tries - 1, 10)))


def own_address(given: str | None) -> str:
    """The numeric address of this host for others: --local-addr, else that of its default route,
    else the first one that is not loopback, else loopback. Raises HostError. Blocks."""
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
                if one.family.name == family and not _is_unusable(one.address):
                    return str(one.address)
    return LOOPBACK


def _is_unusable(address: str) -> bool:
    return "%" in address or is_loopback(address) or not is_ours(address)


def free_port(address: str, first: int) -> int:
    """The first port from `first` on that is free at this address. Raises HostError. Blocks."""
    for port in range(first, min(first + MOST_PORTS, 65536)):
        there = bind_test(address, port)
        if there is Bind.OURS:
            return port
        if there is Bind.ELSEWHERE:
            raise HostError(
                f"{address} is not an address of this host: set one with --local-addr, or set the "
                "master's address with --rdzv-endpoint"
            )
    raise HostError(
        f"no port from {first} to {first + MOST_PORTS - 1} is free here: set another with "
        "--rdzv-endpoint=HOST:PORT"
    )
