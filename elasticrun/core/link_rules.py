"""What the agent's brain makes of its master: which one it obeys, and what it does without any."""

from __future__ import annotations

from elasticrun.core import effects as fx
from elasticrun.core.group_base import GroupBase
from elasticrun.core.group_states import ENDINGS, State
from elasticrun.wire import messages as m

CONFIRM = 10.0
"""Seconds in which a new master says that this node is to stay parked; it does so at once."""


class LinkRules(GroupBase):
    """The rules of the link; the table in `worker_group` says when each applies."""

    def _welcome(self, order: m.Welcome, now: float) -> None:
        if order.term < self._term:
            self._obeying = False
            reason = f"the master that answers is of term {order.term}, older than {self._term}"
            self._note(f"{reason}: it is not obeyed", "warning")
            self._link_gone(reason, now)
            return
        if self._state is State.PARKED and order.term > self._term:
            self._deadlines.arm("confirm", now + CONFIRM)
        self._term = order.term
        self._obeying = True
        if self._link_lost:
            self._note("the master answers again", "warning")
        self._link_lost = ""
        self._deadlines.disarm("master-lost")
        self._master_lost_timeout = order.master_lost_timeout

    def _wait(self, order: m.Wait, now: float) -> None:
        self._wait_ends = now + order.left if order.left else None
        if order.reason != self._reason:
            self._reason = order.reason
            self._note(order.reason)

    def _link_lost_event(self, event: fx.LinkLost, now: float) -> None:
        self._link_gone(event.reason, now)

    def _link_back(self, event: fx.LinkBack, now: float) -> None:
        """Say where this node is. That a master is there to stay shows in its m.Welcome."""
        self._say_all(now)

    def _link_gone(self, reason: str, now: float) -> None:
        # then it needs no master any more
        ending = self._state in ENDINGS and not self.is_parked
        if not self._link_lost and not ending:
            self._note(
                f"no master answers ({reason}); this node goes on for "
                f"{self._master_lost_timeout:g} s",
                "warning",
            )
            self._deadlines.arm("master-lost", now + self._master_lost_timeout)
        self._link_lost = f"no master answers: {reason}"
