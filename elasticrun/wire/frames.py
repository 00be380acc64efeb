"""Frames of messages: four bytes of length (big endian), then one JSON object.

Used between the agent (or a caller of elastic_launch) and the fork server (`wire.spawning`),
between ranks, savers and their agent (`wire.snapshots`), and between savers (`wire.bulk`). Pure
functions and a buffer, no socket; whoever owns the socket feeds bytes in.
Anything that is not exactly one of the expected messages raises `FrameError`, whose text is one
sentence for the operator: there is no second guess about what a peer may have meant.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from elasticrun.wire.records import plain, resolve, typed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_FRAME_BYTES = 4 * 1024 * 1024
"""Room for an environment of 2 MB (Linux' own bound for one exec) with its JSON escapes."""

LENGTH_BYTES = 4


class FrameError(ValueError):
    """The bytes are no message of this conversation; the conversation must end."""


# ---------------------------------------------------------------- encoding


def encode(message: DataclassInstance) -> bytes:
    """One whole frame of a message of one of the unions. Raises FrameError if it would be longer
    than MAX_FRAME_BYTES."""
    body = {"type": type(message).__name__, **plain(message)}
    payload = json.dumps(body, separators=(",", ":")).encode("ascii")
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(
            f"a {body['type']} message of {len(payload)} bytes is longer than the "
            f"{MAX_FRAME_BYTES} bytes that a frame may have"
        )
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


# ---------------------------------------------------------------- decoding


class FrameBuffer:
    """Bytes in, messages out, for one direction of one conversation.

    Holds at most one frame and what one read brought with it.
    """

    def __init__(self, union: Any) -> None:
        """`union`, such as `ToSpawner` or `FromRank`: the messages that may come."""
        self._types = types_of(union)
        resolve(union)
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
    try:
        return typed(body, types_by_name[name], name, strict=True)
    except ValueError as wrong:
        raise FrameError(str(wrong)) from None


def types_of(union: types.UnionType) -> dict[str, type]:
    """The messages of a union by their names on the wire."""
    return {t.__name__: t for t in typing.get_args(union)}
