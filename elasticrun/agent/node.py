"""One node of a job: the agent's parts put together, the brain's effects, and the clean end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace
from typing import Final

from elasticrun.agent import identity, last_words
from elasticrun.agent.checkup import Checkup
from elasticrun.agent.clearing import clear_descendants, end_callers_ranks
from elasticrun.agent.events import EventLog
from elasticrun.agent.helpers import MasterProcess
from elasticrun.agent.host import HostError
from elasticrun.agent.introduction import hello, introduce
from elasticrun.agent.link import Link
from elasticrun.agent.logs import LogsUnusable, RankOutput
from elasticrun.agent.loop import AgentLoop
from elasticrun.agent.meeting import meeting_of
from elasticrun.agent.planted import planted_in
from elasticrun.agent.probing import Probing
from elasticrun.agent.processes import Reaper
from elasticrun.agent.progress import Progress
from elasticrun.agent.ranks import Ranks
from elasticrun.agent.signals import SignalInbox
from elasticrun.agent.snapshots import Snapshots
from elasticrun.agent.spawner import Spawners
from elasticrun.agent.spawner_process import SpawnerProcess
from elasticrun.agent.stores import HOLD, Stores
from elasticrun.agent.threads import in_thread, tell_failure, threadsafe
from elasticrun.agent.trust import trust_of
from elasticrun.agent.waiting import LongWaits, starting
from elasticrun.config import EXIT_FAILED, AgentConfig
from elasticrun.core.effects import (
    AgentEffect,
    AgentEvent,
    CallOffProbe,
    Exit,
    LinkBack,
    Note,
    Obey,
    PrepareStore,
    ReleaseStore,
    RunProbe,
    Say,
    SignalRanks,
    SpawnerLost,
    SpawnRanks,
    SweepRanks,
)
from elasticrun.core.failures import Ending, code_of
from elasticrun.core.group_states import State
from elasticrun.core.worker_group import WorkerGroup
from elasticrun.operator_log import StderrWriter, logger
from elasticrun.wire.ids import mint_incarnation
from elasticrun.wire.messages import Finished, Hello, Running, Start, Stopped
from elasticrun.wire.spawner import (
    Exited,
    FromSpawner,
    ProbeSaid,
    Spawned,
    SpawnFailed,
    StoreListening,
    Swept,
)

GOODBYE: Final = 2.0
"""Seconds for the last reports to reach the master."""

QUIT_LIMIT: Final = 5.0
"""Seconds for a spawner to kill and reap all it has; then the agent does."""

LEVELS: Final = {"info": 20, "warning": 30, "error": 40}


class Node:
    """Built once, run once."""

    def __init__(
        self,
        config: AgentConfig,
        inbox: SignalInbox,
        reaper: Reaper,
        spawner: SpawnerProcess,
        master: MasterProcess | None,
        writer: StderrWriter,
        ignored: tuple[int, ...],
    ) -> None:
        self._config = config = replace(config, env=dict(config.env))  # ours, to add to
        self._inbox = inbox
        self._reaper = reaper
        self._first_spawner = spawner
        self._first_master = master
        self._writer = writer
        self._ignored = ignored
        self._began = time.monotonic()
        self._waiting_since = self._began
        self._incarnation = mint_incarnation()
        self._identity = identity.Identity("", None)
        self._host = ""
        self._last_start: Start | None = None
        self._store_wanted = False
        self._attached = False
        self._ending = False
        self._hurry = asyncio.Event()
        self._events: EventLog | None = None
        self._long_waits = LongWaits()
        self._checkup = Checkup(config)
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ the whole life

    async def run(self) -> Exit:
        """From the first turn to the last process gone."""
        if self._first_master is not None:
            self._first_master.watch(self._reaper)
        self._build()
        loop = asyncio.get_running_loop()
        self._inbox.attach(
            lambda signum, death: threadsafe(loop, self._signalled, signum, death),
            lambda: threadsafe(loop, self._reaper.reap),
        )
        for name in self._inbox.unknown:
            logger.warning("--signals-to-handle: %s cannot be handled", name)
        for note in self._config.notes:
            self._writer.write(note.rstrip("\n") + "\n")
        self._spawners.pet(self._brain.master_lost_timeout)
        self._tasks.append(asyncio.create_task(self._set_out()))
        tell_failure(self._tasks[-1], self._fatal, "setting out")
        try:
            outcome = await self._loop.run()
        except BaseException:
            await self._leave_nothing(None)
            raise
        await self._leave_nothing(outcome)
        return outcome

    def _build(self) -> None:
        config = self._config
        spec = config.spec
        self._brain = WorkerGroup(
            nproc=config.nproc_per_node,
            restart_grace=spec.restart_grace,
            shutdown_timeout=config.shutdown_timeout,
            exit_barrier_timeout=config.exit_barrier_timeout,
            departure_grace=config.departure_grace,
            master_lost_timeout=spec.master_lost_timeout,
            host=os.uname().nodename,  # our own name may take a name server
        )
        self._loop = AgentLoop(self._brain, self._perform)
        self._meeting = meeting_of(
            config, self._reaper, self._writer, self._met, self._fatal, self._loop.deliver
        )
        self._spawners = Spawners(
            config,
            self._first_spawner,
            self._reaper,
            ignored=self._ignored,
            spared=self._meeting.pids,
            heard=self._spawner_said,
            lost=self._spawner_lost,
            fatal=self._fatal,
        )
        self._build_parts(0.0 if spec.max_nodes == 1 else HOLD)
        self._link = Link(
            lambda: self._meeting.dial,
            self._hello,
            self._meeting.overhear(self._from_master),
            waiting=self._no_master,
            broken=self._fatal,
            patience=spec.heartbeat_timeout,
            trust=trust_of(config),
        )

    def _build_parts(self, hold: float) -> None:
        """What has processes of the spawners. `hold`: seconds for which a store's port is held."""
        config, spec = self._config, self._config.spec
        self._stores = Stores(
            self._spawners, lambda: self._meeting.address, self._loop.deliver, self._fatal, hold
        )
        self._output = RankOutput(config.logs, spec.job_id, config.role, config.nproc_per_node)
        self._progress = Progress(
            config.nproc_per_node,
            lambda steps: self._link.offer(steps),
            lambda: self._link.beat_interval,
        )
        self._snapshots = Snapshots(
            config,
            self._spawners,
            environ=os.environ,
            link=lambda: self._link,
            address=lambda: self._meeting.address,
        )
        self._ranks = Ranks(
            config,
            self._spawners,
            self._output,
            host=lambda: self._host,
            deliver=self._loop.deliver,
            fatal=self._fatal,
            progress=self._progress.place,
            snapshots=self._snapshots.place,
            is_put_off=self._snapshots.departing.is_put_off,
        )
        self._probing = Probing(config, self._spawners, self._loop.deliver)
        self._helpers = (self._stores, self._probing, self._snapshots.savers)

    async def _set_out(self) -> None:
        """Who we are, where the master is; then dial."""
        config = self._config
        self._checkup.begin()
        try:
            await in_thread(self._output.prepare, name="logs")
        except LogsUnusable as error:
            self._fatal(str(error))
            return
        introduction = await introduce(config, self._writer)
        self._identity, self._host = introduction.identity, introduction.host
        self._events = introduction.events
        await self._snapshots.open(self._identity.node)
        config.env.update(planted_in(self._identity.node))
        if unfit := await self._checkup.unfit():
            self._loop.end(Exit(code_of(Ending.UNFIT), unfit, (), 0))
            return
        try:
            await self._meeting.settle(self._first_master)
        except HostError as error:
            self._fatal(str(error))

    def _met(self) -> None:
        """The master's place is known (again), and with it our own address."""
        if not self._attached:
            self._attached = True
            if self._store_wanted:
                self._stores.prepare()
            self._link.start()
            self._tasks.append(asyncio.create_task(self._first_contact()))
        self._link.nudge()

    async def _first_contact(self) -> None:
        """End with a sentence if no master is ever heard."""
        limit = self._config.spec.join_timeout
        try:
            await asyncio.wait_for(self._link.connected.wait(), limit)
        except TimeoutError:
            self._fatal(f"no job master answered at {self._meeting.dial} for {limit:g} s")
        else:
            self._checkup.welcomed(self._meeting.dial)

    # ------------------------------------------------------------ what comes in

    def _signalled(self, signum: int, death: bool) -> None:
        if death:
            logger.warning("Received %d death signal, shutting down workers", signum)
        if self._ending:
            if death:
                self._hurry.set()
            return
        self._loop.deliver(self._snapshots.departing.signalled(signum, death=death))

    def _from_master(self, event: AgentEvent) -> None:
        if isinstance(event, LinkBack) and not self._brain.is_parked:  # held comes before said
            self._snapshots.attached()
        self._loop.deliver(event)

    def _spawner_said(self, message: FromSpawner) -> None:
        if isinstance(message, Spawned):
            self._stores.spawned(message)
            self._ranks.spawned(message)
        elif isinstance(message, Exited | SpawnFailed):
            if not any(part.gone(message) for part in self._helpers):
                self._ranks.gone(message)
        elif isinstance(message, ProbeSaid):
            self._probing.said(message)
        elif isinstance(message, StoreListening):
            self._stores.listening(message)
        elif isinstance(message, Swept):
            self._ranks.swept(message)

    def _spawner_lost(self, reason: str) -> None:
        self._ranks.all_lost()
        self._probing.all_lost()
        self._stores.all_lost()
        self._snapshots.savers.all_lost()
        self._loop.deliver(SpawnerLost(reason, time.time_ns() // 1000))

    def _no_master(self, reason: str) -> None:
        """The first dial was in vain; told once."""
        dial, limit = self._meeting.dial, self._config.spec.join_timeout
        words = "no job master answers at %s yet (%s); this node dials for %g s"
        logger.warning(words, dial, reason, limit)

    def _fatal(self, sentence: str) -> None:
        self._loop.end(Exit(EXIT_FAILED, sentence, (), 0))

    def _hello(self) -> Hello:
        where = (self._host, self._meeting.address)
        return hello(self._config, self._identity.node, self._incarnation, *where, self._brain)

    # ------------------------------------------------------------ what goes out

    def _perform(self, effect: AgentEffect) -> None:
        if isinstance(effect, Say):
            self._say(effect)
        elif isinstance(effect, SpawnRanks):
            self._spawn(effect)
        elif isinstance(effect, SignalRanks):
            self._ranks.signal(effect.local_ranks, effect.signum)
        elif isinstance(effect, SweepRanks):
            self._ranks.sweep(effect.grace)
        elif isinstance(effect, PrepareStore):
            if self._attached:
                self._stores.prepare()
            else:  # its endpoint carries our address, which is not known yet
                self._store_wanted = True
        elif isinstance(effect, ReleaseStore):
            self._stores.release(effect.store)
        elif isinstance(effect, RunProbe):
            self._probing.run(effect.order)
        elif isinstance(effect, CallOffProbe):
            self._probing.call_off()
        elif isinstance(effect, Obey):
            self._snapshots.obey(effect.order)
        elif isinstance(effect, Note):
            logger.log(LEVELS.get(effect.level, 20), "%s", effect.text)
        status = self._brain.status()
        if status.state in (State.STOPPING, State.ENDING):
            self._ranks.call_off()
        self._long_waits.look(status)

    def _spawn(self, effect: SpawnRanks) -> None:
        now = time.monotonic()
        start = effect.start
        if start.round.number > 1:
            most = self._config.spec.max_restarts
            logger.warning("%s", starting(start, self._last_start, most))
        self._last_start = start
        self._spawners.pet(self._brain.master_lost_timeout)  # which the master may have told anew
        self._meeting.store(start.store)
        self._progress.begin(start)
        self._snapshots.begin(start)
        if self._events is not None:
            self._events.rendezvous(start, now - self._waiting_since, time.time_ns() // 10**6)
        self._ranks.spawn(effect)

    def _say(self, effect: Say) -> None:
        report = effect.report
        if isinstance(report, Stopped | Finished):
            self._snapshots.reaped()
        if isinstance(report, Stopped):
            self._waiting_since = time.monotonic()
            self._meeting.store(None)
        elif isinstance(report, Running) and self._events and self._ranks.start:
            self._events.started(self._ranks.start, self._ranks.pids, time.time_ns() // 10**6)
        self._link.say(report)

    # ------------------------------------------------------------ the end

    async def _leave_nothing(self, outcome: Exit | None) -> None:
        """End every process below this one, tell the user, and give back what was taken."""
        self._ending = True
        self._snapshots.savers.close()
        self._long_waits.close()
        self._checkup.close()
        for task in self._tasks:
            task.cancel()
        if outcome is not None:
            await clear_descendants(self._ranks, self._config.shutdown_timeout, self._hurry)
        goodbye = asyncio.create_task(self._link.close(GOODBYE))
        await self._spawners.close(QUIT_LIMIT)
        if self._spawners.lives_by_call:
            await end_callers_ranks(self._config, self._ranks.pids.values(), QUIT_LIMIT)
        stuck = await self._reaper.sweep(keep=self._meeting.pids(), limit=QUIT_LIMIT)
        if stuck:
            logger.error("the kernel does not let these processes die: %s", stuck)
        self._ranks.close()
        self._progress.end()
        self._probing.close()
        self._stores.close()
        with contextlib.suppress(TimeoutError):
            await in_thread(lambda: self._output.close(QUIT_LIMIT), limit=4 * QUIT_LIMIT)
        await goodbye
        job_over = outcome is not None and outcome.signum == 0
        await self._snapshots.close(job_over=job_over)
        await self._meeting.close(job_over=job_over)
        with contextlib.suppress(TimeoutError):
            await in_thread(self._identity.release, limit=1.0, name="identity")
        if outcome is not None:
            await self._tell_events(outcome)
            ran = self._ranks.start is not None
            await last_words.tell(self._config, outcome, self._writer, ran=ran)

    async def _tell_events(self, outcome: Exit) -> None:
        if self._events is not None:
            seconds = time.monotonic() - self._began
            ranks = dict(self._ranks.pids)
            await last_words.events(self._events, self._ranks.start, ranks, outcome, seconds)
