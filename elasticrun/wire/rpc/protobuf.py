"""Messages as bytes and back: the only importer of the generated protobuf code.

Bytes that are no message of ours, or whose fields break a bound of `fields.py`, raise `WireError`
with a sentence. What goes out fits into one message: texts are cut to their bound, and what
failures say is shortened until the whole is at most MAX_MESSAGE_BYTES long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from google.protobuf.message import DecodeError, EncodeError
from msgspec.structs import replace

from elasticrun.wire import messages as m
from elasticrun.wire.fields import WireError, cut, load, store
from elasticrun.wire.pb import job_pb2 as pb

__all__ = [
    "ProtocolMismatch",
    "WireError",
    "answer_from_wire",
    "answer_to_wire",
    "order_from_wire",
    "order_to_wire",
    "report_from_wire",
    "report_to_wire",
]


class ProtocolMismatch(WireError):
    """The peer speaks another version of the protocol (`protocol`; `version` is its release)."""

    def __init__(self, protocol: int, version: str) -> None:
        self.protocol = protocol
        self.version = version
        super().__init__(
            f"the peer speaks protocol {protocol} (elasticrun {version or 'of unknown version'}), "
            f"this side speaks {m.PROTOCOL_VERSION}"
        )


_REPORTS: Final[dict[str, type[Any]]] = {
    "knock": m.Knock,
    "proof": m.Proof,
    "hello": m.Hello,
    "join": m.Join,
    "running": m.Running,
    "ranks_failed": m.RanksFailed,
    "stopping": m.Stopping,
    "stopped": m.Stopped,
    "finished": m.Finished,
    "leaving": m.Leaving,
    "beat": m.Beat,
    "probed": m.Probed,
    "steps": m.Steps,
    "reach_me": m.ReachMe,
    "holdings": m.Holdings,
    "where_is": m.WhereIs,
    "shard_bad": m.ShardBad,
    "persisted": m.Persisted,
    "not_replicated": m.NotReplicated,
    "departing": m.Departing,
    "missed": m.Missed,
}
_ORDERS: Final[dict[str, type[Any]]] = {
    "challenge": m.Challenge,
    "welcome": m.Welcome,
    "refused": m.Refused,
    "wait": m.Wait,
    "park": m.Park,
    "start": m.Start,
    "stop": m.Stop,
    "end": m.End,
    "echo": m.Echo,
    "probe": m.Probe,
    "watermark": m.Watermark,
    "persist": m.Persist,
    "commit_checkpoint": m.CommitCheckpoint,
    "persist_over": m.PersistOver,
    "holder": m.Holder,
    "replicate": m.Replicate,
    "save_at": m.SaveAt,
}
_ANSWERS: Final[dict[str, type[Any]]] = {
    "challenge": m.Challenge,
    "refused": m.Refused,
    "page": m.JobStatus,
    "reached": m.Reached,
}
_VERSIONED: Final = frozenset({"knock", "challenge", "hello", "welcome"})
_KIND: Final = {of: kind for kinds in (_REPORTS, _ORDERS, _ANSWERS) for kind, of in kinds.items()}


def _parse(message: Any, data: bytes, most: int, what: str) -> None:
    if len(data) > most:
        raise WireError(f"a {what} of {len(data)} bytes is longer than {most}")
    try:
        message.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError):
        raise WireError(f"{len(data)} bytes that are no {what} of elasticrun") from None


def _from_wire(
    envelope: Any,
    kinds: Mapping[str, type[Any]],
    data: bytes,
    what: str,
    most: int = m.MAX_MESSAGE_BYTES,
) -> Any:
    _parse(envelope, data, most, what)
    kind = envelope.WhichOneof("kind")
    if kind is None:
        raise WireError(f"a {what} of a kind that protocol {m.PROTOCOL_VERSION} does not have")
    message = getattr(envelope, kind)
    if kind in _VERSIONED and message.protocol != m.PROTOCOL_VERSION:
        # Read before the checks: fields of another version may mean other things.
        version = cut(message.version, 80)
        raise ProtocolMismatch(message.protocol, version if version.isprintable() else "")
    return load(kinds[kind], message, kind)


def _to_wire(envelope: Callable[[], Any], value: Any, what: str) -> bytes:
    made = envelope()
    kind = _KIND[type(value)]
    part = getattr(made, kind)
    part.SetInParent()
    try:
        store(value, part, kind)
        return cast("bytes", made.SerializeToString())
    except (EncodeError, TypeError, ValueError) as wrong:
        if isinstance(wrong, WireError):
            raise
        raise WireError(f"a {what} that cannot be sent: {wrong}") from None


def _fitting(envelope: Callable[[], Any], value: Any, what: str) -> bytes:
    """Encode; shorten what its failures say until the message is within its bound."""
    failures = getattr(value, "failures", ())
    if len(failures) > m.MAX_FAILURES:
        failures = failures[: m.MAX_FAILURES]
        value = replace(value, failures=failures)
    data = _to_wire(envelope, value, what)
    room = m.MAX_TEXT
    while len(data) > m.MAX_MESSAGE_BYTES and failures and room > 64:
        room //= 2
        short = tuple(_shorter(failure, room) for failure in failures)
        data = _to_wire(envelope, replace(value, failures=short), what)
    if len(data) > m.MAX_MESSAGE_BYTES:
        raise WireError(f"a {what} of {len(data)} bytes is longer than {m.MAX_MESSAGE_BYTES}")
    return data


def _shorter(failure: m.Failure, room: int) -> m.Failure:
    path = failure.error_file
    return replace(
        failure,
        message=cut(failure.message, room),
        traceback=cut(failure.traceback, room, tail=True),
        error_file=path if len(path) <= max(room, 256) else "",  # half a path is none
    )


# ---------------------------------------------------------------- what others call


def report_to_wire(report: m.Report) -> bytes:
    """Bytes of a Report; WireError if a field breaks its bound (texts are cut instead)."""
    return _fitting(pb.Report, report, "report")


def report_from_wire(data: bytes) -> m.Report:
    """The Report in these bytes; WireError if there is none, ProtocolMismatch for a Knock
    or Hello of another protocol."""
    return cast("m.Report", _from_wire(pb.Report(), _REPORTS, data, "report"))


def order_to_wire(order: m.Order) -> bytes:
    """Bytes of an Order; WireError if a field breaks its bound (texts are cut instead)."""
    return _fitting(pb.Order, order, "order")


def order_from_wire(data: bytes) -> m.Order:
    """The Order in these bytes; WireError if there is none, ProtocolMismatch for a
    Challenge or Welcome of another protocol."""
    return cast("m.Order", _from_wire(pb.Order(), _ORDERS, data, "order"))


def answer_to_wire(answer: m.StatusAnswer) -> bytes:
    """Bytes of an answer to a reader, at most MAX_STATUS_BYTES; WireError as above."""
    data = _to_wire(pb.StatusAnswer, answer, "status reply")
    if len(data) > m.MAX_STATUS_BYTES:
        raise WireError(f"a status reply of {len(data)} bytes is longer than {m.MAX_STATUS_BYTES}")
    return data


def answer_from_wire(data: bytes) -> m.StatusAnswer:
    """The answer in these bytes; WireError and ProtocolMismatch as above."""
    most = m.MAX_STATUS_BYTES
    answer = _from_wire(pb.StatusAnswer(), _ANSWERS, data, "status reply", most)
    return cast("m.StatusAnswer", answer)
