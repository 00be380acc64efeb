"""By what this node and its job's master know each other: the token, and the files of TLS."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elasticrun.config import AgentConfig

if TYPE_CHECKING:
    from elasticrun.wire.auth import Files


FOUND_KINDS: Final = ("etcd", "file", "open")
"""Rendezvous whose master's host no user has named."""

TOKEN_BYTES: Final = 32
"""Random bytes of a token that we mint: nobody guesses it."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What the link needs to enter and to know whom it has met."""

    token: str = field(default="", repr=False)
    files: Files | None = None
    """Of TLS; None for plain TCP. They are read before each connection."""
    name: str = ""
    """Host name or address that the master's certificate must bear; "": the one that is dialled."""


NO_TRUST: Final = Trust()
"""Anybody is followed, over plain TCP."""


def trust_of(config: AgentConfig) -> Trust:
    """The name that the master's certificate must bear is the one that the user gave for it, also
    where we dial it on loopback; a master that etcd or a file named is checked by what we dial."""
    where = config.rendezvous
    return Trust(config.token, config.tls, where.host if where.kind not in FOUND_KINDS else "")


def with_trust(config: AgentConfig) -> AgentConfig:
    """The configuration with a token of its own where no other node has to know it: such a job's
    master is a child of this process and is told by an inherited descriptor. On loopback there is
    no TLS: no certificate names it."""
    kind, token = config.rendezvous.kind, config.token
    tls = None if kind == "standalone" else config.tls
    alone = kind == "standalone" or (kind == "static" and config.spec.max_nodes == 1)
    if not token and alone and not config.delegate:
        token = secrets.token_hex(TOKEN_BYTES)
    if (token, tls) == (config.token, config.tls):
        return config
    return dataclasses.replace(config, token=token, tls=tls)


def unusable(files: Files) -> str:
    """Why TLS is not to be had with these files, "" if it is. Blocks."""
    from elasticrun.wire import auth  # which imports ssl: most jobs need none of it so early

    try:
        auth.read_pem(files)
    except auth.TlsError as wrong:
        return str(wrong)
    return ""
