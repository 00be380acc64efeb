"""The proof of the job's secret (its token), which comes before any other message.

The token never crosses the wire. Each side shows an HMAC-SHA256 under it, over everything that
both have said so far, with a label that says which side it is of. The master proves first: an agent
shows nothing to a master that could not, and never follows one.

    agent                                  master
    Knock      nonce, job, role, node  ->
                                       <-  Challenge   nonce, term, the master's proof
    Proof      the agent's proof       ->
    Hello                              ->              the session is bound to the knock's node

The agent's side of this is `Guest`, the master's `Doorkeeper`; neither does any I/O. Both judge by
one table:

    own token   shown     verdict
    none        nothing   let in: a job without a secret (the exchange still tells versions)
    none        a proof   refused: give this side the token
    a token     nothing   refused: the other side has none
    a token     a proof   let in if it is right, else refused: another token

What is refused is told one fixed sentence; nothing secret and nothing the peer has sent is in it.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from enum import Enum
from typing import Final

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
OTHER_JOB: Final = "the master here serves another job: check the endpoint and --rdzv-id"


class Denied(Exception):
    """One side does not let the other in; the text is the sentence for whoever is refused.

    `word`: what the refusing side may log about it; fixed words, nothing of the peer's."""

    def __init__(self, sentence: str, word: str = "") -> None:
        super().__init__(sentence)
        self.word = word


class OutOfTurn(Exception):
    """A message at a moment when no honest peer sends it; the text is a sentence."""


class Side(Enum):
    """Whose proof it is. The labels keep one side's proofs from being shown as the other's."""

    MASTER = f"elasticrun/{PROTOCOL_VERSION} master"
    PEER = f"elasticrun/{PROTOCOL_VERSION} peer"


@dataclass(frozen=True, slots=True)
class Exchange:
    """All that a proof is about; equal on both sides unless somebody has changed it on the way."""

    job_id: str
    role: Role
    node: str
    incarnation: str
    peer_nonce: bytes
    master_nonce: bytes
    term: int

    def parts(self) -> tuple[bytes, ...]:
        """The fields as bytes, in a fixed order."""
        words = (self.job_id, self.role.value, self.node, self.incarnation, str(self.term))
        return (*(word.encode() for word in words), self.peer_nonce, self.master_nonce)


def prove(token: str, side: Side, exchange: Exchange) -> bytes:
    """The proof of `side`; empty where there is no token."""
    if not token:
        return b""
    # Each part with its length: no two exchanges run together into the same bytes.
    said = b"".join(len(part).to_bytes(4, "big") + part for part in exchange.parts())
    return hmac.digest(token.encode(), side.value.encode() + said, "sha256")


def is_right(token: str, side: Side, exchange: Exchange, shown: bytes) -> bool:
    """Whether this is the proof of `side`; takes as long for a nearly right one as for noise."""
    return hmac.compare_digest(prove(token, side, exchange), shown)


def reader_token(token: str) -> str:
    """What a reader of the status proves in the place of the token: made from it, and of no use to
    an agent. A master leaves it for its own user's `elasticrun status`."""
    if not token:
        return ""
    return hmac.digest(token.encode(), b"elasticrun reader", "sha256").hex()


def fresh_nonce() -> bytes:
    """Random bytes that were never used before."""
    return secrets.token_bytes(NONCE_BYTES)


class Guest:
    """The side that knocks."""

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
        """`token`: a reader's is `reader_token`; "" for none. `version`: our own release."""
        self._token = token
        self.knock = Knock(
            protocol=PROTOCOL_VERSION,
            version=version,
            job_id=job_id,
            role=role,
            node=node,
            incarnation=incarnation,
            nonce=fresh_nonce(),
            proves=bool(token),
        )

    def answer(self, challenge: Challenge) -> Proof:
        """Our proof, once the master has shown its own. Denied if it could not."""
        exchange = _exchange(self.knock, challenge.nonce, challenge.term)
        if not self._token and challenge.proof:
            raise Denied(TOKEN_WANTED)
        if self._token and not challenge.proof:
            raise Denied(MASTER_HAS_NONE)
        if not is_right(self._token, Side.MASTER, exchange, challenge.proof):
            raise Denied(MASTER_WRONG)
        return Proof(prove(self._token, Side.PEER, exchange))


class _State(Enum):
    """What the doorkeeper waits for."""

    KNOCK = "Knock"
    PROOF = "Proof"
    HELLO = "Hello"
    IN = "nothing more"
    SHUT = "nothing"


class Doorkeeper:
    """The master's side of one stream: a message in, an answer or None out.

    | waits for | hears | checks                               | answers   | next              |
    |-----------|-------|--------------------------------------|-----------|-------------------|
    | KNOCK     | Knock | job (an agent's), has token as we do | Challenge | PROOF             |
    | PROOF     | Proof | that it is right                     | nothing   | HELLO; IN: reader |
    | HELLO     | Hello | job, node, life are the knock's      | nothing   | IN                |

    Any other pair is OutOfTurn. After Denied or OutOfTurn the door is shut for good."""

    def __init__(self, token: str, version: str, job_id: str, term: int, role: Role) -> None:
        """`token` is the job's own; `role`: for what this stream is meant."""
        self._token = reader_token(token) if role is Role.READER else token
        self._version = version
        self._job_id = job_id
        self._term = term
        self._role = role
        self._state = _State.KNOCK
        self._knock: Knock
        self._exchange: Exchange
        self.hello: Hello | None = None
        """An agent's, once it is in."""

    @property
    def is_in(self) -> bool:
        """Whether the peer has proved all that it has to."""
        return self._state is _State.IN

    @property
    def awaits(self) -> str:
        """The message that is due, for a sentence about its absence."""
        return self._state.value

    def hear(self, report: Report) -> Challenge | None:
        """Take the next message. Denied, OutOfTurn."""
        # Shut unless the message turns out to be right: no way out of here leaves it ajar.
        state, self._state = self._state, _State.SHUT
        match state, report:
            case _State.KNOCK, Knock():
                return self._knocked(report)
            case _State.PROOF, Proof():
                self._proved(report)
            case _State.HELLO, Hello():
                self._hello(report)
            case _:
                raise OutOfTurn(f"{type(report).__name__} came in the place of {state.value}")
        return None

    def _knocked(self, knock: Knock) -> Challenge:
        if knock.role is not self._role:
            raise OutOfTurn(f"this is no stream for the role {knock.role.value}")
        if knock.role is Role.AGENT and knock.job_id != self._job_id:
            if self._token:
                raise Denied(OTHER_JOB)
            raise Denied(
                f"this node belongs to job {knock.job_id!r}, the master here serves job "
                f"{self._job_id!r}: check the endpoint and --rdzv-id"
            )
        if self._token and not knock.proves:
            raise Denied(TOKEN_WANTED, "somebody without the job's token was refused")
        if knock.proves and not self._token:
            raise Denied(MASTER_HAS_NONE, "somebody with a token was refused: this job has none")
        self._knock = knock
        self._exchange = _exchange(knock, fresh_nonce(), self._term)
        self._state = _State.PROOF
        return Challenge(
            protocol=PROTOCOL_VERSION,
            version=self._version,
            term=self._term,
            nonce=self._exchange.master_nonce,
            proof=prove(self._token, Side.MASTER, self._exchange),
        )

    def _proved(self, proof: Proof) -> None:
        if not is_right(self._token, Side.PEER, self._exchange, proof.proof):
            raise Denied(PEER_WRONG, "somebody with another token than the job's was refused")
        self._state = _State.HELLO if self._role is Role.AGENT else _State.IN

    def _hello(self, hello: Hello) -> None:
        said = (hello.spec.job_id, hello.node, hello.incarnation)
        if said != (self._knock.job_id, self._knock.node, self._knock.incarnation):
            raise OutOfTurn("this Hello is of another node than the one that was proved")
        self.hello = hello
        self._state = _State.IN


def _exchange(knock: Knock, master_nonce: bytes, term: int) -> Exchange:
    return Exchange(
        job_id=knock.job_id,
        role=knock.role,
        node=knock.node,
        incarnation=knock.incarnation,
        peer_nonce=knock.nonce,
        master_nonce=master_nonce,
        term=term,
    )
