"""HTTP/2 by hand, for peers that no gRPC library plays: half a message, a window of nothing."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACK, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """One frame (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(**values: int) -> bytes:
    """A SETTINGS frame; the one setting known here is `window`."""
    body = b"".join(struct.pack(">HI", INITIAL_WINDOW_SIZE, value) for value in values.values())
    return frame(SETTINGS, body)


def call(path: str, stream: int = 1) -> bytes:
    """The headers that open a gRPC call; every field a literal (RFC 7541, 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "master",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\0" + b"".join(bytes([len(word)]) + word.encode() for word in pair)
        for pair in fields.items()
    )
    return frame(HEADERS, block, flags=END_HEADERS, stream=stream)


def message(data: bytes, stream: int = 1, *, says: int | None = None) -> bytes:
    """One gRPC message in a DATA frame; `says`: the length that its prefix claims."""
    length = len(data) if says is None else says
    return frame(DATA, struct.pack(">BI", 0, length) + data, stream=stream)
