"""The local ranks that can leave a round and enter the next one in the same process.

They connect to the snapshot socket, which accepts processes of the agent's user alone. A connection
from another process than the rank's is closed. The state machine decides (`core/worker/recall.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from elasticrun.agent.context import NodeContext
from elasticrun.core import events as fx
from elasticrun.core.rounds.failures import classify
from elasticrun.wire.messages import Failure, Start
from elasticrun.wire.snapshots import (
    EnterRound,
    FromRecoverable,
    LeaveRound,
    Left,
    Raised,
    RecoverableHere,
    Reraise,
    Returned,
    ToRecoverable,
)
from elasticrun.wire.types import MAX_TEXT


class RecoverablePeer(Protocol):
    """The connection of a recoverable rank, as far as it is used here."""

    pid: int
    closed: bool

    def send(self, message: ToRecoverable) -> None:
        """Queue a message."""

    def break_off(self, why: str) -> None:
        """Close the connection and log the reason."""


class Recoverables:
    """The connections of recoverable ranks, by local rank."""

    def __init__(self, node: NodeContext) -> None:
        self._node = node
        self._start: Start | None = None
        self._pids: Mapping[int, int] = {}
        self._peers: dict[int, RecoverablePeer] = {}
        self.waiting: set[int] = set()
        """Local ranks that have left their round."""
        self.lost_us: dict[int, int] = {}
        """When the connection of a rank ended while its function ran, in microseconds since the
        epoch: the kernel closes it some milliseconds before the rank can be reaped."""

    def new_round(self, start: Start, pids: Mapping[int, int]) -> None:
        """The ranks that report from now on are those of this round. `pids`: their processes by
        local rank, as they become known."""
        self._start, self._pids = start, pids
        self.lost_us.clear()

    # ------------------------------------------------------------ orders

    def recall(self, local_rank: int) -> None:
        """Make this rank leave its round."""
        if peer := self._peers.get(local_rank):
            peer.send(LeaveRound())

    def let_fail(self, local_rank: int) -> None:
        """Let the exception that this rank has raised end its process."""
        if peer := self._peers.get(local_rank):
            peer.send(Reraise())

    def enter(self, local_rank: int, order: EnterRound) -> bool:
        """Start the next round in this rank; False if it cannot be reached."""
        self.waiting.discard(local_rank)
        peer = self._peers.get(local_rank)
        if peer is not None:
            peer.send(order)
        return peer is not None and not peer.closed

    def forget(self, local_rank: int) -> None:
        """Forget a rank: its process has exited, its function has returned, or its connection has
        closed."""
        self.waiting.discard(local_rank)
        self._peers.pop(local_rank, None)

    # ------------------------------------------------------------ reports

    def on_message(self, peer: RecoverablePeer, message: FromRecoverable) -> None:
        """Handle a message of a rank, its introduction first."""
        if isinstance(message, RecoverableHere):
            if peer.pid != self._pids.get(message.local_rank, peer.pid):
                peer.break_off("it is not the process of that rank")
                return
            self._peers[message.local_rank] = peer
            self.lost_us.pop(message.local_rank, None)
            self._node.deliver(fx.RankArmed(message.local_rank, True))
        elif (local_rank := self._local_rank(peer)) is not None:
            self._report(local_rank, message)

    def _report(self, local_rank: int, message: FromRecoverable) -> None:
        match message:
            case Returned():
                self.forget(local_rank)
                self._node.deliver(fx.RankArmed(local_rank, False))
            case Raised():
                failure = self._failure(local_rank, message)
                self._node.deliver(fx.RankRaised(local_rank, failure))
            case Left():
                self.waiting.add(local_rank)
                self._node.deliver(fx.RankLeft(local_rank))

    def lost(self, peer: RecoverablePeer) -> None:
        """Handle a closed connection."""
        if (local_rank := self._local_rank(peer)) is not None:
            self.forget(local_rank)
            self.lost_us[local_rank] = time.time_ns() // 1000
            self._node.deliver(fx.RankArmed(local_rank, False))

    def _local_rank(self, peer: RecoverablePeer) -> int | None:
        return next((rank for rank, one in self._peers.items() if one is peer), None)

    def _failure(self, local_rank: int, raised: Raised) -> Failure:
        return Failure(
            host=self._node.host,
            rank=(self._start.first_rank if self._start else 0) + local_rank,
            local_rank=local_rank,
            pid=self._peers[local_rank].pid,
            exitcode=1,
            time_us=raised.time_us,
            kind=classify(1, raised.message, stopping=False, oom=False),
            message=raised.message[:MAX_TEXT],
            traceback=raised.traceback[-MAX_TEXT:],
            error_file="",
        )
