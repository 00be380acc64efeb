"""How often the agents of a job say that they live."""

from __future__ import annotations

from elasticrun.config import BEAT_INTERVAL, SLUGGISH_DEAD

BEATS_PER_SECOND = 500
"""Beats that one master hears per second at most; more nodes beat less often. With more to hear
it would fall behind, and judge late."""


def beat_interval(streams: int) -> float:
    """How often each of so many agents is to say that it lives, in seconds; however many there are,
    one that lives is heard twice before it is given up as sluggish."""
    return min(max(BEAT_INTERVAL, streams / BEATS_PER_SECOND), SLUGGISH_DEAD / 3.0)
