"""What the agent's brain does about probes: no rank lives here, and the master wants a measure.

One probe at a time. A newer order takes the place of one that is under way, the same order again
does not; whoever asks again for a check that is over is given the answer that was kept. A place in
a round, the job's end, a refusal and a death signal call a probe off. The store that this node has
offered may serve a probe, under the check's own prefix, and is offered for the round as before.
"""

from __future__ import annotations

from elasticrun.core import effects as fx
from elasticrun.core.group_base import GroupBase
from elasticrun.core.group_states import State
from elasticrun.wire import messages as m


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
