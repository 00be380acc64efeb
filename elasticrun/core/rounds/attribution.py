"""Whose fault it is that ranks keep dying: a node's, or the script's.

One round says nothing: some rank died first. Over several rounds in a row the causes tell a story.

* The same *node* again and again, and no rank of another node dies by itself: the node is to blame
  (a bad GPU, a full disk, a wrong driver). After EXCLUDE_FAILING_AFTER rounds it is left out, if
  the others are enough to go on without it; it waits at the door for 2, 4, 8 ... minutes. When it
  is back it is on probation for an hour: the first failure that starts there leaves it out again.
* Ranks of other nodes die by themselves in the same rounds as well: that is the script, or its
  data; unless the node held other ranks meanwhile and was still the first each time.
* The same *rank*, first on one node and then on another: the script, and it will fail wherever it
  runs. A node that was left out for that rank is cleared and let in at once, and the other node
  is not left out for it in its turn: the experiment has been made.
* Different ranks on different nodes: the script too.

Ranks keep their nodes over rounds, so "rank 3 of node b, thrice" may be either. Leaving the node
out is also the experiment that tells: rank 3 then runs elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise, takewhile

from msgspec.structs import replace

from elasticrun.config import EXCLUDE_FAILING_AFTER
from elasticrun.core.nodes.admission import backoff_length
from elasticrun.core.persisted import Blamed
from elasticrun.core.reasons import FirstToFail, RankFailed

PROBATION = 3600.0
"""Seconds for which a node that was left out is remembered after it has come back."""

MEMORY = 6 * 3600.0
"""Seconds between two causes beyond which they are no row: by then it was another world."""

TRAIL = 16
"""Causes that are remembered."""

MAX_RECORDS = 1024
"""Nodes that were left out and are remembered; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Which rank was the first to die by itself in a round."""

    node: str
    rank: int
    first_rank: int  # of the node, in that round
    others: bool  # ranks of other nodes died by themselves too
    what: RankFailed | None = None
    at: float = 0.0  # when it was reported
    innocent: bool = False  # the node is not to blame, as for a hang of the script's


@dataclass(slots=True)
class _Record:
    """A node that was left out."""

    times: int
    until: float  # when it was, or is, let in again
    rank: int  # for which rank


class Attribution:
    """The causes of the last rounds that ended by failures of their own."""

    def __init__(self, after: int = EXCLUDE_FAILING_AFTER) -> None:
        """`after`: rounds in a row that make a node suspect."""
        self._after = after
        self._trail: deque[Cause] = deque(maxlen=TRAIL)
        self._records: dict[str, _Record] = {}

    def why_suspect(self, cause: Cause, now: float) -> FirstToFail | None:
        """Why the node of `cause` is to be left out if the present round ended by it; None if it is
        not."""
        row = self._row(cause)
        record = self._records.get(cause.node)
        probation = record is not None and now < record.until + PROBATION
        if len(row) < (1 if probation else self._after):
            return None
        moved = len({one.first_rank for one in row if one.first_rank >= 0}) > 1
        free = any(one.others or one.innocent for one in row)
        if not moved and (free or self._wherever_it_runs(cause)):
            return None
        return FirstToFail(len(row), moved, cause.what)

    def settled(self, cause: Cause) -> None:
        """A round ended by `cause`, and no node is left out for it."""
        self._trail.append(cause)

    def cleared(self, cause: Cause, now: float) -> str:
        """A node that was left out for what turns out to be the script's fault: it is to be let
        in. Empty if there is none."""
        for node, record in self._records.items():
            if now < record.until and node != cause.node and record.rank == cause.rank:
                del self._records[node]
                return node
        return ""

    def leave_out(self, cause: Cause, now: float) -> float:
        """The node of `cause` is left out; for how many seconds."""
        self._trail.append(cause)
        old = self._records.pop(cause.node, None)
        times = 1 + (old.times if old and now < old.until + PROBATION else 0)
        wait = backoff_length(times)
        self._records[cause.node] = _Record(times, now + wait, cause.rank)
        if len(self._records) > MAX_RECORDS:
            self._records.pop(next(iter(self._records)))
        return wait

    def backoff_until(self, node: str, now: float) -> float:
        """Until when a node that was left out waits at the door; `now` if it need not."""
        record = self._records.get(node)
        return now if record is None else max(now, record.until)

    def in_words(self, cause: Cause, nodes: int) -> str:
        """What the last rounds together say, if the present one, of so many `nodes`, ended by
        `cause`; a clause for the sentence of the job's end. Empty if they say nothing."""
        if cause.innocent:
            return ""
        trail = [*self._trail, cause]
        same_rank = _tail(trail, lambda one: one.rank == cause.rank)
        places = len({one.node for one in same_rank})
        if places > 1:
            return (
                f"rank {cause.rank} was the first to fail in the last {len(same_rank)} rounds, on "
                f"{places} different nodes: the script fails there wherever it runs"
            )
        row = self._row(cause)
        if nodes > 1 and len(row) > 1 and not any(one.others or one.innocent for one in row):
            return (
                f"in the last {len(row)} rounds ranks of node {cause.node} were the first to fail, "
                "and no rank of another node did: the node may be at fault"
            )
        several = nodes > 1 and any(one.others for one in trail)
        if several or len({one.node for one in trail}) > 1:
            last = f"the last {len(trail)} rounds" if len(trail) > 1 else "this round"
            return f"ranks failed by themselves on different nodes in {last}: it is the script"
        return ""

    # ------------------------------------------------------------ a master's record

    def record(self, now: float) -> tuple[Blamed, ...]:
        """What the next master must know; MAX_RECORDS + 1 entries at most."""
        found = {
            node: Blamed(node, 0, one.times, one.rank, one.until - now)
            for node, one in self._records.items()
            if now < one.until + PROBATION
        }
        if self._trail:
            last = self._trail[-1]
            row = len(_tail(self._trail, lambda one: one.node == last.node))
            entry = found.pop(last.node, Blamed(last.node, 0, 0, last.rank, 0.0))
            found[last.node] = replace(entry, rounds=row)
        return tuple(found.values())

    def restore(self, blamed: Iterable[Blamed], at: float) -> None:
        """Take over what another master had recorded `at` that time."""
        for one in blamed:
            for _ in range(min(one.rounds, TRAIL)):
                self._trail.append(Cause(one.node, one.rank, -1, others=False, at=at))
            if one.times:
                self._records[one.node] = _Record(one.times, at + one.remaining, one.rank)

    def _wherever_it_runs(self, cause: Cause) -> bool:
        """Whether this very rank has just failed as often as it takes on other nodes as well."""
        same_rank = _tail(self._trail, lambda one: one.rank == cause.rank)
        elsewhere = [
            one for one in same_rank if one.node != cause.node and cause.at - one.at <= MEMORY
        ]
        return len(elsewhere) >= self._after

    def _row(self, cause: Cause) -> list[Cause]:
        """The last causes on this node, as far back as no two are MEMORY apart."""
        last = _tail([*self._trail, cause], lambda one: one.node == cause.node)
        late = [one.at - before.at > MEMORY for before, one in pairwise(last)]
        return last[len(late) - late[::-1].index(True) :] if True in late else last


def _tail(trail: Iterable[Cause], alike: Callable[[Cause], bool]) -> list[Cause]:
    """The last of them, as far back as they are alike."""
    return list(takewhile(alike, reversed([*trail])))[::-1]
