"""Who holds a port: nobody, something that speaks HTTP/2 as gRPC does, or a stranger."""

from __future__ import annotations

import asyncio
import socket
from enum import Enum
from typing import Final

from elasticrun.wire.ids import Endpoint

GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The client's preface and an empty SETTINGS frame (RFC 9113, 3.4)."""

SETTINGS: Final = 4
"""Frame type of the server's first frame."""


class Answer(Enum):
    """What came back from a port."""

    NOBODY = "nobody"  # no connection: refused, unreachable, no such name yet
    HTTP2 = "http2"
    FOREIGN = "foreign"  # bytes that are not HTTP/2
    SILENT = "silent"  # a connection, but nothing on it, or closed at once


async def probe(endpoint: Endpoint, limit: float) -> Answer:
    """Connect, greet, and look at the first frame; `limit` seconds for each of the two."""
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(endpoint.host, endpoint.port), limit
        )
    except (OSError, TimeoutError, socket.gaierror):
        return Answer.NOBODY
    try:
        writer.write(GREETING)
        head = await asyncio.wait_for(reader.readexactly(9), limit)
        return Answer.HTTP2 if head[3] == SETTINGS else Answer.FOREIGN
    except asyncio.IncompleteReadError as short:
        return Answer.FOREIGN if short.partial else Answer.SILENT
    except (OSError, TimeoutError):
        return Answer.SILENT
    finally:
        writer.transport.abort()
