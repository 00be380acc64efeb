"""The words of the network check: standing, group, verdict; and how its figures are written."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

QUOTED = 400
"""Longest reason of an agent that a sentence of ours quotes, in characters."""


class Standing(StrEnum):
    """What the probes have shown of a node until now."""

    UNKNOWN = "unknown"  # never probed, or something has happened since
    ALONE = "alone"  # its own probes passed; no link of it has been tried
    GOOD = "good"  # it has worked with another node


class Group(Struct, frozen=True):
    """Nodes that are probed together; the first one's store is where they meet."""

    check: str  # unique
    nodes: tuple[str, ...]
    perf: bool = False


class Verdict(Struct, frozen=True):
    """What a check came to for one node that did not simply pass."""

    node: str
    kind: str  # "failed": convicted; "slow": an outlier twice; "unresolved": nobody can tell
    reason: str  # node, partners, phase, the measured figure and the limit, in one sentence


class Rate(Struct, frozen=True):
    """A timed all_reduce, and with whom."""

    size: int  # bytes of the reduced buffer
    seconds: float
    ranks: int  # that took part
    partners: tuple[str, ...]  # the other nodes

    @property
    def traffic(self) -> float:
        """Bytes that each rank must send over its link, by which groups of different sizes can be
        compared: size * 2(n-1)/n."""
        return self.size * 2.0 * (self.ranks - 1) / self.ranks

    @property
    def cost(self) -> float:
        """Seconds for each byte that a rank sends."""
        return self.seconds / self.traffic

    @property
    def bus(self) -> float:
        """Bus bandwidth, in bytes per second."""
        return self.traffic / self.seconds


def others(nodes: Sequence[str], node: str) -> tuple[str, ...]:
    """The partners of one node of a group."""
    return tuple(one for one in nodes if one != node)


def duration(seconds: float) -> str:
    """`0.0123 ms`, `10.1 ms`, `3.1 s`, `1200 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def figure(value: float) -> str:
    """Three digits that count, and no exponent for large ones."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def size(count: int) -> str:
    """`4 KiB`, `1 MiB`, `1.5 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"


def speed(rate: float) -> str:
    """Bytes per second in GB/s (1e9), as people compare links."""
    return f"{rate / 1e9:.3g} GB/s"


def quoted(reason: str) -> str:
    """An agent's reason, cut to what a sentence can bear."""
    return reason if len(reason) <= QUOTED else f"{reason[: QUOTED - 3]}..."
