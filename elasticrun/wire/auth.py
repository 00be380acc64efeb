"""Mutual proof of the job's secret (its token) before any other message, join codes, and TLS files.

This exchange never sends the token (only the answer to a join code contains it, encrypted). Each
side sends an HMAC-SHA256 under it, over everything exchanged so far,
with a label for its side. The master proves first: an agent sends no proof to a master without a
valid one, and never follows it.

    agent                                  master
    Knock      nonce, job, role, node  ->
                                       <-  Challenge   nonce, term, the master's proof
    Proof      the agent's proof       ->
    Hello                              ->              the session is bound to the knock's node

`AuthClient` is the agent's side, `AuthServer` the master's; neither does any I/O. Both decide
according to this table:

    own token   proof     verdict
    none        none      accepted: a job without a secret (the exchange still compares versions)
    none        present   refused: give this side the token
    a token     none      refused: the other side has none
    a token     present   accepted if it is valid, else refused: another token

A refused peer gets one sentence without anything secret; in a job without a token it may contain
the ids of both jobs.

Certificates and keys are PEM files. They are checked together, and each mismatch has its own error.
They are read when needed: by an agent before each connection (so the next connection uses a renewed
certificate), by a master at its start.
"""

from __future__ import annotations

import base64
import hmac
import secrets
import ssl
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Final, Protocol

from msgspec import Struct

from elasticrun.wire.messages import (
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    Knock,
    Proof,
    Report,
    Role,
)
from elasticrun.wire.types import WholeText

TOKEN_WANTED: Final = (
    "this job has a token and this side has none: set ELASTICRUN_TOKEN or --token-file to the "
    "job's token"
)
MASTER_HAS_NONE: Final = (
    "this side has a token and the master has none, so it is not followed: start the master (the "
    "node at the endpoint) with the same ELASTICRUN_TOKEN or --token-file, or unset it here"
)
MASTER_WRONG: Final = (
    "the master there does not know this job's token, so it is not followed: check the endpoint, "
    "and that ELASTICRUN_TOKEN or --token-file is the same on all nodes"
)
PEER_WRONG: Final = (
    "the proof of the job's token is wrong: check that ELASTICRUN_TOKEN or --token-file is the "
    "same on all nodes"
)
OPERATOR_WANTED: Final = (
    "only holders of the job's token (ELASTICRUN_TOKEN, --token-file) may do that, and the "
    "job's own user on the host of its master"
)
NO_CODES: Final = (
    "the job there has no token, so it has no join codes: type the first machine's command here, "
    "with --rdzv-endpoint"
)
CODE_WRONG: Final = (
    "this join code belongs to another job: check host and port, or print a new line with "
    "`elasticrun join --new` on the first machine"
)
CODE_EXPIRED: Final = (
    "this join code has expired: print a new line with `elasticrun join --new` on the first machine"
)
OTHER_JOB: Final = "the master here serves another job: check the endpoint and --rdzv-id"


class Denied(Exception):
    """One side refuses the other; the text is the sentence for the refused side.

    `log_text`: what the refusing side may log about it; fixed, with nothing from the peer."""

    def __init__(self, sentence: str, log_text: str = "") -> None:
        super().__init__(sentence)
        self.log_text = log_text


class OutOfTurn(Exception):
    """A message that no honest peer sends at this point; the text is a sentence."""


class Side(Enum):
    """The side of a proof. Because of its label, a proof of one side is not valid as the
    other's."""

    MASTER = f"elasticrun/{PROTOCOL_VERSION} master"
    PEER = f"elasticrun/{PROTOCOL_VERSION} peer"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Everything that a proof covers; equal on both sides unless it was modified on the way."""

    job_id: str
    role: Role
    node: str
    incarnation: str
    peer_nonce: bytes
    master_nonce: bytes
    term: int


def prove(token: str, side: Side, exchange: Exchange) -> bytes:
    """The proof of `side` over the exchange; empty without a token."""
    if not token:
        return b""
    x = exchange
    words = (x.job_id, x.role.value, x.node, x.incarnation, str(x.term))
    parts = (*(word.encode() for word in words), x.peer_nonce, x.master_nonce)
    # Each part is prefixed with its length, so different exchanges never give the same bytes.
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(token.encode(), side.value.encode() + message, "sha256")


def is_valid_proof(token: str, side: Side, exchange: Exchange, shown: bytes) -> bool:
    """Whether `shown` is the proof of `side`. The time taken does not depend on how much is
    right."""
    return hmac.compare_digest(prove(token, side, exchange), shown)


def reader_token(token: str) -> str:
    """What a reader of the status proves instead of the token: derived from the token, and useless
    to join as an agent. A master saves it for `elasticrun status` of its own user."""
    if not token:
        return ""
    return hmac.digest(token.encode(), b"elasticrun reader", "sha256").hex()


def operator_token(secret: str) -> str:
    """What an operator, who may stop the job, proves: derived from the token or, in a job without
    one, from a secret created by its master. A master saves it for its own user."""
    return hmac.digest(secret.encode(), b"elasticrun operator", "sha256").hex()


PAGE_KEY_LIFE: Final = 900.0
"""Seconds for which the key in a link to the job's page is valid, on the clock of its host."""


def page_key(operator: str, now: float) -> str:
    """A new key for one visit to the job's page, for the holder of the operator's token; `now`:
    seconds since 1970 on the master's host."""
    body = f"{int(now + PAGE_KEY_LIFE):x}.{secrets.token_urlsafe(9)}"
    return f"{body}.{_seal(operator, body)}"


def key_expiry(operator: str, key: str) -> float:
    """The end of this key's validity, in seconds since 1970; 0.0 if it is not a key of this job."""
    body, _, seal = key.rpartition(".")
    if not hmac.compare_digest(_seal(operator, body).encode(), seal.encode()):
        return 0.0
    return float(int(body.partition(".")[0], 16))


def _seal(operator: str, body: str) -> str:
    whole = hmac.digest(operator.encode(), b"elasticrun page " + body.encode(), "sha256")
    return whole[:16].hex()


# ---------------------------------------------------------------- join codes

# A join code is a short-lived secret, pasted on another machine, that yields the job's token. It is
# the base32 of 20 bytes: the second (since 1970, on the master's host) until which it is valid, and
# 128 bits of HMAC-SHA256(token, that second). The master stores nothing: it derives the secret from
# its token again, so a code survives a restart of the master, and only the token can create one.
# Joiner and master prove the secret to each other exactly as agents prove the token. Then the
# master sends what a node needs, sealed under keys derived from the secret and both nonces.

# 128 bits cannot be guessed, online or from a recorded exchange, so no PAKE is needed (decision
# 010). There is no forward secrecy: whoever has recorded the exchange and learns the code later can
# read the token. Use TLS against that.

JOIN_CODE_LIFE: Final = 3600
"""Seconds for which a code is valid."""

_TIME_BYTES, _SECRET_BYTES = 4, 16
_TAG_BYTES: Final = 32


class BadCode(ValueError):
    """The text is not a join code, or a sealed answer was modified; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class JoinCode:
    """The content of a code: the end of its validity, in seconds since 1970, and its secret in
    hex."""

    until: int
    secret: str = field(repr=False)

    def __str__(self) -> str:
        raw = self.until.to_bytes(_TIME_BYTES, "big") + bytes.fromhex(self.secret)
        return base64.b32encode(raw).decode().lower()


class JoinAnswer(Struct, frozen=True):
    """What a node needs to join: the job's id, the token, and the command line."""

    job_id: Annotated[str, WholeText(256)]
    token: Annotated[str, WholeText(64 * 1024)]
    command: tuple[Annotated[str, WholeText(128 * 1024)], ...]  # flags, then the program
    program_at: int  # index of the script, module or command in `command`
    folder: Annotated[str, WholeText(4096)]  # working directory on the first machine


def join_code(token: str, now: float) -> JoinCode:
    """A new code for the job with this token; `now`: seconds since 1970."""
    until = int(now) + JOIN_CODE_LIFE
    return JoinCode(until, code_secret(token, until))


def code_secret(token: str, until: int) -> str:
    """The secret of the code that is valid until `until`."""
    message = b"elasticrun join " + str(until).encode()
    return hmac.digest(token.encode(), message, "sha256")[:_SECRET_BYTES].hex()


def parse_code(text: str) -> JoinCode:
    """Parse a code that a person typed; ignores case, spaces and hyphens. Raises BadCode."""
    plain = "".join(text.split()).replace("-", "").upper()
    try:
        raw = base64.b32decode(plain)
    except ValueError:
        raw = b""
    if len(raw) != _TIME_BYTES + _SECRET_BYTES:
        raise BadCode("that is not a join code: copy the whole line that the first machine printed")
    return JoinCode(int.from_bytes(raw[:_TIME_BYTES], "big"), raw[_TIME_BYTES:].hex())


def seal(secret: str, nonces: bytes, plain: bytes) -> str:
    """Encrypt and authenticate `plain`; return base64. `nonces`: both sides', never repeated for
    one secret."""
    encrypt, authenticate = _keys(secret, nonces)
    hidden = _mask(encrypt, plain)
    tag = hmac.digest(authenticate, hidden, "sha256")
    return base64.b64encode(tag + hidden).decode()


def unseal(secret: str, nonces: bytes, sealed: str) -> bytes:
    """Decrypt what `seal` returned. Raises BadCode if it was modified."""
    encrypt, authenticate = _keys(secret, nonces)
    try:
        raw = base64.b64decode(sealed, validate=True)
    except ValueError:
        raw = b""
    tag, hidden = raw[:_TAG_BYTES], raw[_TAG_BYTES:]
    if not hmac.compare_digest(tag, hmac.digest(authenticate, hidden, "sha256")):
        raise BadCode("the master's answer was changed on its way here; use TLS on this network")
    return _mask(encrypt, hidden)


def _keys(secret: str, nonces: bytes) -> tuple[bytes, bytes]:
    """One key per purpose: HMAC-SHA256 over its label and the nonces, like one block of HKDF-Expand
    (RFC 5869) without its counter."""
    key = secret.encode()
    labels = (b"elasticrun join encrypt ", b"elasticrun join authenticate ")
    encrypt, authenticate = (hmac.digest(key, label + nonces, "sha256") for label in labels)
    return encrypt, authenticate


def _mask(key: bytes, data: bytes) -> bytes:
    """XOR with HMAC-SHA256 in counter mode; the key is used once."""
    count = -(-len(data) // _TAG_BYTES)
    stream = b"".join(hmac.digest(key, n.to_bytes(4, "big"), "sha256") for n in range(count))
    return bytes(a ^ b for a, b in zip(data, stream, strict=False))


# ---------------------------------------------------------------- the two sides


class AuthClient:
    """The side that opens the stream: proves the token and checks the master's proof."""

    def __init__(
        self,
        token: str,
        version: str,
        role: Role = Role.READER,
        *,
        job_id: str = "",
        node: str = "",
        incarnation: str = "",
    ) -> None:
        """`token`: for a reader `reader_token`, for an operator `operator_token`; "" for none.
        `version`: our own release."""
        self._token = token
        self.knock = Knock(
            protocol=PROTOCOL_VERSION,
            version=version,
            job_id=job_id,
            role=role,
            node=node,
            incarnation=incarnation,
            nonce=secrets.token_bytes(NONCE_BYTES),
            proves=bool(token),
        )
        self.nonces = b""
        """The nonces of both sides, once the master has proved itself."""

    @classmethod
    def with_code(cls, code: JoinCode, version: str) -> AuthClient:
        """A client that proves a join code instead of the token."""
        return cls(code.secret, version, Role.JOINER, node=str(code.until))

    def answer(self, challenge: Challenge) -> Proof:
        """Check the master's proof and return ours. Raises Denied if the master's is not valid."""
        exchange = _exchange(self.knock, challenge.nonce, challenge.term)
        if not self._token and challenge.proof:
            raise Denied(TOKEN_WANTED)
        is_joiner = self.knock.role is Role.JOINER
        if self._token and not challenge.proof:
            raise Denied(NO_CODES if is_joiner else MASTER_HAS_NONE)
        if not is_valid_proof(self._token, Side.MASTER, exchange, challenge.proof):
            raise Denied(CODE_WRONG if is_joiner else MASTER_WRONG)
        self.nonces = exchange.peer_nonce + exchange.master_nonce
        return Proof(prove(self._token, Side.PEER, exchange))


class _State(Enum):
    """The message that an AuthServer waits for."""

    KNOCK = "Knock"
    PROOF = "Proof"
    HELLO = "Hello"
    DONE = "nothing more"
    CLOSED = "nothing"


class AuthServer:
    """The master's side of one stream: one message in, an answer or None out.

    | waits for | receives | checks                               | answers   | next               |
    |-----------|----------|--------------------------------------|-----------|--------------------|
    | KNOCK     | Knock    | job (an agent's), has token as we do | Challenge | PROOF              |
    | PROOF     | Proof    | its validity                         | nothing   | agent: HELLO       |
    |           |          |                                      |           | other roles: DONE  |
    | HELLO     | Hello    | job, node, incarnation as in Knock   | nothing   | DONE               |

    Any other message is OutOfTurn. After Denied or OutOfTurn all messages are refused."""

    def __init__(self, token: str, version: str, job_id: str, term: int, role: Role) -> None:
        """`token`: the job's token; for Role.OPERATOR the `operator_token`. `role`: the role of
        this stream."""
        self._token = reader_token(token) if role is Role.READER else token
        self._version, self._job_id, self._term, self._role = version, job_id, term, role
        self._state = _State.KNOCK
        self._knock: Knock
        self._exchange: Exchange
        self.hello: Hello | None = None
        """An agent's Hello, once it is accepted."""

    @property
    def code(self) -> JoinCode:
        """A joiner's code, once it is accepted."""
        return JoinCode(int(self._knock.node), self._token)

    @property
    def nonces(self) -> bytes:
        """The nonces of both sides, once the peer is accepted."""
        return self._exchange.peer_nonce + self._exchange.master_nonce

    @property
    def is_authenticated(self) -> bool:
        """Whether the peer has proved everything that it must prove."""
        return self._state is _State.DONE

    @property
    def awaits(self) -> str:
        """The name of the expected message, for a sentence about its absence."""
        return self._state.value

    def receive(self, report: Report) -> Challenge | None:
        """Process the next message. Raises Denied or OutOfTurn."""
        # Closed unless the message turns out to be valid: no exception leaves it open.
        state, self._state = self._state, _State.CLOSED
        match state, report:
            case _State.KNOCK, Knock():
                return self._knocked(report)
            case _State.PROOF, Proof():
                if not is_valid_proof(self._token, Side.PEER, self._exchange, report.proof):
                    log_text = "refused a peer with another token than the job's"
                    raise Denied(PEER_WRONG, log_text)
                self._state = _State.HELLO if self._role is Role.AGENT else _State.DONE
            case _State.HELLO, Hello():
                identity = (report.spec.job_id, report.node, report.incarnation)
                if identity != (self._knock.job_id, self._knock.node, self._knock.incarnation):
                    raise OutOfTurn("this Hello is of another node than the one that was proved")
                self.hello = report
                self._state = _State.DONE
            case _:
                raise OutOfTurn(f"{type(report).__name__} came instead of {state.value}")
        return None

    def _knocked(self, knock: Knock) -> Challenge:
        if knock.role is not self._role:
            raise OutOfTurn(f"this stream is not for the role {knock.role.value}")
        if knock.role is Role.AGENT and knock.job_id != self._job_id:
            if self._token:
                raise Denied(OTHER_JOB)
            raise Denied(
                f"this node belongs to job {knock.job_id!r}, the master here serves job "
                f"{self._job_id!r}: check the endpoint and --rdzv-id"
            )
        if self._role is Role.OPERATOR and not (self._token and knock.proves):
            raise Denied(OPERATOR_WANTED, "refused an operator without the job's token")
        if self._role is Role.JOINER:
            self._token = self._secret_of_code(knock)
        if self._token and not knock.proves:
            raise Denied(TOKEN_WANTED, "refused a peer without the job's token")
        if knock.proves and not self._token:
            raise Denied(MASTER_HAS_NONE, "refused a peer with a token: this job has none")
        self._knock = knock
        self._exchange = _exchange(knock, secrets.token_bytes(NONCE_BYTES), self._term)
        self._state = _State.PROOF
        return Challenge(
            protocol=PROTOCOL_VERSION,
            version=self._version,
            term=self._term,
            nonce=self._exchange.master_nonce,
            proof=prove(self._token, Side.MASTER, self._exchange),
        )

    def _secret_of_code(self, knock: Knock) -> str:
        if not self._token:
            raise Denied(NO_CODES)
        if not (knock.node.isascii() and knock.node.isdigit()):
            raise OutOfTurn("this join code has no expiry time")
        return code_secret(self._token, int(knock.node))


def _exchange(knock: Knock, master_nonce: bytes, term: int) -> Exchange:
    who = (knock.job_id, knock.role, knock.node, knock.incarnation)
    return Exchange(*who, knock.nonce, master_nonce, term)


MAX_PEM_BYTES: Final = 1024 * 1024
"""Maximum size of a PEM file; bundles of all public CAs have a quarter of this."""

_EXPIRED, _NOT_YET = 10, 9
"""X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID"""
_OTHER_ISSUER: Final = (18, 19, 20, 21)
"""Self-signed, or signed by an unknown issuer (X509_V_ERR_*)."""


class Files(Protocol):
    """Paths of PEM files, "" for none (`config.Tls`)."""

    @property
    def cert(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def ca(self) -> str: ...


class TlsError(Exception):
    """These files are unusable; the text is one sentence that names the flag."""


@dataclass(frozen=True, slots=True)
class Pem:
    """The content of the files; b"" for none."""

    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)
    ca: bytes = b""


def read_pem(files: Files, *, serving: bool = False) -> Pem:
    """Read the files and check that they fit together. Raises TlsError. Blocks.

    `serving`: for a master, which must have its own certificate."""
    if serving and not files.cert:
        raise TlsError("the job's master needs a certificate: give --tls-cert and --tls-key")
    pem = Pem(*(_content(name, getattr(files, name)) for name in ("cert", "key", "ca")))
    _check(files, pem)
    return pem


def client_context(files: Files) -> ssl.SSLContext:
    """A client's TLS context with these files, for Python's ssl, which unlike gRPC gives the reason
    why a handshake failed. Blocks. Raises TlsError or OSError."""
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
    """Check that the files fit together. Raises TlsError with the precise reason; gRPC would only
    report that a handshake failed."""
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
        # Never ask for a password: there is no terminal.
        server.load_cert_chain(files.cert, files.key, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as wrong:
        why = "do not belong together or cannot be read"
        if isinstance(wrong, ssl.SSLError) and wrong.reason == "KEY_VALUES_MISMATCH":
            why = "do not belong together"
        raise TlsError(f"--tls-cert={files.cert} and --tls-key={files.key} {why}") from None
    if pem.ca:
        _check_own(files, client, server)


def _check_own(files: Files, client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Check by a handshake with ourselves that peers will accept our own certificate."""
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
                raise TlsError(f"{cert} or its issuer {when}") from None
            if wrong.verify_code in _OTHER_ISSUER:
                raise TlsError(f"{cert} is not signed by --tls-ca={files.ca}") from None
            return  # e.g. its purpose; only a peer can judge that
        except ssl.SSLError:
            return
