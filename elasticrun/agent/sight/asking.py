"""Queries to the answering threads of the local ranks (`training.monitor`), and their answers.

There is one socket per round. The sender's address, a random name of that round, identifies the
rank. Socket credentials prove that the sender belongs to this user. A late answer matches no
pending query and is dropped.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from elasticrun.wire.progress import (
    ANSWER_BYTES,
    CREDENTIALS_BYTES,
    RankAnswer,
    RankQuestion,
    address,
    bound_socket,
    encode_question,
    mint_name,
    read_answer,
    sent_by_us,
)

MOST_AT_ONCE: Final = 64
"""Maximum number of answers read per turn of the loop: one from each rank of a large node."""


@dataclass(slots=True)
class _Query:
    """A pending query."""

    missing: set[int]
    over: asyncio.Future[None]
    answers: dict[int, RankAnswer | None] = field(default_factory=dict)


class RankQueries:
    """Queries the local ranks and collects their answers."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._places: dict[int, str] = {}
        self._next: dict[int, str] = {}
        self._ranks: dict[bytes, int] = {}
        self._pending: dict[int, _Query] = {}
        self._number = 0

    def start(self, nproc: int, kept: Mapping[int, str]) -> Mapping[int, str]:
        """Start a round: returns the address at which each rank answers; empty if no socket can be
        created. `kept`: the addresses of ranks that keep their process. Call in the running
        loop."""
        self.stop()
        try:
            found = self._socket = bound_socket(mint_name())
        except OSError:
            return {}
        self._places = {rank: kept.get(rank) or self.next_place(rank) for rank in range(nproc)}
        self._next = {}
        self._ranks = {address(name).encode(): rank for rank, name in self._places.items()}
        asyncio.get_running_loop().add_reader(found, self._readable)
        return self._places

    def next_place(self, local_rank: int) -> str:
        """The address of this rank in the next round."""
        return self._next.setdefault(local_rank, mint_name())

    def stop(self) -> None:
        """Stop querying; pending queries return the answers so far. May be called again."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        self._socket, self._places, self._ranks = None, {}, {}
        for query in self._pending.values():
            if not query.over.done():
                query.over.set_result(None)

    async def ask(
        self, ranks: Collection[int], limit: float, *, full: bool = False, stacks: bool = False
    ) -> dict[int, RankAnswer | None]:
        """Query these local ranks; returns the answers that arrive within `limit` seconds, None for
        a silent rank. Ranks without an answering thread are left out."""
        self._number = (self._number + 1) % 2**32
        number = self._number
        query = _Query(set(), asyncio.get_running_loop().create_future())
        question = encode_question(RankQuestion(number, full, stacks))
        for rank in ranks:
            if self._send_question(question, rank):
                query.missing.add(rank)
                query.answers[rank] = None
        if not query.missing:
            return {}
        self._pending[number] = query
        try:
            await asyncio.wait({query.over}, timeout=limit)
        finally:
            del self._pending[number]
        return query.answers

    def _send_question(self, question: bytes, rank: int) -> bool:
        """Send the query. Returns False if the rank's answering thread does not exist yet, or has
        exited; True also if the rank does not read and its queue is full."""
        if self._socket is None or rank not in self._places:
            return False
        try:
            self._socket.sendto(question, address(self._places[rank]))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _readable(self) -> None:
        for _ in range(MOST_AT_ONCE):
            if self._socket is None:
                return
            try:
                data, credentials, _, sender = self._socket.recvmsg(
                    ANSWER_BYTES + 1, CREDENTIALS_BYTES
                )
            except OSError:
                return
            rank = self._ranks.get(sender) if isinstance(sender, bytes) else None
            if rank is not None and sent_by_us(credentials):
                self._answered(rank, read_answer(data))

    def _answered(self, rank: int, answer: RankAnswer | None) -> None:
        query = self._pending.get(answer.number) if answer is not None else None
        if answer is None or query is None or rank not in query.missing:
            return
        query.missing.discard(rank)
        query.answers[rank] = answer
        if not query.missing and not query.over.done():
            query.over.set_result(None)
