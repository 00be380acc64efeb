"""The probes of this node: one process per local rank, a time limit, and their combined result.

The master's order names a small group of nodes and the store where they meet. The result is one
`Probed` with the worst of the local ranks. It is sent when every process of the probe has been
reaped; a cancelled probe sends nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Final

from elasticrun.agent.context import NodeContext
from elasticrun.agent.runtime import Tasks, Timer, in_thread
from elasticrun.agent.workers.ranks import probe_environment
from elasticrun.agent.workers.spawner import Child, Spawners
from elasticrun.config import PROBE_LOAD_CPU, PROBE_LOAD_GPU, ProbeLoad
from elasticrun.core.events import ProbeEnded
from elasticrun.core.health.words import duration
from elasticrun.host import accelerators
from elasticrun.host.accelerators import Accelerator
from elasticrun.host.log import logger
from elasticrun.wire import env, spawning
from elasticrun.wire.messages import Probe, Probed, ProbePhase, Transfer

OWN_PHASES: Final = (ProbePhase.START, ProbePhase.COMPUTE)
"""A failure in these phases is the node's own: no other node is involved."""

TORCH_MARGIN: Final = 1.0
"""Seconds by which torch's own timeouts in a probe exceed the limit, so that the agent ends the
probe first and reports every hang in the same words."""


@dataclass(eq=False)
class _RunningProbe:
    """An order in progress."""

    order: Probe
    load: ProbeLoad
    began: float  # monotonic seconds
    children: dict[Child, int] = field(default_factory=dict)  # to their local ranks, until reaped
    phases: dict[int, ProbePhase] = field(default_factory=dict)  # by local rank
    results: dict[int, _Result] = field(default_factory=dict)  # in order of arrival
    timer: Timer = field(default_factory=Timer)
    started: bool = False  # its processes have been requested
    over: bool = False  # reported or cancelled

    def phase(self, local_rank: int) -> ProbePhase:
        return self.phases.get(local_rank, ProbePhase.START)


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of one local rank; `reason`: the clause about it in `Probed.reason`."""

    ok: bool
    phase: ProbePhase
    own: bool
    excused: bool
    reason: str
    compute: float = 0.0
    transfers: tuple[float, ...] = ()
    timed: float = 0.0

    @property
    def weight(self) -> int:
        """Severity: a node reports the worst of its local ranks."""
        if self.ok:
            return 0
        return 3 if self.own else 1 if self.excused else 2


class Probing:
    """Carries out RunProbe and CallOffProbe."""

    def __init__(self, node: NodeContext, spawners: Spawners) -> None:
        self._node = node
        self._launch = node.launch
        self._spawners = spawners
        self._deliver = node.deliver
        self._current: _RunningProbe | None = None
        self._children: dict[Child, _RunningProbe] = {}
        self._accelerator: Accelerator | None = None
        self._tasks = Tasks(logger.error)  # a probe that fails to start times out later

    # ------------------------------------------------------------ orders

    def run(self, order: Probe) -> None:
        """Run a probe, and kill the current one without a report. ProbeEnded follows after
        `order.limit` seconds at the latest, plus the time to kill and reap."""
        self.call_off()
        probing = _RunningProbe(order, PROBE_LOAD_CPU, time.monotonic())
        self._current = probing
        probing.timer.after(order.limit, self._on_limit, probing)
        self._tasks.start(self._start(probing), "starting probes")

    def call_off(self) -> None:
        """Kill the current probe without a report."""
        probing, self._current = self._current, None
        if probing is not None:
            self._close(probing)
            self._kill(probing)

    def close(self) -> None:
        """Cancel the current probe, because the agent ends; its spawners kill and reap the
        processes."""
        self.call_off()
        self._tasks.close()

    # ------------------------------------------------------------ reports

    def on_child_message(self, child: Child, message: spawning.FromSpawner) -> None:
        """Handle a report about a probe process: it has entered a phase, finished, been reaped, or
        could not be started. The last exit completes the order."""
        probing = self._children[child]
        local_rank = probing.children[child]
        if isinstance(message, spawning.Exited | spawning.SpawnFailed):
            self._spawners.forget(child)
            self.lost(child)
            if not probing.over:
                ended = "it ended without a result"
                why = ended if isinstance(message, spawning.Exited) else message.reason
                self._add_failure(probing, local_rank, self._clause(probing, local_rank, why))
            self._check_done(probing)
        elif isinstance(message, spawning.ProbeSaid) and not probing.over:
            with contextlib.suppress(ValueError):  # an unknown phase
                probing.phases[local_rank] = ProbePhase(message.phase)
            if message.done:
                probing.results.setdefault(local_rank, self._result(probing, local_rank, message))

    def lost(self, child: Child) -> None:
        """Remove a process that was reaped or lost. If its spawner died, the node cancels the order
        next: its state machine handles that and reports it itself."""
        del self._children.pop(child).children[child]

    # ------------------------------------------------------------ starting

    async def _start(self, probing: _RunningProbe) -> None:
        ranks = range(self._launch.nproc_per_node)
        try:
            accelerator = await self._find_accelerator()
            environments = [probe_environment(self._node, rank, os.environ) for rank in ranks]
        except Exception as error:  # BadEnvironment, or any error of a vendor's tool
            why = str(error) or type(error).__name__
            for rank in ranks:
                self._add_failure(probing, rank, self._clause(probing, rank, why))
            probing.started = True
            self._check_done(probing)
            return
        if probing.over:
            return
        probing.load = PROBE_LOAD_CPU if accelerator.device == "cpu" else PROBE_LOAD_GPU
        probing.started = True
        for rank in ranks:
            plan = self._plan(probing, accelerator, rank)
            order = spawning.SpawnProbe(0, plan, environments[rank], ())
            child = self._spawners.start(order, self)
            probing.children[child] = rank
            self._children[child] = probing

    async def _find_accelerator(self) -> Accelerator:
        if self._accelerator is None:
            word = self._launch.accelerator
            self._accelerator = await in_thread(
                lambda: accelerators.accelerator_for(word, os.environ), name="accelerator"
            )
        return self._accelerator

    def _plan(
        self, probing: _RunningProbe, accelerator: Accelerator, local_rank: int
    ) -> spawning.ProbePlan:
        order, load = probing.order, probing.load
        return spawning.ProbePlan(
            check=order.check,
            rank=order.first_rank + local_rank,
            world_size=order.world_size,
            store_host=order.store.host,
            store_port=order.store.port,
            device=accelerator.device,
            device_index=0 if self._launch.virtual_local_rank else local_rank,
            backend=accelerator.backend,
            matrix=0 if order.perf else load.matrix,
            dtype=load.dtype,
            matmuls=load.matmuls,
            sizes=load.perf_sizes if order.perf else (load.size,),
            transfers=load.transfers,
            warmup=load.warmup,
            limit=max(0.0, order.limit + TORCH_MARGIN - (time.monotonic() - probing.began)),
            fault=self._node.variables.get(env.NODE_FAULT, ""),
        )

    # ------------------------------------------------------------ ends

    def _on_limit(self, probing: _RunningProbe) -> None:
        """Handle the time limit: local ranks without a result have failed in their current phase;
        kill all processes."""
        limit = probing.order.limit
        for local_rank in range(self._launch.nproc_per_node):
            hung = f"{self._where(local_rank)}hung: no end within its limit of {limit:g} s"
            self._add_failure(probing, local_rank, hung)
        probing.started = True
        self._kill(probing)
        self._check_done(probing)

    def _kill(self, probing: _RunningProbe) -> None:
        for child in probing.children:
            child.signal(signal.SIGKILL)

    def _check_done(self, probing: _RunningProbe) -> None:
        """Report once every local rank has a result and every process is reaped."""
        if probing.over or not probing.started or probing.children:
            return
        self._close(probing)
        self._current = None
        self._deliver(ProbeEnded(self._combine(probing)))

    def _close(self, probing: _RunningProbe) -> None:
        probing.over = True
        probing.timer.cancel()

    # ------------------------------------------------------------ results

    def _result(
        self, probing: _RunningProbe, local_rank: int, message: spawning.ProbeSaid
    ) -> _Result:
        phase = probing.phase(local_rank)
        reason = ""
        if message.excused:
            reason = f"{_who_failed(probing.order)} {message.reason}"
        elif not message.ok:
            reason = self._clause(probing, local_rank, message.reason)
        return _Result(
            message.ok,
            phase,
            message.own,
            message.excused,
            reason,
            message.compute,
            message.transfers,
            message.timed,
        )

    def _add_failure(self, probing: _RunningProbe, local_rank: int, reason: str) -> None:
        phase = probing.phase(local_rank)
        failed = _Result(False, phase, phase in OWN_PHASES, False, reason)
        probing.results.setdefault(local_rank, failed)

    def _clause(self, probing: _RunningProbe, local_rank: int, why: str) -> str:
        """A clause without phase and partners, because the master's sentence names them."""
        after = duration(time.monotonic() - probing.began)
        limit = f"{probing.order.limit:g} s"
        return f"{self._where(local_rank)}after {after}, limit {limit}: {why}"

    def _where(self, local_rank: int) -> str:
        return f"local rank {local_rank}, " if self._launch.nproc_per_node > 1 else ""

    def _combine(self, probing: _RunningProbe) -> Probed:
        order, load = probing.order, probing.load
        results = list(probing.results.values())
        worst = max(results, key=lambda result: result.weight)  # the first of equals
        times = zip(*(result.transfers for result in results), strict=False)
        sizes = load.perf_sizes if order.perf else (load.size,)
        return Probed(
            check=order.check,
            ok=worst.ok,
            phase=worst.phase,
            own=worst.own,
            excused=worst.excused,
            reason=worst.reason,
            compute=max(result.compute for result in results),
            flops=0.0 if order.perf else 2.0 * load.matrix**3,
            transfers=tuple(
                Transfer(size, max(seconds))
                for size, seconds in zip(sizes, times, strict=False)
                if worst.ok
            ),
            seconds=time.monotonic() - probing.began,
            timed=max(result.timed for result in results),
        )


def _who_failed(order: Probe) -> str:
    """Who reported a failure of its own, as far as that is known."""
    if not order.partners:
        return "another local rank"
    return order.partners if order.group_world_size == 2 else f"one of {order.partners}"
