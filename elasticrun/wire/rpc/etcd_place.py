"""Where a job's etcd is, and which keys agents and masters use in it.

All keys of a job are under `/elasticrun/v1/<job id>/`:

lead/master     who leads (`LeaderKey`), under its lease; the key's create_revision is the fencing
                token of every decision. The term of that master is this plus `terms`
lead/candidate  which agent is about to start a master, under a lease of some seconds
lead/outcome    how the job ended (messages.End), for OUTCOME_TTL seconds
record          the facts of the job: what the next master loads
terms           what is added to a revision to make a term: 0 (no key), or, in an etcd that has lost
                its history while the job ran, the highest term that was known then
crashes         how many masters in a row have failed on these facts; expires a minute after the
                last failure

Agents watch only `lead/`, which is small; the record grows with the number of nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from elasticrun.wire.types import Endpoint, dumps, loads

ROOT: Final = "/elasticrun/v1"
DEFAULT_PORT: Final = 2379
MAX_SERVERS: Final = 16
"""Maximum number of servers in one URL; etcd recommends at most seven."""
MAX_VALUE: Final = 8 * 1024
"""Longest valid value under `lead/`, in bytes."""

_HOST: Final = re.compile(r"[\w.:%-]+")


class PlaceError(ValueError):
    """The text is not an address of etcd; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """The servers of one etcd, tried in turn. `secure`: use TLS."""

    servers: tuple[Endpoint, ...]
    secure: bool = False

    def __str__(self) -> str:
        scheme = "etcds" if self.secure else "etcd"
        return f"{scheme}://{','.join(map(str, self.servers))}"


def parse_place(text: str) -> EtcdPlace:
    """Parse `etcd://HOST[:PORT][,HOST[:PORT]...]`, or `etcds://` for TLS. Raises PlaceError."""
    scheme, mark, rest = text.strip().partition("://")
    if not mark or scheme not in ("etcd", "etcds"):
        raise PlaceError(f"{text!r} is not an etcd address: write etcd://HOST:PORT[,HOST:PORT...]")
    if "@" in rest:
        raise PlaceError("a name and password for etcd are not supported: use etcds:// and --tls-*")
    servers = tuple(dict.fromkeys(_server(part, text) for part in rest.rstrip("/").split(",")))
    if len(servers) > MAX_SERVERS:
        raise PlaceError(f"{len(servers)} servers of etcd are more than {MAX_SERVERS}")
    return EtcdPlace(servers, secure=scheme == "etcds")


def _server(part: str, text: str) -> Endpoint:
    host, colon, port = part.strip().rpartition(":")
    if not colon or part.endswith("]"):
        host, port = part.strip(), str(DEFAULT_PORT)
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host != bare
    if not _HOST.fullmatch(bare) or (":" in bare and not bracketed):
        raise PlaceError(f"{text!r} names no host in {part!r}: write etcd://HOST:PORT")
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise PlaceError(f"{text!r} names no port in {part!r}: write etcd://HOST:PORT")
    return Endpoint(bare, int(port))


class Keys:
    """The keys of one job. A job's id may contain any character, even a slash."""

    def __init__(self, job_id: str) -> None:
        self.base = f"{ROOT}/{quote(job_id, safe='')}/"
        self.lead = self.base + "lead/"
        """The prefix that agents watch."""
        self.master = self.lead + "master"
        self.candidate = self.lead + "candidate"
        self.outcome = self.lead + "outcome"
        self.record = self.base + "record"
        self.terms = self.base + "terms"
        self.crashes = self.base + "crashes"


@dataclass(frozen=True, slots=True)
class LeaderKey:
    """The value of `lead/master`."""

    host: str
    port: int
    holder: str  # identifies the agent's incarnation that started this master
    nonce: str  # identifies this master

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.host, self.port)

    def to_bytes(self) -> bytes:
        return dumps(self).encode()


def leader_from_bytes(data: bytes) -> LeaderKey | None:
    """The leader in these bytes; None if they are invalid, so that agents wait for a valid leader
    instead of connecting to something that elasticrun has not written."""
    if len(data) > MAX_VALUE:
        return None
    try:
        leader = loads(data, LeaderKey)
    except ValueError:
        return None
    texts = (leader.host, leader.holder, leader.nonce)
    is_valid = all(word.isprintable() for word in texts) and bool(leader.host)
    return leader if is_valid and 0 < leader.port < 65536 else None
