"""Passes work between the ranks of this node and the master, and keeps what each rank has.

What a rank has outlives the master here: it is reported again on every stream, before anything from
which a new master concludes that it has heard this node. So a grant is added here before the rank
gets it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.rpc.protobuf import report_to_wire
from elasticrun.wire.types import WireError

if TYPE_CHECKING:
    from elasticrun.agent.link.link import Link


class WorkPeer(Protocol):
    """The connection of a rank that takes work, as far as it is used here."""

    def send(self, message: s.ToWorker) -> None:
        """Queue a message."""

    def break_off(self, why: str) -> None:
        """Close the connection and log the reason."""

    def close(self) -> None:
        """Close the connection."""


def with_grant(state: m.WorkState, order: m.WorkGrant) -> m.WorkState:
    """What a rank has once it has received this grant."""
    shares = tuple(
        _granted(one, order) if one.spec.name == order.dataset else one for one in state.shares
    )
    return replace(state, shares=shares)


def _granted(share: m.DatasetShare, order: m.WorkGrant) -> m.DatasetShare:
    known = share.dropped + sum(stop - start for start, stop in m.batched(share.leases))
    return replace(share, leases=share.leases + m.after(order, known), wants=False)


class LocalWork:
    """The work of this node's ranks in the current round."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._start: m.Start | None = None
        self._base: m.WorkBase | None = None  # from rank 0
        self._states: dict[int, m.WorkState] = {}  # by local rank
        self._peers: dict[int, WorkPeer] = {}
        self._had: set[int] = set()  # local ranks that have connected in this round

    def round_began(self, start: m.Start) -> None:
        """Start a round, in which all earlier leases are void."""
        for peer in list(self._peers.values()):
            peer.close()
        self._start, self._base = start, None
        self._states.clear()
        self._peers.clear()
        self._had.clear()

    def restored(self, message: s.Restored) -> None:
        """Report what rank 0 has restored, which is on this node."""
        if self._start is not None and message.looked:
            self._base = m.WorkBase(self._start.round, message.source, message.step, message.used)
            self._link.send(self._base)

    def attached(self) -> None:
        """Report everything again to a master that may know nothing of it."""
        if self._base is not None:
            self._link.send(self._base)
        for state in self._states.values():
            self._link.send(state)

    def on_message(self, peer: WorkPeer, message: s.FromWorker) -> None:
        """Process a message of a rank, its introduction first."""
        start = self._start
        if isinstance(message, s.WorkHere):
            local_rank = message.local_rank
            if start is None or start.first_rank + local_rank != message.rank:
                peer.break_off("it is no rank of this round")
            elif local_rank in self._had:
                peer.break_off("another process of this rank has taken work in this round")
            else:
                self._had.add(local_rank)
                self._peers[local_rank] = peer
            return
        found = next((rank for rank, one in self._peers.items() if one is peer), None)
        if start is None or found is None:
            return
        state = _state(start, found, message)
        try:
            report_to_wire(state)
        except WireError as wrong:
            peer.break_off(str(wrong))
            return
        self._states[found] = state
        self._link.send(state)

    def lost(self, peer: WorkPeer) -> None:
        """Handle a closed connection. What the rank had counts until the round ends."""
        self._peers = {rank: one for rank, one in self._peers.items() if one is not peer}

    def grant(self, order: m.WorkGrant) -> None:
        """Pass leases on to a rank."""
        start = self._start
        if start is None or order.round != start.round:
            return
        local_rank = order.rank - start.first_rank
        state, peer = self._states.get(local_rank), self._peers.get(local_rank)
        if state is not None:
            self._states[local_rank] = with_grant(state, order)
        if peer is not None and order.refused:
            peer.send(s.RankRefused(order.refused))
        elif peer is not None:
            leases = (order.first, order.leases, order.dropped, order.over, order.record)
            peer.send(s.RankLeases(order.dataset, *leases))


def _state(start: m.Start, local_rank: int, work: s.RankWork) -> m.WorkState:
    shares = (
        m.DatasetShare(
            m.DatasetSpec(one.name, one.total, one.size, one.epochs, one.shuffle),
            *(one.dropped, one.leases, one.used, one.marks, one.wants),
        )
        for one in work.shares
    )
    rank = start.first_rank + local_rank
    return m.WorkState(
        *(start.round, rank, work.restored, work.since, work.marked),
        shares=tuple(shares),
        record=work.record,
    )
