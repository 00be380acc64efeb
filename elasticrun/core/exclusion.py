"""Which nodes the job refuses, why, and until when.

A node is excluded by a verdict: it failed the network check ("failed"), or it is too slow ("slow").
The entry is of a node id on a host: who moves to another host under the same id is a newcomer. When
its time is over it may come back, and is probed as any newcomer is. At most STRAGGLERS_PER_HOUR
times within an hour a node is excluded for being slow, be it the same one, so that a wrong measure
cannot take a job apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from elasticrun.config import STRAGGLERS_PER_HOUR
from elasticrun.wire.messages import MAX_EXCLUDED, ExcludedNode

HOUR = 3600.0

FAILED = "failed"
SLOW = "slow"


@dataclass(frozen=True, slots=True)
class _Entry:
    """One exclusion; times are monotonic seconds."""

    kind: str
    reason: str
    at: float
    until: float


class Exclusions:
    """The nodes that were excluded, MAX_EXCLUDED at most: the oldest are forgotten first."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], _Entry] = {}  # by node id and host, oldest first
        self._slow: deque[float] = deque(maxlen=STRAGGLERS_PER_HOUR)
        """When nodes were last excluded for being slow; older ones do not matter any more."""

    def add(
        self, node: str, host: str, *, kind: str, reason: str, seconds: float, now: float
    ) -> None:
        """Exclude this node for so many seconds."""
        self._forget_old(now)
        self._entries.pop((node, host), None)
        self._entries[node, host] = _Entry(kind, reason, now, now + seconds)
        if kind == SLOW:
            self._slow.append(now)
        if len(self._entries) > MAX_EXCLUDED:
            self._entries.pop(next(iter(self._entries)))

    def refusal(self, node: str, host: str, now: float) -> str:
        """Why this node may not attach, in a sentence; empty if it may."""
        entry = self._entries.get((node, host))
        if entry is None or now >= entry.until:
            return ""
        return (
            f"node {node} on {host or 'its host'} is excluded for {entry.until - now:.0f} s more: "
            f"{entry.reason}"
        )

    def remaining(self, node: str, host: str, now: float) -> float:
        """For how many seconds more this node is excluded; 0 if it is not."""
        entry = self._entries.get((node, host))
        return 0.0 if entry is None else max(0.0, entry.until - now)

    def may_be_slow(self, now: float) -> bool:
        """Whether one more node may be excluded for being slow."""
        return len(self.slow_ages(now)) < STRAGGLERS_PER_HOUR

    def page(self, now: float) -> tuple[ExcludedNode, ...]:
        """Those that are refused now, for people, for schedulers and for the next master."""
        return tuple(
            ExcludedNode(node, host, entry.kind, entry.reason, now - entry.at, entry.until - now)
            for (node, host), entry in self._entries.items()
            if now < entry.until
        )

    def slow_ages(self, now: float) -> tuple[float, ...]:
        """How long ago (seconds) nodes were excluded for being slow within the hour, oldest first,
        STRAGGLERS_PER_HOUR at most; the next master must know of these too."""
        return tuple(now - at for at in self._slow if now - at < HOUR)

    def restore(
        self, excluded: Iterable[ExcludedNode], slow_ages: Iterable[float], now: float
    ) -> None:
        """Take over what another master had recorded."""
        self._slow.extend(now - age for age in slow_ages)
        for one in excluded:
            self._entries[one.node, one.host] = _Entry(
                one.kind, one.reason, now - one.age, now + one.remaining
            )

    def _forget_old(self, now: float) -> None:
        self._entries = {key: e for key, e in self._entries.items() if now < e.until}
