"""The fields of every message with their bounds, one row per message of `messages.py`.

Used by `codec.py` in both directions. What comes in is checked field by field before anything of
elasticrun sees it: no negative size, no endless text, no word outside its enum, no NaN. What goes
out passes the same checks, after texts have been cut to their bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from elasticrun.wire import messages as m
from elasticrun.wire.ids import Endpoint, RoundName

INT32: Final = 2**31 - 1
INT64: Final = 2**63 - 1


class WireError(ValueError):
    """A message that is not one of ours or breaks a bound; the text is a sentence for people."""


# ---------------------------------------------------------------- kinds of fields


@dataclass(frozen=True, slots=True)
class _Int:
    low: int
    high: int

    def load(self, where: str, message: Any, name: str) -> int:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: int) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: int) -> int:
        if not self.low <= value <= self.high:
            raise WireError(f"{where} is {value}, not between {self.low} and {self.high}")
        return int(value)


@dataclass(frozen=True, slots=True)
class _Flag:
    def load(self, where: str, message: Any, name: str) -> bool:
        return bool(getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: bool) -> None:
        setattr(message, name, bool(value))


@dataclass(frozen=True, slots=True)
class _Seconds:
    def load(self, where: str, message: Any, name: str) -> float:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: float) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: float) -> float:
        if not (math.isfinite(value) and 0 <= value <= m.MAX_SECONDS):
            raise WireError(f"{where} is {value} s, not between 0 and {m.MAX_SECONDS:.0f} s")
        return float(value)


@dataclass(frozen=True, slots=True)
class _Text:
    """Free text for people: the sender cuts it, the receiver refuses what is longer."""

    tail: bool = False  # keep the end: a traceback says last what went wrong

    def load(self, where: str, message: Any, name: str) -> str:
        value = str(getattr(message, name))
        if len(value) > m.MAX_TEXT:
            raise WireError(f"{where} has {len(value)} characters, more than {m.MAX_TEXT}")
        return value

    def store(self, where: str, message: Any, name: str, value: str) -> None:
        setattr(message, name, cut(value, m.MAX_TEXT, tail=self.tail))


@dataclass(frozen=True, slots=True)
class _Name:
    """A name: one printable line that is never cut, because a cut name is another name."""

    empty: bool = False

    def load(self, where: str, message: Any, name: str) -> str:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: str) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: str) -> str:
        if not value and not self.empty:
            raise WireError(f"{where} is empty")
        if len(value) > m.MAX_NAME:
            raise WireError(f"{where} has {len(value)} characters, more than {m.MAX_NAME}")
        if not value.isprintable():
            raise WireError(f"{where} holds a character that cannot be printed")
        return value


@dataclass(frozen=True, slots=True)
class _Word:
    """One of a few words; `make` turns it into its enum."""

    words: tuple[str, ...]
    make: Callable[[str], str] = str

    def load(self, where: str, message: Any, name: str) -> str:
        return self.make(self.check(where, getattr(message, name)))

    def store(self, where: str, message: Any, name: str, value: str) -> None:
        setattr(message, name, self.check(where, str(value)))

    def check(self, where: str, value: str) -> str:
        if value not in self.words:
            raise WireError(f"{where} is {value[:80]!r}, not one of {', '.join(self.words)}")
        return value


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A nonce or a proof: of exactly this length, or (`empty`) none at all."""

    length: int
    empty: bool = False

    def load(self, where: str, message: Any, name: str) -> bytes:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: bytes) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: bytes) -> bytes:
        if len(value) != self.length and (value or not self.empty):
            raise WireError(f"{where} has {len(value)} bytes, not {self.length}")
        return bytes(value)


@dataclass(frozen=True, slots=True)
class _Part:
    """A message within a message."""

    of: type[Any]
    optional: bool = False

    def load(self, where: str, message: Any, name: str) -> Any:
        if message.HasField(name):
            return load(self.of, getattr(message, name), where)
        if self.optional:
            return None
        raise WireError(f"{where} is missing")

    def store(self, where: str, message: Any, name: str, value: Any) -> None:
        if value is None and self.optional:
            return
        part = getattr(message, name)
        part.SetInParent()
        store(value, part, where)


@dataclass(frozen=True, slots=True)
class _Many:
    """A bounded list: of messages (`of`) or of process ids."""

    most: int
    of: type[Any] | None = None

    def load(self, where: str, message: Any, name: str) -> tuple[Any, ...]:
        values = getattr(message, name)
        self.bound(where, len(values))
        if self.of is None:
            return tuple(_PID.check(where, pid) for pid in values)
        return tuple(load(self.of, part, where) for part in values)

    def store(self, where: str, message: Any, name: str, value: tuple[Any, ...]) -> None:
        self.bound(where, len(value))
        target = getattr(message, name)
        if self.of is None:
            target.extend(_PID.check(where, pid) for pid in value)
            return
        for item in value:
            store(item, target.add(), where)

    def bound(self, where: str, count: int) -> None:
        if count > self.most:
            raise WireError(f"{where} lists {count}, more than {self.most}")


_Field = _Int | _Flag | _Seconds | _Text | _Name | _Word | _Bytes | _Part | _Many

_PID = _Int(-1, INT32)
_NAME = _Name()
_MAYBE = _Name(empty=True)
_TEXT = _Text()
_COUNT = _Int(0, INT32)
_RANK = _Int(0, m.MAX_RANKS)
_RANK_OR_NONE = _Int(-1, m.MAX_RANKS)
_WORLD = _Int(1, m.MAX_RANKS)
_NODES = _Int(1, m.MAX_NODES)
_LOCAL = _Int(1, m.MAX_LOCAL_RANKS)
_EXIT = _Int(0, 255)
_SECONDS = _Seconds()
_NONCE = _Bytes(m.NONCE_BYTES)
_PROOF = _Bytes(m.PROOF_BYTES, empty=True)
_ROUND = _Part(RoundName)
_ENDPOINT = _Part(Endpoint)
_FAILURES = _Many(m.MAX_FAILURES, m.Failure)

_PLACE: Final[dict[str, _Field]] = {
    "round": _ROUND,
    "group_rank": _RANK,
    "group_world_size": _NODES,
    "first_rank": _RANK,
    "world_size": _WORLD,
    "restart_count": _COUNT,
    "store": _ENDPOINT,
}

_FIELDS: Final[Mapping[type[Any], Mapping[str, _Field]]] = {
    RoundName: {"term": _Int(0, INT64), "number": _Int(1, INT64), "nonce": _NAME},
    Endpoint: {"host": _NAME, "port": _Int(1, 65535)},
    m.Failure: {
        "host": _MAYBE,
        "rank": _RANK_OR_NONE,
        "local_rank": _Int(-1, m.MAX_LOCAL_RANKS),
        "pid": _PID,
        "exitcode": _Int(-INT32, INT32),
        "time_us": _Int(0, INT64),
        "kind": _Word(tuple(m.FailureKind), m.FailureKind),
        "message": _TEXT,
        "traceback": _Text(tail=True),
        "error_file": _TEXT,
    },
    m.JobSpec: {
        "job_id": _MAYBE,
        "min_nodes": _NODES,
        "max_nodes": _NODES,
        "node_unit": _NODES,
        "max_restarts": _COUNT,
        "restart_backoff": _SECONDS,
        "restart_window": _SECONDS,
        "join_timeout": _SECONDS,
        "last_call_timeout": _SECONDS,
        "heartbeat_timeout": _SECONDS,
        "grow": _Word(("auto", "now")),
        "grow_cooldown": _SECONDS,
        "restart_grace": _SECONDS,
        "master_lost_timeout": _SECONDS,
    },
    m.RoundReport: _PLACE,
    m.Knock: {
        "protocol": _COUNT,
        "version": _NAME,
        "job_id": _MAYBE,
        "role": _Word(tuple(m.Role), m.Role),
        "node": _MAYBE,
        "incarnation": _MAYBE,
        "nonce": _NONCE,
        "proves": _Flag(),
    },
    m.Challenge: {
        "protocol": _COUNT,
        "version": _NAME,
        "term": _Int(0, INT64),
        "nonce": _NONCE,
        "proof": _PROOF,
    },
    m.Proof: {"proof": _PROOF},
    m.Hello: {
        "protocol": _COUNT,
        "version": _NAME,
        "node": _NAME,
        "incarnation": _NAME,
        "host": _MAYBE,
        "address": _NAME,
        "pid": _PID,
        "node_rank": _Int(-1, m.MAX_NODES - 1),
        "local_world_size": _LOCAL,
        "role": _MAYBE,
        "spec": _Part(m.JobSpec),
        "attached": _Part(m.RoundReport, optional=True),
        "last_term": _Int(0, INT64),
    },
    m.Join: {"store": _ENDPOINT},
    m.Running: {"round": _ROUND, "pids": _Many(m.MAX_LOCAL_RANKS)},
    m.RanksFailed: {"round": _ROUND, "failures": _FAILURES},
    m.Stopping: {"round": _ROUND, "remaining": _SECONDS},
    m.Stopped: {"round": _ROUND},
    m.Finished: {"round": _ROUND},
    m.Leaving: {"reason": _TEXT, "signal": _Int(0, 64)},
    m.Beat: {"number": _Int(0, INT64)},
    m.Welcome: {
        "protocol": _COUNT,
        "version": _NAME,
        "job_id": _MAYBE,
        "term": _Int(0, INT64),
        "beat_interval": _SECONDS,
        "master_lost_timeout": _SECONDS,
        "status_url": _MAYBE,
    },
    m.Refused: {"reason": _TEXT, "exit_code": _EXIT},
    m.Wait: {"reason": _TEXT},
    m.Start: {**_PLACE, "role_first_rank": _RANK, "role_world_size": _WORLD, "host_store": _Flag()},
    m.Stop: {"round": _ROUND, "reason": _TEXT},
    m.End: {"exit_code": _EXIT, "reason": _TEXT, "failures": _FAILURES},
    m.Echo: {"number": _Int(0, INT64), "beat_interval": _SECONDS},
    m.NodeStatus: {
        "node": _NAME,
        "host": _MAYBE,
        "address": _MAYBE,
        "state": _MAYBE,
        "activity": _MAYBE,
        "reason": _TEXT,
        "group_rank": _RANK_OR_NONE,
        "first_rank": _RANK_OR_NONE,
        "local_world_size": _Int(0, m.MAX_LOCAL_RANKS),
        "pids": _Many(m.MAX_LOCAL_RANKS),
    },
    m.JobStatus: {
        "job_id": _MAYBE,
        "phase": _MAYBE,
        "reason": _TEXT,
        "round": _Part(RoundName, optional=True),
        "world_size": _RANK,
        "restart_count": _COUNT,
        "restarts_left": _COUNT,
        "max_restarts": _COUNT,
        "min_nodes": _Int(0, m.MAX_NODES),
        "max_nodes": _Int(0, m.MAX_NODES),
        "nodes": _Many(m.MAX_NODES, m.NodeStatus),
        "last_failure": _TEXT,
        "outcome": _TEXT,
    },
}


def cut(text: str, most: int, *, tail: bool = False) -> str:
    """At most `most` characters, none of which UTF-8 cannot carry (half a surrogate pair)."""
    if len(text) > most:
        text = "…" + text[1 - most :] if tail else text[: most - 1] + "…"
    return text.encode("utf-8", "replace").decode()


# ---------------------------------------------------------------- messages


def load(of: type[Any], message: Any, where: str) -> Any:
    """The dataclass `of` read from a protobuf message; WireError names the field, below `where`."""
    rows = _FIELDS[of]
    made = of(**{name: rule.load(f"{where}.{name}", message, name) for name, rule in rows.items()})
    _agree(made, where)
    return made


def store(value: Any, message: Any, where: str) -> None:
    """Fill a protobuf message from a dataclass; WireError names the field, below `where`."""
    _agree(value, where)
    for name, rule in _FIELDS[type(value)].items():
        rule.store(f"{where}.{name}", message, name, getattr(value, name))


def _agree(value: Any, where: str) -> None:
    """What no field can say alone."""
    match value:
        case m.JobSpec() if value.min_nodes > value.max_nodes:
            raise WireError(f"{where}: min_nodes {value.min_nodes} > max_nodes {value.max_nodes}")
        case m.Start() | m.RoundReport():
            if value.group_rank >= value.group_world_size or value.first_rank >= value.world_size:
                raise WireError(
                    f"{where}: node {value.group_rank} of {value.group_world_size} with first rank "
                    f"{value.first_rank} of {value.world_size}"
                )
