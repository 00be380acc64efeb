"""What a master takes over from the one before: a round that it did not form.

Either way the round is taken as it was, and for REATTACH_GRACE those who have not been heard are
waited for: agents dial again within a second, so who is silent for longer has gone.

With a record it *restores* the round as RUNNING, or as ended: its nodes are members from the first
moment, unheard until they attach, so that none begins beside it, whoever finds the new master
first. A member that was never told its place is told it now; one that comes back as a newer life
has passed the fence. A round that agents report wins over an older one in the record (a disk may
have lost its last writes); what neither the record nor any agent tells, nobody can know.

Without a record it *adopts* the highest round that agents report, as RUNNING, and its members one
by one as they attach; how many are missing it learns from the world size. Where these hold half of
its ranks or more, they may be in a later round of which only they know: unless `max` nodes are here
all the same, it forms none until they have had the time to stop by themselves, as for the fence. It
learns that there was a master before it from any agent that has obeyed one, be it a spare: from
then on it forms nothing until the grace is over or a round was reported. What remains: a successor
without a record that only new agents have found cannot know; it may begin a round, which it ends
when the first old agent attaches.
"""

from __future__ import annotations

from elasticrun.config import REATTACH_GRACE


class Takeover:
    """Who of another master's round has been heard, and how long the others are waited for. Times
    are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.grace_until = now
        """Until when nodes that the master before this one served may still dial again."""
        self.at = now
        """When the round of another master was taken over."""
        self.expected_until: float | None = None
        """Until when a round that nobody has reported is waited for; None: none is expected."""
        self.elsewhere: dict[str, int] = {}
        """Nodes that were there before this master and know of no place in the adopted round: so
        many ranks are in no later one."""
        self.ranks = 0
        """Of the round taken over."""
        self.round_began()
        self.is_first = True
        """No round was formed, restored or adopted."""

    def round_began(self) -> None:
        """Nothing is known of the members of the last round yet."""
        self.vanished = 0
        """How many members of a restored round were given up before they were heard."""
        self.unseen_ranks = 0
        """Of a round that was adopted: how many were not heard of yet."""
        self.is_begun = False
        """Whether one of a restored round's members was told its place only now."""
        self.given_up_ranks = 0
        """That were not heard of in time, and have gone, as far as this master can know."""
        self.is_first, self.expected_until = False, None

    def round_taken(self, ranks: int, unseen_ranks: int, now: float) -> None:
        """A round of so many ranks was restored or adopted: how many are missing."""
        self.ranks, self.unseen_ranks = ranks, unseen_ranks
        self.at, self.grace_until = now, now + REATTACH_GRACE

    def grant(self, now: float) -> None:
        """Nodes have the grace to come back, from now on at least."""
        self.grace_until = max(self.grace_until, now + REATTACH_GRACE)

    def overslept(self, by: float) -> None:
        """The master did not listen for `by` seconds: the grace is a time of listening."""
        self.grace_until += by
        if self.expected_until is not None:
            self.expected_until += by

    # ------------------------------------------------------------ without a record

    def expect_round(self, now: float) -> None:
        """Another master served this job before: there may be a round that nobody reported yet."""
        if self.is_first and self.expected_until is None:
            self.expected_until = now + REATTACH_GRACE

    def ranks_heard(self, ranks: int, now: float) -> None:
        """So many more ranks of the adopted round are accounted for."""
        self.unseen_ranks = max(0, self.unseen_ranks - ranks)
        if now >= self.grace_until:  # a cut has healed: the others dial just now as well
            self.grace_until = now + REATTACH_GRACE
