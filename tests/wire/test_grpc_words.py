"""gRPC's explanations, for an operator."""

from __future__ import annotations

import pytest

from elasticrun.wire.rpc.channel import MAX_WORDS, in_words


@pytest.mark.parametrize(
    ("details", "said"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to "
            "connect to remote host: Connection refused",
            "Connection refused",
        ),
        (
            "errors resolving h:1: [field:hostname lookup error:UNKNOWN: address lookup failed for "
            "h:1: Domain name not found]",
            "the name server does not know this host",
        ),
        ("Cancelling all calls", "it has ended"),
        ("Stream removed (ping timeout)", "no answer to pings"),
        ("two\n lines", "two lines"),
        ("", "unavailable"),
        (None, "unavailable"),
        ("x" * 1000, "x" * MAX_WORDS),
    ],
)
def test_what_an_operator_reads(details: str | None, said: str) -> None:
    assert in_words("UNAVAILABLE", details) == said
