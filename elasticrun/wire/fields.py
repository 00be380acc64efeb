"""The kinds of fields that messages have: how each is read from protobuf, written, and bounded.

`fields.py` says which field of which message is of which kind.

What the fields of a message say together: the bounds that no field has alone.

`fields.py` asks in both directions, after the fields themselves have been checked on their way in
and before they are on their way out.

The fields of every message with their bounds, one row per message of `messages.py`.

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
from elasticrun.wire.types import Endpoint, RoundName

INT32: Final = 2**31 - 1
INT64: Final = 2**63 - 1


class WireError(ValueError):
    """A message that is not one of ours or breaks a bound; the text is a sentence for people."""


@dataclass(frozen=True, slots=True)
class Int:
    """A whole number between two bounds."""

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
class Flag:
    """Yes or no."""

    def load(self, where: str, message: Any, name: str) -> bool:
        return bool(getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: bool) -> None:
        setattr(message, name, bool(value))


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration, neither negative nor without end; `zero`: it may be none at all."""

    zero: bool = True

    def load(self, where: str, message: Any, name: str) -> float:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: float) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: float) -> float:
        if not (math.isfinite(value) and 0 <= value <= m.MAX_SECONDS):
            raise WireError(f"{where} is {value} s, not between 0 and {m.MAX_SECONDS:.0f} s")
        if value == 0 and not self.zero:
            raise WireError(f"{where} is {value} s, with which nothing can be done in time")
        return float(value)


@dataclass(frozen=True, slots=True)
class Amount:
    """A number that is neither negative nor without end."""

    def load(self, where: str, message: Any, name: str) -> float:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: float) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: float) -> float:
        if not (math.isfinite(value) and value >= 0):
            raise WireError(f"{where} is {value}, which is no amount")
        return float(value)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times a usual value something must be to stand out: above 1, and not without end."""

    def load(self, where: str, message: Any, name: str) -> float:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: float) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: float) -> float:
        if not (math.isfinite(value) and value > 1):
            raise WireError(f"{where} is {value}, not a ratio above 1")
        return float(value)


@dataclass(frozen=True, slots=True)
class Text:
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
class Name:
    """A name: one printable line that is never cut, because a cut name is another name."""

    empty: bool = False
    most: int = m.MAX_NAME  # characters

    def load(self, where: str, message: Any, name: str) -> str:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: str) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: str) -> str:
        if not value and not self.empty:
            raise WireError(f"{where} is empty")
        if len(value) > self.most:
            raise WireError(f"{where} has {len(value)} characters, more than {self.most}")
        if not value.isprintable():
            raise WireError(f"{where} holds a character that cannot be printed")
        return value


@dataclass(frozen=True, slots=True)
class Word:
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
class Bytes:
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


def cut(text: str, most: int, *, tail: bool = False) -> str:
    """At most `most` characters, none of which UTF-8 cannot carry (half a surrogate pair)."""
    if len(text) > most:
        text = "…" + text[1 - most :] if tail else text[: most - 1] + "…"
    return text.encode("utf-8", "replace").decode()


def agree(value: Any, where: str) -> None:
    """WireError, naming the message `where`, if its fields contradict each other."""
    match value:
        case m.JobSpec() if value.min_nodes > value.max_nodes:
            raise WireError(f"{where}: min_nodes {value.min_nodes} > max_nodes {value.max_nodes}")
        case m.Start() | m.RoundReport() | m.Probe():
            if value.group_rank >= value.group_world_size or value.first_rank >= value.world_size:
                raise WireError(
                    f"{where}: node {value.group_rank} of {value.group_world_size} with first rank "
                    f"{value.first_rank} of {value.world_size}"
                )
        case m.Holding() if not 1 <= len(value.contents) <= value.world_size - value.first_rank:
            raise WireError(
                f"{where}: {len(value.contents)} ranks from rank {value.first_rank} on of "
                f"{value.world_size}"
            )
        case m.Holdings() if (listed := sum(len(h.contents) for h in value.held)) > m.MAX_CONTENTS:
            raise WireError(f"{where} lists {listed} ranks, more than {m.MAX_CONTENTS}")
        case m.Replicate():
            if not value.ranks or max(value.ranks) >= value.world_size:
                raise WireError(f"{where}: no rank, or one beyond {value.world_size}, is copied")
            if len(value.contents) != len(value.ranks):
                raise WireError(f"{where}: {len(value.contents)} contents of other ranks")
        case m.Persist():
            _agree_persist(value, where)


def _agree_persist(value: m.Persist, where: str) -> None:
    if not value.ranks or max(value.ranks) >= value.world_size:
        raise WireError(f"{where}: no rank, or one beyond {value.world_size}, would write")
    if not set(value.shared) <= set(value.ranks) or len(value.ranks) > value.writers:
        raise WireError(f"{where}: ranks write that are not among its {value.writers} writers")
    if value.coordinates is (value.coordinator is not None):
        raise WireError(f"{where}: a node coordinates, or is told who does")


_PID = Int(-1, INT32)


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
    """A bounded list: of messages (`of`) or of whole numbers (`each`)."""

    most: int
    of: type[Any] | None = None
    each: Int = _PID

    def load(self, where: str, message: Any, name: str) -> tuple[Any, ...]:
        values = getattr(message, name)
        self.bound(where, len(values))
        if self.of is None:
            return tuple(self.each.check(where, number) for number in values)
        return tuple(load(self.of, part, where) for part in values)

    def store(self, where: str, message: Any, name: str, value: tuple[Any, ...]) -> None:
        self.bound(where, len(value))
        target = getattr(message, name)
        if self.of is None:
            target.extend(self.each.check(where, number) for number in value)
            return
        for item in value:
            store(item, target.add(), where)

    def bound(self, where: str, count: int) -> None:
        if count > self.most:
            raise WireError(f"{where} lists {count}, more than {self.most}")


_Field = Int | Flag | Seconds | Amount | Ratio | Text | Name | Word | Bytes | _Part | _Many

_NAME = Name()
_MAYBE = Name(empty=True)
_TEXT = Text()
_COUNT = Int(0, INT32)
_RANK = Int(0, m.MAX_RANKS)
_RANK_OR_NONE = Int(-1, m.MAX_RANKS)
_WORLD = Int(1, m.MAX_RANKS)
_NODES = Int(1, m.MAX_NODES)
_LOCAL = Int(1, m.MAX_LOCAL_RANKS)
_EXIT = Int(0, 255)
_SECONDS = Seconds()
_NONCE = Bytes(m.NONCE_BYTES)
_PROOF = Bytes(m.PROOF_BYTES, empty=True)
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

_SNAPSHOT: Final[dict[str, _Field]] = {"round": _ROUND, "step": Int(0, INT64)}
_REWOUND = Int(-1, INT64)
_RESTORE: Final[dict[str, _Field]] = {
    "restore": _Part(m.Restore, optional=True),
    "rewound_from": _REWOUND,
}
_ATTEMPT = Name(most=m.MAX_ATTEMPT)
_MAYBE_ENDPOINT = _Part(Endpoint, optional=True)

_FIELDS: Final[Mapping[type[Any], Mapping[str, _Field]]] = {
    RoundName: {"term": Int(0, INT64), "number": Int(1, INT64), "nonce": _NAME},
    Endpoint: {"host": _NAME, "port": Int(1, 65535)},
    m.Failure: {
        "host": _MAYBE,
        "rank": _RANK_OR_NONE,
        "local_rank": Int(-1, m.MAX_LOCAL_RANKS),
        "pid": _PID,
        "exitcode": Int(-INT32, INT32),
        "time_us": Int(0, INT64),
        "kind": Word(tuple(m.FailureKind), m.FailureKind),
        "message": _TEXT,
        "traceback": Text(tail=True),
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
        "grow": Word(("auto", "now")),
        "grow_cooldown": _SECONDS,
        "restart_grace": _SECONDS,
        "master_lost_timeout": _SECONDS,
        "checks": _Part(m.CheckSpec),
        "saves": _Part(m.SaveSpec),
        "scheduler_codes": Flag(),
    },
    m.SaveSpec: {"at_breakpoint": Flag(), "limit": Seconds(zero=False), "restore_step": _REWOUND},
    m.CheckSpec: {
        **dict.fromkeys(("network", "perf", "exclude_stragglers"), Flag()),
        "perf_floor": Amount(),
        "slow_ratio": Ratio(),
        "slow_for": _SECONDS,
        "probe_limit": Seconds(zero=False),
        "exclude_for": _SECONDS,
        "quarantine": Int(0, m.MAX_NODES),
    },
    m.RoundReport: {**_PLACE, **_RESTORE},
    m.Knock: {
        "protocol": _COUNT,
        "version": _NAME,
        "job_id": _MAYBE,
        "role": Word(tuple(m.Role), m.Role),
        "node": _MAYBE,
        "incarnation": _MAYBE,
        "nonce": _NONCE,
        "proves": Flag(),
    },
    m.Challenge: {
        "protocol": _COUNT,
        "version": _NAME,
        "term": Int(0, INT64),
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
        "node_rank": Int(-1, m.MAX_NODES - 1),
        "local_world_size": _LOCAL,
        "role": _MAYBE,
        "spec": _Part(m.JobSpec),
        "attached": _Part(m.RoundReport, optional=True),
        "last_term": Int(0, INT64),
    },
    m.Join: {"store": _ENDPOINT},
    m.Running: {"round": _ROUND, "pids": _Many(m.MAX_LOCAL_RANKS)},
    m.RanksFailed: {"round": _ROUND, "failures": _FAILURES},
    m.Stopping: {"round": _ROUND, "remaining": _SECONDS},
    m.Stopped: {"round": _ROUND},
    m.Finished: {"round": _ROUND},
    m.Leaving: {"reason": _TEXT, "signal": Int(0, 64)},
    m.Beat: {"number": Int(0, INT64)},
    m.Transfer: {"size": Int(0, INT64), "seconds": _SECONDS},
    m.Probed: {
        "check": _NAME,
        "ok": Flag(),
        "phase": Word(tuple(m.ProbePhase), m.ProbePhase),
        "own": Flag(),
        "excused": Flag(),
        "reason": _TEXT,
        "compute": _SECONDS,
        "flops": Amount(),
        "transfers": _Many(m.MAX_TRANSFERS, m.Transfer),
        "seconds": _SECONDS,
        "timed": _SECONDS,
    },
    m.Steps: {
        "round": _ROUND,
        "step": Int(0, INT64),
        "steps": Int(1, INT32),
        "seconds": _SECONDS,
        "own": _SECONDS,
        "waited": _SECONDS,
    },
    m.ReachMe: {"port": Int(1024, 65535), "nonce": _NONCE},
    m.Welcome: {
        "protocol": _COUNT,
        "version": _NAME,
        "job_id": _MAYBE,
        "term": Int(0, INT64),
        "beat_interval": _SECONDS,
        "master_lost_timeout": _SECONDS,
        "status_url": _MAYBE,
        "clock_us": Int(0, INT64),
    },
    m.Refused: {"reason": _TEXT, "exit_code": _EXIT},
    m.Wait: {"reason": _TEXT, "left": _SECONDS},
    m.Park: {"reason": _TEXT, "seconds": _SECONDS},
    m.Start: {
        **_PLACE,
        "role_first_rank": _RANK,
        "role_world_size": _WORLD,
        "host_store": Flag(),
        **_RESTORE,
        "suspect": Flag(),
        "restore_step": _REWOUND,
        "why": _TEXT,
    },
    m.Stop: {"round": _ROUND, "reason": _TEXT},
    m.End: {"exit_code": _EXIT, "reason": _TEXT, "failures": _FAILURES},
    m.Echo: {"number": Int(0, INT64), "beat_interval": _SECONDS},
    m.Probe: {
        "check": _NAME,
        "perf": Flag(),
        "partners": _TEXT,
        "group_rank": _RANK,
        "group_world_size": _NODES,
        "first_rank": _RANK,
        "world_size": _WORLD,
        "store": _ENDPOINT,
        "limit": _SECONDS,
    },
    m.NodeStatus: {
        "node": _NAME,
        "host": _MAYBE,
        "address": _MAYBE,
        "state": _MAYBE,
        "activity": _MAYBE,
        "reason": _TEXT,
        "group_rank": _RANK_OR_NONE,
        "first_rank": _RANK_OR_NONE,
        "local_world_size": Int(0, m.MAX_LOCAL_RANKS),
        "pids": _Many(m.MAX_LOCAL_RANKS),
        "health": _TEXT,
    },
    m.ExcludedNode: {
        "node": _NAME,
        "host": _MAYBE,
        "kind": Word(("failed", "slow")),
        "reason": _TEXT,
        "age": _SECONDS,
        "remaining": _SECONDS,
    },
    m.Reached: {
        "ok": Flag(),
        "reason": _TEXT,
        "address": _MAYBE,
        "mtu": Int(0, INT32),
        "clock_us": Int(0, INT64),
        "host": _MAYBE,
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
        "min_nodes": Int(0, m.MAX_NODES),
        "max_nodes": Int(0, m.MAX_NODES),
        "nodes": _Many(m.MAX_NODES, m.NodeStatus),
        "last_failure": _TEXT,
        "outcome": _TEXT,
        "excluded": _Many(m.MAX_EXCLUDED, m.ExcludedNode),
        **dict.fromkeys(("check", "snapshot"), _TEXT),
        "step": Int(-1, INT64),
        **dict.fromkeys(("step_age", "age"), _SECONDS),
    },
    m.Holding: {
        **_SNAPSHOT,
        "first_rank": _RANK,
        "world_size": _WORLD,
        "contents": _Many(m.MAX_CONTENTS, each=Int(0, INT64)),
        **dict.fromkeys(("wanted", "replica", "own"), Flag()),
    },
    m.Holdings: {
        "saver": _MAYBE_ENDPOINT,
        "held": _Many(m.MAX_HOLDINGS, m.Holding),
        "replicas": Flag(),
        "last": _Part(m.LastRound, optional=True),
        "went_on": _Part(m.WentOn, optional=True),
        "skipped": _COUNT,
    },
    m.WentOn: {**_SNAPSHOT},
    m.LastRound: {"round": _ROUND, "world_size": _WORLD, **_RESTORE},
    m.NotReplicated: {**_SNAPSHOT, "reason": _TEXT},
    m.Replicate: {
        **_SNAPSHOT,
        "world_size": _WORLD,
        "ranks": _Many(m.MAX_LOCAL_RANKS, each=_RANK),
        "contents": _Many(m.MAX_LOCAL_RANKS, each=Int(1, INT64)),
        "saver": _ENDPOINT,
    },
    m.Restore: {**_SNAPSHOT, "world_size": _WORLD},
    m.ShardBad: {**_SNAPSHOT, "rank": _RANK, "reason": _TEXT},
    m.WhereIs: {**_SNAPSHOT, "rank": _RANK},
    m.Holder: {
        **_SNAPSHOT,
        "rank": _RANK,
        "holds": _RANK_OR_NONE,
        "saver": _MAYBE_ENDPOINT,
        "reason": _TEXT,
    },
    m.Watermark: {"round": _ROUND, "step": Int(-1, INT64), "given_up": Int(-1, INT64)},
    m.Persist: {
        "attempt": _ATTEMPT,
        **_SNAPSHOT,
        "world_size": _WORLD,
        "ranks": _Many(m.MAX_LOCAL_RANKS, each=_RANK),
        "shared": _Many(m.MAX_LOCAL_RANKS, each=_RANK),
        "writers": Int(1, m.MAX_RANKS),
        "coordinates": Flag(),
        "coordinator": _MAYBE_ENDPOINT,
        "reason": Word(("periodic", "breakpoint", "asked")),
        "limit": Seconds(zero=False),
        "rewound_from": _REWOUND,
    },
    m.Departing: {
        **_SNAPSHOT,
        "reason": _TEXT,
        "signal": Int(1, 64),
        "margin": Int(1, m.MAX_MARGIN),
        "asked": Int(-1, INT64),
    },
    m.SaveAt: {**_SNAPSHOT, "reason": _TEXT},
    m.Missed: {**_SNAPSHOT, "asked": Int(0, INT64)},
    m.CommitCheckpoint: {"attempt": _ATTEMPT},
    m.PersistOver: {
        "attempt": Name(empty=True, most=m.MAX_ATTEMPT),
        **_SNAPSHOT,
        "ok": Flag(),
        "reason": _TEXT,
    },
    m.Persisted: {
        "attempt": _ATTEMPT,
        "ok": Flag(),
        "committed": Flag(),
        "reason": _TEXT,
        "nbytes": Int(0, INT64),
        "seconds": _SECONDS,
    },
}


# ---------------------------------------------------------------- messages


def load(of: type[Any], message: Any, where: str) -> Any:
    """The dataclass `of` read from a protobuf message; WireError names the field, below `where`."""
    rows = _FIELDS[of]
    made = of(**{name: rule.load(f"{where}.{name}", message, name) for name, rule in rows.items()})
    agree(made, where)
    return made


def store(value: Any, message: Any, where: str) -> None:
    """Fill a protobuf message from a dataclass; WireError names the field, below `where`."""
    agree(value, where)
    for name, rule in _FIELDS[type(value)].items():
        rule.store(f"{where}.{name}", message, name, getattr(value, name))
