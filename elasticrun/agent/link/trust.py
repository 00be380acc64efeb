"""How this node and its job's master authenticate each other: the token and the TLS files."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elasticrun.config import AgentConfig

if TYPE_CHECKING:
    from elasticrun.wire.auth import Files


FOUND_KINDS: Final = ("etcd", "file", "open")
"""Kinds of rendezvous in which the user does not name the master's host."""

TOKEN_BYTES: Final = 32
"""Random bytes in a generated token; too many to guess."""


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


def trust_of(config: AgentConfig) -> Trust:
    """The trust settings of this configuration. The certificate must contain the host name that the
    user gave, even when we dial loopback. A master found through etcd or a file is checked by the
    dialled address."""
    where = config.rendezvous
    return Trust(config.token, config.tls, where.host if where.kind not in FOUND_KINDS else "")


def with_trust(config: AgentConfig) -> AgentConfig:
    """The configuration, with a generated token if no other node has to know it: such a master is
    our child and gets the token through an inherited descriptor. A standalone job uses no TLS,
    because it runs on loopback and no certificate contains that."""
    kind, token = config.rendezvous.kind, config.token
    tls = None if kind == "standalone" else config.tls
    alone = kind == "standalone" or (kind == "static" and config.spec.max_nodes == 1)
    if not token and alone and not config.delegate:
        token = secrets.token_hex(TOKEN_BYTES)
    if (token, tls) == (config.token, config.tls):
        return config
    return dataclasses.replace(config, token=token, tls=tls)


def unusable(files: Files) -> str:
    """Why TLS cannot be used with these files; "" if it can. Blocks."""
    from elasticrun.wire import auth  # late: it imports ssl, which most jobs do not need

    try:
        auth.read_pem(files)
    except auth.TlsError as wrong:
        return str(wrong)
    return ""
