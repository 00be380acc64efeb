"""What gRPC says of a call that failed, in words for an operator."""

from __future__ import annotations

from typing import Final

MAX_WORDS: Final = 400
"""Characters of an explanation that are shown."""

_PLAIN: Final = {
    "Cancelling all calls": "it has ended",
    "Stream removed (Socket closed)": "the connection was closed",
    "Stream removed (ping timeout)": "no answer to pings",
}
"""gRPC's words (1.85) for what happens most, and ours."""


def in_words(code: str, details: str | None) -> str:
    """An explanation of at most MAX_WORDS characters. `code`: the name of the status, for where
    gRPC has nothing more to say."""
    text = " ".join((details or "").split()) or code.lower().replace("_", " ")
    # "failed to connect to all addresses; last error: UNKNOWN: ipv4:...: Failed to connect to
    # remote host: Connection refused" tells the same thrice
    text = text.rpartition("remote host: ")[2]
    if "address lookup failed" in text:
        text = "the name server does not know this host"
    return _PLAIN.get(text, text)[:MAX_WORDS]
