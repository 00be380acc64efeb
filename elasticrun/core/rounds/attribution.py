"""Attribution: whether a node or the script is to blame when ranks keep failing.

One round proves nothing, because some rank always fails first. Several in a row are evidence:

* The same *node* each time, and no rank of another node fails by itself: the node is to blame (a
  bad GPU, a full disk, a wrong driver). After EXCLUDE_FAILING_AFTER rounds it is put in backoff
  for 2, 4, 8 ... minutes, if the other nodes suffice. After that it is on probation for an hour:
  the first failure that starts there puts it in backoff again.
* Ranks of other nodes fail by themselves in the same rounds too: the script or its data is to
  blame, unless the node held different ranks in these rounds and still failed first each time.
* The same *rank* fails first on one node and then on another: the script is to blame and fails
  wherever it runs. A node in backoff for that rank is cleared and admitted at once. The other node
  is not put in backoff for it: its failure has already shown that the script is to blame.
* Different ranks on different nodes: the script is to blame too.

Ranks keep their nodes from round to round, so three failures of rank 3 on node b may be the fault
of either. Putting the node in backoff is also the experiment that decides: rank 3 then runs
elsewhere.
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
"""Seconds for which a node is remembered after its backoff."""

MEMORY = 6 * 3600.0
"""Two causes further apart than this many seconds are not consecutive: the circumstances may have
changed."""

TRAIL = 16
"""Number of causes that are remembered."""

MAX_RECORDS = 1024
"""Maximum number of remembered nodes; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The rank that failed first, by itself, in a round."""

    node: str
    rank: int
    first_rank: int  # on the node, in that round
    others: bool  # ranks of other nodes failed by themselves too
    what: RankFailed | None = None
    at: float = 0.0  # when it was reported
    innocent: bool = False  # the node is not to blame, as for a hang caused by the script


@dataclass(slots=True)
class _Record:
    """A node that was put in backoff."""

    times: int
    until: float  # when the backoff ended or ends
    rank: int  # the rank that failed


class Attribution:
    """The causes of the last rounds that ended because of their own failures."""

    def __init__(self, after: int = EXCLUDE_FAILING_AFTER) -> None:
        """`after`: number of consecutive rounds that make a node suspect."""
        self._after = after
        self._trail: deque[Cause] = deque(maxlen=TRAIL)
        self._records: dict[str, _Record] = {}

    def why_suspect(self, cause: Cause, now: float) -> FirstToFail | None:
        """Why the node of `cause` must be put in backoff if the current round ended because of that
        cause; None if it must not."""
        row = self._streak(cause)
        record = self._records.get(cause.node)
        probation = record is not None and now < record.until + PROBATION
        if len(row) < (1 if probation else self._after):
            return None
        moved = len({one.first_rank for one in row if one.first_rank >= 0}) > 1
        free = any(one.others or one.innocent for one in row)
        if not moved and (free or self._fails_on_other_nodes(cause)):
            return None
        return FirstToFail(len(row), moved, cause.what)

    def add_cause(self, cause: Cause) -> None:
        """Record that a round ended because of `cause`, without putting a node in backoff."""
        self._trail.append(cause)

    def clear_node(self, cause: Cause, now: float) -> str:
        """Clear a node that is in backoff for what `cause` shows to be the script's fault: forget
        its record and return its id; it may be admitted. "" if there is none."""
        for node, record in self._records.items():
            if now < record.until and node != cause.node and record.rank == cause.rank:
                del self._records[node]
                return node
        return ""

    def back_off(self, cause: Cause, now: float) -> float:
        """Put the node of `cause` in backoff; return for how many seconds."""
        self._trail.append(cause)
        old = self._records.pop(cause.node, None)
        times = 1 + (old.times if old and now < old.until + PROBATION else 0)
        wait = backoff_length(times)
        self._records[cause.node] = _Record(times, now + wait, cause.rank)
        if len(self._records) > MAX_RECORDS:
            self._records.pop(next(iter(self._records)))
        return wait

    def backoff_until(self, node: str, now: float) -> float:
        """When the backoff of this node ends; `now` if it has none."""
        record = self._records.get(node)
        return now if record is None else max(now, record.until)

    def in_words(self, cause: Cause, nodes: int) -> str:
        """A clause for the message about the job's end: the pattern of the last rounds, if the
        current one, with `nodes` nodes, ended because of `cause`. "" if there is no pattern."""
        if cause.innocent:
            return ""
        trail = [*self._trail, cause]
        same_rank = _tail(trail, lambda one: one.rank == cause.rank)
        places = len({one.node for one in same_rank})
        if places > 1:
            return (
                f"rank {cause.rank} was the first to fail in the last {len(same_rank)} rounds, on "
                f"{places} different nodes: the script fails at that rank on any node"
            )
        row = self._streak(cause)
        if nodes > 1 and len(row) > 1 and not any(one.others or one.innocent for one in row):
            return (
                f"in the last {len(row)} rounds ranks of node {cause.node} were the first to fail, "
                "and no rank of another node did: the node may be at fault"
            )
        several = nodes > 1 and any(one.others for one in trail)
        if several or len({one.node for one in trail}) > 1:
            last = f"the last {len(trail)} rounds" if len(trail) > 1 else "this round"
            ranks = "ranks failed by themselves on different nodes"
            return f"in {last}, {ranks}: the script is at fault"
        return ""

    # ------------------------------------------------------------ a master's record

    def record(self, now: float) -> tuple[Blamed, ...]:
        """What the next master needs; at most MAX_RECORDS + 1 entries."""
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
        """Restore what another master recorded at time `at`."""
        for one in blamed:
            for _ in range(min(one.rounds, TRAIL)):
                self._trail.append(Cause(one.node, one.rank, -1, others=False, at=at))
            if one.times:
                self._records[one.node] = _Record(one.times, at + one.remaining, one.rank)

    def _fails_on_other_nodes(self, cause: Cause) -> bool:
        """Whether this rank has just failed on other nodes as often as it takes to suspect a
        node."""
        same_rank = _tail(self._trail, lambda one: one.rank == cause.rank)
        elsewhere = [
            one for one in same_rank if one.node != cause.node and cause.at - one.at <= MEMORY
        ]
        return len(elsewhere) >= self._after

    def _streak(self, cause: Cause) -> list[Cause]:
        """The last consecutive causes on the node of `cause`, back to the first gap longer than
        MEMORY."""
        last = _tail([*self._trail, cause], lambda one: one.node == cause.node)
        late = [one.at - before.at > MEMORY for before, one in pairwise(last)]
        return last[len(late) - late[::-1].index(True) :] if True in late else last


def _tail(trail: Iterable[Cause], alike: Callable[[Cause], bool]) -> list[Cause]:
    """The longest suffix whose elements are all alike."""
    return list(takewhile(alike, reversed([*trail])))[::-1]
