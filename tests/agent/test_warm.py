"""What a warm process or a guard says, as an agent reads it."""

from __future__ import annotations

import socket

import pytest

from elasticrun.agent.warm import hear
from elasticrun.wire import frames, spawning


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_a_word_in_pieces_is_one_word(pieces: int) -> None:
    said = spawning.Declined("its umask differs")
    data = frames.encode(said)
    size = -(-len(data) // pieces)
    # of such a pair each piece is received by itself
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for begin in range(0, len(data), size):
            theirs.send(data[begin : begin + size])
        assert hear(ours) == said


@pytest.mark.parametrize("before", [b"", b"\0\0"])
def test_who_ends_in_the_middle_of_a_word_has_said_none(before: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(before)
        theirs.close()
        with pytest.raises(ConnectionResetError, match="it ended"):
            hear(ours)
