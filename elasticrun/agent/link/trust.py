"""How this node and its job's master authenticate each other: the token and the TLS files."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elasticrun.config import Identity, Launch, Place

if TYPE_CHECKING:
    from elasticrun.wire.auth import Files


FOUND_KINDS: Final = ("etcd", "file", "open")
"""Kinds of rendezvous in which the user does not name the master's host."""

TOKEN_BYTES: Final = 32
"""Number of random bytes in a generated token."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What the link needs to authenticate itself and the master."""

    token: str = field(default="", repr=False)
    files: Files | None = None
    """TLS files, read before each connection; None for plain TCP."""
    name: str = ""
    """The host name or address that the master's certificate must contain; "": the dialled one."""


NO_TRUST: Final = Trust()
"""No authentication, plain TCP."""


def trust_of(place: Place, identity: Identity) -> Trust:
    """This node's trust settings. The certificate must contain the host name that the user gave,
    even when we dial loopback. If the master is found through etcd or a file, the certificate must
    contain the dialled address."""
    name = place.host if place.kind not in FOUND_KINDS else ""
    return Trust(identity.token, identity.tls, name)


def with_token(launch: Launch, place: Place, identity: Identity) -> Identity:
    """The identity, with a generated token if no other node has to know it: the master is then our
    child and gets the token through an inherited descriptor. A standalone job uses no TLS, because
    it stays on loopback, which no certificate names."""
    alone = place.kind == "standalone" or (place.kind == "static" and launch.spec.max_nodes == 1)
    token = identity.token or (secrets.token_hex(TOKEN_BYTES) if alone else "")
    tls = None if place.kind == "standalone" else identity.tls
    return dataclasses.replace(identity, token=token, tls=tls)


def why_unusable(files: Files) -> str:
    """Why TLS cannot be used with these files; "" if it can. Blocks."""
    from elasticrun.wire import auth  # late: it imports ssl, which most jobs do not need

    try:
        auth.read_pem(files)
    except auth.TlsError as wrong:
        return str(wrong)
    return ""
