"""The datagrams between a rank and its agent, and the names of their sockets.

A rank reports its steps, the cost of saves and restores, and its `quiet` blocks on its own, in
small datagrams. A thread in the rank answers everything else, when the agent asks for it
(`RankQuestion`, `RankAnswer`).

The sockets are abstract (a name without a file: nothing is left behind). A name has 128 random bits
and is new for each restart of the ranks, so that datagrams of ranks from before a restart are lost,
and two jobs never meet. The agent also checks the sender's user (SO_PASSCRED), because every
process on the host can read the names in /proc/net/unix.
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

_NOT_FINITE: Final = struct.Struct("<BxHq8s")

MAX_QUIET_BYTES: Final = 64
"""Maximum bytes of the text of a `quiet` block."""

_QUIET: Final = struct.Struct(f"<BxHd{MAX_QUIET_BYTES}s")

DATAGRAM_BYTES: Final = 64 * 1024
"""Maximum length of a datagram. RankRows are JSON; each other kind has a fixed length of its own;
any other datagram is rejected.
"""

MAX_ROWS: Final = 64
MAX_COLUMNS: Final = 32
MAX_COLUMN_NAME: Final = 64
MAX_VALUE: Final = 24
"""Maximum number of rows in a datagram, of columns, of characters in a column's name, and of
characters in a number.
"""

NOT_FINITE: Final = ("nan", "inf", "-inf")
"""Losses that are not finite, as `repr` shows them."""

MAX_QUIET_SECONDS: Final = 86400.0
"""Maximum seconds of a `quiet` block."""

MAX_SECONDS: Final = 1e7
"""Maximum seconds of a step (four months); a longer one is invalid."""


class Own(IntEnum):
    """What is known of a rank's own part of a step."""

    KNOWN = 0  # it is in this datagram
    LATER = 1  # measured only from time to time, not since the last datagram
    ALONE = 2  # no process group: there is nobody to wait for or to compare with
    UNAVAILABLE = 3  # torch's flight recorder is off, or has too little information


@dataclass(frozen=True, slots=True)
class RankSteps:
    """The steps of one rank since its last datagram; times are means over these steps, in
    seconds."""

    local_rank: int
    step: int  # the newest; not negative
    steps: int  # at least 1
    seconds: float  # of one step, from one call of `progress` to the next
    own: float = math.nan  # of one step, until it entered the last collective; NaN: unknown
    waited: float = math.nan  # of one step, in collectives; NaN: unknown
    knows: Own = Own.LATER


@dataclass(frozen=True, slots=True)
class RankCosts:
    """Seconds for which saves and restores have blocked this process since it started."""

    local_rank: int
    step: int = -1  # the newest one reported to the Checkpointer; -1: none
    saves: int = 0
    saved: float = 0.0
    restored: float = 0.0


@dataclass(frozen=True, slots=True)
class RankQuiet:
    """The `quiet` block that a rank is in, and its remaining seconds; "" and 0.0: none."""

    local_rank: int
    what: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RankRows:
    """Metrics of the script's steps. `rows`: step, time (seconds since 1970), and numbers as text
    in the order of `names`, "" for a missing one. `dropped`: rows of this process that were not
    kept."""

    local_rank: int
    names: tuple[str, ...]
    rows: tuple[tuple[int, float, tuple[str, ...]], ...]
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class RankNotFinite:
    """The first step whose loss is not finite, and the loss: nan, inf or -inf."""

    local_rank: int
    step: int
    value: str


def mint_name() -> str:
    """A new random name for a socket."""
    return f"elasticrun-{os.urandom(16).hex()}"


def address(name: str) -> str:
    """The address of a socket's name, for `bind` and `sendto`; NUL selects the abstract
    namespace."""
    return "\0" + name


def place(name: str, local_rank: int) -> str:
    """The value of env.PROGRESS for a rank: the socket's name, and the local rank, which
    --virtual-local-rank hides from the rank."""
    return f"{name}/{local_rank}"


def read_place(text: str) -> tuple[str, int]:
    """The inverse of `place`. Raises ValueError."""
    name, _, local_rank = text.rpartition("/")
    return name, int(local_rank)


RankDatagram = RankSteps | RankCosts | RankQuiet | RankRows | RankNotFinite


def encode(message: RankDatagram) -> bytes:
    """The datagram of a message. Raises struct.error for numbers that do not fit."""
    if isinstance(message, RankQuiet):
        return _QUIET.pack(
            VERSION, message.local_rank, message.seconds, message.what.encode()[:MAX_QUIET_BYTES]
        )
    if isinstance(message, RankNotFinite):
        return _NOT_FINITE.pack(VERSION, message.local_rank, message.step, message.value.encode())
    if isinstance(message, RankRows):
        return json.dumps(asdict(message), separators=(",", ":")).encode("ascii")
    if isinstance(message, RankCosts):
        sums = (message.saves, message.step, message.saved, message.restored)
        return _COSTS.pack(VERSION, message.local_rank, *sums)
    return _LAYOUT.pack(
        VERSION,
        message.knows,
        message.local_rank,
        message.steps,
        message.step,
        message.seconds,
        message.own,
        message.waited,
    )


def decode(datagram: bytes) -> RankDatagram | None:
    """The inverse of `encode`; None for an invalid datagram."""
    if datagram[:1] == b"{":
        return _rows(datagram)
    if len(datagram) == _QUIET.size:
        version, local_rank, seconds, text = _QUIET.unpack(datagram)
        what = text.rstrip(b"\0").decode(errors="ignore")
        is_valid = version == VERSION and 0.0 <= seconds <= MAX_QUIET_SECONDS and what.isprintable()
        return RankQuiet(local_rank, what, seconds) if is_valid else None
    if len(datagram) == _COSTS.size:
        version, local_rank, saves, step, *spent = _COSTS.unpack(datagram)
        is_valid = (
            version == VERSION and step >= -1 and all(0.0 <= one <= MAX_SECONDS for one in spent)
        )
        return RankCosts(local_rank, step, saves, *spent) if is_valid else None
    if len(datagram) == _NOT_FINITE.size:
        version, local_rank, step, text = _NOT_FINITE.unpack(datagram)
        value = text.rstrip(b"\0").decode(errors="ignore")
        is_valid = version == VERSION and step >= 0 and value in NOT_FINITE
        return RankNotFinite(local_rank, step, value) if is_valid else None
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
    import msgspec  # not needed in scripts that report steps

    try:
        rows = msgspec.json.decode(datagram, type=RankRows)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    known = len(rows.names)
    is_valid = (
        known <= MAX_COLUMNS
        and len(rows.rows) <= MAX_ROWS
        and rows.local_rank >= 0
        and rows.dropped >= 0
        and all(is_column(name) for name in rows.names)
        and all(
            step >= 0 and math.isfinite(at) and len(values) == known and all(map(_is_value, values))
            for step, at, values in rows.rows
        )
    )
    return rows if is_valid else None


def is_column(name: str) -> bool:
    """Whether a column may have this name."""
    return 0 < len(name) <= MAX_COLUMN_NAME and name.isprintable()


def _is_value(text: str) -> bool:
    return len(text) <= MAX_VALUE and text.isprintable()


def bind_socket(made: socket.socket, name: str) -> None:
    """Bind this datagram socket to `name`, and request the credentials of senders. Raises
    OSError."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    made.bind(address(name))


def bound_socket(name: str) -> socket.socket:
    """A new non-blocking datagram socket bound to `name`. Raises OSError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        bind_socket(made, name)
    except OSError:
        made.close()
        raise
    return made


def sender_of(credentials: Iterable[tuple[int, int, bytes]]) -> tuple[int, int] | None:
    """Pid and user id of a datagram's sender, from the kernel; None if missing."""
    for level, kind, data in credentials:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, uid, _ = _CREDENTIALS.unpack_from(data)
            return pid, uid
    return None


def sent_by_us(credentials: Iterable[tuple[int, int, bytes]]) -> bool:
    """Whether a datagram's sender runs as this user, according to the kernel."""
    sender = sender_of(credentials)
    return sender is not None and sender[1] == os.getuid()


# ---------------------------------------------------------------- questions to a rank


_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid

CREDENTIALS_BYTES: Final = socket.CMSG_SPACE(_CREDENTIALS.size)
"""Space for the credentials that accompany a datagram."""

_QUESTION: Final = struct.Struct("<BBBBI")

QUESTION_BYTES: Final = _QUESTION.size
"""The exact length of every question."""

ANSWER_BYTES: Final = 128 * 1024
"""Maximum length of an answer: the kernel accepts at most about 200 KB."""

MAX_ANSWER_GROUPS: Final = 16
"""Maximum number of process groups in an answer."""

MAX_ANSWER_THREADS: Final = 64
MAX_ANSWER_FRAMES: Final = 60
"""Maximum number of threads in an answer, and of frames of each."""


@dataclass(frozen=True, slots=True)
class RankQuestion:
    """Ask a rank for its position in its collectives. `full`: with names and the open call;
    `stacks`: also the stacks of its threads. The answer repeats `number`."""

    number: int
    full: bool = False
    stacks: bool = False


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """A process group, with one rank's counters of its collectives. The fields after `done` are
    only set in a full answer."""

    key: str  # number in this process
    entered: int
    started: int  # -1: unknown
    done: int
    name: str = ""  # the name that all ranks use
    title: str = ""
    members: str = ""  # as in messages.GroupSeen
    call: str = ""  # the oldest open one
    age: float = 0.0  # seconds since the call
    limit: float = 0.0  # torch's timeout in seconds; 0.0: unknown


@dataclass(frozen=True, slots=True)
class ThreadAnswer:
    """A thread ("main", or its name) and its frames: file, line, function; innermost first."""

    name: str
    frames: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """A rank's answer to a RankQuestion."""

    number: int  # of the question
    groups: tuple[GroupAnswer, ...] = ()
    threads: tuple[ThreadAnswer, ...] = ()


def encode_question(question: RankQuestion) -> bytes:
    """The datagram of a question."""
    return _QUESTION.pack(VERSION, question.full, question.stacks, 0, question.number)


def read_question(datagram: bytes) -> RankQuestion | None:
    """The question in a datagram; None if invalid."""
    if len(datagram) != QUESTION_BYTES:
        return None
    version, full, stacks, _, number = _QUESTION.unpack(datagram)
    return RankQuestion(number, bool(full), bool(stacks)) if version == VERSION else None


def encode_answer(answer: RankAnswer) -> bytes:
    """The datagram of an answer. If it is too long, each stack is cut to fewer frames."""
    depth = MAX_ANSWER_FRAMES
    while True:
        data = json.dumps(asdict(answer), separators=(",", ":")).encode("ascii")
        if len(data) <= ANSWER_BYTES or not depth:
            return data
        depth //= 2
        threads = tuple(ThreadAnswer(one.name, one.frames[:depth]) for one in answer.threads)
        answer = replace(answer, threads=threads)


def read_answer(datagram: bytes) -> RankAnswer | None:
    """The answer in a datagram; None if invalid."""
    import msgspec  # not needed in scripts that report steps

    if len(datagram) > ANSWER_BYTES:
        return None
    try:
        answer = msgspec.json.decode(datagram, type=RankAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    long = max((len(one.frames) for one in answer.threads), default=0)
    if len(answer.groups) > MAX_ANSWER_GROUPS or len(answer.threads) > MAX_ANSWER_THREADS:
        return None
    return answer if long <= MAX_ANSWER_FRAMES else None
