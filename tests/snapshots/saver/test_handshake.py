"""What savers prove to each other, and what they take for a message."""

from __future__ import annotations

import json

import pytest

from elasticrun.snapshots.saver import transfer
from elasticrun.wire.frames import FrameError, encode, length_of

NONCES = ("aa", "bb")


def test_a_proof_is_of_one_side_one_secret_and_one_request() -> None:
    shown = {
        transfer.prove("s", "host", *NONCES),
        transfer.prove("t", "host", *NONCES),
        transfer.prove("s", "host", "aab", "b"),
        transfer.prove("s", "client", *NONCES, b""),
        transfer.prove("s", "client", *NONCES, b"x"),
        transfer.prove("s", "client", "bb", "aa", b""),
    }
    assert len(shown) == 6
    assert transfer.prove("", "host", *NONCES) == transfer.prove("", "client", *NONCES, b"x") == ""
    assert transfer.prove("s", "host", "\ud800", "b"), "nonces may be any text"


@pytest.mark.parametrize(
    ("secret", "shown", "sentence"),
    [
        ("", "ab", transfer.SECRET_WANTED),
        ("s", "", transfer.OTHER_HAS_NONE),
        ("s", "ab", transfer.WRONG),
        ("s", "\ud800\xe4", transfer.WRONG),
    ],
)
def test_what_is_not_right_is_denied(secret: str, shown: str, sentence: str) -> None:
    with pytest.raises(transfer.NotAuthenticated, match=sentence):
        transfer.check(secret, shown, transfer.prove(secret, "host", *NONCES))


def test_what_is_right_is_let_in() -> None:
    transfer.check("", "", transfer.prove("", "host", *NONCES))
    transfer.check("s", transfer.prove("s", "host", *NONCES), transfer.prove("s", "host", *NONCES))


MESSAGES = (
    transfer.Dial(1, "aa", True),
    transfer.Get("ff", 3, 0, True),
    transfer.Put("a", 1, 2, "d"),
)


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_come_through(message: transfer.Dial | transfer.Get | transfer.Put) -> None:
    frame = encode(message)
    assert length_of(frame[:4]) == len(frame) - 4
    assert transfer.read(frame[4:], transfer.CLIENT_TYPES, type(message)) == message
    with pytest.raises(FrameError, match="unknown type"):
        transfer.read(frame[4:], transfer.HOST_TYPES, type(message))
    with pytest.raises(FrameError, match="out of turn"):
        transfer.read(frame[4:], transfer.CLIENT_TYPES, transfer.Shown)


def test_a_frame_is_bounded() -> None:
    with pytest.raises(FrameError, match="claims 65537 bytes"):
        length_of((transfer.MAX_HEADER + 1).to_bytes(4, "big"), transfer.MAX_HEADER)


def test_a_number_beyond_all_bounds_is_no_number() -> None:
    plain = {"type": "Get", "round": "ff", "step": 2**63, "rank": 0, "body": True}
    with pytest.raises(FrameError, match="out of range"):
        transfer.read(json.dumps(plain).encode(), transfer.CLIENT_TYPES, transfer.Get)
