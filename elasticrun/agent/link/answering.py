"""Probes who listens on a port: nobody, an HTTP/2 server such as gRPC, another protocol, or a
server with incompatible TLS settings (and why: gRPC only reports a failed handshake).
"""

from __future__ import annotations

import asyncio
import ssl
from enum import Enum
from typing import Final

from elasticrun.agent.runtime import in_thread
from elasticrun.wire import auth
from elasticrun.wire.types import Endpoint

GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The client's preface and an empty SETTINGS frame (RFC 9113, 3.4)."""

HEAD: Final = 9
"""Bytes of the header of an HTTP/2 frame."""

SETTINGS: Final = 4
"""Frame type of the server's first frame."""

THEY_WANT_TLS: Final = (
    "the master uses TLS and this node does not: set --tls-ca (and --tls-cert, --tls-key) "
    "on all nodes"
)
THEY_HAVE_NO_TLS: Final = (
    "the master does not use TLS and this node does: set --tls-cert, --tls-key and --tls-ca on "
    "all nodes, or on none"
)

THEY_REFUSE_US: Final = (
    "the master closes the connection after the TLS handshake, as it does if a "
    "node has no certificate, or one that the master's --tls-ca has not signed: check "
    "--tls-cert and --tls-key of this node"
)


class PortAnswer(Enum):
    """What a port answered."""

    NOBODY = "nobody"  # no connection: refused, unreachable, name does not resolve yet
    HTTP2 = "http2"
    FOREIGN = "foreign"  # bytes that are not HTTP/2
    SILENT = "silent"  # connected, but no bytes
    CLOSED = "closed"  # connected, then closed at once
    INSECURE = "insecure"  # a certificate is rejected, or only one side uses TLS


Found = tuple[PortAnswer, str]
"""The answer and, for INSECURE, a sentence with the reason."""


async def probe(
    endpoint: Endpoint, limit: float, files: auth.Files | None = None, name: str = ""
) -> Found:
    """Connect, send the HTTP/2 preface (over TLS if there are `files`), and read the first frame;
    `limit` seconds for each step. `name`: the name that the certificate must contain, "" for the
    endpoint's host."""
    if files is None:
        answer = await _probe_once(endpoint, limit)
        if answer is PortAnswer.CLOSED and await _speaks_tls(endpoint, limit):
            return PortAnswer.INSECURE, THEY_WANT_TLS
        return answer, ""
    try:
        context = await in_thread(lambda: auth.client_context(files), limit=limit, name="tls")
        answer = await _probe_once(endpoint, limit, context, name or endpoint.host)
        # A server that rejects the client's certificate closes the connection without data.
        refused = answer is PortAnswer.CLOSED
        return (PortAnswer.INSECURE, THEY_REFUSE_US) if refused else (answer, "")
    except ssl.SSLCertVerificationError as wrong:
        why = wrong.verify_message.rstrip(".")
        return PortAnswer.INSECURE, f"the master's certificate is refused: {why}"
    except ssl.SSLError as wrong:
        answer = await _probe_once(endpoint, limit)
        if answer is PortAnswer.HTTP2:
            return PortAnswer.INSECURE, THEY_HAVE_NO_TLS
        if answer is not PortAnswer.CLOSED:
            return answer, ""
        reason = (wrong.reason or "it was interrupted").lower().replace("_", " ")
        return PortAnswer.INSECURE, f"the TLS handshake with the master failed: {reason}"
    except (auth.TlsError, OSError, TimeoutError):
        return PortAnswer.NOBODY, ""


async def _speaks_tls(endpoint: Endpoint, limit: float) -> bool:
    """Whether a TLS handshake completes there, whatever the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # no data is sent; this only tests for TLS
    context.set_alpn_protocols(["h2"])
    try:
        return await _probe_once(endpoint, limit, context) is not PortAnswer.NOBODY
    except ssl.SSLError:
        return False


async def _probe_once(
    endpoint: Endpoint, limit: float, context: ssl.SSLContext | None = None, name: str = ""
) -> PortAnswer:
    """Probe with one connection. Raises SSLError, which contains the reason, if TLS fails."""
    try:
        opening = asyncio.open_connection(
            endpoint.host, endpoint.port, ssl=context, server_hostname=name if context else None
        )
        reader, writer = await asyncio.wait_for(opening, limit)
    except ssl.SSLError:
        raise
    except (OSError, TimeoutError, UnicodeError):  # UnicodeError: not a valid host name
        return PortAnswer.NOBODY
    try:
        writer.write(GREETING)
        head = await asyncio.wait_for(reader.readexactly(HEAD), limit)
        return PortAnswer.HTTP2 if head[3] == SETTINGS else PortAnswer.FOREIGN
    except asyncio.IncompleteReadError as short:
        return PortAnswer.FOREIGN if short.partial else PortAnswer.CLOSED
    except ssl.SSLError:
        raise
    except TimeoutError:
        return PortAnswer.SILENT
    except OSError:
        return PortAnswer.CLOSED
    finally:
        writer.transport.abort()
