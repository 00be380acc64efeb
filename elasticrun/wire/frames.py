"""Frames of messages: four bytes of length (big endian), then one JSON object.

Used between the agent (or a caller of elastic_launch) and the fork server (`wire.spawner`), between
ranks, savers and their agent (`wire.snapshots`), and between savers (`wire.bulk`). Pure functions
and a buffer, no socket; whoever owns the socket feeds bytes in.
Anything that is not exactly one of the expected messages raises `FrameError`, whose text is one
sentence for the operator: there is no second guess about what a peer may have meant.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_FRAME_BYTES = 4 * 1024 * 1024
"""Room for an environment of 2 MB (Linux' own bound for one exec) with its JSON escapes."""

LENGTH_BYTES = 4
_INT_BOUND = 2**63


class FrameError(ValueError):
    """The bytes are no message of this conversation; the conversation must end."""


# ---------------------------------------------------------------- encoding


def encode(message: DataclassInstance) -> bytes:
    """One whole frame of a message of one of the unions. Raises FrameError if it would be longer
    than MAX_FRAME_BYTES."""
    body = {"type": type(message).__name__, **_plain(message)}
    payload = json.dumps(body, separators=(",", ":")).encode("ascii")
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(
            f"a {body['type']} message of {len(payload)} bytes is longer than the "
            f"{MAX_FRAME_BYTES} bytes that a frame may have"
        )
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


# ---------------------------------------------------------------- decoding


class FrameBuffer:
    """Bytes in, messages out, for one direction of one conversation.

    Holds at most one frame and what one read brought with it.
    """

    def __init__(self, union: Any) -> None:
        """`union`, such as `ToSpawner` or `FromRank`: the messages that may come."""
        self._types = types_of(union)
        for cls in self._types.values():
            _fields(cls)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Take in bytes; yield each message that is complete now. Raises FrameError."""
        self._bytes += data
        while True:
            payload = self._next_payload()
            if payload is None:
                return
            yield decode(payload, self._types)

    @property
    def pending(self) -> int:
        """How many bytes of an unfinished frame are held; not 0 at EOF means a cut frame."""
        return len(self._bytes)

    def _next_payload(self) -> bytes | None:
        if len(self._bytes) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._bytes[:LENGTH_BYTES], "big")
        if length > MAX_FRAME_BYTES:
            raise FrameError(
                f"a frame claims {length} bytes; at most {MAX_FRAME_BYTES} are allowed"
            )
        end = LENGTH_BYTES + length
        if len(self._bytes) < end:
            return None
        payload = bytes(self._bytes[LENGTH_BYTES:end])
        del self._bytes[:end]
        return payload


def decode(payload: bytes, types_by_name: dict[str, type]) -> Any:
    """The message in one payload (without its length). Raises FrameError."""
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame holds no JSON ({type(error).__name__})") from None
    if not isinstance(body, dict):
        raise FrameError("a frame holds no JSON object")
    name = body.pop("type", None)
    if not isinstance(name, str) or name not in types_by_name:
        raise FrameError(f"a frame holds a message of unknown type {str(name)[:60]!r}")
    return _object(types_by_name[name], body, name)


def _object(cls: type, body: dict[str, Any], where: str) -> Any:
    known = _fields(cls)
    for key in body:
        if key not in known:
            raise FrameError(f"{where} has no field {key[:60]!r}")
    values = {}
    for name, (field, annotation) in known.items():
        if name in body:
            values[name] = _value(annotation, body[name], f"{where}.{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise FrameError(f"{where} comes without {name}")
    return cls(**values)


@cache
def _fields(cls: type) -> dict[str, tuple[Field[Any], Any]]:
    """Names, fields and resolved annotations; once a class, while sys.modules still has it (the
    fork server hides its modules before it reads its second message)."""
    hints = typing.get_type_hints(cls)
    for annotation in hints.values():
        if is_dataclass(annotation) and isinstance(annotation, type):
            _fields(annotation)
    return {f.name: (f, hints[f.name]) for f in fields(cls)}


def _value(annotation: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(annotation)
    if origin is tuple and isinstance(value, list):
        item = typing.get_args(annotation)[0]
        return tuple(_value(item, v, where) for v in value)
    if origin is dict and isinstance(value, dict):
        return {_value(str, k, where): _value(str, v, where) for k, v in value.items()}
    if origin is None and isinstance(annotation, type):
        return _scalar(annotation, value, where)
    raise FrameError(f"{where} has the wrong type {type(value).__name__}")


def _scalar(cls: type, value: Any, where: str) -> Any:
    if is_dataclass(cls) and isinstance(value, dict):
        return _object(cls, value, where)
    if issubclass(cls, StrEnum) and isinstance(value, str):
        try:
            return cls(value)
        except ValueError:
            raise FrameError(f"{where} is {value[:60]!r}, which is none of its words") from None
    if cls is str and isinstance(value, str) and "\0" not in value:
        return value
    if cls is bool and isinstance(value, bool):
        return value
    if cls is int and type(value) is int and -_INT_BOUND <= value < _INT_BOUND:
        return value
    if cls is float and type(value) in (int, float) and value == value and abs(value) < 1e18:
        return float(value)
    raise FrameError(f"{where} has the wrong type or is out of range")


def types_of(union: types.UnionType) -> dict[str, type]:
    """The messages of a union by their names on the wire."""
    return {t.__name__: t for t in typing.get_args(union)}
