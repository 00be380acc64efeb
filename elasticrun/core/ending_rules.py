"""How the agent's brain ends the ranks of a round, and the agent itself."""

from __future__ import annotations

from elasticrun.config import STUCK_AFTER
from elasticrun.core import effects as fx
from elasticrun.core.group_states import ENDINGS, State
from elasticrun.core.probing_rules import ProbingRules
from elasticrun.wire import messages as m

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
