"""The probes of this node: one process a local rank, a limit, and what they come to together.

The master's order names a small group of nodes and the store where they meet; what is measured here
is one `Probed`, the worst of the local ranks. Every process of a probe has been reaped before it is
told, or it was called off and nothing is told.
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
"""Whoever fails here has failed with no part of any other node in it."""

LATER: Final = 1.0
"""Seconds by which torch's own time-outs in a probe come after the limit: the agent ends it first,
and says so in the same words whatever it was that hung."""


@dataclass(eq=False)
class _Probing:
    """One order under way."""

    order: Probe
    load: ProbeLoad
    began: float  # monotonic seconds
    children: dict[Child, int] = field(default_factory=dict)  # their local ranks, until reaped
    phases: dict[int, ProbePhase] = field(default_factory=dict)  # by local rank
    results: dict[int, _Result] = field(default_factory=dict)  # in the order of their coming
    timer: Timer = field(default_factory=Timer)
    started: bool = False  # its processes have been ordered
    over: bool = False  # told, or called off

    def phase(self, local_rank: int) -> ProbePhase:
        return self.phases.get(local_rank, ProbePhase.START)


@dataclass(frozen=True, slots=True)
class _Result:
    """What came of one local rank; `reason` is the clause about it in `Probed.reason`."""

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
        """How bad it is: the worst of a node's local ranks is what the node says."""
        if self.ok:
            return 0
        return 3 if self.own else 1 if self.excused else 2


class Probing:
    """Carries out RunProbe and CallOffProbe."""

    def __init__(self, node: NodeContext, spawners: Spawners) -> None:
        self._config = node.config
        self._spawners = spawners
        self._deliver = node.deliver
        self._current: _Probing | None = None
        self._children: dict[Child, _Probing] = {}
        self._accelerator: Accelerator | None = None
        self._tasks = Tasks(logger.error)  # a probe that is not started is overdue later

    # ------------------------------------------------------------ orders

    def run(self, order: Probe) -> None:
        """Probe as the order says; ProbeEnded tells, after `order.limit` seconds at the latest (and
        the moment that it takes to kill and reap)."""
        self.call_off()
        probing = _Probing(order, PROBE_LOAD_CPU, time.monotonic())
        self._current = probing
        probing.timer.after(order.limit, self._overdue, probing)
        self._tasks.start(self._start(probing), "starting probes")

    def call_off(self) -> None:
        """Kill what is under way; nothing is told of it."""
        probing, self._current = self._current, None
        if probing is not None:
            self._close(probing)
            self._kill(probing)

    def close(self) -> None:
        """The agent ends; its spawners kill and reap what is left."""
        self.call_off()
        self._tasks.close()

    # ------------------------------------------------------------ reports

    def heard(self, child: Child, message: spawning.FromSpawner) -> None:
        """A probe enters a phase, has come to its end, or is reaped: the last one's is the end of
        the order."""
        probing = self._children[child]
        local_rank = probing.children[child]
        if isinstance(message, spawning.Exited | spawning.SpawnFailed):
            self._spawners.forget(child)
            self.lost(child)
            if not probing.over:
                ended = "it ended without a result"
                why = ended if isinstance(message, spawning.Exited) else message.reason
                self._failed(probing, local_rank, self._clause(probing, local_rank, why))
            self._look(probing)
        elif isinstance(message, spawning.ProbeSaid) and not probing.over:
            with contextlib.suppress(ValueError):  # no phase of ours
                probing.phases[local_rank] = ProbePhase(message.phase)
            if message.done:
                probing.results.setdefault(local_rank, self._result(probing, local_rank, message))

    def lost(self, child: Child) -> None:
        """Reaped. Where its spawner died, the node calls the order off next: its state machine
        knows of it, and answers for itself."""
        del self._children.pop(child).children[child]

    # ------------------------------------------------------------ starting

    async def _start(self, probing: _Probing) -> None:
        config = self._config
        ranks = range(config.nproc_per_node)
        try:
            accelerator = await self._find_accelerator()
            environments = [probe_environment(config, rank, os.environ) for rank in ranks]
        except Exception as error:  # BadEnvironment, or whatever a vendor's tools have raised
            why = str(error) or type(error).__name__
            for rank in ranks:
                self._failed(probing, rank, self._clause(probing, rank, why))
            probing.started = True
            self._look(probing)
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
            word = self._config.accelerator
            self._accelerator = await in_thread(
                lambda: accelerators.of(word, os.environ), name="accelerator"
            )
        return self._accelerator

    def _plan(
        self, probing: _Probing, accelerator: Accelerator, local_rank: int
    ) -> spawning.ProbePlan:
        order, load = probing.order, probing.load
        return spawning.ProbePlan(
            check=order.check,
            rank=order.first_rank + local_rank,
            world_size=order.world_size,
            store_host=order.store.host,
            store_port=order.store.port,
            device=accelerator.device,
            device_index=0 if self._config.virtual_local_rank else local_rank,
            backend=accelerator.backend,
            matrix=0 if order.perf else load.matrix,
            dtype=load.dtype,
            matmuls=load.matmuls,
            sizes=load.perf_sizes if order.perf else (load.size,),
            transfers=load.transfers,
            warmup=load.warmup,
            limit=max(0.0, order.limit + LATER - (time.monotonic() - probing.began)),
            fault=self._config.env.get(env.NODE_FAULT, ""),
        )

    # ------------------------------------------------------------ ends

    def _overdue(self, probing: _Probing) -> None:
        """The limit: what has not said its result by now has failed where it is, and is killed."""
        limit = probing.order.limit
        for local_rank in range(self._config.nproc_per_node):
            hung = f"{self._where(local_rank)}hung: no end within its limit of {limit:g} s"
            self._failed(probing, local_rank, hung)
        probing.started = True
        self._kill(probing)
        self._look(probing)

    def _kill(self, probing: _Probing) -> None:
        for child in probing.children:
            child.signal(signal.SIGKILL)

    def _look(self, probing: _Probing) -> None:
        """Tell the result once every local rank has one and every process is reaped."""
        if probing.over or not probing.started or probing.children:
            return
        self._close(probing)
        self._current = None
        self._deliver(ProbeEnded(self._together(probing)))

    def _close(self, probing: _Probing) -> None:
        probing.over = True
        probing.timer.cancel()

    # ------------------------------------------------------------ results

    def _result(self, probing: _Probing, local_rank: int, said: spawning.ProbeSaid) -> _Result:
        phase = probing.phase(local_rank)
        reason = ""
        if said.excused:
            reason = f"{_another(probing.order)} {said.reason}"
        elif not said.ok:
            reason = self._clause(probing, local_rank, said.reason)
        return _Result(
            said.ok,
            phase,
            said.own,
            said.excused,
            reason,
            said.compute,
            said.transfers,
            said.timed,
        )

    def _failed(self, probing: _Probing, local_rank: int, reason: str) -> None:
        phase = probing.phase(local_rank)
        failed = _Result(False, phase, phase in OWN_PHASES, False, reason)
        probing.results.setdefault(local_rank, failed)

    def _clause(self, probing: _Probing, local_rank: int, why: str) -> str:
        """The master's sentences name phase and partners before they quote it."""
        after = duration(time.monotonic() - probing.began)
        limit = f"{probing.order.limit:g} s"
        return f"{self._where(local_rank)}after {after}, limit {limit}: {why}"

    def _where(self, local_rank: int) -> str:
        return f"local rank {local_rank}, " if self._config.nproc_per_node > 1 else ""

    def _together(self, probing: _Probing) -> Probed:
        order, load = probing.order, probing.load
        results = list(probing.results.values())
        worst = max(results, key=lambda result: result.weight)  # of several, the first
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


def _another(order: Probe) -> str:
    """Who it was that said it had failed, as far as that is known here."""
    if not order.partners:
        return "another local rank"
    return order.partners if order.group_world_size == 2 else f"one of {order.partners}"
