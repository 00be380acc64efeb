"""Masters of running jobs: the endpoint that a user names, and what proves to each master that its
own user asks."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Final

from elasticrun.config import Tls
from elasticrun.host.user_folder import Published, published, user_folder
from elasticrun.wire.auth import reader_token
from elasticrun.wire.types import Endpoint


class NoStatus(Exception):
    """Nothing can be shown; the text is a sentence."""


ANSWER_LIMIT: Final = 5.0
"""Seconds to wait for a master; one on the other side of the world answers within one."""


DEFAULT_PORT: Final = 29400
"""torchrun's port for a rendezvous endpoint without one."""


@dataclass(frozen=True, slots=True)
class Question:
    """One master to be asked, by what it knows us, and the run folder of its job, "" where that is
    not known here."""

    endpoint: Endpoint
    reader: str = field(default="", repr=False)
    files: Tls | None = None
    run: str = ""


def parse_endpoint(text: str) -> Endpoint:
    """`host`, `host:port`, `[ipv6]:port` or `[ipv6]`; NoStatus if it is none of these."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise NoStatus(f"{text!r} is no endpoint: write host:port")
    return Endpoint(host, int(port))


def published_here() -> list[Published]:
    """The masters of this user on this host. NoStatus."""
    try:
        return published(user_folder(os.environ))
    except OSError as wrong:
        raise NoStatus(f"the user's folder cannot be read: {wrong}") from None


def question(endpoint: Endpoint, token: str, files: Tls | None) -> Question:
    """With the job's token, or with what a master of our own on this port has left for us. It is no
    secret of another job's: a proof made with it is good for that master alone."""
    if token:
        return Question(endpoint, reader_token(token), files)
    with contextlib.suppress(NoStatus):
        for master in published_here():
            if master.port == endpoint.port:
                run = master.run if is_here(endpoint.host) else ""
                return Question(endpoint, master.reader, files, run)
    return Question(endpoint, "", files)


def question_to(master: Published, token: str, files: Tls | None) -> Question:
    """One for a master of this user's on this host."""
    given = master.reader or reader_token(token)
    return Question(master.endpoint, given, files if master.tls else None, master.run)


def is_here(host: str) -> bool:
    """Whether a master at this address is on this host."""
    from elasticrun.host.system.network import is_ours, is_this_host

    return is_this_host(host) or is_ours(host)
