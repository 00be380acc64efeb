"""Takeover: a master continues a round that its predecessor formed.

With or without a record, the master accepts the round as it was, and waits during REATTACH_GRACE
for nodes that have not reported. Agents redial within a second, so a node that has not reported by
then is lost.

With a record, the master *restores* the round as RUNNING or as ended. Its nodes are members from
the start, even before they attach, so no second round begins beside it, no matter which node finds
the new master first. A member that never received its place receives it now; the return of a node
as a newer incarnation proves that its old ranks are dead. A round that agents report replaces an
older one in the record (a disk may have lost its last writes). The master cannot know of a round
that is in neither the record nor a report.

Without a record, the master *adopts* the highest round that agents report, as RUNNING, and its
members one by one as they attach; the world size says how many are missing. If the missing nodes
hold half of its ranks or more, they may be in a later round that only they know. Then no round
forms, unless `max` nodes are present, until the missing nodes have had the time to stop their ranks
on their own, as for the fence. An agent that has obeyed an earlier master, even a spare, reveals
that there was one; from then on nothing forms until the grace period is over or a round was
reported. One gap remains: a new master without a record that only new agents have found cannot know
of the old round. It may begin a round, which it ends when the first old agent attaches.
"""

from __future__ import annotations

from elasticrun.config import REATTACH_GRACE


class Takeover:
    """Which part of another master's round has reported, and how long to wait for the rest. Times
    are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.grace_until = now
        """Until when nodes of the previous master may still redial."""
        self.taken_at = now
        """When another master's round was taken over."""
        self.expected_until: float | None = None
        """Until when to wait for a round that no agent has reported; None: none is expected."""
        self.elsewhere: dict[str, int] = {}
        """Nodes that have obeyed an earlier master and have no place in the adopted round, with
        their number of ranks: these ranks are in no later round."""
        self.ranks = 0
        """Ranks of the round taken over."""
        self.round_began()
        self.is_first = True
        """Whether no round was formed, restored or adopted yet."""

    def round_began(self) -> None:
        """A round was formed, restored or adopted: forget what was known of the previous one."""
        self.vanished = 0
        """Number of members of a restored round that were lost before they reported."""
        self.unseen_ranks = 0
        """Number of ranks of an adopted round that have not reported yet."""
        self.is_begun = False
        """Whether a member of a restored round received its place only now."""
        self.given_up_ranks = 0
        """Number of ranks that did not report in time; this master considers them lost."""
        self.is_first, self.expected_until = False, None

    def round_taken(self, ranks: int, unseen_ranks: int, now: float) -> None:
        """A round with `ranks` ranks was restored or adopted; `unseen_ranks` of them are
        missing."""
        self.ranks, self.unseen_ranks = ranks, unseen_ranks
        self.taken_at, self.grace_until = now, now + REATTACH_GRACE

    def grant(self, now: float) -> None:
        """Extend the grace period for redialling to at least REATTACH_GRACE from now."""
        self.grace_until = max(self.grace_until, now + REATTACH_GRACE)

    def overslept(self, by: float) -> None:
        """The master did not listen for `by` seconds; the grace period counts listening time
        only."""
        self.grace_until += by
        if self.expected_until is not None:
            self.expected_until += by

    # ------------------------------------------------------------ without a record

    def expect_round(self, now: float) -> None:
        """Another master served this job before: there may be a round that no agent has reported
        yet."""
        if self.is_first and self.expected_until is None:
            self.expected_until = now + REATTACH_GRACE

    def ranks_heard(self, ranks: int, now: float) -> None:
        """`ranks` more ranks of the adopted round are accounted for."""
        self.unseen_ranks = max(0, self.unseen_ranks - ranks)
        if now >= self.grace_until:  # a network partition has healed: the others are redialling too
            self.grace_until = now + REATTACH_GRACE
