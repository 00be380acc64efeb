"""What savers prove to each other, and what they take for a message."""

from __future__ import annotations

import json

import pytest

from elasticrun.wire import bulk
from elasticrun.wire.frames import FrameError, encode

NONCES = ("aa", "bb")


def test_a_proof_is_of_one_side_one_secret_and_one_request() -> None:
    shown = {
        bulk.host_proof("s", *NONCES),
        bulk.host_proof("t", *NONCES),
        bulk.host_proof("s", "aab", "b"),
        bulk.client_proof("s", *NONCES, b""),
        bulk.client_proof("s", *NONCES, b"x"),
        bulk.client_proof("s", "bb", "aa", b""),
    }
    assert len(shown) == 6
    assert bulk.host_proof("", *NONCES) == bulk.client_proof("", *NONCES, b"x") == ""


@pytest.mark.parametrize(
    ("secret", "shown", "sentence"),
    [
        ("", "ab", bulk.SECRET_WANTED),
        ("s", "", bulk.OTHER_HAS_NONE),
        ("s", "ab", bulk.WRONG),
        ("s", "\ud800\xe4", bulk.WRONG),
    ],
)
def test_what_is_not_right_is_denied(secret: str, shown: str, sentence: str) -> None:
    with pytest.raises(bulk.Denied, match=sentence):
        bulk.check(secret, shown, bulk.host_proof(secret, *NONCES))


def test_what_is_right_is_let_in() -> None:
    bulk.check("", "", bulk.host_proof("", *NONCES))
    bulk.check("s", bulk.host_proof("s", *NONCES), bulk.host_proof("s", *NONCES))


def test_nonces_may_be_any_text() -> None:
    assert bulk.host_proof("s", "\ud800", "b")


@pytest.mark.parametrize(
    "message", [bulk.Dial(1, "aa", True), bulk.Get("ff", 3, 0, True), bulk.Put("a", 1, 2, "dd")]
)
def test_messages_come_through(message: bulk.Dial | bulk.Get | bulk.Put) -> None:
    frame = encode(message)
    assert bulk.frame_length(frame[:4]) == len(frame) - 4
    assert bulk.read(frame[4:], bulk.CLIENT_TYPES, type(message)) == message
    with pytest.raises(FrameError, match="unknown type"):
        bulk.read(frame[4:], bulk.HOST_TYPES, type(message))
    with pytest.raises(FrameError, match="out of turn"):
        bulk.read(frame[4:], bulk.CLIENT_TYPES, bulk.Shown)


def test_a_frame_is_bounded() -> None:
    with pytest.raises(FrameError, match="claims 65537 bytes"):
        bulk.frame_length((bulk.MAX_HEADER + 1).to_bytes(4, "big"))


def test_a_number_beyond_all_bounds_is_no_number() -> None:
    plain = {"type": "Get", "round": "ff", "step": 2**63, "rank": 0, "body": True}
    with pytest.raises(FrameError, match="out of range"):
        bulk.read(json.dumps(plain).encode(), bulk.CLIENT_TYPES, bulk.Get)
