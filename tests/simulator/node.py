"""A node of the simulated world: the real agent's brain with a fake shell around it.

The shell does what the real one owes: it dials and says Hello, beats, prepares stores, starts and
signals ranks, sweeps, and ends. Everything takes a little virtual time and can be made to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from elasticrun.core import events as fx
from elasticrun.core.rounds.failures import classify
from elasticrun.core.worker.group import WorkerGroup
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint
from tests.simulator.memory import Memory
from tests.simulator.network import Stream
from tests.simulator.probes import ProbeShell, report_steps
from tests.simulator.ranks import NodeSetup as NodeSetup, Rank
from tests.simulator.words import in_short

if TYPE_CHECKING:
    from tests.simulator.world import World

SIGKILL, SIGTERM = 9, 15
DEATH = 0.002
"""Seconds from a signal to the end of a rank that does not handle it."""


class Node:
    def __init__(
        self, world: World, setup: NodeSetup, incarnation: str, before: Memory | None = None
    ) -> None:
        self.world = world
        self.setup = setup
        self.name = setup.name
        self.incarnation = incarnation
        self.alive = True
        self.frozen = False
        self.cut = False
        self.exited: fx.Exit | None = None
        self.stream: Stream | None = None
        self.ranks: dict[int, Rank] = {}
        self.stuck_pids: tuple[int, ...] = ()
        self._held: list[Callable[[], None]] = []  # what came in while frozen
        self._stores = 0
        self._spawner = 1
        self.beats = 0
        self._tick_at: float | None = None
        self._dialling = False
        self._last_wait = ""
        self._probe = ProbeShell(world, self)
        self.memory = Memory(world, self, before)
        self.group = WorkerGroup(
            nproc=setup.nproc,
            restart_grace=setup.spec.restart_grace,
            shutdown_timeout=setup.shutdown_timeout,
            exit_barrier_timeout=setup.exit_barrier,
            master_lost_timeout=setup.spec.master_lost_timeout,
            host=setup.name,
        )
        self._schedule_tick()
        self.dial()
        if world.steps:
            report_steps(world, self)

    # ------------------------------------------------------------ the loop

    def feed(self, event: fx.AgentEvent) -> None:
        if self.frozen:
            self._held.append(lambda: self.feed(event))
            return
        if not self.alive:
            return
        for effect in self.group.step(event, self.world.clock.now):
            self._perform(effect)
        self._schedule_tick()

    def hold(self, what: Callable[[], None]) -> None:
        """This happens once the agent is no longer stopped."""
        self._held.append(what)

    def _schedule_tick(self) -> None:
        when = self.group.next_deadline()
        if not self.alive or when is None or when == self._tick_at:
            return
        self._tick_at = when

        def tick() -> None:
            if self._tick_at == when:
                self._tick_at = None
                self.feed(fx.Tick())

        self.world.clock.at(when, tick)

    def _perform(self, effect: fx.AgentEffect) -> None:
        after = self.world.clock.after
        if isinstance(effect, fx.Say):
            self.say(effect.report)
        elif isinstance(effect, fx.Note):
            if effect.text != self._last_wait:  # the trace has it already, as an order
                self.world.trace(self.name, effect.text)
        elif isinstance(effect, fx.PrepareStore):
            self._prepare_store()
        elif isinstance(effect, fx.SpawnRanks):
            self._spawn(effect)
        elif isinstance(effect, fx.RecallRanks):
            for local_rank in effect.local_ranks:
                rank = self.ranks[local_rank]
                assert rank.leaves_within is not None
                after(rank.leaves_within, partial(self._left, rank))
        elif isinstance(effect, fx.LetRankFail):
            after(DEATH, partial(self.end_rank, self.ranks[effect.local_rank], 1, "ValueError"))
        elif isinstance(effect, fx.SignalRanks):
            for local_rank in effect.local_ranks:
                self._signal(self.ranks[local_rank], effect.signum)
        elif isinstance(effect, fx.SweepRanks):
            after(0.001, partial(self._swept, self._spawner))
        elif isinstance(effect, fx.RunProbe | fx.CallOffProbe):
            self._probe.perform(effect)
        elif isinstance(effect, fx.Obey):
            self.memory.obey(effect.order)
        elif isinstance(effect, fx.Exit):
            self._exit(effect)

    # ------------------------------------------------------------ the link

    def dial(self) -> None:
        """Attach to the master, again and again until it answers."""
        self._dialling = False
        if not self.alive or self.stream is not None:
            return
        if self.frozen:
            self._held.append(self.dial)
            return
        master = self.world.master
        if master is None or self.cut:
            self.feed(fx.LinkLost("the master does not answer"))
            self._dial_again()
            return
        self.stream = self.world.new_stream(self, master)
        self.stream.hello(self.hello())
        self.memory.attached()
        self.feed(fx.LinkBack())
        self.world.insides.attached(self, self.group.status().round if self.ranks else None)
        self._beat(self.stream)

    def _dial_again(self) -> None:
        if not self._dialling:
            self._dialling = True
            self.world.clock.after(self.world.redial, self.dial)

    def hello(self) -> m.Hello:
        return m.Hello(
            protocol=m.PROTOCOL_VERSION,
            version="sim",
            node=self.name,
            incarnation=self.incarnation,
            host=self.name,
            address=self.name,
            pid=1,
            node_rank=self.setup.node_rank,
            local_world_size=self.setup.nproc,
            role=self.setup.role,
            spec=self.setup.spec,
            attached=self.group.start,
            last_term=self.group.term,
        )

    def ordered(self, stream: Stream, order: m.Order) -> None:
        if self.frozen:
            self._held.append(lambda: self.ordered(stream, order))
            return
        if not self.alive or stream is not self.stream:
            return
        if self.world.traced and not isinstance(order, m.Welcome):
            self.world.trace(self.name, f"< {in_short(order)}")
        if self.world.on_order is not None:
            self.world.on_order(self, order)
        if isinstance(order, m.Wait):
            self._last_wait = order.reason
        if isinstance(order, m.Inspect):
            self.world.insides.inspect(self, order)
            return
        if self.group.is_changed_by(order):
            self.feed(fx.Ordered(order))
        else:
            self._route(order)

    def _route(self, order: m.Order) -> None:
        if self.group.obeys and isinstance(order, m.Warn):
            self.world.trace(self.name, order.text)
        elif self.group.obeys:
            self.memory.obey(order)

    def link_broke(self, stream: Stream, reason: str) -> None:
        if self.frozen:
            self._held.append(lambda: self.link_broke(stream, reason))
            return
        if self.alive and stream is self.stream:
            self.stream = None
            self.feed(fx.LinkLost(reason))
            self._dial_again()

    def _beat(self, stream: Stream) -> None:
        if not self.alive or stream is not self.stream or not self.world.beats:
            return
        if not self.frozen:
            self.beats += 1
            stream.report(m.Beat(self.beats))
        self.world.clock.after(self.world.pace(), lambda: self._beat(stream))

    def say(self, report: m.Report) -> None:
        if isinstance(report, m.Leaving):
            self.world.shelves.leaving.add(self.name)
        if self.stream is not None:
            if self.world.traced:
                self.world.trace(self.name, f"> {in_short(report)}")
            self.stream.report(report)
            if self.world.says_twice():
                self.stream.report(report)

    def repeat(self) -> None:
        """Say again how things stand here, as on a new stream."""
        if self.stream is not None:
            self.feed(fx.LinkBack())

    # ------------------------------------------------------------ stores and ranks

    def _prepare_store(self) -> None:
        spawner = self._spawner
        delay = self.setup.first_store if self._stores == 0 else self.setup.store
        self._stores += 1
        store = Endpoint(self.name, self.world.new_port())

        def ready() -> None:
            if spawner == self._spawner:
                self.feed(fx.StoreReady(store))

        self.world.clock.after(delay, ready)

    def lose_store(self) -> None:
        """The store on offer ends by itself."""
        offered = self.group.status().offered_store
        if offered is not None:
            self.feed(fx.StoreLost(offered))

    def _spawn(self, effect: fx.SpawnRanks) -> None:
        start, spawner = effect.start, self._spawner
        self.memory.started(start)
        kept = {local_rank: self.ranks[local_rank] for local_rank in effect.kept}
        self.ranks = {local: self._new_rank(start, local, one.pid) for local, one in kept.items()}
        for local_rank, before in kept.items():
            if before.alive:
                before.alive = False
            else:  # its exit has been reported, or is about to be
                self.ranks[local_rank].alive = False

        def born(local_rank: int) -> None:
            if not self.alive or spawner != self._spawner:
                return
            rank = self.ranks.get(local_rank)
            if rank is None or local_rank not in kept:
                rank = self.ranks[local_rank] = self._new_rank(
                    start, local_rank, self.world.new_pid()
                )
            if rank.alive:
                self.world.worlds.born(rank)
            self.feed(fx.RankSpawned(local_rank, rank.pid))
            if local_rank not in kept and rank.leaves_within is not None:
                self.feed(fx.RankArmed(local_rank, True))

        for local_rank in range(self.setup.nproc):
            delay = 0.0 if local_rank in kept else self.setup.spawn * (local_rank + 1)
            self.world.clock.after(delay, partial(born, local_rank))

    def _new_rank(self, start: m.Start, local_rank: int, pid: int) -> Rank:
        rank = Rank(
            round=start.round,
            rank=start.first_rank + local_rank,
            local_rank=local_rank,
            world_size=start.info.world_size,
            pid=pid,
            on_exit=lambda code, message: self._rank_ended(rank, code, message),
            ignores_term=self.setup.term,
            exit_on_term=self.setup.term_code,
            leaves_within=self.setup.leaves,
        )
        return rank

    def _left(self, rank: Rank) -> None:
        """A recalled rank has left its round."""
        if rank.alive and not rank.waits:
            rank.waits = True
            self.world.worlds.dead(rank)
            self.feed(fx.RankLeft(rank.local_rank))

    def break_collective(self, rank: Rank, message: str) -> None:
        """A rank has lost its peer: its process ends, or it raises in a recoverable function."""
        if rank.leaves_within is None:
            self.end_rank(rank, 1, message)
        elif not rank.waits:
            self.feed(fx.RankRaised(rank.local_rank, self._failure(rank, 1, message)))

    def _signal(self, rank: Rank, signum: int) -> None:
        delay = DEATH
        code = -signum
        if signum != SIGKILL:
            delay += rank.ignores_term
            code = code if rank.exit_on_term is None else rank.exit_on_term
        self.world.clock.after(delay, lambda: self.end_rank(rank, code, ""))

    def end_rank(self, rank: Rank, code: int, message: str) -> None:
        """A rank ends by itself or of a signal; its agent reaps it."""
        if rank.alive and rank.pid not in self.stuck_pids:
            rank.alive = False
            self.world.rank_died(self, rank, code)
            rank.on_exit(code, message)

    def _rank_ended(self, rank: Rank, code: int, message: str) -> None:
        failure = self._failure(rank, code, message) if code != 0 else None
        self.feed(fx.RankExited(rank.local_rank, code, failure))

    def _failure(self, rank: Rank, code: int, message: str) -> m.Failure:
        return m.Failure(
            host=self.name,
            rank=rank.rank,
            local_rank=rank.local_rank,
            pid=rank.pid,
            exitcode=code,
            time_us=round(self.world.clock.now * 1e6),
            kind=classify(code, message, stopping=False, oom=False),
            message=message,
            traceback="",
            error_file="",
        )

    def _swept(self, spawner: int) -> None:
        if spawner == self._spawner:
            self.memory.reaped()
            self.feed(fx.RanksSwept(self.stuck_pids))

    # ------------------------------------------------------------ what befalls it

    def signal(self, signum: int, name: str, *, death: bool) -> None:
        held, current = self.memory.signalled(), self.memory.current
        self.feed(fx.Signalled(signum, name, death, current, held=held, fresh=current < 0))

    def lose_spawner(self) -> None:
        """The fork server is killed: its ranks and stores go with it."""
        self._spawner += 1
        self._stores = 0
        self._kill_ranks()
        self._probe.lose_spawner()
        self.feed(fx.SpawnerLost("killed by signal 9"))

    def _kill_ranks(self) -> None:
        for rank in self.ranks.values():
            if rank.alive:
                rank.alive = False
                self.world.rank_died(self, rank, -SIGKILL)

    def kill(self) -> None:
        """kill -9 of the agent: its ranks go with it, the kernel closes its stream."""
        self.alive = False
        self._kill_ranks()
        if self.stream is not None:
            self.stream.close_from_agent(clean=False)
            self.stream = None

    def vanish(self) -> None:
        """The host loses its power: nobody is told; only unanswered pings tell the master."""
        self.alive = False
        self.memory.is_lost = True
        self._kill_ranks()
        if self.stream is not None:
            self.world.cut_stream(self.stream, self)
            self.stream = None

    def freeze(self) -> None:
        """SIGSTOP to the agent: its ranks run on."""
        self.frozen = True
        if self.stream is not None:
            stream = self.stream

            def unanswered() -> None:
                if self.frozen:
                    self.world.unanswered(stream)

            self.world.clock.after(self.world.ping_timeout, unanswered)

    def thaw(self) -> None:
        """SIGCONT: what came in is read now, in its order."""
        self.frozen = False
        held, self._held = self._held, []
        for what in held:
            what()
        if self.stream is not None and not self.stream.master_open:
            self.stream.break_at_agent("the stream broke while this process was stopped")

    def _exit(self, effect: fx.Exit) -> None:
        self.exited = effect
        self.alive = False
        self.memory.leave(effect.code)
        self.world.trace(self.name, f"exits {effect.code}: {effect.reason}")
        self._kill_ranks()
        if self.stream is not None:
            self.stream.close_from_agent(clean=True)
            self.stream = None
