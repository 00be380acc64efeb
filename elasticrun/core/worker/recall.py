"""Ranks that leave their round without ending their process (`training.recoverable`).

A rank is *armed* while it runs a recoverable function. When its round is over it is *recalled*: it
leaves its collective and destroys its process groups. After that it counts as stopped, although its
process lives: no call of it can reach a rank of that round or of a later one. It is *kept* until
the next round starts in it.

In doubt, a rank is treated like any other. A recalled rank that has not left within the time limit
gets SIGTERM. The limit is RECALL_LIMIT at first, and then LEARNT_FACTOR times what the slowest rank
of this node has taken, from MIN_RECALL_LIMIT to RECALL_LIMIT. An exception that is not the loss of
a peer is the rank's own failure. A node that ends signals its kept ranks.
"""

from __future__ import annotations

from typing import Final

from elasticrun.config import MIN_RECALL_LIMIT, RECALL_LIMIT
from elasticrun.core import events as fx
from elasticrun.core.rounds.failures import ECHOES
from elasticrun.core.worker.context import GroupContext
from elasticrun.core.worker.ranks import SIGTERM
from elasticrun.core.worker.states import GroupWish, StopRanks, SweepNow

LEARNT_FACTOR: Final = 10.0
"""Factor of the limit: a rank that takes this many times as long as any before it is stuck."""


class Recall:
    """Recalls the ranks of a worker group; the group's table defines when each method applies."""

    def __init__(self, ctx: GroupContext) -> None:
        self._ctx = ctx
        self._limit = RECALL_LIMIT  # seconds, of the current recall
        self._began = 0.0  # when the current recall began
        self._slowest = 0.0  # seconds that a rank has taken to leave; 0: none has left yet
        self._kill_at = 0.0  # when ranks that were signalled instead of recalled are killed

    # ------------------------------------------------------------ what the group orders

    def begin(self, grace: float, master_lost: float, now: float) -> float:
        """Recall every armed rank; return the seconds until ranks are killed. `grace`: seconds from
        SIGTERM to SIGKILL. `master_lost`: seconds for which ranks may run without a master; the
        next round waits no longer than that if this node falls silent now."""
        ctx = self._ctx
        self._kill_at = now + grace
        if recalled := ctx.ranks.recall():
            ctx.out.append(fx.RecallRanks(recalled))
        if not ctx.ranks.recalled:
            return grace
        learnt = max(MIN_RECALL_LIMIT, LEARNT_FACTOR * (self._slowest or RECALL_LIMIT))
        self._began, self._limit = now, min(learnt, RECALL_LIMIT, master_lost)
        ctx.deadlines.arm("recall", now + self._limit)
        return self._limit + grace

    def cancel(self, grace: float, now: float) -> None:
        """This node ends: recalled ranks may be signalled like the others from now on."""
        ctx = self._ctx
        ctx.deadlines.disarm("recall")
        if ctx.ranks.recalled:
            ctx.ranks.recalled.clear()
            self._arm_kill(now + grace)

    def expired(self) -> None:
        """The time limit of the recall is over: send SIGTERM to the recalled ranks."""
        ctx = self._ctx
        late = len(ctx.ranks.recalled)
        ranks = "1 rank has" if late == 1 else f"{late} ranks have"
        ctx.note(f"{ranks} not left the round within {self._limit:g} s: stopping them", "warning")
        self._slowest = 0.0  # the limit may have been too short
        ctx.ranks.recalled.clear()
        ctx.signal(SIGTERM)

    def settle(self) -> None:
        """A rank has left or exited: if none is recalled any more, ranks that were signalled at the
        beginning are killed when their own grace period ends."""
        ctx = self._ctx
        if "recall" in ctx.deadlines and not ctx.ranks.recalled:
            ctx.deadlines.disarm("recall")
            self._arm_kill(self._kill_at)

    def _arm_kill(self, when: float) -> None:
        kill = self._ctx.deadlines.when("kill")
        if kill is not None and when < kill:
            self._ctx.deadlines.arm("kill", when)

    # ------------------------------------------------------------ what ranks report

    def armed(self, event: fx.RankArmed, now: float) -> None:
        """STARTING or RUNNING: a rank has become recallable, or is no longer."""
        ranks = self._ctx.ranks
        if event.armed and event.local_rank in ranks.live:
            ranks.armed.add(event.local_rank)
        else:
            ranks.armed.discard(event.local_rank)

    def disarmed(self, event: fx.RankArmed, now: float) -> None:
        """Any other state: a rank is no longer recallable. If it was recalled, its limit
        remains."""
        if not event.armed:
            self._ctx.ranks.armed.discard(event.local_rank)

    def raised(self, event: fx.RankRaised, now: float) -> GroupWish | None:
        """STARTING or RUNNING: an exception has left the recoverable function of a rank. The loss
        of a peer is reported as if the rank had exited, and the rank is recalled with the others.
        With any other exception, the rank fails."""
        ctx, local_rank = self._ctx, event.local_rank
        if local_rank not in ctx.ranks.live:
            return None
        failure = ctx.ranks.failed(fx.RankExited(local_rank, 1, event.failure), now)
        if failure.kind not in ECHOES or local_rank not in ctx.ranks.armed:
            self.let_fail(local_rank)
            return None
        ctx.failed(local_rank, failure)
        return StopRanks()

    def let_fail(self, local_rank: int) -> None:
        """Let this rank fail with its exception. It is not signalled before it has exited, because
        its failure is the cause of others."""
        ranks = self._ctx.ranks
        ranks.armed.discard(local_rank)
        ranks.failing.add(local_rank)
        self._ctx.out.append(fx.LetRankFail(local_rank))

    def left(self, event: fx.RankLeft, now: float) -> GroupWish | None:
        """STOPPING: a recalled rank has left its round. Sweep if no rank is left in it."""
        ranks = self._ctx.ranks
        if not ranks.left(event.local_rank):
            return None  # it was signalled meanwhile
        self._slowest = max(self._slowest, now - self._began)
        self.settle()
        return None if ranks.live else SweepNow()

    def kept_exited(self, event: fx.RankExited, now: float) -> None:
        """A kept rank has exited between two rounds: the next round starts another process."""
        self._ctx.ranks.kept.pop(event.local_rank, None)
