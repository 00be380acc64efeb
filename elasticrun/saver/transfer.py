"""Snapshots and parts of checkpoints between savers: both ends of one connection (`wire.bulk`).

Plain blocking sockets, each in a thread of its own; every wait has a limit, and so has the whole.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from elasticrun.saver.hashing import Gone, OpenSegment, digest, keep
from elasticrun.shm.layout import MAX_LAYOUT_BYTES, MAX_SIZE, PAGE
from elasticrun.shm.segment import Segment, SegmentError, block_of, round_key
from elasticrun.wire import bulk
from elasticrun.wire.frames import LENGTH_BYTES, FrameError, encode
from elasticrun.wire.types import Endpoint, RoundName

CONNECT_LIMIT: Final = 10.0
DOOR_LIMIT: Final = 5.0
"""Seconds for a connection, and for a stranger to prove who it is and say what it wants."""

STALL_LIMIT: Final = 30.0
"""Seconds without a byte after which the other side counts as gone."""

SLOWEST: Final = 4 * 1024 * 1024
"""Bytes a second: whoever is slower over a whole request is given up."""

CHUNK: Final = 4 * 1024 * 1024
"""Bytes that are sent or received at once."""


class Broken(Exception):
    """The other side went away, or said what cannot be understood; a sentence."""


class Spoiled(Exception):
    """What came is not what was written; a sentence. Another try would bring the same."""


class PeerRefused(Exception):
    """The other side cannot do it; a sentence. `again`: it may in a moment."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason[: bulk.MAX_TEXT])
        self.again = again


class PeerLink:
    """One end of one connection. Raises Broken."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._end = time.monotonic() + DOOR_LIMIT

    def allow(self, nbytes: int) -> None:
        """Give it time for as many bytes, from now on."""
        self._end = time.monotonic() + STALL_LIMIT + nbytes / SLOWEST

    def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            for at in range(0, len(view), CHUNK):
                self._hurry()
                self._socket.sendall(view[at : at + CHUNK])
        except OSError as error:
            raise Broken(_about(error)) from None

    def say(self, message: bulk.FromClient | bulk.FromHost) -> None:
        self.send(encode(message))

    def take_into(self, view: memoryview) -> None:
        """Fill `view`."""
        at = 0
        try:
            while at < len(view):
                self._hurry()
                got = self._socket.recv_into(view[at : at + CHUNK])
                if not got:
                    raise Broken("the other side has hung up in the middle of it")
                at += got
        except OSError as error:
            raise Broken(_about(error)) from None

    def take(self, length: int) -> bytes:
        taken = bytearray(length)
        self.take_into(memoryview(taken))
        return bytes(taken)

    def payload(self) -> bytes:
        """The payload of the next frame."""
        try:
            return self.take(bulk.frame_length(self.take(LENGTH_BYTES)))
        except FrameError as error:
            raise Broken(str(error)) from None

    def _hurry(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(min(left, STALL_LIMIT))


def _about(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "the other side takes too long"
    return f"the connection broke: {error.strerror or type(error).__name__}"


# ---------------------------------------------------------------- the host's end


@dataclass(frozen=True, slots=True)
class Served:
    """A snapshot that may be sent."""

    opened: OpenSegment
    slot: int
    sequence: int


Answer = Served | bulk.GoOn | bulk.Taken | bulk.Refusal
Ask = Callable[[bulk.Get | bulk.Put, bytes], Answer]
"""Who knows what is served and which parts are awaited; the bytes are those of a Put, b"" at first.
Is called in the connection's thread."""


def serve(sock: socket.socket, secret: str, ask: Ask, proved: Callable[[], None]) -> str:
    """Answer the one request of a connection, which stays the caller's: "" or a sentence about a
    peer that was refused. `proved` is called once it has said what only a saver of the job can."""
    try:
        return _let_in(PeerLink(sock), secret, ask, proved)
    except bulk.Denied as denied:
        return str(denied)
    except (Broken, FrameError, SegmentError) as error:
        return str(error)


def _let_in(link: PeerLink, secret: str, ask: Ask, proved: Callable[[], None]) -> str:
    dial = bulk.read(link.payload(), bulk.CLIENT_TYPES, bulk.Dial)
    if dial.version != bulk.VERSION:
        return _refuse(link, f"this saver speaks version {bulk.VERSION}, not {dial.version}")
    if dial.proves != bool(secret):
        return _refuse(link, bulk.OTHER_HAS_NONE if dial.proves else bulk.SECRET_WANTED)
    nonce = bulk.fresh_nonce()
    link.say(bulk.Counter(bulk.VERSION, nonce, bulk.host_proof(secret, dial.nonce, nonce)))
    shown = bulk.read(link.payload(), bulk.CLIENT_TYPES, bulk.Shown)
    request = link.payload()
    try:
        bulk.check(secret, shown.proof, bulk.client_proof(secret, dial.nonce, nonce, request))
    except bulk.Denied:
        return _refuse(link, bulk.WRONG)
    proved()
    match bulk.read(request, bulk.CLIENT_TYPES, bulk.Get, bulk.Put):
        case bulk.Get() as get:
            return _send_snapshot(link, get, ask)
        case put:
            return _take_part(link, put, ask)


def _refuse(link: PeerLink, reason: str, *, again: bool = False) -> str:
    link.say(bulk.Refusal(reason[: bulk.MAX_TEXT], again))
    return "" if again else reason


def _send_snapshot(link: PeerLink, get: bulk.Get, ask: Ask) -> str:
    served = ask(get, b"")
    if not isinstance(served, Served):
        assert isinstance(served, bulk.Refusal)
        link.say(served)
        return ""
    opened = served.opened
    try:
        snapshot = opened.snapshot(served.slot, served.sequence)
        if (snapshot.round.hex(), snapshot.step) != (get.round, get.step):
            raise Gone(f"step {get.step} was withdrawn, and its slot was used again")
        layout = opened.segment.layout()
        tensors = opened.tensor_bytes(snapshot)
    except Gone as gone:  # it was needed no more: no news here
        link.say(bulk.Refusal(str(gone)[: bulk.MAX_TEXT], again=False))
        return ""
    except SegmentError as error:
        return _refuse(link, str(error))
    known = opened.known(snapshot)
    encoded = layout.encode()
    values = snapshot.values_bytes
    link.say(
        bulk.Head(
            *(len(encoded), layout.slot_bytes, tensors, values),
            *(snapshot.sequence, snapshot.layout),
        )
    )
    if not get.body:
        return ""
    link.allow(len(encoded) + tensors + values)
    link.send(encoded)
    wrong = ""
    for number, stretch in enumerate(opened.stretches(snapshot)):
        link.send(stretch)
        # What was hashed right after the commit tells of any harm since then, too.
        mark = known[number] if number < len(known) else digest(stretch)
        link.send(mark.to_bytes(8, "little"))
    try:
        opened.still(snapshot)
    except Gone as gone:
        wrong = str(gone)
    link.say(bulk.Sent(not wrong, wrong))
    return ""


def _take_part(link: PeerLink, put: bulk.Put, ask: Ask) -> str:
    if not 0 < put.length <= MAX_LAYOUT_BYTES:
        return _refuse(link, f"no part has {put.length} bytes")
    answer = ask(put, b"")
    if isinstance(answer, bulk.GoOn):
        link.say(answer)
        link.allow(put.length)
        data = link.take(put.length)
        if hashlib.sha256(data).hexdigest() != put.digest:
            return _refuse(link, "a part is not what its digest says")
        answer = ask(put, data)
    assert isinstance(answer, bulk.Taken | bulk.Refusal)
    link.say(answer)
    return ""


# ---------------------------------------------------------------- the client's end


def _dial(
    place: Endpoint, secret: str, request: bulk.Get | bulk.Put
) -> tuple[socket.socket, PeerLink]:
    """Connect, prove, ask. Broken, Denied, PeerRefused."""
    try:
        sock = socket.create_connection((place.host, place.port), CONNECT_LIMIT)
    except OSError as error:
        raise Broken(f"nobody answers there: {error.strerror or error}") from None
    link = PeerLink(sock)
    try:
        nonce = bulk.fresh_nonce()
        link.say(bulk.Dial(bulk.VERSION, nonce, bool(secret)))
        counter = _hear(link, bulk.Counter)
        assert isinstance(counter, bulk.Counter)
        bulk.check(secret, counter.proof, bulk.host_proof(secret, nonce, counter.nonce))
        asked = encode(request)
        proof = bulk.client_proof(secret, nonce, counter.nonce, asked[LENGTH_BYTES:])
        link.send(encode(bulk.Shown(proof)) + asked)
    except BaseException:
        sock.close()
        raise
    return sock, link


def _hear(link: PeerLink, wanted: type) -> bulk.FromHost:
    try:
        message = bulk.read(link.payload(), bulk.HOST_TYPES, wanted, bulk.Refusal)
    except FrameError as error:
        raise Broken(str(error)) from None
    if isinstance(message, bulk.Refusal):
        raise PeerRefused(message.reason, message.again)
    found: bulk.FromHost = message
    return found


def _head(link: PeerLink) -> bulk.Head:
    head = _hear(link, bulk.Head)
    assert isinstance(head, bulk.Head)
    numbers = (head.layout_length, head.slot_bytes, head.tensor_bytes, head.values_bytes)
    if not all(0 <= n <= MAX_SIZE for n in numbers) or head.layout_length > MAX_LAYOUT_BYTES:
        raise Broken("it offers a snapshot of impossible sizes")
    if head.tensor_bytes + head.values_bytes > head.slot_bytes or head.slot_bytes % PAGE:
        raise Broken("it offers a snapshot that is longer than its slot")
    return head


def ask_size(place: Endpoint, secret: str, get: bulk.Get) -> bulk.Head:
    """What a snapshot takes. Broken, Denied, PeerRefused."""
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
    """Copy a snapshot into a slot of the segment behind `descriptor` and commit it there, if it has
    this layout (0: any; another slot's snapshot would lose its own).
    Broken, Denied, PeerRefused, Spoiled, SegmentError, OSError: nothing is committed then."""
    mapping = mmap.mmap(descriptor, os.fstat(descriptor).st_size)  # ends with its last view
    segment = Segment(memoryview(mapping))
    if not 0 <= slot < segment.slots:
        raise SegmentError(f"a segment of {segment.slots} slots has no slot {slot}")
    segment.withdraw(slot)
    get = bulk.Get(round_key(round).hex(), step, rank, body=True)
    sock, link = _dial(place, secret, get)
    with sock:
        head = _head(link)
        if head.slot_bytes > segment.slot_bytes or head.layout_length > segment.slot_at(0) - PAGE:
            raise SegmentError("the memory that was made for a snapshot is too small for it")
        if layout_key not in (0, head.layout):
            raise SegmentError("the snapshot has another layout than it was announced with")
        link.allow(head.layout_length + head.slot_bytes)
        link.take_into(memoryview(mapping)[PAGE : PAGE + head.layout_length])
        layout = segment.layout()
        if (layout.key, layout.own_bytes + layout.shared_bytes) != (head.layout, head.tensor_bytes):
            raise Broken("its layout is not the one that it has announced")
        hashes = _receive(link, head, segment.payload(slot))
        sent = _hear(link, bulk.Sent)
    assert isinstance(sent, bulk.Sent)
    if not sent.ok:
        raise Spoiled(sent.reason[: bulk.MAX_TEXT])
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
    keep(descriptor, segment.slot_at(slot), snapshot, hashes)


def _receive(link: PeerLink, head: bulk.Head, payload: memoryview) -> tuple[int, ...]:
    """The stretches of a snapshot; their hashes. Broken, Spoiled."""
    block = block_of(head.tensor_bytes)
    ends = [*range(block, head.tensor_bytes, block)]
    ends += [head.tensor_bytes] if head.tensor_bytes else []
    ends.append(head.tensor_bytes + head.values_bytes)
    hashes = []
    at = 0
    for number, end in enumerate(ends):
        stretch = payload[at:end]
        link.take_into(stretch)
        mark = int.from_bytes(link.take(8), "little")
        if digest(stretch) != mark:
            raise Spoiled(
                f"block {number + 1} of {len(ends)} is not what was written: it differs from its "
                "hash"
            )
        hashes.append(mark)
        at = end
    return tuple(hashes)


def put(place: Endpoint, secret: str, attempt: str, rank: int, part: bytes) -> None:
    """Hand a part to its attempt's coordinator. Broken, Denied, PeerRefused."""
    request = bulk.Put(attempt, rank, len(part), hashlib.sha256(part).hexdigest())
    sock, link = _dial(place, secret, request)
    with sock:
        _hear(link, bulk.GoOn)
        link.allow(len(part))
        link.send(part)
        _hear(link, bulk.Taken)
