"""Ranks that wait for room: each is told when a slot of its segment is free, or a step is whole.

What frees a slot is written into its segment's control page by this agent alone, so nobody needs to
look there again and again.
"""

from __future__ import annotations

from elasticrun.agent.held import Held
from elasticrun.agent.snapshot_peers import Peer
from elasticrun.wire.segment import NONE
from elasticrun.wire.snapshots import RoomThere


class Awaiting:
    """One question a local rank; the newest counts."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[Peer, Held, int]] = {}

    def ask(self, peer: Peer, local_rank: int, held: Held | None, whole: int) -> None:
        """AwaitRoom; answered with RoomThere, at once or later."""
        if held is None:
            peer.break_off("it waits for a slot, and has no segment")
            return
        self._asked[local_rank] = (peer, held, whole)
        self.look()

    def look(self) -> None:
        """Something was written into control pages."""
        for local_rank, (peer, held, whole) in list(self._asked.items()):
            gone = peer.closed or held.gone
            if gone or _has_come(held, whole):
                del self._asked[local_rank]
                if not gone:
                    peer.send(RoomThere())

    def clear(self) -> None:
        """A new life of the ranks."""
        self._asked.clear()


def _has_come(held: Held, whole: int) -> bool:
    if whole != NONE:  # or a later step is to be saved instead
        return held.segment.watermark >= whole or held.segment.save_at > whole
    return held.segment.free_slot() is not None
