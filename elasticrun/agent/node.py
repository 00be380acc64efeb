"""One node of a job: its identity, its parts, the effects of its state machine, its shutdown.

The identity is complete before the first connection; a slow name server or disk may delay that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from elasticrun import __version__
from elasticrun.agent import shutdown
from elasticrun.agent.boot import Reaper, SignalInbox, SpawnerProcess, fault_environment
from elasticrun.agent.checkup import Checkup
from elasticrun.agent.context import NodeContext
from elasticrun.agent.job_log import OperatorMessages, notice
from elasticrun.agent.link.identity import NodeId, host_name, identify, temporary_id
from elasticrun.agent.link.link import Link
from elasticrun.agent.link.master_process import MasterProcess
from elasticrun.agent.link.reports import Reporter
from elasticrun.agent.link.trust import trust_of
from elasticrun.agent.logs.log_index import LogNotes
from elasticrun.agent.logs.output import LogsUnusable, RankOutput
from elasticrun.agent.rendezvous.endpoint import EndpointRegistry
from elasticrun.agent.rendezvous.invitation import Invitation
from elasticrun.agent.rendezvous.place import HostError
from elasticrun.agent.rendezvous.registry import Leader, NoRegistry, Registry
from elasticrun.agent.rendezvous.rendezvous import NodeRendezvous
from elasticrun.agent.runtime import (
    DISK_LIMIT,
    AgentLoop,
    Tasks,
    awaited,
    in_thread,
    own_defect,
    threadsafe,
)
from elasticrun.agent.shutdown import ShutdownSteps, end_callers_ranks
from elasticrun.agent.sight.watching import LocalSight
from elasticrun.agent.snapshots.snapshots import LocalSnapshots
from elasticrun.agent.standby.next_life import NextLife
from elasticrun.agent.workers.events import EventLog
from elasticrun.agent.workers.probes import Probing
from elasticrun.agent.workers.progress import Progress
from elasticrun.agent.workers.ranks import Ranks
from elasticrun.agent.workers.recoverable import Recoverables
from elasticrun.agent.workers.spawner import Spawners
from elasticrun.agent.workers.stores import HOLD, Stores
from elasticrun.config import EXIT_FAILED, EXIT_OK, Caller, Identity, Launch, Place, spec_of
from elasticrun.core import events as fx
from elasticrun.core.reasons import MasterUnmet
from elasticrun.core.rounds.failures import Ending, code_of
from elasticrun.core.worker.group import WorkerGroup
from elasticrun.core.worker.leaving import ending
from elasticrun.core.worker.states import State
from elasticrun.host.log import NOTICE, StderrWriter, logger, set_prefix
from elasticrun.host.system.sandbox import NoThread
from elasticrun.wire import env, messages as m
from elasticrun.wire.types import Endpoint

if TYPE_CHECKING:
    from elasticrun.agent.rendezvous.finding import FoundJob

NAME_LIMIT: Final = 2.0
"""Seconds for a name server to resolve this host's name."""

SLOT_LIMIT: Final = 15.0
"""Seconds for locking this node's slot in the job; the user's folder may be on a network file
system."""

GOODBYE: Final = 2.0
"""Seconds for sending the last reports to the master."""

QUIT_LIMIT: Final = 5.0
"""Seconds for a spawner to kill and reap its descendants; then the agent does it."""

REMOVE_LIMIT: Final = 12.0
"""Seconds for releasing the memory of the snapshots; more than the limit in `segments`."""

LEAVE_LIMIT: Final = 10.0
"""Seconds for leaving the rendezvous; more than the limits of its own steps."""


def rendezvous_of(
    node: NodeContext, on_master: Callable[[], None], found: FoundJob | None
) -> NodeRendezvous:
    """The rendezvous of this job. `on_master` is called when the master's address is known, and
    whenever a master starts to serve there. `found`: the result of `finding.find_job`, if any."""
    if found is None:
        return NodeRendezvous(node, on_master, _registry(node))
    invitation = None
    hosts = not isinstance(found.seen, Leader)
    if hosts and node.launch.spec.max_nodes > 1:
        invitation = Invitation(node, given=found.given)
    return NodeRendezvous(
        node, on_master, found.registry or _registry(node), found.seen, invitation
    )


def _registry(node: NodeContext) -> Registry:
    """The registry of a job that needs no search. Imports the etcd client only if it is needed."""
    if node.place.kind != "etcd":
        return EndpointRegistry(node.launch, node.place, node.identity.job_id)
    from elasticrun.agent.rendezvous.etcd import EtcdRegistry

    try:
        return EtcdRegistry(node.launch, node.place, node.identity)
    except HostError as wrong:
        return NoRegistry(str(wrong))


@dataclass(frozen=True)
class Early:
    """What exists before the event loop."""

    inbox: SignalInbox
    reaper: Reaper
    spawner: SpawnerProcess
    writer: StderrWriter
    ignored: tuple[int, ...]
    """Signals that this process inherited as ignored."""
    caller: Caller | None = None
    master: MasterProcess | None = None
    found: FoundJob | None = None
    """Where the job is, if that had to be looked up."""


def extra_variables(launch: Launch, caller: Caller | None) -> dict[str, str]:
    """Extra variables of every rank: the caller's, and the path of the run folder."""
    found = {} if caller is None else dict(caller.variables)
    if folder := launch.master.run.folder:
        found[env.RUN_FOLDER] = os.path.abspath(folder)
    return found


async def run_node(launch: Launch, place: Place, identity: Identity, early: Early) -> fx.Exit:
    """Run a node's part of a job, until its last process has exited."""
    if early.master is not None:
        early.master.watch(early.reaper)
    return await NodeAgent(launch, place, identity, early).run(early)


class NodeAgent:
    """The composition root: built once, run once, in the running loop."""

    def __init__(self, launch: Launch, place: Place, identity: Identity, early: Early) -> None:
        spec = launch.spec
        brain = WorkerGroup(
            nproc=launch.nproc_per_node,
            restart_grace=spec.restart_grace,
            shutdown_timeout=launch.shutdown_timeout,
            exit_barrier_timeout=launch.exit_barrier_timeout,
            departure_grace=launch.departure_grace,
            master_lost_timeout=spec.master_lost_timeout,
            host=os.uname().nodename,  # resolving our own name may be slow
        )
        self._loop = AgentLoop(brain, self)
        self._tasks = Tasks(self.fatal)
        self._shutdown = ShutdownSteps()
        shared = self._shared = NodeContext(
            *(launch, place, identity, self._loop.deliver, self.fatal, early.reaper, early.writer),
            called=early.caller is not None,
            variables=extra_variables(launch, early.caller),
        )
        self._checkup = Checkup(shared)
        self._rendezvous = rendezvous_of(shared, self._master_found, early.found)
        self._spawners = Spawners(shared, early.spawner, early.ignored, self._spawner_lost)
        shared.link = Link(
            self,
            trust_of(place, identity),
            patience=spec.heartbeat_timeout,
            page_level=NOTICE if spec.max_nodes > 1 else logging.INFO,
        )
        self._messages = OperatorMessages(launch, place, self._rendezvous)
        self._events = EventLog(
            launch.event_log_handler,
            early.writer.write,
            run_id=identity.job_id,
            role=launch.role,
            host="",  # set once it is known
            backend=place.kind,
            entry_point=launch.entry.target,
        )
        hold = 0.0 if spec.max_nodes == 1 else HOLD  # seconds for which a store's port is held
        self._stores = Stores(shared, self._spawners, hold)
        shown = (1, 2) if early.caller is None else early.caller.console_fds
        nproc, job_id = launch.nproc_per_node, identity.job_id
        self._output = RankOutput(launch.logs, job_id, launch.role, nproc, *shown)
        self._output.notes = LogNotes(os.environ, job_id, launch.master.run.folder)
        self._progress = Progress(nproc, shared.link)
        resumed = self._messages.resumed
        recoverables = Recoverables(shared)
        self._snapshots = LocalSnapshots(shared, self._spawners, recoverables, os.environ, resumed)
        self._ranks = Ranks(
            *(shared, self._spawners, recoverables, self._output),
            *(self._snapshots.drain.defers_signal, self._events),
        )
        self._probing = Probing(shared, self._spawners)
        self._sight = LocalSight(shared, self._ranks, self._progress)
        self._reports = Reporter(shared, self._progress, self._snapshots, self._output)
        places = (self._progress, self._snapshots, self._sight)
        health = self._checkup.reporter
        standbys = NextLife(shared, self._spawners, self._ranks, self._stores, health, places)
        shared.parts += [self._messages, self._progress, self._snapshots, self._events]
        shared.parts += [self._sight, standbys]

    # ------------------------------------------------------------ the whole run

    async def run(self, early: Early) -> fx.Exit:
        """Run the node, until its last process has exited."""
        loop = asyncio.get_running_loop()
        early.inbox.attach(
            lambda signum, death: threadsafe(loop, self._signalled, signum, death),
            lambda: threadsafe(loop, early.reaper.reap),
        )
        for name in early.inbox.unknown:
            logger.warning("--signals-to-handle: %s cannot be handled", name)
        self._spawners.keep_alive(self._loop.brain.master_lost_timeout)
        loop.set_exception_handler(self._uncaught)
        self._tasks.start(self._start_up(early.master), "starting the node")
        try:
            outcome = await self._loop.run()
        except BaseException:
            await self._shut_down(None)
            raise
        finally:
            loop.set_exception_handler(None)
        await self._shut_down(outcome)
        return outcome

    def _uncaught(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An uncaught exception in our own callback ends the node, as in a task. Exceptions of
        others (grpc) go to the default handler."""
        if (error := own_defect(context)) is None:
            loop.default_exception_handler(context)
            return
        logger.error("a bug in elasticrun", exc_info=error)
        self.fatal(f"a bug in elasticrun, please report it: {error!r}")

    async def _start_up(self, master: MasterProcess | None) -> None:
        """Determine the identity and the master's address, then connect. `master`: one that already
        runs."""
        shared, launch = self._shared, self._shared.launch
        self._checkup.start()
        where = f"--log-dir {launch.logs.log_dir or '(a folder for temporary files)'}"
        try:
            slow = f"{where}: the disk does not answer"
            await in_thread(self._output.prepare, limit=DISK_LIMIT, name="logs", slow=slow)
        except (LogsUnusable, NoThread) as error:
            self.fatal(str(error))
            return
        except TimeoutError:
            self.fatal(f"{where}: the disk has not answered for {DISK_LIMIT:g} s")
            return
        await self._identify()
        node = shared.identity.node_id
        if self._output.notes is not None:
            self._output.notes.node = node
        if launch.spec.max_nodes > 1:
            set_prefix(f"elasticrun[{node}]")
            if self._output.has_files:
                notice(f"the output of its ranks is in {self._output.run_dir}")
        await self._snapshots.open(node)
        shared.variables |= fault_environment(node)
        if unfit := await self._checkup.why_unfit():
            self._loop.finish(fx.Exit(code_of(Ending.UNFIT), unfit, (), 0))
            return
        try:
            await self._rendezvous.settle(master)
        except HostError as error:
            self.fatal(str(error))

    async def _identify(self) -> None:
        """Set this node's id and its host's name."""
        shared = self._shared
        given, job_id = shared.identity.node_id, shared.identity.job_id
        try:
            found = await in_thread(
                lambda: identify(given, job_id, os.environ),
                limit=SLOT_LIMIT,
                name="identity",
                late=NodeId.release,
            )
        except TimeoutError as error:
            why = str(error) or f"the disk has not answered for {SLOT_LIMIT:g} s"
            found = temporary_id(why, os.environ)
        shared.identity, shared.slot = replace(shared.identity, node_id=found.text), found.slot
        if found.note:
            logger.warning("%s", found.note)
        try:
            host = await in_thread(host_name, limit=NAME_LIMIT, name="host-name")
        except TimeoutError:
            host = os.uname().nodename
        shared.host = self._events.host = host

    def _master_found(self) -> None:
        """Called when the master's address is known, and whenever a master starts to serve there:
        update our own address, which depends on it, and connect."""
        self._shared.address = self._rendezvous.address
        self._stores.on_address()
        if self._shared.link.start():
            self._tasks.start(self._first_contact(), "the first contact with the master")
        self._shared.link.nudge()

    async def _first_contact(self) -> None:
        """End the node if no master answers within the join timeout; else schedule the checks that
        need the master."""
        limit = self._shared.launch.spec.join_timeout
        try:
            await asyncio.wait_for(self._shared.link.connected.wait(), limit)
        except TimeoutError:
            self._loop.finish(ending(EXIT_FAILED, MasterUnmet(str(self.dial), limit)))
        else:
            self._checkup.on_welcome(self.dial)

    # ------------------------------------------------------------ events in

    def _signalled(self, signum: int, death: bool) -> None:
        if death:
            logger.info("Received %d death signal, shutting down workers", signum)
            self._shutdown.note_death_signal()
        if self._shutdown.has_begun:
            if death:
                self._shutdown.hurry()
            return
        self._loop.deliver(self._snapshots.drain.signalled(signum, death=death))

    @property
    def dial(self) -> Endpoint:
        """The master's address, as far as it is known."""
        return self._rendezvous.dial

    def linked(self, event: fx.AgentEvent) -> None:
        """Dispatch an event of the link."""
        self._rendezvous.on_link_event(event)
        if isinstance(event, fx.LinkBack):  # holdings go before reports
            self._snapshots.attached()
            self._sight.resend()
            self._checkup.reporter.resend()
            if self._loop.brain.status().state is State.RUNNING:
                self._messages.linked_again()
        self._loop.deliver(event)

    def route(self, order: m.Order) -> None:
        """Dispatch an order that changes nothing in the state machine."""
        match order:
            case m.Inspect():
                self._sight.obey(order)
            case m.Recovery():
                self._messages.recovered(order)
            case m.Warn():
                self._messages.noted(fx.Note(order.text, "warning"), self._loop.brain.status())
            case _:
                self._snapshots.obey(order)

    def _spawner_lost(self, reason: str) -> None:
        self._sight.close()
        self._ranks.drop_all()
        self._probing.call_off()  # the state machine reports the failure itself
        self._loop.deliver(fx.SpawnerLost(reason, time.time_ns() // 1000))

    def no_master(self, reason: str) -> None:
        """No master has answered the first attempts to connect; called once."""
        self._messages.no_master(reason)

    def fatal(self, sentence: str) -> None:
        """End the node for this reason."""
        self._loop.finish(fx.Exit(EXIT_FAILED, sentence, (), 0))

    def hello(self) -> m.Hello:
        """The Hello of this node."""
        shared, launch, brain = self._shared, self._shared.launch, self._loop.brain
        return m.Hello(
            protocol=m.PROTOCOL_VERSION,
            version=__version__,
            node=shared.identity.node_id,
            incarnation=shared.incarnation,
            host=shared.host,
            address=self._rendezvous.address,
            pid=os.getpid(),
            node_rank=launch.node_rank,
            local_world_size=launch.nproc_per_node,
            role=launch.role,
            spec=spec_of(launch, shared.identity),
            attached=brain.start,
            last_term=brain.term,
        )

    # ------------------------------------------------------------ effects out

    def perform(self, effect: fx.AgentEffect) -> None:
        """Carry out an effect of the state machine."""
        match effect:
            case fx.Say(report):
                self._reports.send(report)
            case fx.SpawnRanks():
                self._spawn(effect)
            case fx.RanksStopping():
                for part in self._shared.parts:
                    part.ranks_stopping()
            case fx.RanksGone(done):
                for part in self._shared.parts:
                    part.ranks_gone(done=done)
            case fx.RecallRanks(local_ranks):
                self._ranks.recall(local_ranks)
            case fx.LetRankFail(local_rank):
                self._ranks.let_fail(local_rank)
            case fx.SignalRanks(local_ranks, signum):
                self._ranks.signal(local_ranks, signum)
            case fx.SweepRanks(grace):
                self._ranks.sweep(grace)
            case fx.PrepareStore():
                self._stores.prepare()
            case fx.ReleaseStore(store):
                self._stores.release(store)
            case fx.RunProbe(order):
                self._probing.run(order)
            case fx.CallOffProbe():
                self._probing.call_off()
            case fx.Obey(order):
                self._snapshots.obey(order)
        status = self._loop.brain.status()
        if isinstance(effect, fx.Note):
            self._messages.noted(effect, status)
        if status.state in (State.STOPPING, State.ENDING):
            self._ranks.call_off()
        self._messages.update(status)

    def _spawn(self, effect: fx.SpawnRanks) -> None:
        # the master may have changed the timeout
        self._spawners.keep_alive(self._loop.brain.master_lost_timeout)
        for part in self._shared.parts:
            part.round_began(effect.start)
        ranks = range(self._shared.launch.nproc_per_node)
        self._ranks.spawn(
            effect, {rank: self._reporting_variables(rank) for rank in ranks}, self._sight.places
        )

    def _reporting_variables(self, local_rank: int) -> dict[str, str]:
        """The environment of this rank for reporting steps and snapshots, as far as available."""
        progress, snapshots = self._progress.place(local_rank), self._snapshots.place(local_rank)
        own = {env.PROGRESS: progress, env.SNAPSHOTS: snapshots}
        return {name: place for name, place in own.items() if place}

    # ------------------------------------------------------------ shutdown

    async def _shut_down(self, outcome: fx.Exit | None) -> None:
        """End every descendant, release all resources, and print the outcome."""
        signalled = outcome is None or outcome.signum != 0
        steps, launch = self._shutdown, self._shared.launch
        steps.start()
        steps.run_now("closing the saver", self._snapshots.close)
        steps.run_now("closing the log of waits", self._messages.close)
        steps.run_now("closing the checkup", self._checkup.close)
        self._tasks.close()
        self._reports.close()
        if outcome is not None:
            grace = launch.shutdown_timeout
            grace = steps.time_for(grace) / 2 if signalled else grace
            well = outcome.code == EXIT_OK and not signalled
            linger = launch.child_exit_timeout if well else 0.0
            ended = steps.end_descendants(self._ranks, grace, linger)
            await steps.run_step("ending the ranks' processes", ended, None)
            if not signalled:
                steps.start()
        goodbye = awaited(self._shared.link.close(GOODBYE), "goodbye")
        await self._end_processes()
        await steps.run_step("closing the link to the master", goodbye, GOODBYE + 1.0)
        job_over = not signalled
        snapshots = self._snapshots.release(job_over=job_over)
        for what, work, limit in (
            ("releasing the snapshots", snapshots, REMOVE_LIMIT),
            ("leaving the rendezvous", self._rendezvous.close(job_over=job_over), LEAVE_LIMIT),
            ("releasing this node's id", in_thread(self._shared.release_slot), 1.0),
        ):
            await steps.run_step(what, work, limit)
        # This takes as long as somebody reads; nothing else waits for it.
        await steps.run_step(
            "showing output", steps.show_output(self._output, hurried=signalled), None
        )
        if not signalled:
            steps.start()
        well = outcome is not None and outcome.code == EXIT_OK
        tidying = in_thread(lambda: self._output.tidy(ended_well=well), name="tidy")
        await steps.run_step("removing log folders", tidying, 2.0)
        if outcome is not None:
            await steps.run_step("the last events", self._write_last_events(outcome), 5.0)
            words = shutdown.print_outcome(
                *(self._shared, outcome, steps.time_for(shutdown.PRINT_LIMIT)),
                ran=self._ranks.start is not None,
                folder=self._snapshots.folder,
            )
            await steps.run_step("the last words", words, None)

    async def _end_processes(self) -> None:
        steps = self._shutdown
        await steps.run_step(
            "stopping the fork server",
            self._spawners.close(steps.time_for(QUIT_LIMIT)),
            QUIT_LIMIT + 1,
        )
        if self._spawners.is_caller:
            pids = self._ranks.pids.values()
            await steps.run_step(
                "ending the ranks",
                end_callers_ranks(self._shared.variables.get(env.CALLER, ""), pids, QUIT_LIMIT),
                QUIT_LIMIT + 1,
            )
        await steps.run_step("killing leftover processes", self._kill_the_rest(), QUIT_LIMIT + 1)
        steps.run_now("closing the ranks", self._ranks.close)
        for part in self._shared.parts:
            steps.run_now("closing what follows the ranks", part.close)
        steps.run_now("closing the probes", self._probing.close)
        steps.run_now("closing the stores", self._stores.close)

    async def _kill_the_rest(self) -> None:
        limit = self._shutdown.time_for(QUIT_LIMIT)
        stuck = await self._shared.reaper.sweep(limit=limit)
        if stuck:
            logger.error(
                "these processes do not exit after SIGKILL (blocked in the kernel): %s", stuck
            )

    async def _write_last_events(self, outcome: fx.Exit) -> None:
        ranks = dict(self._ranks.pids)
        await shutdown.write_last_events(self._events, self._ranks.start, ranks, outcome)
