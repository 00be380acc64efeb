"""What the kernel would do with a packet to an address. Nothing is sent: connecting a UDP socket
only looks the route up."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

DISCARD: Final = 9
"""A port that no packet of ours ever reaches; a lookup needs some port."""

_IP_MTU: Final = 14
_IPV6_MTU: Final = 24
"""From linux/in.h and linux/in6.h; Python's socket module has no names for them."""


def source_of(address: str) -> str:
    """The local address from which a packet to `address` (in numbers) would leave. OSError."""
    with _looked_up(address) as sock:
        return str(sock.getsockname()[0])


def is_ours(address: str) -> bool:
    """Whether `address` (in numbers) is one of this host's own, loopback among them."""
    if is_loopback(address):
        return True
    try:
        return source_of(address).partition("%")[0] == address.partition("%")[0]
    except OSError:
        return False


def is_loopback(address: str) -> bool:
    """Whether `address` (in numbers) is of loopback, all of which is ours (127.0.1.1, say)."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


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
