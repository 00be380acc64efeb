"""Facts that have lain in a record for a while: their ages have grown, what remains has shrunk.

Without this every crash of a master would start an exclusion or a window of the restart budget
anew, and a master that crashes often enough would never let anything end.
"""

from __future__ import annotations

from msgspec.structs import replace

from elasticrun.core.facts import Facts, LeftOut, RoundFacts
from elasticrun.wire.messages import ExcludedNode


def aged(facts: Facts, seconds: float) -> Facts:
    """The same facts `seconds` later. `starved` stays as it is: while there was no master nobody
    could have joined."""
    if seconds <= 0.0:
        return facts
    last = facts.round
    return replace(
        facts,
        round=None if last is None else _round(last, seconds),
        charges=tuple(age + seconds for age in facts.charges),
        left_out=tuple(_left_out(entry, seconds) for entry in facts.left_out),
        fickle=tuple(_left_out(entry, seconds) for entry in facts.fickle),
        blamed=tuple(replace(b, remaining=b.remaining - seconds) for b in facts.blamed),
        excluded=tuple(_excluded(entry, seconds) for entry in facts.excluded),
        slow_ages=tuple(age + seconds for age in facts.slow_ages),
    )


def _round(last: RoundFacts, seconds: float) -> RoundFacts:
    return replace(last, age=last.age + seconds, silent=last.silent + seconds)


def _left_out(entry: LeftOut, seconds: float) -> LeftOut:
    return replace(
        entry,
        silences=tuple(age + seconds for age in entry.silences),
        remaining=max(0.0, entry.remaining - seconds),
    )


def _excluded(entry: ExcludedNode, seconds: float) -> ExcludedNode:
    remaining = max(0.0, entry.remaining - seconds)
    return replace(entry, age=entry.age + seconds, remaining=remaining)
