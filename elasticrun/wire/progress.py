"""What a rank tells its agent of its steps: one small datagram, and the name where it is sent.

The socket is an abstract one (a name without a file: nothing can be left behind) whose name has 128
random bits, a fresh one for each life of the ranks: what a rank of an older life says reaches
nobody, and two jobs never meet. The agent looks at the sender's user besides (SO_PASSCRED), since
every process of the host can read the names in /proc/net/unix.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

VERSION: Final = 1

_LAYOUT: Final = struct.Struct("<BBHIqddd")

DATAGRAM_BYTES: Final = _LAYOUT.size
"""Every datagram is exactly this long; anything else is none of ours."""

MAX_SECONDS: Final = 1e7
"""A step longer than this (four months) is nonsense."""


class Own(IntEnum):
    """What is known of a rank's own part of a step."""

    KNOWN = 0  # this datagram says it
    LATER = 1  # measured from time to time, and not since the last datagram
    ALONE = 2  # no process group: there is nobody to wait for, and nobody to be slower than
    UNTOLD = 3  # torch's flight recorder is off, or does not say enough


@dataclass(frozen=True, slots=True)
class RankSteps:
    """The steps of one rank since its last datagram; times in seconds, means over these steps."""

    local_rank: int
    step: int  # the newest; not negative
    steps: int  # at least 1
    seconds: float  # of one step, from one call of `progress` to the next
    own: float = math.nan  # of one step, until it entered the last collective; NaN: not known
    waited: float = math.nan  # of one step, in collectives; NaN: not known
    knows: Own = Own.LATER


def mint_name() -> str:
    """A fresh name for a socket."""
    return f"elasticrun-{os.urandom(16).hex()}"


def address(name: str) -> str:
    """What `bind` and `sendto` take for a name: the NUL puts it into the abstract namespace."""
    return "\0" + name


def place(name: str, local_rank: int) -> str:
    """What a rank is given (wire.env.PROGRESS): the name, and which rank it is to its agent, which
    --virtual-local-rank hides from it."""
    return f"{name}/{local_rank}"


def read_place(text: str) -> tuple[str, int]:
    """Back from `place`. ValueError."""
    name, _, local_rank = text.rpartition("/")
    return name, int(local_rank)


def encode(said: RankSteps) -> bytes:
    """The datagram. struct.error for numbers that do not fit."""
    return _LAYOUT.pack(
        VERSION,
        said.knows,
        said.local_rank,
        said.steps,
        said.step,
        said.seconds,
        said.own,
        said.waited,
    )


def decode(datagram: bytes) -> RankSteps | None:
    """Back from `encode`; None for what is no such datagram or cannot be true."""
    if len(datagram) != DATAGRAM_BYTES:
        return None
    version, knows, local_rank, steps, step, seconds, own, waited = _LAYOUT.unpack(datagram)
    if version != VERSION or knows not in Own.__members__.values() or steps < 1 or step < 0:
        return None
    if not 0.0 <= seconds <= MAX_SECONDS:
        return None
    known = knows == Own.KNOWN
    if known and not (0.0 <= own <= MAX_SECONDS and 0.0 <= waited <= MAX_SECONDS):
        return None
    if not known:
        own = waited = math.nan
    return RankSteps(local_rank, step, steps, seconds, own, waited, Own(knows))
