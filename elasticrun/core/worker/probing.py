"""What the agent does about probes: no rank lives here, and the master wants a measure.

One probe at a time. A newer order takes the place of one that is under way, the same order again
does not; whoever asks again for a check that is over is given the answer that was kept. A place in
a round, the job's end, a refusal and a death signal call a probe off. The store that this node has
offered may serve a probe, under the check's own prefix, and is offered for the round as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrun.core import events as fx
from elasticrun.core.reasons import BeingProbed, text
from elasticrun.core.worker.states import State
from elasticrun.wire import messages as m

if TYPE_CHECKING:
    from elasticrun.core.worker.group import WorkerGroup


class LocalProbe:
    """The part of a worker group that probes its machine; the group's table says when its methods
    apply."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._order: m.Probe | None = None  # under way
        self.answer: m.Probed | None = None
        """The last one, until a round begins."""

    def probe(self, order: m.Probe, now: float) -> None:
        """PREPARING or JOINED: start the probe, or say again what it came to."""
        group = self._group
        if self.answer is not None and self.answer.check == order.check:
            group.say(self.answer)
            return
        group.state = State.PROBING
        self._order = order
        self.answer = None
        group.reason = BeingProbed(order.partners if order.group_world_size > 1 else "")
        group.note(text(group.reason))
        group.out.append(fx.RunProbe(order))

    def probe_newer(self, order: m.Probe, now: float) -> None:
        """PROBING: the same order again changes nothing, another one takes its place."""
        if self._order is None or self._order.check != order.check:
            self.call_off()
            self.probe(order, now)

    def probe_ended(self, event: fx.ProbeEnded, now: float) -> None:
        """PROBING: say what it came to. The Join still stands if the store does."""
        group = self._group
        if self._order is None or event.result.check != self._order.check:
            return
        self._ended(event.result)
        group.state = State.PREPARING if group.stores.offer is None else State.JOINED
        group.out += group.stores.prepare()

    def lost(self, reason: str) -> None:
        """PROBING: the spawner took the probe's processes with it; the runtime has reaped them."""
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
        group, self._order, self.answer = self._group, None, result
        group.reason = None
        if result.excused:
            group.note(f"the probe of this machine was not finished: {result.reason}")
        elif not result.ok:
            what = f"the probe of this machine failed in {result.phase}: {result.reason}"
            group.note(what, "warning")
        group.say(result)

    def call_off(self) -> None:
        """Something else is to happen here: kill what the probe has started, if one runs."""
        if self._order is not None:
            self._order = None
            self._group.out.append(fx.CallOffProbe())
