"""Probes on the agent's side: no rank is alive here, and the master orders a measurement.

Only one probe runs at a time. A newer order replaces a running probe; a repetition of the same
order does not. If a finished probe is ordered again, the stored answer is sent. A place in a round,
the job's end, a refusal and a death signal cancel a probe. The store that this node has offered may
serve a probe, under the check's own prefix, and remains on offer for the round.
"""

from __future__ import annotations

from elasticrun.core import events as fx
from elasticrun.core.reasons import BeingProbed, text
from elasticrun.core.worker.context import GroupContext
from elasticrun.core.worker.states import State
from elasticrun.wire import messages as m


class LocalProbe:
    """The probes of a worker group; the group's table defines when each method applies."""

    def __init__(self, ctx: GroupContext) -> None:
        self._ctx = ctx
        self._order: m.Probe | None = None  # of the running probe; None: none runs
        self.answer: m.Probed | None = None
        """The last answer, until a round begins."""

    def probe(self, order: m.Probe, now: float) -> None:
        """PREPARING or JOINED: start the probe, or resend the stored answer."""
        ctx = self._ctx
        if self.answer is not None and self.answer.check == order.check:
            ctx.send(self.answer)
            return
        ctx.state = State.PROBING
        self._order = order
        self.answer = None
        ctx.reason = BeingProbed(order.partners if order.group_world_size > 1 else "")
        ctx.note(text(ctx.reason))
        ctx.out.append(fx.RunProbe(order))

    def probe_newer(self, order: m.Probe, now: float) -> None:
        """PROBING: an order for another check replaces the probe; a repetition changes nothing."""
        if self._order is None or self._order.check != order.check:
            self.call_off()
            self.probe(order, now)

    def probe_ended(self, event: fx.ProbeEnded, now: float) -> None:
        """PROBING: report the result. The Join remains valid while its store is alive."""
        ctx = self._ctx
        if self._order is None or event.result.check != self._order.check:
            return
        self._ended(event.result)
        ctx.state = State.PREPARING if ctx.stores.offer is None else State.JOINED
        ctx.out += ctx.stores.prepare()

    def lost(self, reason: str) -> None:
        """PROBING: the probe's processes died with the spawner; the runtime has reaped them."""
        assert self._order is not None
        self._ended(
            m.Probed(
                check=self._order.check,
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

    def _ended(self, result: m.Probed) -> None:
        ctx, self._order, self.answer = self._ctx, None, result
        ctx.reason = None
        if result.excused:
            ctx.note(f"the probe of this machine did not finish: {result.reason}")
        elif not result.ok:
            what = f"the probe of this machine failed in {result.phase}: {result.reason}"
            ctx.note(what, "warning")
        ctx.send(result)

    def call_off(self) -> None:
        """Cancel the probe, if one is running: kill its processes."""
        if self._order is not None:
            self._order = None
            self._ctx.out.append(fx.CallOffProbe())
