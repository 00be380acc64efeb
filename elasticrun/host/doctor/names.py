"""Checks whether this host's name resolves to this host, and is unique in its job."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from elasticrun.host.doctor.verdict import ok, warning
from elasticrun.host.system.network import is_loopback, is_ours, routed_address
from elasticrun.wire.types import Finding

if TYPE_CHECKING:
    from elasticrun.wire.messages import JobStatus

CHECK: Final = "host name"
REVERSE: Final = "reverse name"
DUPLICATE: Final = "host name in the job"

SLOW: Final = 2.0
"""Seconds that a lookup may take; several libraries query the name server while a rank starts."""

MAX_SAME: Final = 8
"""Maximum number of nodes with our name whose addresses are checked; each may need a lookup."""


def examine(several: bool, environ: Mapping[str, str]) -> list[Finding]:
    """Check the addresses of this host's name. `several`: the job has other nodes. Blocks as long
    as the resolver does."""
    name = socket.gethostname()
    todo = f"make {name} resolve to this host's address (/etc/hosts, DNS)"
    gloo = "gloo offers the address of this name to other nodes"
    if environ.get("GLOO_SOCKET_IFNAME"):
        several = False  # gloo does not use the name then
    else:
        todo += ", or set GLOO_SOCKET_IFNAME"
    began = time.monotonic()
    addresses = resolve(name)
    took = time.monotonic() - began
    if not addresses:
        seen = f"the name of this host, {name}, does not resolve"
        return [warning(CHECK, f"{seen}; {gloo}", todo) if several else ok(CHECK, seen)]
    seen = f"{name} resolves to {', '.join(addresses)}"
    foreign = [address for address in addresses if not is_ours(address)]
    if foreign:
        return [warning(CHECK, f"{seen}; {foreign[0]} is not an address of this host", todo)]
    if several and all(is_loopback(address) for address in addresses):
        return [warning(CHECK, f"{seen}, which is only loopback; {gloo}", todo)]
    if took > SLOW:
        return [warning(CHECK, f"{seen}, after {took:.1f} s", "check /etc/resolv.conf")]
    return [ok(CHECK, seen)]


def reverse() -> list[Finding]:
    """Check the reverse lookup of this host's address on the default route, and that the name found
    resolves to that address. Blocks as long as the resolver does."""
    address = routed_address()
    if not address:
        return [ok(REVERSE, "this host has no address beyond loopback")]
    began = time.monotonic()
    try:
        name = socket.gethostbyaddr(address)[0]
    except OSError:
        name = ""
    took = time.monotonic() - began
    seen = f"{address} has the name {name}" if name else f"{address} has no name"
    if took > SLOW:
        seen = f"{seen}; the name server took {took:.1f} s"
        return [warning(REVERSE, seen, "check /etc/resolv.conf, because each lookup takes as long")]
    if name and (there := resolve(name)) and address not in there:
        seen = f"{seen}, which resolves to {', '.join(there)}"
        return [warning(REVERSE, seen, "make forward and reverse lookup agree (/etc/hosts, DNS)")]
    return [ok(REVERSE, seen)]


def resolve(name: str) -> list[str]:
    """Numeric addresses of a name; none if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def duplicate_name(page: JobStatus, names: Iterable[str]) -> list[Finding]:
    """Check whether another host of the job has one of `names`, this host's names. Blocks as long
    as the resolver does if a node's address is a name (--local-addr)."""
    ours = set(names)
    same = {
        node.address: node.host
        for node in page.nodes
        if node.host in ours and node.state in ("alive", "suspect")
    }
    others = [address for address in list(same)[:MAX_SAME] if _is_elsewhere(address)]
    if not others:
        return [ok(DUPLICATE, f"no other host of job {page.job_id!r} has this host's name")]
    seen = f"{same[others[0]]} is also the name of the host at {others[0]}"
    todo = "give every host a unique name: logs and gloo cannot distinguish them"
    return [warning(DUPLICATE, seen, todo)]


def _is_elsewhere(address: str) -> bool:
    """Whether a node's address is another host's; False if unknown."""
    known = resolve(address) if address else []
    return bool(known) and not any(map(is_ours, known))
