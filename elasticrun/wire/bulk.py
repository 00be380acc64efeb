"""What savers of different nodes say to each other: snapshots and parts of checkpoints.

One request a connection, over TCP. Frames (`wire.frames`) of bounded length, and after some of them
raw bytes whose number the frame has said. Both sides prove the job's secret before anything else is
looked at (the manner is that of `wire.auth`; the host proves first):

    client                                host
    Dial       nonce                  ->
                                      <-  Counter    nonce, the host's proof
    Shown      the client's proof     ->
    Get | Put                         ->
                                      <-  Head, then bytes | GoOn | Refusal
    after GoOn: the bytes             ->
                                      <-  Taken | Refusal

The client's proof covers its request too, and a Put says the digest of what follows it. The bytes
themselves are neither encrypted nor proved against somebody who sits on the way.

After a Head that was asked for with its body: the layout, then the tensors in blocks, each followed
by its xxh3 of eight bytes (little-endian), then the opaque values with their table and their xxh3,
then a Sent.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Any, Final

from elasticrun.wire.frames import LENGTH_BYTES, FrameError, decode, types_of

VERSION: Final = 1

MAX_HEADER: Final = 64 * 1024
"""Bytes of any frame here."""

MAX_TEXT: Final = 1000
"""Characters of a reason that are passed on."""

NONCE_BYTES: Final = 32

SECRET_WANTED: Final = "the saver of the other node has a secret and this one has none"
OTHER_HAS_NONE: Final = "the saver of the other node has no secret and this one has"
WRONG: Final = "the saver of the other node does not know this job's secret"


class Denied(Exception):
    """The other side is not let in, or not followed; the text is a sentence."""


@dataclass(frozen=True, slots=True)
class Dial:
    """A client's first message."""

    version: int
    nonce: str  # hex
    proves: bool  # whether it has a secret


@dataclass(frozen=True, slots=True)
class Counter:
    """The host's answer to Dial."""

    version: int
    nonce: str
    proof: str  # hex; "" without a secret


@dataclass(frozen=True, slots=True)
class Shown:
    """The client's proof; its request follows at once."""

    proof: str


@dataclass(frozen=True, slots=True)
class Get:
    """The snapshot of a rank of (round, step); without `body` only what its sizes are."""

    round: str  # hex of segment.round_key
    step: int
    rank: int
    body: bool


@dataclass(frozen=True, slots=True)
class Put:
    """What an attempt's coordinator must know of a part that another node has written; after GoOn
    its `length` bytes follow. A part that comes again changes nothing."""

    attempt: str
    rank: int
    length: int
    digest: str  # hex; sha256 of the bytes


FromClient = Dial | Shown | Get | Put


@dataclass(frozen=True, slots=True)
class Head:
    """There is such a snapshot."""

    layout_length: int  # bytes, encoded
    slot_bytes: int
    tensor_bytes: int  # own and shared stretch
    values_bytes: int  # opaque values with their table
    sequence: int
    layout: int  # Layout.key


@dataclass(frozen=True, slots=True)
class Sent:
    """After the last byte: whether the snapshot was still what it had been at the first."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class GoOn:
    """The part that was announced may come."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The part is in good hands."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """It cannot be done; `again`: it may be possible in a moment."""

    reason: str
    again: bool


FromHost = Counter | Head | Sent | GoOn | Taken | Refusal

CLIENT_TYPES: Final = types_of(FromClient)
HOST_TYPES: Final = types_of(FromHost)


def frame_length(prefix: bytes) -> int:
    """How many bytes of a frame follow its first LENGTH_BYTES. FrameError beyond MAX_HEADER."""
    length = int.from_bytes(prefix[:LENGTH_BYTES], "big")
    if length > MAX_HEADER:
        raise FrameError(f"a frame claims {length} bytes; at most {MAX_HEADER} are allowed")
    return length


def read(payload: bytes, types: dict[str, type], *wanted: type) -> Any:
    """The message in a payload, which must be one of `wanted`. FrameError."""
    message = decode(payload, types)
    if not isinstance(message, wanted):
        raise FrameError(f"a {type(message).__name__} message came out of turn")
    return message


def fresh_nonce() -> str:
    """Random, never used before."""
    return secrets.token_hex(NONCE_BYTES)


def host_proof(secret: str, client_nonce: str, host_nonce: str) -> str:
    """What the host shows; "" without a secret."""
    return _prove(secret, "host", client_nonce, host_nonce, b"")


def client_proof(secret: str, client_nonce: str, host_nonce: str, request: bytes) -> str:
    """What the client shows; `request` is the payload of its Get or Put."""
    return _prove(secret, "client", client_nonce, host_nonce, request)


def check(secret: str, shown: str, right: str) -> None:
    """Whether to go on with a peer that has `shown` this, where `right` is due. Denied."""
    if not secret and shown:
        raise Denied(SECRET_WANTED)
    if secret and not shown:
        raise Denied(OTHER_HAS_NONE)
    if not hmac.compare_digest(shown.encode(errors="replace"), right.encode()):
        raise Denied(WRONG)


def _prove(secret: str, side: str, client_nonce: str, host_nonce: str, request: bytes) -> str:
    if not secret:
        return ""
    label = f"elasticrun saver/{VERSION} {side}".encode()
    nonces = [nonce.encode(errors="replace") for nonce in (client_nonce, host_nonce)]
    parts = (label, *nonces, request)
    # Each part with its length: no two exchanges run together into the same bytes.
    said = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret.encode(), said, "sha256").hex()
