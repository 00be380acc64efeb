"""The files of transport security: read, checked, and told apart when they do not fit.

Certificates and keys are PEM files. Whoever needs them reads them, at the moment of the need: an
agent before each connection (a renewed certificate is used from the next one on), a master at its
start.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

MAX_PEM_BYTES: Final = 1024 * 1024
"""A longer file is no certificate; the bundles of all public CAs have a quarter of it."""

_EXPIRED, _NOT_YET = 10, 9
"""X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID"""
_OTHER_ISSUER: Final = (18, 19, 20, 21)
"""Self-signed, or signed by somebody whose certificate is not at hand (X509_V_ERR_*)."""


class Files(Protocol):
    """Paths, "" for none (`config.Tls`)."""

    @property
    def cert(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def ca(self) -> str: ...


class TlsError(Exception):
    """These files cannot serve; the text is one sentence that names the flag."""


@dataclass(frozen=True, slots=True)
class Pem:
    """What the files hold; b"" for none."""

    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)
    ca: bytes = b""


def read(files: Files, *, serving: bool = False) -> Pem:
    """The contents of the files, once they are known to fit together. TlsError. Blocks.

    `serving`: for a master, which cannot do without a certificate of its own."""
    if serving and not files.cert:
        raise TlsError("the job's master needs a certificate: give --tls-cert and --tls-key")
    pem = Pem(*(_content(name, getattr(files, name)) for name in ("cert", "key", "ca")))
    _check(files, pem)
    return pem


def client_context(files: Files) -> ssl.SSLContext:
    """The same for a handshake by Python's own ssl, which says in words why one fails. Blocks.
    TlsError, OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if files.ca:
        context.load_verify_locations(files.ca)
    else:
        context.load_default_certs()
    if files.cert:
        context.load_cert_chain(files.cert, files.key)
    return context


def _content(name: str, path: str) -> bytes:
    if not path:
        return b""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_PEM_BYTES + 1)
    except OSError as wrong:
        raise TlsError(f"--tls-{name}={path} cannot be read: {wrong.strerror}") from None
    if len(content) > MAX_PEM_BYTES or b"-----BEGIN " not in content:
        raise TlsError(f"--tls-{name}={path} is no PEM file")
    return content


def _check(files: Files, pem: Pem) -> None:
    """Sentences in the place of gRPC's, which says no more than that a handshake failed."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if pem.ca:
        try:
            client.load_verify_locations(cadata=pem.ca.decode("ascii", "replace"))
        except ssl.SSLError:
            raise TlsError(f"--tls-ca={files.ca} holds no certificate that can be read") from None
    if not pem.cert:
        return
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password is never asked for: nobody sits at a node.
        server.load_cert_chain(files.cert, files.key, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as wrong:
        why = "do not belong together or cannot be read"
        if isinstance(wrong, ssl.SSLError) and wrong.reason == "KEY_VALUES_MISMATCH":
            why = "do not belong together"
        raise TlsError(f"--tls-cert={files.cert} and --tls-key={files.key} {why}") from None
    if pem.ca:
        _check_own(files, client, server)


def _check_own(files: Files, client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """What our peers will find wrong with our own certificate: shake hands with ourselves."""
    client.check_hostname = False
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    for turn in range(6):  # a handshake has three flights
        try:
            ends[turn % 2].do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as wrong:
            cert = f"--tls-cert={files.cert}"
            if wrong.verify_code in (_EXPIRED, _NOT_YET):
                when = "has expired" if wrong.verify_code == _EXPIRED else "is not valid yet"
                raise TlsError(f"{cert} or what has signed it {when}") from None
            if wrong.verify_code in _OTHER_ISSUER:
                raise TlsError(f"{cert} is not signed by --tls-ca={files.ca}") from None
            return  # its purpose, say: a peer's affair
        except ssl.SSLError:
            return
