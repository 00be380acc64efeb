"""Transfers snapshots, and descriptions of written parts, between the savers of two nodes: the
protocol and both ends of a connection.

One request per connection, over TCP. Frames (`wire.frames`) of bounded length; some are followed by
raw bytes, whose number is in the frame. Both sides prove knowledge of the job's secret before
anything else is processed (similar to `wire.auth`; the host proves first):

    client                                host
    Dial       nonce                  ->
                                      <-  Counter    nonce, the host's proof
    Shown      the client's proof     ->
    Get | Put                         ->
                                      <-  Head, then bytes | GoOn | Refusal
    after GoOn: the bytes             ->
                                      <-  Taken | Refusal

The client's proof covers its request, and a Put contains the digest of the bytes that follow it.
The bytes themselves are neither encrypted nor protected against a man in the middle.

A Head that answers a Get with `body` is followed by the layout; the tensors in blocks, each
followed by its xxh3 of eight bytes (little-endian); the opaque values with their table, and their
xxh3; a Sent.

The sockets are blocking, each in a thread of its own. Every wait has a time limit, and so has the
whole exchange.
"""

from __future__ import annotations

import hashlib
import hmac
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from elasticrun.snapshots.saver.hashing import OpenSegment, Overwritten, digest, store_hashes
from elasticrun.snapshots.shm.layout import MAX_LAYOUT_BYTES, MAX_SIZE, PAGE
from elasticrun.snapshots.shm.segment import Segment, SegmentError, block_of, round_key
from elasticrun.wire.frames import LENGTH_BYTES, FrameError, decode, encode, length_of, types_of
from elasticrun.wire.types import Endpoint, RoundName

M = TypeVar("M")

VERSION: Final = 1

MAX_HEADER: Final = 64 * 1024
"""Maximum bytes of a frame."""

MAX_TEXT: Final = 1000
"""Maximum characters of a reason that is sent or received."""

NONCE_BYTES: Final = 32

SECRET_WANTED: Final = "the saver of the other node has a secret and this one has none"
OTHER_HAS_NONE: Final = "the saver of the other node has no secret and this one has"
WRONG: Final = "the saver of the other node does not know this job's secret"

CONNECT_LIMIT: Final = 10.0
AUTH_LIMIT: Final = 5.0
"""Seconds to connect, and for an unauthenticated client to prove itself and send its request."""

STALL_LIMIT: Final = 30.0
"""Seconds without a byte after which the other side counts as dead."""

MIN_RATE: Final = 4 * 1024 * 1024
"""Minimum bytes per second: a slower transfer is aborted."""

CHUNK: Final = 4 * 1024 * 1024
"""Bytes sent or received at once."""


# ---------------------------------------------------------------- the protocol


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
    """The client's proof; its request follows immediately."""

    proof: str


@dataclass(frozen=True, slots=True)
class Get:
    """Request the snapshot of (`round`, `step`, `rank`); without `body`, only its sizes."""

    round: str  # hex of segment.round_key
    step: int
    rank: int
    body: bool


@dataclass(frozen=True, slots=True)
class Put:
    """Announce the description of a part, for the attempt's coordinator; its `length` bytes follow
    after GoOn. Repeating it has no further effect."""

    attempt: str
    rank: int
    length: int
    digest: str  # hex; sha256 of the bytes


FromClient = Dial | Shown | Get | Put


@dataclass(frozen=True, slots=True)
class Head:
    """The snapshot exists; its sizes."""

    layout_length: int  # bytes, encoded
    slot_bytes: int
    tensor_bytes: int  # own and shared
    values_bytes: int  # opaque values with their table
    sequence: int
    layout: int  # Layout.key


@dataclass(frozen=True, slots=True)
class Sent:
    """Follows the last byte of a snapshot: whether it stayed unchanged while it was sent."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class GoOn:
    """Permission to send the announced description."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The description was accepted."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request cannot be fulfilled; `again`: it may be possible in a moment."""

    reason: str
    again: bool


FromHost = Counter | Head | Sent | GoOn | Taken | Refusal

CLIENT_TYPES: Final = types_of(FromClient)
HOST_TYPES: Final = types_of(FromHost)


def read(payload: bytes, types: dict[str, type], *wanted: type) -> Any:
    """Decode a payload into a message, which must be of one of the `wanted` types. Raises
    FrameError."""
    message = decode(payload, types)
    if not isinstance(message, wanted):
        raise FrameError(f"a {type(message).__name__} message came out of turn")
    return message


def prove(secret: str, side: str, client: str, host: str, request: bytes = b"") -> str:
    """The proof of `side` ("host" or "client") for these nonces; "" without a secret. `request`:
    the payload of a client's Get or Put."""
    if not secret:
        return ""
    label = f"elasticrun saver/{VERSION} {side}".encode()
    nonces = [nonce.encode(errors="replace") for nonce in (client, host)]
    # Each part is prefixed with its length, so that different exchanges never give the same bytes.
    parts = (label, *nonces, request)
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret.encode(), message, "sha256").hex()


def check(secret: str, shown: str, right: str) -> None:
    """Compare the proof that a peer has `shown` with the expected one. Raises NotAuthenticated."""
    if not secret and shown:
        raise NotAuthenticated(SECRET_WANTED)
    if secret and not shown:
        raise NotAuthenticated(OTHER_HAS_NONE)
    if not hmac.compare_digest(shown.encode(errors="replace"), right.encode()):
        raise NotAuthenticated(WRONG)


# ---------------------------------------------------------------- one connection


class NotAuthenticated(Exception):
    """The other side's proof is wrong or missing, or this side has no secret to check it."""


class ConnectionBroken(Exception):
    """The connection broke, or the other side sent an invalid message."""


class CorruptTransfer(Exception):
    """The received snapshot differs from its hashes, or was overwritten while it was sent."""


class PeerRefused(Exception):
    """The other side refuses the request. `again`: it may succeed in a moment."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason[:MAX_TEXT])
        self.again = again


class PeerLink:
    """One end of a connection, with a time limit for the whole exchange. Its methods raise
    ConnectionBroken."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._end = time.monotonic() + AUTH_LIMIT

    def restart_limit(self, nbytes: int) -> None:
        """Restart the time limit, long enough to transfer this many bytes."""
        self._end = time.monotonic() + STALL_LIMIT + nbytes / MIN_RATE

    def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            for at in range(0, len(view), CHUNK):
                self._remaining()
                self._socket.sendall(view[at : at + CHUNK])
        except OSError as error:
            raise ConnectionBroken(_about(error)) from None

    def send_message(self, message: FromClient | FromHost) -> None:
        self.send(encode(message))

    def receive_into(self, view: memoryview) -> None:
        """Receive until `view` is full."""
        at = 0
        try:
            while at < len(view):
                self._remaining()
                got = self._socket.recv_into(view[at : at + CHUNK])
                if not got:
                    raise ConnectionBroken("the other side closed the connection too early")
                at += got
        except OSError as error:
            raise ConnectionBroken(_about(error)) from None

    def receive(self, length: int) -> bytes:
        taken = bytearray(length)
        self.receive_into(memoryview(taken))
        return bytes(taken)

    def payload(self) -> bytes:
        """The payload of the next frame."""
        try:
            return self.receive(length_of(self.receive(LENGTH_BYTES), MAX_HEADER))
        except FrameError as error:
            raise ConnectionBroken(str(error)) from None

    def _remaining(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(min(left, STALL_LIMIT))


def _about(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "the other side took too long"
    return f"the connection broke: {error.strerror or type(error).__name__}"


# ---------------------------------------------------------------- the host's end


@dataclass(frozen=True, slots=True)
class ServedSnapshot:
    """A snapshot that may be sent to other nodes."""

    opened: OpenSegment
    slot: int
    sequence: int


Answer = ServedSnapshot | GoOn | Taken | Refusal
Ask = Callable[[Get | Put, bytes], Answer]
"""Decides on a request: returns the snapshot to send, GoOn or Taken, or a refusal. Called with b"",
and for a Put once more with the bytes of the description. Runs in the connection's thread.
"""


def serve(sock: socket.socket, secret: str, ask: Ask, proved: Callable[[], None]) -> str:
    """Answer the one request of a connection; the caller owns the socket. Returns "", or a sentence
    if the peer was refused or the connection failed. `proved` is called once the peer is
    authenticated."""
    try:
        return _serve_request(PeerLink(sock), secret, ask, proved)
    except NotAuthenticated as denied:
        return str(denied)
    except (ConnectionBroken, FrameError, SegmentError) as error:
        return str(error)


def _serve_request(link: PeerLink, secret: str, ask: Ask, proved: Callable[[], None]) -> str:
    dial = read(link.payload(), CLIENT_TYPES, Dial)
    if dial.version != VERSION:
        return _refuse(link, f"this saver speaks version {VERSION}, not {dial.version}")
    if dial.proves != bool(secret):
        return _refuse(link, OTHER_HAS_NONE if dial.proves else SECRET_WANTED)
    nonce = secrets.token_hex(NONCE_BYTES)
    link.send_message(Counter(VERSION, nonce, prove(secret, "host", dial.nonce, nonce)))
    shown = read(link.payload(), CLIENT_TYPES, Shown)
    request = link.payload()
    try:
        check(secret, shown.proof, prove(secret, "client", dial.nonce, nonce, request))
    except NotAuthenticated:
        return _refuse(link, WRONG)
    proved()
    match read(request, CLIENT_TYPES, Get, Put):
        case Get() as get:
            return _send_snapshot(link, get, ask)
        case put:
            return _receive_part(link, put, ask)


def _refuse(link: PeerLink, reason: str, *, again: bool = False) -> str:
    link.send_message(Refusal(reason[:MAX_TEXT], again))
    return "" if again else reason


def _send_snapshot(link: PeerLink, get: Get, ask: Ask) -> str:
    served = ask(get, b"")
    if not isinstance(served, ServedSnapshot):
        assert isinstance(served, Refusal)
        link.send_message(served)
        return ""
    opened = served.opened
    try:
        snapshot = opened.snapshot(served.slot, served.sequence)
        if (snapshot.round.hex(), snapshot.step) != (get.round, get.step):
            raise Overwritten(f"step {get.step} was withdrawn, and its slot was used again")
        layout = opened.segment.layout()
        tensors = opened.tensor_bytes(snapshot)
    except Overwritten as gone:  # the snapshot is outdated; no log line
        link.send_message(Refusal(str(gone)[:MAX_TEXT], again=False))
        return ""
    except SegmentError as error:
        return _refuse(link, str(error))
    known = opened.stored_hashes(snapshot)
    encoded = layout.encode()
    values = snapshot.values_bytes
    link.send_message(
        Head(
            *(len(encoded), layout.slot_bytes, tensors, values),
            *(snapshot.sequence, snapshot.layout),
        )
    )
    if not get.body:
        return ""
    link.restart_limit(len(encoded) + tensors + values)
    link.send(encoded)
    wrong = ""
    for number, stretch in enumerate(opened.stretches(snapshot)):
        link.send(stretch)
        # A stored hash, computed right after the commit, also reveals damage since then.
        mark = known[number] if number < len(known) else digest(stretch)
        link.send(mark.to_bytes(8, "little"))
    try:
        opened.check_not_overwritten(snapshot)
    except Overwritten as gone:
        wrong = str(gone)
    link.send_message(Sent(not wrong, wrong))
    return ""


def _receive_part(link: PeerLink, put: Put, ask: Ask) -> str:
    if not 0 < put.length <= MAX_LAYOUT_BYTES:
        return _refuse(link, f"no part has {put.length} bytes")
    answer = ask(put, b"")
    if isinstance(answer, GoOn):
        link.send_message(answer)
        link.restart_limit(put.length)
        data = link.receive(put.length)
        if hashlib.sha256(data).hexdigest() != put.digest:
            return _refuse(link, "a part is not what its digest says")
        answer = ask(put, data)
    assert isinstance(answer, Taken | Refusal)
    link.send_message(answer)
    return ""


# ---------------------------------------------------------------- the client's end


def _dial(place: Endpoint, secret: str, request: Get | Put) -> tuple[socket.socket, PeerLink]:
    """Connect, authenticate and send the request; the caller closes the socket. Raises
    ConnectionBroken, NotAuthenticated or PeerRefused."""
    try:
        sock = socket.create_connection((place.host, place.port), CONNECT_LIMIT)
    except OSError as error:
        raise ConnectionBroken(f"cannot connect: {error.strerror or error}") from None
    link = PeerLink(sock)
    try:
        nonce = secrets.token_hex(NONCE_BYTES)
        link.send_message(Dial(VERSION, nonce, bool(secret)))
        counter = _receive_reply(link, Counter)
        check(secret, counter.proof, prove(secret, "host", nonce, counter.nonce))
        frame = encode(request)
        proof = prove(secret, "client", nonce, counter.nonce, frame[LENGTH_BYTES:])
        link.send(encode(Shown(proof)) + frame)
    except BaseException:
        sock.close()
        raise
    return sock, link


def _receive_reply(link: PeerLink, wanted: type[M]) -> M:
    try:
        message: M | Refusal = read(link.payload(), HOST_TYPES, wanted, Refusal)
    except FrameError as error:
        raise ConnectionBroken(str(error)) from None
    if isinstance(message, Refusal):
        raise PeerRefused(message.reason, message.again)
    return message


def _head(link: PeerLink) -> Head:
    head = _receive_reply(link, Head)
    numbers = (head.layout_length, head.slot_bytes, head.tensor_bytes, head.values_bytes)
    if not all(0 <= n <= MAX_SIZE for n in numbers) or head.layout_length > MAX_LAYOUT_BYTES:
        raise ConnectionBroken("it offers a snapshot of impossible sizes")
    if head.tensor_bytes + head.values_bytes > head.slot_bytes or head.slot_bytes % PAGE:
        raise ConnectionBroken("it offers a snapshot that is longer than its slot")
    return head


def ask_size(place: Endpoint, secret: str, get: Get) -> Head:
    """Request the sizes of a snapshot. Raises ConnectionBroken, NotAuthenticated or PeerRefused."""
    sock, link = _dial(place, secret, get)
    with sock:
        return _head(link)


def fetch(
    place: Endpoint,
    secret: str,
    round: RoundName,
    step: int,
    rank: int,
    descriptor: int,
    slot: int = 0,
    layout_key: int = 0,
) -> None:
    """Copy a snapshot from the saver at `place` into a slot of the segment behind `descriptor`, and
    commit it there with its hashes. `layout_key`: the layout that it must have, because another one
    would invalidate the snapshots in other slots; 0: any. Raises ConnectionBroken,
    NotAuthenticated, PeerRefused, CorruptTransfer, SegmentError or OSError; then the slot is empty,
    unless only its hashes could not be stored."""
    mapping = mmap.mmap(descriptor, os.fstat(descriptor).st_size)  # unmapped with its last view
    segment = Segment(memoryview(mapping))
    if not 0 <= slot < segment.slots:
        raise SegmentError(f"a segment of {segment.slots} slots has no slot {slot}")
    segment.withdraw(slot)
    get = Get(round_key(round).hex(), step, rank, body=True)
    sock, link = _dial(place, secret, get)
    with sock:
        head = _head(link)
        if head.slot_bytes > segment.slot_bytes or head.layout_length > segment.slot_at(0) - PAGE:
            raise SegmentError("the memory allocated for the snapshot is too small")
        if layout_key not in (0, head.layout):
            raise SegmentError("the snapshot's layout is not the announced one")
        link.restart_limit(head.layout_length + head.slot_bytes)
        link.receive_into(memoryview(mapping)[PAGE : PAGE + head.layout_length])
        layout = segment.layout()
        if (layout.key, layout.tensor_bytes) != (head.layout, head.tensor_bytes):
            raise ConnectionBroken("its layout is not the announced one")
        hashes = _receive(link, head, segment.payload(slot))
        sent = _receive_reply(link, Sent)
    if not sent.ok:
        raise CorruptTransfer(sent.reason[:MAX_TEXT])
    segment.commit(
        slot,
        round=round,
        sequence=head.sequence,
        step=step,
        layout=head.layout,
        values=head.values_bytes,
    )
    snapshot = segment.read(slot)
    assert snapshot is not None
    store_hashes(descriptor, segment.slot_at(slot), snapshot, hashes)


def _receive(link: PeerLink, head: Head, payload: memoryview) -> tuple[int, ...]:
    """Receive the stretches of a snapshot and compare them with the hashes that follow them;
    returns the hashes. Raises ConnectionBroken or CorruptTransfer."""
    block = block_of(head.tensor_bytes)
    ends = [min(at + block, head.tensor_bytes) for at in range(0, head.tensor_bytes, block)]
    ends.append(head.tensor_bytes + head.values_bytes)
    hashes = []
    at = 0
    for number, end in enumerate(ends):
        stretch = payload[at:end]
        link.receive_into(stretch)
        mark = int.from_bytes(link.receive(8), "little")
        if digest(stretch) != mark:
            raise CorruptTransfer(
                f"block {number + 1} of {len(ends)} is not what was written: it differs from its "
                "hash"
            )
        hashes.append(mark)
        at = end
    return tuple(hashes)


def put(place: Endpoint, secret: str, attempt: str, rank: int, part: bytes) -> None:
    """Send the description of a part to the attempt's coordinator. Raises ConnectionBroken,
    NotAuthenticated or PeerRefused."""
    request = Put(attempt, rank, len(part), hashlib.sha256(part).hexdigest())
    sock, link = _dial(place, secret, request)
    with sock:
        _receive_reply(link, GoOn)
        link.restart_limit(len(part))
        link.send(part)
        _receive_reply(link, Taken)
