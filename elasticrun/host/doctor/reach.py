"""Checks based on the master's answer to a ReachMe: ports, packet sizes, this host's clock.

Ports: whether the master's host can connect to this one. Ranks and stores listen on ports that the
kernel chooses; a firewall that passes only the master's port is detected here, before it causes a
hang. Packet sizes are compared at both ends of the route.
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

from elasticrun.host.doctor.verdict import failed, ok, warning
from elasticrun.host.system.network import is_loopback, is_ours, mtu_to
from elasticrun.wire.messages import NONCE_BYTES, Reached, ReachMe
from elasticrun.wire.types import Finding

PORTS: Final = "ports"

TRIES: Final = 2
"""Number of ports tried; the kernel chooses them, from the same range as for ranks."""

MAX_CLIENTS: Final = 16
"""Maximum number of connections that an open port answers; the master makes one."""

SEND_LIMIT: Final = 2.0
"""Seconds to send a nonce; never reached, because a nonce fits into the kernel's buffer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The master's answer to one try, and the time on this host's clock before and after it, in
    microseconds since 1970."""

    port: int
    reached: Reached
    sent_us: int
    received_us: int


@contextlib.contextmanager
def open_port() -> Iterator[ReachMe]:
    """In this context, a thread sends a nonce to every client of a new port of this host; yields
    the request to dial it. Raises OSError."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    with _listening() as listener:
        port = listener.getsockname()[1]
        name = f"elasticrun-port-{port}"
        threading.Thread(
            target=_serve_nonce, args=(listener, nonce), name=name, daemon=True
        ).start()
        try:
            yield ReachMe(port=port, nonce=nonce)
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close() does not


def _listening() -> socket.socket:
    """Listen on all addresses, because only the master knows which of them it can reach."""
    six = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if six else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=4, dualstack_ipv6=six)


def _serve_nonce(listener: socket.socket, nonce: bytes) -> None:
    for _ in range(MAX_CLIENTS):
        try:
            client, _ = listener.accept()
        except OSError:  # the context has ended
            return
        with client, contextlib.suppress(OSError):
            client.settimeout(SEND_LIMIT)
            client.sendall(nonce)


def examine_ports(answers: Sequence[Answer], dialled: str, root: Path = Path("/")) -> list[Finding]:
    """Whether the master's host could connect to the ports that were tried. `dialled`: the master's
    numeric address."""
    if not answers:
        return []
    low, high = _range(root)
    reached = answers[0].reached
    span, ports = "", "the TCP ports"
    if high:
        span, ports = f" (of {low} to {high})", f"TCP ports {low} to {high}"
    tried = " and ".join(str(answer.port) for answer in answers)
    todo = f"open {ports} of this host to other hosts (firewall, security group)"
    if not is_direct(reached, dialled):
        seen = (
            f"the master sees this host as {reached.address or 'no address'}, through NAT or "
            "a proxy, so its ports cannot be checked"
        )
        return [ok(PORTS, seen)]
    broken = [answer for answer in answers if not answer.reached.ok]
    if broken:
        seen = (
            f"the master's host {reached.host} cannot connect to port {broken[0].port}{span} "
            f"of this host at {reached.address}: {broken[0].reached.reason}"
        )
        return [failed(PORTS, seen, todo)]
    port = "ports" if len(answers) > 1 else "port"
    seen = f"the master's host {reached.host} has connected to {port} {tried}{span} of this host"
    return [ok(PORTS, seen if dialled != reached.address else f"{seen} (it is this host)")]


def is_direct(reached: Reached, dialled: str) -> bool:
    """Whether the master sees this host directly. Behind the port proxy of a job with a master port
    it sees its own loopback address, and behind NAT or another proxy the address of that."""
    if is_loopback(reached.address):
        return is_ours(dialled)
    return is_ours(reached.address)


def _range(root: Path) -> tuple[int, int]:
    """The range from which the kernel chooses ports; zeros if unknown."""
    try:
        low, high = (root / "proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 0, 0


PACKET_SIZE: Final = "packet size"


def examine_mtu(reached: Reached, dialled: str) -> list[Finding]:
    """Compare the MTU at both ends of the route to the master. `dialled`: the master's numeric
    address; "" if unknown."""
    own = mtu_to(dialled) if dialled else 0
    if not own or not reached.mtu or not is_direct(reached, dialled):
        return [ok(PACKET_SIZE, "the MTU at an end of the route to the master is unknown")]
    if own == reached.mtu:
        seen = f"packets of {own} bytes (MTU) at both ends of the route to the master"
        return [ok(PACKET_SIZE, seen)]
    seen = (
        f"this host sends packets of {own} bytes (MTU) to the master's host {reached.host}, which "
        f"sends {reached.mtu}"
    )
    todo = "give all interfaces of a network the same MTU; otherwise large messages hang"
    return [warning(PACKET_SIZE, seen, todo)]


CLOCK: Final = "clock"

MAX_CLOCK_SKEW: Final = 1.0
"""Seconds that clocks may differ: the logs of several nodes still look ordered. elasticrun does not
depend on it, but certificates and file systems do.
"""


def examine_clock(answers: Sequence[Answer]) -> list[Finding]:
    """Compare this host's clock with that of the master's host. Uses the quickest answer, because
    the uncertainty is half of its round trip."""
    if not answers:
        return []
    best = min(answers, key=lambda answer: answer.received_us - answer.sent_us)
    middle = (best.sent_us + best.received_us) / 2
    ahead = (middle - best.reached.clock_us) / 1e6
    doubt = (best.received_us - best.sent_us) / 2e6
    side = "ahead of" if ahead > 0 else "behind"
    seen = (
        f"this host's clock is {_amount(abs(ahead))} {side} that of the master's host "
        f"{best.reached.host} (to within {_amount(doubt)})"
    )
    if abs(ahead) - doubt > MAX_CLOCK_SKEW:
        return [warning(CLOCK, seen, "synchronize both by NTP (chronyc tracking, timedatectl)")]
    return [ok(CLOCK, seen)]


def _amount(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
