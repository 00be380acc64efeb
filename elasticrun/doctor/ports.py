"""Whether the master's host can dial this one: ranks and stores listen on ports that the kernel
chooses, and a firewall that lets only the master's port through is found here and not by a hang.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticrun.doctor.verdict import failed, ok
from elasticrun.system.network import is_loopback, is_ours
from elasticrun.wire.messages import NONCE_BYTES, Reached, ReachMe
from elasticrun.wire.types import Finding

CHECK: Final = "ports"

TRIES: Final = 2
"""Ports that are tried; the kernel chooses them, from the range that it gives to ranks as well."""

MAX_VISITS: Final = 16
"""Connections that one open port answers; the master makes one."""

SEND_LIMIT: Final = 2.0
"""Seconds for a nonce to leave; it always fits into the kernel's buffer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the master said to one try, and this host's clock before and after, in microseconds."""

    port: int
    reached: Reached
    sent_us: int
    received_us: int


@contextlib.contextmanager
def open_port() -> Iterator[ReachMe]:
    """A port of this host that shows a nonce to whoever dials it, for as long as the context lasts.
    OSError."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    with _listening() as listener:
        port = listener.getsockname()[1]
        name = f"elasticrun-port-{port}"
        threading.Thread(target=_show, args=(listener, nonce), name=name, daemon=True).start()
        try:
            yield ReachMe(port=port, nonce=nonce)
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing does not


def _listening() -> socket.socket:
    """On all addresses: which of them the master sees, only it can say."""
    six = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if six else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=4, dualstack_ipv6=six)


def _show(listener: socket.socket, nonce: bytes) -> None:
    for _ in range(MAX_VISITS):
        try:
            visitor, _ = listener.accept()
        except OSError:  # the context is over
            return
        with visitor, contextlib.suppress(OSError):
            visitor.settimeout(SEND_LIMIT)
            visitor.sendall(nonce)


def examine(answers: Sequence[Answer], dialled: str, root: Path = Path("/")) -> list[Finding]:
    """`dialled`: the master's address in numbers."""
    if not answers:
        return []
    low, high = _range(root)
    reached = answers[0].reached
    span = f" (of {low} to {high})" if high else ""
    tried = " and ".join(str(answer.port) for answer in answers)
    todo = (
        f"open TCP ports {low} to {high} of this host to the others (firewall, security group)"
        if high
        else "open the TCP ports of this host to the others (firewall, security group)"
    )
    if not straight(reached, dialled):
        seen = (
            f"the master sees this host as {reached.address or 'no address'}, by way of a door or "
            "a proxy, so it cannot be seen whether ports of this host are open"
        )
        return [ok(CHECK, seen)]
    broken = [answer for answer in answers if not answer.reached.ok]
    if broken:
        seen = (
            f"the master's host {reached.host} cannot dial port {broken[0].port}{span} "
            f"of this host at {reached.address}: {broken[0].reached.reason}"
        )
        return [failed(CHECK, seen, todo)]
    ports = "ports" if len(answers) > 1 else "port"
    seen = f"the master's host {reached.host} has dialled {ports} {tried}{span} of this host"
    return [ok(CHECK, seen if dialled != reached.address else f"{seen} (it is this host)")]


def straight(reached: Reached, dialled: str) -> bool:
    """Whether what the master saw and dialled was this host. Behind the door of a job with a master
    port it sees its own loopback, and behind NAT or a proxy an address of those."""
    if is_loopback(reached.address):
        return is_ours(dialled)
    return is_ours(reached.address)


def _range(root: Path) -> tuple[int, int]:
    """The ports that the kernel chooses from; zeros where it does not tell."""
    try:
        low, high = (root / "proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 0, 0
