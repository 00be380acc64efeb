"""What the agent's brain makes of its master: which one it obeys, and what it does without any.

What the agent's brain does about probes: no rank lives here, and the master wants a measure.

One probe at a time. A newer order takes the place of one that is under way, the same order again
does not; whoever asks again for a check that is over is given the answer that was kept. A place in
a round, the job's end, a refusal and a death signal call a probe off. The store that this node has
offered may serve a probe, under the check's own prefix, and is offered for the round as before.

How the agent's brain ends the ranks of a round, and the agent itself.
"""

from __future__ import annotations

from elasticrun.config import STUCK_AFTER
from elasticrun.core import events as fx
from elasticrun.core.worker.base import GroupBase
from elasticrun.core.worker.states import ENDINGS, State
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


class ProbingRules(GroupBase):
    """The rules of PROBING; the table in `worker_group` says when each applies."""

    def _probe(self, order: m.Probe, now: float) -> None:
        """PREPARING or JOINED: start the probe, or say again what it came to."""
        if self._probed is not None and self._probed.check == order.check:
            self._say(self._probed)
            return
        self._state = State.PROBING
        self._probe_order = order
        self._probed = None
        self._reason = "this machine is being probed"
        if order.group_world_size > 1:
            self._reason += f" with {order.partners}"
        self._note(self._reason)
        self._out.append(fx.RunProbe(order))

    def _probe_newer(self, order: m.Probe, now: float) -> None:
        """PROBING: the same order again changes nothing, another one takes its place."""
        if self._probe_order is None or self._probe_order.check != order.check:
            self._call_off_probe()
            self._probe(order, now)

    def _probe_ended(self, event: fx.ProbeEnded, now: float) -> None:
        """PROBING: say what it came to. The Join still stands if the store does."""
        if self._probe_order is None or event.result.check != self._probe_order.check:
            return
        self._answer_probe(event.result)
        self._state = State.PREPARING if self._stores.offer is None else State.JOINED
        self._prepare()

    def _answer_probe(self, result: m.Probed) -> None:
        self._probe_order = None
        self._probed = result
        self._reason = ""
        if result.excused:
            self._note(f"the probe of this machine was not finished: {result.reason}")
        elif not result.ok:
            what = f"the probe of this machine failed in {result.phase}: {result.reason}"
            self._note(what, "warning")
        self._say(result)

    def _probe_lost(self, reason: str) -> None:
        """PROBING: the spawner took the probe's processes with it; the shell has reaped them."""
        assert self._probe_order is not None
        self._answer_probe(
            m.Probed(
                check=self._probe_order.check,
                ok=False,
                phase=m.ProbePhase.START,
                own=True,
                excused=False,
                reason=f"the fork server ended: {reason}",
                compute=0.0,
                flops=0.0,
                transfers=(),
                seconds=0.0,
                timed=0.0,
            )
        )

    def _call_off_probe(self) -> None:
        """Something else is to happen here: kill what the probe has started, if one runs."""
        if self._probe_order is not None:
            self._probe_order = None
            self._out.append(fx.CallOffProbe())


SIGTERM = 15

SWEEP_GRACE = 5.0
"""Least time for descendants with sessions of their own after SIGTERM; wandb's helper needs up to
4.7 s to flush. Never more than the grace of the ranks themselves."""


class EndingRules(ProbingRules):
    """The rules of ends; the table in `worker_group` says when each applies."""

    def _finish(self, now: float) -> None:
        self._state = State.FINISHED
        self._reason = "all ranks of this node are done; waiting for the other nodes"
        if self._start is not None:
            self._say(m.Finished(self._start.round))
        if self._exit_barrier is not None:
            self._deadlines.arm("exit-barrier", now + self._exit_barrier)

    def _begin_stop(self, state: State, signum: int, grace: float, now: float) -> None:
        """Signal the ranks that live and report how long they have; sweep if none does."""
        self._state = state
        if not self._ranks.live:
            self._sweep(State.CLEARING if state is State.ENDING else State.SWEEPING, now)
            return
        self._signal(signum)
        if "kill" not in self._deadlines and "stuck" not in self._deadlines:
            self._deadlines.arm("kill", now + grace)
        self._say_stopping(now)

    def _sweep(self, state: State, now: float) -> None:
        """Every rank has ended: remove what they left, with what is left of their grace."""
        self._state = state
        base = self._restart_grace if state is State.SWEEPING else self._shutdown_timeout
        kill, killed = self._deadlines.when("kill"), "stuck" in self._deadlines
        rest = base if kill is None else kill - now
        if killed:
            rest = 0.0
        grace = max(rest, min(SWEEP_GRACE, base))
        self._deadlines.disarm("kill")
        self._deadlines.arm("stuck", now + grace + STUCK_AFTER)
        self._out.append(fx.SweepRanks(grace))
        # the master waits a little longer than it was told (rendezvous.SURVIVOR_SLACK): it need
        # hear of a sweep only if that is not enough
        if grace > rest + 1.0 and self._start is not None:
            self._say(m.Stopping(self._start.round, grace))

    def _conclude(
        self, outcome: fx.Exit, now: float, signum: int = SIGTERM, grace: float | None = None
    ) -> None:
        """End the agent with `outcome`, as soon as no rank lives here."""
        if self._state in ENDINGS:
            return
        self._call_off_probe()
        self._departing = None
        self._deadlines.disarm("departing")
        self._deadlines.disarm("exit-barrier")  # it must not end a node that is HOLDING
        self._outcome = outcome
        self._reason = outcome.reason
        if self._state is State.SWEEPING:
            self._state = State.CLEARING
        elif self._ranks.live or self._state is State.RUNNING:
            grace = self._shutdown_timeout if grace is None else grace
            self._begin_stop(State.ENDING, signum, grace, now)
        else:
            self._exit(outcome)
