"""What a rank and its agent say in datagrams, and the names where they are sent.

A rank tells of its steps, of what saves and restores have cost, and of what takes long on purpose,
by itself, in small datagrams. What else it does, a thread in it answers when the agent asks
(`RankAsked`, `RankSays`).

A socket is an abstract one (a name without a file: nothing can be left behind) whose name has 128
random bits, a fresh one for each life of the ranks: what a rank of an older life says reaches
nobody, and two jobs never meet. The agent looks at the sender's user besides (SO_PASSCRED), since
every process of the host can read the names in /proc/net/unix.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Final

VERSION: Final = 1

_LAYOUT: Final = struct.Struct("<BBHIqddd")

_COSTS: Final = struct.Struct("<BxHIqdd")

MAX_WORD: Final = 64
"""Bytes of what a rank says that it is in."""

_WORD: Final = struct.Struct(f"<BxHd{MAX_WORD}s")

DATAGRAM_BYTES: Final = 64 * 1024
"""No datagram is longer. Rows are JSON; each other kind has a length of its own; anything else is
none of ours."""

MAX_ROWS: Final = 64
MAX_COLUMNS: Final = 32
MAX_COLUMN_NAME: Final = 64
MAX_VALUE: Final = 24
"""Rows of a datagram, their columns, and the characters of a column's name and of a number."""

LONGEST_WORD: Final = 86400.0
"""Seconds for which a rank's word holds at most."""

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


@dataclass(frozen=True, slots=True)
class RankCosts:
    """What saves and restores have kept this process from training, since it began; seconds."""

    local_rank: int
    step: int = -1  # the newest that the Checkpointer was told of; -1: none
    saves: int = 0
    saved: float = 0.0
    restored: float = 0.0


@dataclass(frozen=True, slots=True)
class RankWord:
    """What a rank is in that takes long on purpose, and for how many seconds at most; "" and 0.0:
    in nothing."""

    local_rank: int
    what: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RankRows:
    """What the script says of its steps. `rows`: step, moment (seconds since 1970), and numbers as
    text in the order of `names`, "" where there is none. `dropped`: rows that were not kept, of
    this process so far."""

    local_rank: int
    names: tuple[str, ...]
    rows: tuple[tuple[int, float, tuple[str, ...]], ...]
    dropped: int = 0


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


RankTold = RankSteps | RankCosts | RankWord | RankRows


def encode(said: RankTold) -> bytes:
    """The datagram. struct.error for numbers that do not fit."""
    if isinstance(said, RankWord):
        return _WORD.pack(VERSION, said.local_rank, said.seconds, said.what.encode()[:MAX_WORD])
    if isinstance(said, RankRows):
        return json.dumps(asdict(said), separators=(",", ":")).encode("ascii")
    if isinstance(said, RankCosts):
        sums = (said.saves, said.step, said.saved, said.restored)
        return _COSTS.pack(VERSION, said.local_rank, *sums)
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


def decode(datagram: bytes) -> RankTold | None:
    """Back from `encode`; None for what is no such datagram or cannot be true."""
    if datagram[:1] == b"{":
        return _rows(datagram)
    if len(datagram) == _WORD.size:
        version, local_rank, seconds, word = _WORD.unpack(datagram)
        what = word.rstrip(b"\0").decode(errors="ignore")
        true = version == VERSION and 0.0 <= seconds <= LONGEST_WORD and what.isprintable()
        return RankWord(local_rank, what, seconds) if true else None
    if len(datagram) == _COSTS.size:
        version, local_rank, saves, step, *spent = _COSTS.unpack(datagram)
        true = version == VERSION and step >= -1 and all(0.0 <= one <= MAX_SECONDS for one in spent)
        return RankCosts(local_rank, step, saves, *spent) if true else None
    if len(datagram) != _LAYOUT.size:
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


def _rows(datagram: bytes) -> RankRows | None:
    import msgspec  # a script that tells its steps goes without

    try:
        said = msgspec.json.decode(datagram, type=RankRows)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    known = len(said.names)
    sound = (
        known <= MAX_COLUMNS
        and len(said.rows) <= MAX_ROWS
        and said.local_rank >= 0
        and said.dropped >= 0
        and all(is_column(name) for name in said.names)
        and all(
            step >= 0 and math.isfinite(at) and len(values) == known and all(map(_is_value, values))
            for step, at, values in said.rows
        )
    )
    return said if sound else None


def is_column(name: str) -> bool:
    """Whether a column may be called so."""
    return 0 < len(name) <= MAX_COLUMN_NAME and name.isprintable()


def _is_value(text: str) -> bool:
    return len(text) <= MAX_VALUE and text.isprintable()


def hear_at(made: socket.socket, name: str) -> None:
    """Have this datagram socket hear at `name`, and who says what it hears. OSError."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    made.bind(address(name))


def hearing_at(name: str) -> socket.socket:
    """A socket that hears at `name` and does not block. OSError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        hear_at(made, name)
    except OSError:
        made.close()
        raise
    return made


def sender_of(credentials: Iterable[tuple[int, int, bytes]]) -> tuple[int, int] | None:
    """The process and the user that have sent a datagram, as the kernel says; None: it does not."""
    for level, kind, data in credentials:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, uid, _ = _CREDENTIALS.unpack_from(data)
            return pid, uid
    return None


def sent_by_us(credentials: Iterable[tuple[int, int, bytes]]) -> bool:
    """Whether the kernel says that a datagram's sender runs as this user."""
    sender = sender_of(credentials)
    return sender is not None and sender[1] == os.getuid()


# ---------------------------------------------------------------- questions to a rank


_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid

CREDENTIALS_BYTES: Final = socket.CMSG_SPACE(_CREDENTIALS.size)
"""Room that they take beside a datagram."""

_QUESTION: Final = struct.Struct("<BBBBI")

QUESTION_BYTES: Final = _QUESTION.size
"""Every question is exactly this long."""

ANSWER_BYTES: Final = 128 * 1024
"""An answer is no longer: the kernel takes none of more than some 200 KB."""

MAX_GROUPS_SAID: Final = 16
"""Process groups in an answer."""

MAX_THREADS_SAID: Final = 64
MAX_FRAMES_SAID: Final = 60
"""Threads in an answer, and frames of each."""


@dataclass(frozen=True, slots=True)
class RankAsked:
    """Where is the rank in its collectives? `full`: by name, and in which call; `stacks`: and where
    do its threads stand? `number` comes back with the answer."""

    number: int
    full: bool = False
    stacks: bool = False


@dataclass(frozen=True, slots=True)
class GroupSays:
    """A process group as one rank counts its collectives; the fields after `done` are in a full
    answer alone."""

    key: str  # number in this process
    entered: int
    started: int  # -1: not told
    done: int
    name: str = ""  # by which all ranks know it
    title: str = ""
    members: str = ""  # as in messages.GroupSeen
    call: str = ""  # the oldest that is open
    age: float = 0.0  # seconds since it was called
    limit: float = 0.0  # seconds that torch gives it; 0.0: not told


@dataclass(frozen=True, slots=True)
class ThreadSays:
    """A thread ("main", or its name) and its frames: file, line, function; innermost first."""

    name: str
    frames: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True)
class RankSays:
    """A rank's answer."""

    number: int  # of the question
    groups: tuple[GroupSays, ...] = ()
    threads: tuple[ThreadSays, ...] = ()


def encode_question(asked: RankAsked) -> bytes:
    """The datagram."""
    return _QUESTION.pack(VERSION, asked.full, asked.stacks, 0, asked.number)


def read_question(datagram: bytes) -> RankAsked | None:
    """Back from it; None for what is no question."""
    if len(datagram) != QUESTION_BYTES:
        return None
    version, full, stacks, _, number = _QUESTION.unpack(datagram)
    return RankAsked(number, bool(full), bool(stacks)) if version == VERSION else None


def encode_answer(said: RankSays) -> bytes:
    """The datagram. Where the stacks do not fit, each is told less far out."""
    depth = MAX_FRAMES_SAID
    while True:
        data = json.dumps(asdict(said), separators=(",", ":")).encode("ascii")
        if len(data) <= ANSWER_BYTES or not depth:
            return data
        depth //= 2
        threads = tuple(ThreadSays(one.name, one.frames[:depth]) for one in said.threads)
        said = replace(said, threads=threads)


def read_answer(datagram: bytes) -> RankSays | None:
    """Back from it; None for what is no answer."""
    import msgspec  # a script that tells its steps goes without

    if len(datagram) > ANSWER_BYTES:
        return None
    try:
        said = msgspec.json.decode(datagram, type=RankSays)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    long = max((len(one.frames) for one in said.threads), default=0)
    if len(said.groups) > MAX_GROUPS_SAID or len(said.threads) > MAX_THREADS_SAID:
        return None
    return said if long <= MAX_FRAMES_SAID else None
