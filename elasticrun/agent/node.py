"""One node of a job: who it is (found out before the first dial: a name server or a disk may be
slow), the agent's parts put together, the brain's effects, and the clean end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from elasticrun import __version__
from elasticrun.agent import farewell
from elasticrun.agent.boot import Reaper, SignalInbox, SpawnerProcess, planted_in
from elasticrun.agent.checkup import Checkup
from elasticrun.agent.context import NodeContext
from elasticrun.agent.farewell import Clearing, end_callers_ranks
from elasticrun.agent.link import identity
from elasticrun.agent.link.link import Link
from elasticrun.agent.link.master_process import MasterProcess
from elasticrun.agent.link.trust import trust_of
from elasticrun.agent.logs.last_lines import LIMIT
from elasticrun.agent.logs.output import LogsUnusable, RankOutput
from elasticrun.agent.logs.whereabouts import LogNotes
from elasticrun.agent.rendezvous.c10d import C10dRendezvous
from elasticrun.agent.rendezvous.place import HostError
from elasticrun.agent.runtime import (
    DISK_LIMIT,
    AgentLoop,
    Tasks,
    awaited,
    in_thread,
    own_defect,
    threadsafe,
)
from elasticrun.agent.sight.watching import LocalSight
from elasticrun.agent.snapshots.snapshots import LocalSnapshots
from elasticrun.agent.story import LongWaits, Story, directed, in_words
from elasticrun.agent.workers.events import EventLog
from elasticrun.agent.workers.probes import Probing
from elasticrun.agent.workers.progress import Progress
from elasticrun.agent.workers.ranks import Ranks
from elasticrun.agent.workers.spawner import Spawners
from elasticrun.agent.workers.stores import HOLD, Stores
from elasticrun.config import EXIT_FAILED, EXIT_OK, AgentConfig
from elasticrun.core import events as fx
from elasticrun.core.reasons import MasterUnmet, out_of_reach, text
from elasticrun.core.rounds.failures import ECHOES, Ending, code_of, root_cause
from elasticrun.core.worker.group import WorkerGroup
from elasticrun.core.worker.leaving import ending
from elasticrun.core.worker.states import GroupStatus, State
from elasticrun.host.log import LEVELS, NOTICE, StderrWriter, logger, name_speaker
from elasticrun.host.system.sandbox import NoThread
from elasticrun.wire import env, messages as m
from elasticrun.wire.types import Endpoint, mint_incarnation

if TYPE_CHECKING:
    from elasticrun.agent.rendezvous.etcd import EtcdRendezvous
    from elasticrun.agent.rendezvous.file import FileRendezvous
    from elasticrun.agent.rendezvous.finding import FoundJob

NAME_LIMIT: Final = 2.0
"""Seconds that a name server may take to say how this host is called."""

SLOT_LIMIT: Final = 15.0
"""Seconds for the lock on this node's place in the job; the user's folder may be on a network."""

GOODBYE: Final = 2.0
"""Seconds for the last reports to reach the master."""

QUIT_LIMIT: Final = 5.0
"""Seconds for a spawner to kill and reap all it has; then the agent does."""

REMOVE_LIMIT: Final = 12.0
"""Seconds for giving back the memory of the snapshots; more than `segments` takes by itself."""

LEAVE_LIMIT: Final = 10.0
"""Seconds for leaving the rendezvous; more than a meeting takes by itself."""


def rendezvous_of(
    node: NodeContext, met: Callable[[], None], found: FoundJob | None
) -> C10dRendezvous | EtcdRendezvous | FileRendezvous:
    """The way in which the nodes of this job meet. `met` is called when the master's place is known
    and whenever one serves there anew; `found`: see `finding`. What is not needed is not
    imported."""
    if found is not None:
        from elasticrun.agent.rendezvous.file import FileRendezvous

        return FileRendezvous(node, met, found)
    if node.config.rendezvous.kind == "etcd":
        from elasticrun.agent.rendezvous.etcd import EtcdRendezvous

        return EtcdRendezvous(node, met)
    return C10dRendezvous(node, met)


class NodeAgent:
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
        found: FoundJob | None = None,
    ) -> None:
        """`found`: where the job is, where that had to be found out before."""
        self._found = found
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
        self._store_wanted = False
        self._attached = False
        self._ending = False
        self._clearing = Clearing()
        self._events: EventLog | None = None
        self._long_waits = LongWaits(self._waits_long)
        self._story = Story(
            most=config.spec.max_restarts,
            several=config.spec.max_nodes > 1,
            say=_notice,
        )
        self._checkup = Checkup(config)
        self._tasks = Tasks(self.fatal)

    # ------------------------------------------------------------ the whole life

    async def run(self) -> fx.Exit:
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
        self._spawners.keep_alive(self._brain.master_lost_timeout)
        loop.set_exception_handler(self._uncaught)
        self._tasks.start(self._set_out(), "setting out")
        try:
            outcome = await self._loop.run()
        except BaseException:
            await self._leave_nothing(None)
            raise
        finally:
            loop.set_exception_handler(None)
        await self._leave_nothing(outcome)
        return outcome

    def _uncaught(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What nobody caught in a callback of ours ends the node, as in a task of ours; what others
        (grpc) leave is told as ever."""
        if (error := own_defect(context)) is None:
            loop.default_exception_handler(context)
            return
        logger.error("a defect of elasticrun", exc_info=error)
        self.fatal(f"a defect of elasticrun, please report it: {error!r}")

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
        self._shared = NodeContext(
            config, self._loop.deliver, self.fatal, self._reaper, self._writer
        )
        self._meeting = rendezvous_of(self._shared, self._met, self._found)
        self._spawners = Spawners(
            self._shared, self._first_spawner, self._ignored, self._spawner_lost
        )
        self._link = self._shared.link = Link(
            self,
            trust_of(config),
            patience=spec.heartbeat_timeout,
            page_level=NOTICE if spec.max_nodes > 1 else logging.INFO,
        )
        self._build_parts()

    def _build_parts(self) -> None:
        """What has processes of the spawners."""
        config, spec, shared = self._config, self._config.spec, self._shared
        hold = 0.0 if spec.max_nodes == 1 else HOLD  # seconds for which a store's port is held
        self._stores = Stores(shared, self._spawners, hold)
        self._output = RankOutput(
            config.logs, spec.job_id, config.role, config.nproc_per_node, *config.console_fds
        )
        self._notes = LogNotes(os.environ, spec.job_id, config.run.folder)
        self._output.remember_in(self._notes)
        self._progress = Progress(config.nproc_per_node, self._link)
        self._snapshots = LocalSnapshots(shared, self._spawners, os.environ, self._resumed)
        self._ranks = Ranks(shared, self._spawners, self._output, self._snapshots.drain.is_put_off)
        self._probing = Probing(shared, self._spawners)
        self._sight = LocalSight(shared, self._ranks, self._progress)

    async def _set_out(self) -> None:
        """Who we are, where the master is; then dial."""
        config = self._config
        self._checkup.begin()
        where = f"--log-dir {config.logs.log_dir or '(a folder for temporary files)'}"
        try:
            slow = f"{where}: the disk does not answer"
            await in_thread(self._output.prepare, limit=DISK_LIMIT, name="logs", slow=slow)
        except (LogsUnusable, NoThread) as error:
            self.fatal(str(error))
            return
        except TimeoutError:
            self.fatal(f"{where}: the disk has not answered for {DISK_LIMIT:g} s")
            return
        await self._introduce()
        self._notes.node = self._identity.node
        if config.spec.max_nodes > 1:
            name_speaker(f"elasticrun[{self._identity.node}]")
            if self._output.has_files:
                _notice(f"the output of its ranks is in {self._output.run_dir}")
        await self._snapshots.open(self._identity.node)
        config.env.update(planted_in(self._identity.node))
        if unfit := await self._checkup.unfit():
            self._loop.end(fx.Exit(code_of(Ending.UNFIT), unfit, (), 0))
            return
        try:
            await self._meeting.settle(self._first_master)
        except HostError as error:
            self.fatal(str(error))

    async def _introduce(self) -> None:
        """This node's id, its host's name, and the event log, which bears both."""
        config = self._config
        try:
            self._identity = await in_thread(
                lambda: identity.identify(config.node_id, config.spec.job_id, os.environ),
                limit=SLOT_LIMIT,
                name="identity",
                late=identity.Identity.release,
            )
        except TimeoutError as error:
            why = str(error) or f"no answer of the disk for {SLOT_LIMIT:g} s"
            self._identity = identity.for_this_life(why, os.environ)
        if self._identity.note:
            logger.warning("%s", self._identity.note)
        try:
            host = await in_thread(identity.host_name, limit=NAME_LIMIT, name="host-name")
        except TimeoutError:
            host = os.uname().nodename
        self._shared.host = host
        self._events = EventLog(
            config.event_log_handler,
            self._writer.write,
            run_id=config.spec.job_id,
            role=config.role,
            host=host,
            backend=config.rendezvous.kind,
            entry_point=config.entry.target,
        )

    def _met(self) -> None:
        """The master's place is known (again), and with it our own address."""
        self._shared.address = self._meeting.address
        if not self._attached:
            self._attached = True
            if self._store_wanted:
                self._stores.prepare()
            self._link.start()
            self._tasks.start(self._first_contact(), "the first contact with the master")
        self._link.nudge()

    async def _first_contact(self) -> None:
        """End with a sentence if no master is ever heard."""
        limit = self._config.spec.join_timeout
        try:
            await asyncio.wait_for(self._link.connected.wait(), limit)
        except TimeoutError:
            self._loop.end(ending(EXIT_FAILED, MasterUnmet(str(self.dial), limit)))
        else:
            self._checkup.welcomed(self.dial)

    # ------------------------------------------------------------ what comes in

    def _signalled(self, signum: int, death: bool) -> None:
        if death:
            logger.info("Received %d death signal, shutting down workers", signum)
            self._clearing.signalled()
        if self._ending:
            if death:
                self._clearing.hurry()
            return
        self._loop.deliver(self._snapshots.drain.signalled(signum, death=death))

    @property
    def dial(self) -> Endpoint:
        """Where the master is, as far as it is known."""
        return self._meeting.dial

    def linked(self, event: fx.AgentEvent) -> None:
        """What the link says."""
        self._meeting.heard(event)
        if isinstance(event, fx.LinkBack):  # held comes before said
            self._snapshots.attached()
            self._sight.again()
            if self._brain.status().state is State.RUNNING:
                self._story.linked_again()
        if isinstance(event, fx.Ordered) and isinstance(event.order, m.Inspect):
            self._sight.obey(event.order)
            return
        self._loop.deliver(event)

    def _spawner_lost(self, reason: str) -> None:
        self._sight.end()
        self._ranks.all_lost()
        self._probing.call_off()  # the brain knows, and answers for itself
        self._loop.deliver(fx.SpawnerLost(reason, time.time_ns() // 1000))

    def no_master(self, reason: str) -> None:
        """The first dial was in vain; told once."""
        dial, limit = self.dial, self._config.spec.join_timeout
        unmet = MasterUnmet(str(dial), limit, reason)
        logger.warning("%s", directed(text(unmet), out_of_reach(unmet), dial))

    def _directed(self, note: fx.Note) -> str:
        """For people. The brain's sentence stands in traces and on pages as it is."""
        whom = "" if note.level == "info" else out_of_reach(note.why)
        return directed(note.text, whom, self.dial)

    def fatal(self, sentence: str) -> None:
        """End, for this reason."""
        self._loop.end(fx.Exit(EXIT_FAILED, sentence, (), 0))

    def _waits_long(self, status: GroupStatus) -> None:
        where, dial = self._config.rendezvous, self.dial
        place = f"{where.host}:{where.port}" if where.host else str(dial)  # as the user wrote it
        said = in_words(status, place, time.monotonic())
        _notice(directed(said, out_of_reach(status.why), dial))

    def hello(self) -> m.Hello:
        """What this node says to a master first."""
        config = self._config
        return m.Hello(
            protocol=m.PROTOCOL_VERSION,
            version=__version__,
            node=self._identity.node,
            incarnation=self._incarnation,
            host=self._shared.host,
            address=self._meeting.address,
            pid=os.getpid(),
            node_rank=config.node_rank,
            local_world_size=config.nproc_per_node,
            role=config.role,
            spec=config.spec,
            attached=self._brain.attached(),
            last_term=self._brain.term,
        )

    # ------------------------------------------------------------ what goes out

    def _perform(self, effect: fx.AgentEffect) -> None:
        match effect:
            case fx.Say(report):
                self._say(report)
            case fx.SpawnRanks():
                self._spawn(effect)
            case fx.SignalRanks(local_ranks, signum):
                self._ranks.signal(local_ranks, signum)
            case fx.SweepRanks(grace):
                self._ranks.sweep(grace)
            case fx.PrepareStore() if self._attached:
                self._stores.prepare()
            case fx.PrepareStore():  # its endpoint carries our address, which is not known yet
                self._store_wanted = True
            case fx.ReleaseStore(store):
                self._stores.release(store)
            case fx.RunProbe(order):
                self._probing.run(order)
            case fx.CallOffProbe():
                self._probing.call_off()
            case fx.Obey(order):
                self._snapshots.obey(order)
            case fx.TellRecovery(order):
                self._story.recovered(order)
        status = self._brain.status()
        if isinstance(effect, fx.Note):
            self._long_waits.noted(effect, status, self._noted)
        if status.state in (State.STOPPING, State.ENDING):
            self._ranks.call_off()
        self._long_waits.look(status)

    def _noted(self, note: fx.Note) -> None:
        logger.log(LEVELS.get(note.level, 20), "%s", self._directed(note))

    def _spawn(self, effect: fx.SpawnRanks) -> None:
        now = time.monotonic()
        start = effect.start
        self._story.starts(start)
        # which the master may have told anew
        self._spawners.keep_alive(self._brain.master_lost_timeout)
        self._meeting.store(start.store)
        self._progress.begin(start)
        self._snapshots.begin(start)
        if self._events is not None:
            self._events.rendezvous(start, now - self._waiting_since, time.time_ns() // 10**6)
        places = self._sight.begin(start)
        self._ranks.spawn(
            effect,
            {rank: self._own(rank) for rank in range(self._config.nproc_per_node)},
            places,
        )

    def _resumed(self, step: int, source: str) -> None:
        self._story.resumed(step, source)

    def _own(self, local_rank: int) -> dict[str, str]:
        """Where this rank tells its steps and speaks of its snapshots, as far as it can."""
        progress, snapshots = self._progress.place(local_rank), self._snapshots.place(local_rank)
        own = {env.PROGRESS: progress, env.SNAPSHOTS: snapshots}
        return {name: place for name, place in own.items() if place}

    def _say(self, report: m.Report) -> None:
        if isinstance(report, m.RanksFailed | m.Stopped | m.Finished):
            self._progress.last_words()
        if isinstance(report, m.RanksFailed | m.Stopping | m.Stopped):
            newest = max(self._progress.newest, self._snapshots.drain.generation.newest())
            self._sight.stopping()
            if isinstance(report, m.RanksFailed | m.Stopped):
                report = structs.replace(report, newest=newest)
        if isinstance(report, m.Stopped | m.Finished):
            self._snapshots.reaped()
            self._sight.end()
        if isinstance(report, m.Stopped):
            self._waiting_since = time.monotonic()
            self._meeting.store(None)
        elif isinstance(report, m.Running) and self._ranks.start and self._events is not None:
            self._events.started(self._ranks.start, self._ranks.pids, time.time_ns() // 10**6)
        self._link.say(report)
        if isinstance(report, m.RanksFailed):
            self._tasks.start(self._say_last_lines(report), "reading what a rank wrote last")

    async def _say_last_lines(self, report: m.RanksFailed) -> None:
        """For the master's record of it; nothing waits for this."""
        cause = root_cause(report.failures)
        if cause is None or cause.kind in ECHOES:
            return
        with contextlib.suppress(TimeoutError, NoThread):
            text = await in_thread(
                lambda: self._output.last_lines(cause.local_rank), limit=LIMIT, name="last-lines"
            )
            if text:
                self._link.say(m.LastLines(report.round, cause.rank, text))

    # ------------------------------------------------------------ the end

    async def _leave_nothing(self, outcome: fx.Exit | None) -> None:
        """End every process below this one, give back what was taken, and tell the user."""
        self._ending = True
        signalled = outcome is None or outcome.signum != 0
        end = self._clearing
        end.begin()
        end.now("calling the saver off", self._snapshots.savers.close)
        end.now("the end of warnings", self._long_waits.close)
        end.now("the end of the doctor", self._checkup.close)
        self._tasks.close()
        if outcome is not None:
            grace = self._config.shutdown_timeout
            grace = end.left(grace) / 2 if signalled else grace
            well = outcome.code == EXIT_OK and not signalled
            linger = self._config.child_exit_timeout if well else 0.0
            ended = end.descendants(self._ranks, grace, linger)
            await end.step("the end of ranks' processes", ended, None)
            if not signalled:
                end.begin()
        goodbye = awaited(self._link.close(GOODBYE), "goodbye")
        await self._end_processes()
        await end.step("the goodbye to the master", goodbye, GOODBYE + 1.0)
        job_over = not signalled
        for what, work, limit in (
            ("giving the snapshots back", self._snapshots.close(job_over=job_over), REMOVE_LIMIT),
            ("leaving the rendezvous", self._meeting.close(job_over=job_over), LEAVE_LIMIT),
            ("giving this node's id back", in_thread(self._identity.release), 1.0),
        ):
            await end.step(what, work, limit)
        # It lasts as long as somebody reads: nothing else waits for it.
        await end.step("showing output", end.output(self._output, hurried=signalled), None)
        if not signalled:
            end.begin()
        well = outcome is not None and outcome.code == EXIT_OK
        tidying = in_thread(lambda: self._output.tidy(ended_well=well), name="tidy")
        await end.step("removing log folders", tidying, 2.0)
        if outcome is not None:
            await end.step("the last events", self._tell_events(outcome), 5.0)
            words = farewell.tell(
                *(self._config, outcome, self._writer, end.left(farewell.TELL_LIMIT)),
                ran=self._ranks.start is not None,
                folder=self._snapshots.folder,
            )
            await end.step("the last words", words, None)

    async def _end_processes(self) -> None:
        end = self._clearing
        await end.step(
            "the fork server's end", self._spawners.close(end.left(QUIT_LIMIT)), QUIT_LIMIT + 1
        )
        if self._spawners.lives_by_call:
            pids = self._ranks.pids.values()
            await end.step(
                "ending the ranks",
                end_callers_ranks(self._config, pids, QUIT_LIMIT),
                QUIT_LIMIT + 1,
            )
        await end.step("killing what is left", self._kill_the_rest(), QUIT_LIMIT + 1)
        end.now("the end of the ranks", self._ranks.close)
        end.now("the end of looks", self._sight.end)
        end.now("the end of progress", self._progress.end)
        end.now("the end of probes", self._probing.close)
        end.now("the end of stores", self._stores.close)

    async def _kill_the_rest(self) -> None:
        limit = self._clearing.left(QUIT_LIMIT)
        stuck = await self._reaper.sweep(limit=limit)
        if stuck:
            logger.error("the kernel does not let these processes die: %s", stuck)

    async def _tell_events(self, outcome: fx.Exit) -> None:
        if self._events is not None:
            seconds = time.monotonic() - self._began
            ranks = dict(self._ranks.pids)
            await farewell.events(self._events, self._ranks.start, ranks, outcome, seconds)


def _notice(text: str) -> None:
    logger.log(NOTICE, "%s", text)
