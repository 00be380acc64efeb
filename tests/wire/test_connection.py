"""One conversation over a socketpair: what comes, what waits, and how it ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.wire.frames import Connection, DescriptorsLost, FrameError, HungUp, NotRead, encode
from elasticrun.wire.snapshots import SegmentClosed, SegmentOpen, ToSaver
from tests.harness import descriptors_of

CLOSED = SegmentClosed(7)


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = Connection(ours, ToSaver, max_descriptors=2)
    yield connection, theirs
    connection.close()
    theirs.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """The only descriptor of a file."""
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def test_messages_come_whole_and_in_order(pair: tuple[Connection, socket.socket]) -> None:
    connection, peer = pair
    assert connection.receive() is None
    both = encode(CLOSED) + encode(SegmentClosed(8))
    peer.sendall(both[:-3])
    assert list(connection.receive() or ()) == [CLOSED]
    assert connection.is_cut
    peer.sendall(both[-3:])
    assert list(connection.wait()) == [SegmentClosed(8)]
    assert not connection.is_cut


def test_what_is_no_message_is_told_after_those_before_it(
    pair: tuple[Connection, socket.socket],
) -> None:
    connection, peer = pair
    peer.sendall(encode(CLOSED) + b"\0\0\0\2{}")
    messages = connection.receive()
    assert next(messages) == CLOSED
    with pytest.raises(FrameError, match="unknown type"):
        next(messages)


def test_the_end_is_told_once_all_is_read(pair: tuple[Connection, socket.socket]) -> None:
    connection, peer = pair
    peer.sendall(encode(CLOSED))
    peer.close()
    connection.send(CLOSED)  # nobody will read it
    assert connection.unsent == 0
    assert list(connection.receive() or ()) == [CLOSED]
    with pytest.raises((HungUp, ConnectionResetError)):
        connection.receive()


@pytest.mark.parametrize("bound", [{"max_bytes": 10_000}, {"max_messages": 3}], ids=str)
def test_a_peer_that_does_not_read_is_given_up(bound: dict[str, int], file: int) -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours, ToSaver, **bound)

    def tell() -> None:
        for _ in range(100_000):
            connection.send(SegmentOpen(1, 2), file)

    with theirs, pytest.raises(NotRead):
        tell()
    assert connection.unsent > 0
    connection.close()
    assert ours.fileno() == -1
    assert descriptors_of(file) == 1, "nor is what waited beside the messages left"


def test_what_waited_goes_out_when_it_is_read(pair: tuple[Connection, socket.socket]) -> None:
    connection, peer = pair
    sent = 0
    while not connection.unsent:
        connection.send(CLOSED)
        sent += 1
    other = Connection(peer, ToSaver)
    heard: list[object] = []
    while len(heard) < sent:
        heard += other.receive() or ()
        connection.flush()
    assert heard == [CLOSED] * sent


def test_a_descriptor_comes_with_its_message(pair: tuple[Connection, socket.socket]) -> None:
    connection, peer = pair
    sender = Connection(peer, ToSaver)
    read, write = os.pipe()
    sender.send(SegmentOpen(1, 2), write)
    os.close(write)
    assert list(connection.receive() or ()) == [SegmentOpen(1, 2)]
    here = connection.take_descriptor()
    assert not os.get_inheritable(here)
    os.write(here, b"x")
    assert os.read(read, 1) == b"x"
    os.close(here)
    os.close(read)
    assert connection.take_descriptor() is None


def test_descriptors_without_room_end_it(pair: tuple[Connection, socket.socket]) -> None:
    connection, peer = pair
    socket.send_fds(peer, [encode(CLOSED)], [0] * 9)
    with pytest.raises(DescriptorsLost):
        connection.receive()


def test_where_none_is_expected_none_is_held(file: int) -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours, ToSaver)
    with theirs:
        socket.send_fds(theirs, [encode(CLOSED)], [file])
        assert list(connection.receive() or ()) == [CLOSED]
        assert descriptors_of(file) == 1
    connection.close()
