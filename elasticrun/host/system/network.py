"""What the kernel would do with a packet to an address, and which addresses are our own. Nothing is
sent: connecting a UDP socket only looks the route up.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

DISCARD: Final = 9
"""A port that no packet of ours ever reaches; a lookup needs some port."""

ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation (RFC 5737, RFC 3849): the way to them is the default route."""

_IP_MTU: Final = 14
_IPV6_MTU: Final = 24
"""From linux/in.h and linux/in6.h; Python's socket module has no names for them."""


def source_of(address: str) -> str:
    """The local address from which a packet to `address` (in numbers) would leave. OSError."""
    with _looked_up(address) as sock:
        return str(sock.getsockname()[0])


def routed_address() -> str:
    """This host's address on its default route, "" if it has none beyond loopback."""
    for target in ELSEWHERE:
        try:
            address = source_of(target)
        except OSError:
            continue
        found = ipaddress.ip_address(_bare(address))
        if not found.is_loopback and not (found.version == 6 and found.is_link_local):
            return address
    return ""


def no_loopback() -> str:
    """A sentence where nothing is reached at 127.0.0.1 (in a network namespace whose loopback is
    down), on which every job depends; "" where it is."""
    try:
        source_of("127.0.0.1")
    except OSError as wrong:
        why = f"127.0.0.1 cannot be reached on this host ({wrong.strerror})"
        return f"{why}: bring its loopback interface up (`ip link set lo up`, as root)"
    return ""


def is_ours(address: str) -> bool:
    """Whether `address` (in numbers) is one of this host's own, loopback among them."""
    if is_loopback(address):
        return True
    try:
        return _bare(source_of(address)) == _bare(address)
    except OSError:
        return False


def is_loopback(address: str) -> bool:
    """Whether `address` (in numbers) is of loopback, all of which is ours (127.0.1.1, say)."""
    try:
        return ipaddress.ip_address(_bare(address)).is_loopback
    except ValueError:
        return False


def names_this_host_only(host: str) -> bool:
    """Whether an endpoint's host means loopback by what it says, so that no other host can join."""
    return host.lower().rstrip(".") in ("localhost", "ip6-localhost") or is_loopback(host)


def is_this_host(host: str) -> bool:
    """Whether that is a name of this host, as far as it shows without asking anybody."""
    return names_this_host_only(host) or host == socket.gethostname()


def mtu_to(address: str) -> int:
    """Largest packet in bytes that leaves for `address`: the interface's, or less where the way is
    known to take less. 0: there is no way, or the kernel does not tell."""
    six = ":" in address
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if six else (socket.IPPROTO_IP, _IP_MTU)
    try:
        with _looked_up(address) as sock:
            return sock.getsockopt(level, option)
    except OSError:
        return 0


def _looked_up(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect((address, DISCARD))
    except OSError:
        sock.close()
        raise
    return sock


def _bare(address: str) -> str:
    """Without the interface that a link-local address may name."""
    return address.partition("%")[0]
