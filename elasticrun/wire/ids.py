"""The names by which processes of a job know each other."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundName:
    """The whole name of a round; every fence compares all three parts.

    A number alone is ambiguous once a master has come back empty and counted again, so a
    round also carries the master's term and a nonce that nobody could have guessed.
    """

    term: int
    number: int  # from 1, grows by one with every round of the job
    nonce: str

    def __str__(self) -> str:
        return f"{self.number} ({self.term}/{self.nonce})"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name or address, IPv6 without brackets) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def mint_incarnation() -> str:
    """A name for one life of an agent; random, because clocks and pids can go backwards."""
    return secrets.token_hex(8)


def mint_nonce() -> str:
    """Eight hex digits that tell two rounds of one number apart."""
    return secrets.token_hex(4)
