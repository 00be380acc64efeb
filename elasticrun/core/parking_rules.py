"""What the agent's brain does where its node is excluded and is to stay (--quarantine): PARKED.

No rank lives here, and the machine stays taken, so that no scheduler gives it to a replacement.
Ranks and snapshots that are still here are ended and written out first, as before an end. A parked
node ends with the job and its exit code; else, with that of a bad node, at a refusal, at a death
signal, when its time is over, or when no master answers for too long. A master that is new has to
say so again (`link_rules.CONFIRM`): one without a record knows of no exclusion.
"""

from __future__ import annotations

from msgspec.structs import replace

from elasticrun.core import effects as fx
from elasticrun.core.ending_rules import EndingRules
from elasticrun.core.failures import Ending, code_of
from elasticrun.core.group_states import ENDINGS, State
from elasticrun.wire import messages as m


class ParkingRules(EndingRules):
    """The rules of PARKED; the table in `worker_group` says when each applies."""

    def _park(self, order: m.Park, now: float) -> None:
        """Any state but OVER."""
        if self._state in ENDINGS and not self.is_parked:
            return  # it ends for a reason of its own
        outcome = fx.Exit(code_of(Ending.EXCLUDED), order.reason, (), 0)
        self._parked_until = now + order.seconds
        if self._state is State.PARKED:
            self._over(outcome)
        else:
            self._conclude(outcome, now)

    def _unpark(self, outcome: fx.Exit) -> None:
        """It is to end: at once, or as soon as what is still here has ended."""
        self._parked_until = None
        self._outcome = outcome
        if self._state is State.PARKED:
            self._exit(outcome)

    def _park_ends(self, why: str, signum: int = 0) -> None:
        """It need not, or cannot, stay any longer. While ranks are still ended here: not after."""
        outcome = self._outcome
        assert outcome is not None
        if self._state is State.PARKED:
            self._say(m.Leaving(why, signum))
        self._unpark(replace(outcome, reason=f"{outcome.reason}; {why}", signum=signum))

    def _signalled_parked(self, event: fx.Signalled, now: float) -> None:
        if event.death:
            self._park_ends(f"received {event.name}", event.signum)

    def _store_parked(self, event: fx.StoreReady, now: float) -> None:
        """One that was on its way: no round will use it."""
        self._out.append(fx.ReleaseStore(event.store))
