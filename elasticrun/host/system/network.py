"""Routes to addresses, and which addresses belong to this host. Nothing is sent: connecting a UDP
socket only looks up the route.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

DISCARD: Final = 9
"""The port of the lookups, which need some port; no packet is sent to it."""

ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation (RFC 5737, RFC 3849), to which only the default route leads."""

_IP_MTU: Final = 14
_IPV6_MTU: Final = 24
"""From linux/in.h and linux/in6.h; Python's socket module does not define them."""


def source_of(address: str) -> str:
    """The local address from which a packet to `address` (numeric) would leave. Raises OSError."""
    with _routed_socket(address) as sock:
        return str(sock.getsockname()[0])


def routed_address() -> str:
    """This host's address on its default route, "" if it has only loopback."""
    for target in ELSEWHERE:
        try:
            address = source_of(target)
        except OSError:
            continue
        found = ipaddress.ip_address(_bare(address))
        if not found.is_loopback and not (found.version == 6 and found.is_link_local):
            return address
    return ""


def loopback_problem() -> str:
    """A sentence if 127.0.0.1, on which every job depends, is unreachable; else "". In a network
    namespace the loopback interface may be down."""
    try:
        source_of("127.0.0.1")
    except OSError as wrong:
        why = f"127.0.0.1 cannot be reached on this host ({wrong.strerror})"
        return f"{why}: bring its loopback interface up (`ip link set lo up`, as root)"
    return ""


def is_ours(address: str) -> bool:
    """Whether `address` (numeric) belongs to this host, including loopback."""
    if is_loopback(address):
        return True
    try:
        return _bare(source_of(address)) == _bare(address)
    except OSError:
        return False


def is_loopback(address: str) -> bool:
    """Whether `address` (numeric) is a loopback address, such as 127.0.1.1; all belong to this
    host."""
    try:
        return ipaddress.ip_address(_bare(address)).is_loopback
    except ValueError:
        return False


def names_this_host_only(host: str) -> bool:
    """Whether an endpoint's host is written as loopback, so that no other host can join."""
    return host.lower().rstrip(".") in ("localhost", "ip6-localhost") or is_loopback(host)


def is_this_host(host: str) -> bool:
    """Whether `host` is a name of this host, as far as known without a lookup."""
    return names_this_host_only(host) or host == socket.gethostname()


def mtu_to(address: str) -> int:
    """The MTU in bytes towards `address` (numeric): the interface's, or that of the path if known
    to be smaller. 0: no route, or unknown."""
    six = ":" in address
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if six else (socket.IPPROTO_IP, _IP_MTU)
    try:
        with _routed_socket(address) as sock:
            return sock.getsockopt(level, option)
    except OSError:
        return 0


def _routed_socket(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect((address, DISCARD))
    except OSError:
        sock.close()
        raise
    return sock


def _bare(address: str) -> str:
    """The address without the interface that a link-local address may name."""
    return address.partition("%")[0]
