"""Converts messages to bytes and back: the only importer of the generated protobuf code.

The annotations in `messages.py` determine how a field is read and written, and its bound; the kinds
of an envelope come from the proto file. Bytes that are not a message of ours, or whose fields
violate a bound, raise `WireError` with a sentence. Sent data fits into one message: texts are cut
to their bound, failures beyond MAX_FAILURES are dropped, and the texts of the others are shortened
until the message has at most MAX_MESSAGE_BYTES.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Final, cast

from google.protobuf.message import DecodeError, EncodeError
from msgspec.structs import replace

from elasticrun.wire import messages as m
from elasticrun.wire.pb import job_pb2 as pb
from elasticrun.wire.types import (
    INT64,
    MAX_TEXT,
    Between,
    Bound,
    Endpoint,
    OneOf,
    RoundName,
    WireError,
    cut,
    seconds,
    tail,
    text,
)


class ProtocolMismatch(WireError):
    """The peer uses another version of the protocol (`protocol`; `version` is its release)."""

    def __init__(self, protocol: int, version: str) -> None:
        self.protocol, self.version = protocol, version
        super().__init__(
            f"the peer speaks protocol {protocol} (elasticrun {version or 'of unknown version'}), "
            f"this side speaks {m.PROTOCOL_VERSION}"
        )


# ---------------------------------------------------------------- fields


class _Scalar:
    """Reads and writes a field of a protobuf message, within its bound."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound

    def load(self, where: str, message: Any, name: str) -> Any:
        return self.bound(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: Any) -> None:
        setattr(message, name, self.bound(where, value))


class _Text(_Scalar):
    """A text that the sender truncates."""

    def store(self, where: str, message: Any, name: str, value: str) -> None:
        setattr(message, name, cut(value, MAX_TEXT, keep_end=self.bound is tail))


class _Part:
    """A message within a message."""

    def __init__(self, of: type[Any], *, optional: bool = False) -> None:
        self.of, self.optional = of, optional

    def load(self, where: str, message: Any, name: str) -> Any:
        if message.HasField(name):
            return _load(self.of, getattr(message, name), where)
        if self.optional:
            return None
        raise WireError(f"{where} is missing")

    def store(self, where: str, message: Any, name: str, value: Any) -> None:
        if value is None and self.optional:
            return
        part = getattr(message, name)
        part.SetInParent()
        _store(value, part, where)


class _Many:
    """A bounded list of messages or of numbers."""

    def __init__(self, bound: Bound, each: _Scalar | _Part) -> None:
        self.bound, self.each = bound, each

    def load(self, where: str, message: Any, name: str) -> tuple[Any, ...]:
        values = self.bound(where, getattr(message, name))
        if isinstance(self.each, _Part):
            return tuple(_load(self.each.of, part, where) for part in values)
        return tuple(self.each.bound(where, number) for number in values)

    def store(self, where: str, message: Any, name: str, value: tuple[Any, ...]) -> None:
        target, values = getattr(message, name), self.bound(where, value)
        if isinstance(self.each, _Part):
            for item in values:
                _store(item, target.add(), where)
        else:
            target.extend(self.each.bound(where, number) for number in values)


_BOUNDS: Final[dict[type, Bound]] = {
    int: Between(0, INT64),
    float: seconds,
    str: text,
    bool: lambda where, value: bool(value),
}
"""Bounds of fields whose annotation has none."""


def _rule(kind: Any) -> _Scalar | _Part | _Many:
    bound = None
    if typing.get_origin(kind) is Annotated:
        kind, bound = typing.get_args(kind)
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        each = _rule(inner[0])
        assert bound is not None, f"{kind} has no bound"
        assert not isinstance(each, _Many), f"{kind} is a list of lists"
        return _Many(bound, each)
    if isinstance(kind, types.UnionType):
        return _Part(inner[0], optional=True)
    if issubclass(kind, StrEnum):
        return _Scalar(OneOf(*kind, make=kind))
    if bound is None and kind not in _BOUNDS:
        return _Part(kind)
    bound = bound or _BOUNDS[kind]
    return _Text(bound) if bound in (text, tail) else _Scalar(bound)


@cache
def rules(of: Any) -> Mapping[str, _Scalar | _Part | _Many]:
    """How each field of a message is read and written, in order."""
    hints = typing.get_type_hints(of, include_extras=True)
    return {name: _rule(kind) for name, kind in hints.items()}


def _load(of: type, message: Any, where: str) -> Any:
    """Read a record of type `of` from a protobuf message; WireError names the field, below
    `where`."""
    made = of(
        **{name: rule.load(f"{where}.{name}", message, name) for name, rule in rules(of).items()}
    )
    if hasattr(of, "validate"):
        made.validate(where)
    return made


def _store(value: Any, message: Any, where: str) -> None:
    """Fill a protobuf message from a record; WireError names the field, below `where`."""
    if hasattr(value, "validate"):
        value.validate(where)
    kind: type = type(value)
    for name, rule in rules(kind).items():
        rule.store(f"{where}.{name}", message, name, getattr(value, name))


# ---------------------------------------------------------------- envelopes

NAMES: Final = {"Round": RoundName, "Endpoint": Endpoint}
"""Messages with another name in the proto, or defined outside `messages.py`."""


def kinds(envelope: Any) -> dict[str, type[Any]]:
    """The message types in an envelope, by the names of its fields."""
    fields = envelope.DESCRIPTOR.fields
    named = {field.name: field.message_type.name for field in fields}
    return {field: NAMES.get(name) or getattr(m, name) for field, name in named.items()}


_KINDS: Final = {of: kinds(of) for of in (pb.Report, pb.Order, pb.StatusAnswer)}
_FIELD: Final = {of: field for known in _KINDS.values() for field, of in known.items()}
_VERSIONED: Final = frozenset({"knock", "challenge", "hello", "welcome"})


def _from_wire(of: Any, data: bytes, what: str, most: int = m.MAX_MESSAGE_BYTES) -> Any:
    if len(data) > most:
        raise WireError(f"a {what} of {len(data)} bytes is longer than {most}")
    try:
        envelope = of.FromString(data)
    except (DecodeError, UnicodeDecodeError):
        raise WireError(f"{len(data)} bytes that are no {what} of elasticrun") from None
    kind = envelope.WhichOneof("kind")
    if kind is None:
        raise WireError(f"a {what} of a kind that protocol {m.PROTOCOL_VERSION} does not have")
    message = getattr(envelope, kind)
    if kind in _VERSIONED and message.protocol != m.PROTOCOL_VERSION:
        # Checked first: fields of another version may have other meanings.
        version = cut(message.version, 80)
        raise ProtocolMismatch(message.protocol, version if version.isprintable() else "")
    return _load(_KINDS[of][kind], message, kind)


def _to_wire(envelope: Callable[[], Any], value: Any, what: str) -> bytes:
    made = envelope()
    kind = _FIELD[type(value)]
    part = getattr(made, kind)
    part.SetInParent()
    try:
        _store(value, part, kind)
        return cast("bytes", made.SerializeToString())
    except (EncodeError, TypeError, ValueError) as wrong:
        if isinstance(wrong, WireError):
            raise
        raise WireError(f"a {what} that cannot be sent: {wrong}") from None


def _fitting(envelope: Callable[[], Any], value: Any, what: str) -> bytes:
    """Encode a message. Drop failures beyond MAX_FAILURES, and shorten the texts of the others
    until the message is within its bound. Raises WireError if it still is not."""
    failures = getattr(value, "failures", ())
    if len(failures) > m.MAX_FAILURES:
        failures = failures[: m.MAX_FAILURES]
        value = replace(value, failures=failures)
    data = _to_wire(envelope, value, what)
    room = MAX_TEXT
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
        traceback=cut(failure.traceback, room, keep_end=True),
        error_file=path if len(path) <= max(room, 256) else "",  # half a path is useless
    )


# ---------------------------------------------------------------- public functions


def report_to_wire(report: m.Report) -> bytes:
    """The bytes of a Report, with texts truncated to their bound. Raises WireError if another field
    violates its bound."""
    return _fitting(pb.Report, report, "report")


def report_from_wire(data: bytes) -> m.Report:
    """The Report in these bytes; WireError if there is none, ProtocolMismatch for a Knock
    or Hello of another protocol."""
    return cast("m.Report", _from_wire(pb.Report, data, "report"))


def order_to_wire(order: m.Order) -> bytes:
    """The bytes of an Order, with texts truncated to their bound. Raises WireError if another field
    violates its bound."""
    return _fitting(pb.Order, order, "order")


def order_from_wire(data: bytes) -> m.Order:
    """The Order in these bytes; WireError if there is none, ProtocolMismatch for a
    Challenge or Welcome of another protocol."""
    return cast("m.Order", _from_wire(pb.Order, data, "order"))


def answer_to_wire(answer: m.StatusAnswer) -> bytes:
    """The bytes of an answer to a reader, at most MAX_STATUS_BYTES. Raises WireError as above."""
    data = _to_wire(pb.StatusAnswer, answer, "status reply")
    if len(data) > m.MAX_STATUS_BYTES:
        raise WireError(f"a status reply of {len(data)} bytes is longer than {m.MAX_STATUS_BYTES}")
    return data


def answer_from_wire(data: bytes) -> m.StatusAnswer:
    """The answer in these bytes; WireError and ProtocolMismatch as above."""
    answer = _from_wire(pb.StatusAnswer, data, "status reply", m.MAX_STATUS_BYTES)
    return cast("m.StatusAnswer", answer)
