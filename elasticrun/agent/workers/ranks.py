"""The local ranks: turns effects into orders to the spawner, and its reports into events.

A rank gets the launcher's own environment, which the spawner inherited, overlaid with torchrun's
variables (names in `wire.env`). One start of the ranks is active at a time. Blocking work (log
folders, error files, sysfs) runs in threads, so a stop may arrive before its ranks have started;
such ranks are reported as exited.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from string import Template
from typing import Any, Final

from msgspec.structs import replace

from elasticrun.agent.context import NodeContext
from elasticrun.agent.logs.output import LogsUnusable, RankLogs, RankOutput
from elasticrun.agent.runtime import DISK_LIMIT, Tasks, in_thread
from elasticrun.agent.workers.events import EventLog
from elasticrun.agent.workers.exits import KillLog, describe, oom_watcher
from elasticrun.agent.workers.recoverable import Recoverables
from elasticrun.agent.workers.spawner import Child, Spawners
from elasticrun.core.events import RankExited, RankSpawned, RanksSwept, SpawnRanks
from elasticrun.core.reasons import text
from elasticrun.core.rounds.failures import ECHOES, reason_of
from elasticrun.host.log import NOTICE, logger
from elasticrun.host.system.sandbox import NoThread
from elasticrun.wire import debugger, env, spawning
from elasticrun.wire.messages import Failure, FailureKind, Start
from elasticrun.wire.snapshots import EnterRound
from elasticrun.wire.types import Endpoint, EntryKind, Entrypoint

DESCRIBE_LIMIT: Final = 0.5
"""Seconds for reading what a failed rank left; a hung file system must not delay a restart."""

STOP_MEMORY: Final = 5.0
"""A rank that dies within this many seconds of a signal that we sent counts as stopped by it."""


class BadEnvironment(Exception):
    """The requested settings do not fit this node, for example too few devices; the text is one
    sentence."""


def rank_environment(
    node: NodeContext,
    start: Start,
    local_rank: int,
    environ: Mapping[str, str],
    own: Mapping[str, str],
) -> dict[str, str]:
    """The variables of this rank that are set over the launcher's own environment.

    `environ`: the launcher's environment; `own`: the addresses for its steps and snapshots. Raises
    BadEnvironment if CUDA_VISIBLE_DEVICES (on ROCm HIP_VISIBLE_DEVICES) has too few devices for
    virtual local ranks."""
    # Ranks of a static job see exactly the master address that the user named, as under torchrun:
    # the proxy on that port forwards to the round's store (decision 008).
    launch, where = node.launch, node.place
    master = Endpoint(where.host, where.port) if where.kind == "static" else start.store
    return {
        env.RANK: str(start.first_rank + local_rank),
        env.LOCAL_RANK: "0" if launch.virtual_local_rank else str(local_rank),
        env.GROUP_RANK: str(start.group_rank),
        env.ROLE_RANK: str(start.role_first_rank + local_rank),
        env.ROLE_NAME: launch.role,
        env.WORLD_SIZE: str(start.info.world_size),
        env.LOCAL_WORLD_SIZE: str(launch.nproc_per_node),
        env.GROUP_WORLD_SIZE: str(start.group_world_size),
        env.ROLE_WORLD_SIZE: str(start.role_world_size),
        env.MASTER_ADDR: master.host,
        env.MASTER_PORT: str(master.port),
        env.RESTART_COUNT: str(start.info.restart_count),
        env.MAX_RESTARTS: str(launch.spec.max_restarts),
        env.RUN_ID: node.identity.job_id,
        env.USE_AGENT_STORE: "True",
        env.ERROR_FILE: "",  # the path is set with the logs, if there is one
        env.SIGNALS_TO_HANDLE: ",".join(launch.signals_to_handle),
        env.NCCL_ASYNC_ERROR_HANDLING: environ.get(env.NCCL_ASYNC_ERROR_HANDLING, "1"),
        **own,
        **probe_environment(node, local_rank, environ),
    }


def probe_environment(
    node: NodeContext, local_rank: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables of a probe over the launcher's own environment: those of the rank that it
    represents, without the rank numbers. Raises BadEnvironment as for a rank."""
    table = {}
    if node.launch.set_omp_threads:
        table[env.OMP_NUM_THREADS] = "1"
    if node.launch.virtual_local_rank:
        table.update(_only_device(local_rank, environ))
    table.update(node.variables)
    return table


def _only_device(local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make only this local rank's device visible. As in torch 2.15, ROCm uses
    HIP_VISIBLE_DEVICES if it is set. Raises BadEnvironment."""
    hip = environ.get(env.HIP_VISIBLE_DEVICES)
    name = env.HIP_VISIBLE_DEVICES if hip else env.CUDA_VISIBLE_DEVICES
    visible = environ.get(name)
    devices = [str(rank) for rank in range(local_rank + 1)]
    if visible is not None:
        devices = visible.split(",")
    if local_rank >= len(devices):
        raise BadEnvironment(
            f"--virtual-local-rank: local rank {local_rank} has no device of its own in "
            f"{name}={visible}"
        )
    names = (env.CUDA_VISIBLE_DEVICES, name)
    return dict.fromkeys(names, devices[local_rank].strip())


def rank_entry(entry: Entrypoint, local_rank: int) -> Entrypoint:
    """The entry with `${local_rank}` replaced, as torchrun does: in the arguments and, unless the
    program is executed directly, in its name. Other `$` words are unchanged."""

    def fill(word: str) -> str:
        return Template(word).safe_substitute(local_rank=local_rank)

    target = entry.target if entry.kind is EntryKind.COMMAND else fill(entry.target)
    return dataclasses.replace(entry, target=target, args=tuple(fill(word) for word in entry.args))


def _as_debugged(entry: Entrypoint, python: str) -> Entrypoint:
    """The entry, run under the debugger that this process runs under, if it is configured to follow
    subprocesses. The fork server, which starts the rank, is not debugged."""
    if not debugger.is_following():
        return entry
    words = debugger.with_debugger(spawning.command(entry, python))
    return Entrypoint(EntryKind.COMMAND, words[0], tuple(words[1:]))


MOST_LINGERING: Final = 5
"""Maximum number of leftover processes named in a sentence."""


@dataclass
class _Attempt:
    """One attempt: one start of the local ranks."""

    start: Start
    number: int
    children: dict[Child, int] = field(default_factory=dict)  # to their local ranks
    pids: dict[int, int] = field(default_factory=dict)
    forked: set[int] = field(default_factory=set)
    monitors: Mapping[int, str] = field(default_factory=dict)
    logs: Mapping[int, RankLogs] = field(default_factory=dict)
    signalled: dict[int, int] = field(default_factory=dict)  # local rank -> last signal sent
    starting: asyncio.Task[None] | None = None  # requests its ranks from the spawner
    is_started: bool = False  # its ranks were requested from the spawner
    called_off: bool = False  # stopped before its ranks were started
    kept: frozenset[int] = frozenset()  # local ranks still in their process of the last attempt

    @property
    def is_swept(self) -> bool:
        """Whether there is nothing to sweep: no rank was started, or its spawner died and
        everything was swept."""
        return next(iter(self.children)).is_lost if self.children else True


class Ranks:
    """Starts, signals, sweeps and reports the local ranks."""

    def __init__(
        self,
        node: NodeContext,
        spawners: Spawners,
        recoverables: Recoverables,
        output: RankOutput,
        defers_signal: Callable[[int, int], bool] = lambda local_rank, signum: False,
        events: EventLog | None = None,
    ) -> None:
        """`defers_signal`: whether this local rank defers this signal. `events`: notified when all
        ranks run."""
        self._events = events
        self._recoverables = recoverables
        self._node = node
        self._launch = node.launch
        self._spawners = spawners
        self._output = output
        self._defers_signal = defers_signal
        self._attempt: _Attempt | None = None
        self._sweeping: tuple[Child, ...] = ()
        self._exits: asyncio.Queue[tuple[Child, asyncio.Task[RankExited]]] = asyncio.Queue()
        self._tasks = Tasks(node.fatal)
        self._killers = KillLog()
        self._tasks.start(self._report_exits(), "reporting exits of ranks")
        self._sent_us: dict[int, int] = {}  # by signal, microseconds since the epoch
        self._cleared: asyncio.Event | None = None
        self._exited_pids: frozenset[int] = frozenset()  # of the last ranks
        self._lingering: spawning.Lingering | None = None  # leftovers that may run for a while

    @property
    def start(self) -> Start | None:
        """The Start of the newest ranks; None before the first one and after the death of their
        spawner."""
        return self._attempt.start if self._attempt is not None else None

    @property
    def log_folder(self) -> str:
        """The log folder of the newest ranks, if the user named it or it has files; else ""."""
        if self._attempt is None or not self._output.is_kept:
            return ""
        return os.path.join(self._output.run_dir, f"attempt_{self._attempt.number}")

    def last_lines(self) -> dict[int, str]:
        """The last lines that each of the newest ranks wrote to its files, if any; blocks."""
        texts = {rank: self._output.last_lines(rank) for rank in self.pids}
        return {rank: text for rank, text in texts.items() if text}

    @property
    def pids(self) -> dict[int, int]:
        """Pids of the newest ranks by local rank."""
        return self._attempt.pids if self._attempt is not None else {}

    @property
    def forked(self) -> frozenset[int]:
        """Local ranks that were forked and so have an answering thread."""
        return frozenset(self._attempt.forked) if self._attempt is not None else frozenset()

    # ------------------------------------------------------------ orders

    def spawn(
        self,
        effect: SpawnRanks,
        own: Mapping[int, Mapping[str, str]],
        monitors: Mapping[int, str],
    ) -> None:
        """Start all local ranks of a round, each with its `own` variables; RankSpawned or
        RankExited follows for each. Kept ranks enter the round in their process. `monitors`: the
        addresses at which forked ranks answer
        queries."""
        attempt = _Attempt(effect.start, effect.attempt, monitors=monitors)
        if effect.kept and self._attempt is not None:
            self._keep(self._attempt, attempt, effect.kept)
        self._note_exited(attempt)
        self._attempt = attempt
        self._recoverables.new_round(effect.start, attempt.pids)
        self._sent_us.clear()
        for local_rank, pid in attempt.pids.items():
            self._node.deliver(RankSpawned(local_rank, pid))
        attempt.starting = self._tasks.start(self._start(attempt, own), "starting the ranks")

    def _note_exited(self, later: _Attempt | None = None) -> None:
        """The newest ranks have exited, except those that `later` keeps."""
        kept = frozenset(later.pids.values()) if later is not None else frozenset()
        self._exited_pids = (frozenset(self.pids.values()) or self._exited_pids) - kept

    @staticmethod
    def _keep(last: _Attempt, attempt: _Attempt, kept: tuple[int, ...]) -> None:
        """Carry these ranks over from the last attempt, because they keep their process."""
        attempt.kept = frozenset(kept)
        for child, local_rank in last.children.items():
            if local_rank in attempt.kept:
                attempt.children[child] = local_rank
                attempt.pids[local_rank] = last.pids[local_rank]
                attempt.logs = {**attempt.logs, local_rank: last.logs[local_rank]}
        attempt.forked = last.forked & attempt.kept

    @property
    def kept_monitors(self) -> Mapping[int, str]:
        """The addresses of the answering threads of ranks that wait for the next round."""
        last, waiting = self._attempt, self._recoverables.waiting
        if last is None:
            return {}
        return {rank: name for rank, name in last.monitors.items() if rank in waiting}

    def recall(self, local_ranks: tuple[int, ...]) -> None:
        """Make these ranks leave their round without ending their process."""
        for local_rank in local_ranks:
            self._recoverables.recall(local_rank)

    def let_fail(self, local_rank: int) -> None:
        """Let a rank that has raised an exception exit with it."""
        self._recoverables.let_fail(local_rank)

    def signal(self, local_ranks: tuple[int, ...], signum: int) -> None:
        """Send a signal to these ranks' process groups. So that it ends them, stopped processes are
        continued as well, and a rank that defers this signal is killed."""
        attempt = self._attempt
        if attempt is None:
            return
        for child, local_rank in attempt.children.items():
            if local_rank not in local_ranks:
                continue
            if attempt.signalled.get(local_rank) != signum:
                pid = attempt.pids.get(local_rank)
                self._log_signal(pid, signum, attempt.signalled.get(local_rank))
            attempt.signalled[local_rank] = signum
            self._sent_us[signum] = time.time_ns() // 1000
            child.signal(signum)
            if signum in (signal.SIGTERM, signal.SIGINT):
                child.signal(signal.SIGCONT)  # a stopped process does not end before SIGCONT
            if self._defers_signal(local_rank, signum):
                # this signal would end the process, but our handler in the rank defers it
                self._sent_us[signal.SIGKILL] = time.time_ns() // 1000
                child.signal(signal.SIGKILL, alone=True)

    def call_off(self) -> None:
        """Cancel the ranks that were requested and have not started yet; each is reported as
        exited."""
        attempt = self._attempt
        if attempt is None or attempt.is_started or attempt.called_off:
            return
        attempt.called_off = True
        now = time.time_ns() // 1000
        for local_rank in set(range(self._launch.nproc_per_node)) - attempt.kept:
            failure = self._bare_failure(attempt, local_rank, -signal.SIGTERM, now)
            failure = replace(failure, kind=FailureKind.STOPPED, message="never started")
            self._node.deliver(RankExited(local_rank, -signal.SIGTERM, failure))

    def sweep(self, grace: float, linger: float = 0.0) -> None:
        """End the descendants of the ranks, which have all exited; RanksSwept follows. `linger`:
        seconds for which these may keep running."""
        attempt = self._attempt
        if attempt is None or attempt.is_swept:
            self._node.deliver(RanksSwept(()))
            return
        waiting = self._recoverables.waiting
        exited = (child for child, rank in attempt.children.items() if rank not in waiting)
        self._sweeping = tuple(exited)
        if not self._sweeping:
            self._node.deliver(RanksSwept(()))
            return
        self._sweeping[0].send(
            spawning.SweepOrder(tuple(child.key for child in self._sweeping), grace, linger)
        )

    async def clear(self, grace: float, linger: float) -> None:
        """Like `sweep`, when the agent ends: for ranks that were never swept; returns when all have
        exited. Without `linger`, ranks that are still running are killed at once."""
        if self._sweeping or self._attempt is None or self._attempt.is_swept:
            return
        self._cleared = asyncio.Event()
        self.sweep(grace, linger)
        try:
            await self._cleared.wait()
        except asyncio.CancelledError:  # a death signal: kill what is left
            if self._lingering:
                logger.warning("killing %s", _left_by_ranks(self._lingering))
            raise

    # ------------------------------------------------------------ reports

    def on_child_message(self, child: Child, message: spawning.FromSpawner) -> None:
        """Handle a report: a rank has started, exited or failed to start, or all were swept."""
        attempt = self._attempt
        if isinstance(message, spawning.Swept):
            self._swept(message)
        elif isinstance(message, spawning.Lingering):
            self._log_lingering(message)
        elif attempt is None or child not in attempt.children:
            return
        elif isinstance(message, spawning.Spawned):
            local_rank = attempt.children[child]
            attempt.pids[local_rank] = message.pid
            if message.forked and local_rank in attempt.monitors:
                attempt.forked.add(local_rank)
            self._node.deliver(RankSpawned(local_rank, message.pid))
            if self._events is not None and len(attempt.pids) == self._launch.nproc_per_node:
                self._events.write_started(attempt.start, attempt.pids, time.time_ns() // 10**6)
        elif isinstance(message, spawning.Execed):
            attempt.forked.discard(attempt.children[child])
        elif isinstance(message, spawning.SpawnFailed):
            self._spawn_failed(attempt, child, message)
        elif isinstance(message, spawning.Exited):
            self._exited(attempt, child, message)

    def lost(self, child: Child) -> None:
        """No-op: `drop_all` handles all ranks together."""

    def _spawn_failed(self, attempt: _Attempt, child: Child, message: spawning.SpawnFailed) -> None:
        local_rank = attempt.children[child]
        logger.error("cannot start local rank %d: %s", local_rank, message.reason)
        failure = self._bare_failure(attempt, local_rank, 1, time.time_ns() // 1000)
        failure = replace(failure, kind=FailureKind.SPAWN, message=message.reason)
        self._queue_exit(child, _ready(RankExited(local_rank, 1, failure)))

    def _exited(self, attempt: _Attempt, child: Child, message: spawning.Exited) -> None:
        local_rank = attempt.children[child]
        self._output.rank_exited(local_rank)
        self._recoverables.forget(local_rank)
        sent = attempt.signalled.get(local_rank)
        if sent is None and self._defers_signal(local_rank, -message.code):
            logger.warning("local rank %d exited on a signal that it had blocked", local_rank)
        self._queue_exit(child, self._explain(attempt, local_rank, message, log=sent is None))

    def _swept(self, message: spawning.Swept) -> None:
        if self._sweeping and set(message.keys) == {child.key for child in self._sweeping}:
            self._spawners.forget(*self._sweeping)
            self._sweeping = ()
            self._node.deliver(RanksSwept(message.stuck))
            if self._cleared is not None:
                self._cleared.set()

    def _log_lingering(self, message: spawning.Lingering) -> None:
        if self._lingering is not None:  # an exiting process has no command line any more
            known = dict(zip(self._lingering.pids, self._lingering.commands, strict=True))
            named = zip(message.pids, message.commands, strict=True)
            commands = tuple(known.get(pid, command) for pid, command in named)
            message = dataclasses.replace(message, commands=commands)
        self._lingering, left = message, _left_by_ranks(message)
        limit, flag = self._launch.child_exit_timeout, "--child-exit-timeout"
        if message.ending:
            logger.warning("terminating %s, %g s after the ranks exited (%s)", left, limit, flag)
        else:
            logger.log(NOTICE, "waiting up to %g s (%s) for %s", limit, flag, left)

    def drop_all(self) -> None:
        """Drop all ranks: their spawner has died, they were killed and reaped, and the state
        machine is notified separately."""
        self._sweeping = ()
        if self._attempt is not None:
            self._attempt.called_off = True
            self._note_exited()
            self._attempt = None

    def close(self) -> None:
        self._tasks.close()

    # ------------------------------------------------------------ starting

    async def _start(self, attempt: _Attempt, own: Mapping[int, Mapping[str, str]]) -> None:
        launch = self._launch
        try:
            environments = {
                rank: rank_environment(
                    self._node, attempt.start, rank, os.environ, own.get(rank, {})
                )
                for rank in range(launch.nproc_per_node)
            }
            logs = await self._open_logs(attempt, environments)
        except (BadEnvironment, LogsUnusable) as error:
            self._node.fatal(str(error))
            return
        if self._exited_pids and self._node.memory is not None:
            await self._node.memory.wait_until_free(self._exited_pids)
        if attempt is not self._attempt or attempt.called_off:
            return
        for local_rank in attempt.kept:  # its process writes to its first error file
            error_file = attempt.logs[local_rank].error_file
            logs[local_rank] = dataclasses.replace(logs[local_rank], error_file=error_file)
            environments[local_rank][env.ERROR_FILE] = error_file
        attempt.is_started, attempt.logs = True, logs
        for local_rank, environment in environments.items():
            if local_rank in attempt.kept:
                self._enter(attempt, local_rank, environment)
            else:
                self._spawn(attempt, local_rank, environment)

    def _enter(self, attempt: _Attempt, local_rank: int, environment: dict[str, str]) -> None:
        """Start the round in the process of a kept rank."""
        logs = attempt.logs[local_rank]
        restores = attempt.start.info.restore is not None
        order = EnterRound(environment, logs.stdout, logs.stderr, restores)
        if not self._recoverables.enter(local_rank, order):
            logger.warning("local rank %d cannot be reached: killing it", local_rank)
            self.signal((local_rank,), signal.SIGKILL)

    def _spawn(self, attempt: _Attempt, local_rank: int, environment: dict[str, str]) -> None:
        monitor = attempt.monitors.get(local_rank, "")
        order = self._order(local_rank, environment, attempt.logs[local_rank], monitor)
        attempt.children[self._spawners.start(order, self)] = local_rank

    def _order(
        self, local_rank: int, environment: dict[str, str], logs: RankLogs, monitor: str
    ) -> spawning.SpawnRank:
        launch = self._launch
        return spawning.SpawnRank(
            key=0,
            local_rank=local_rank,
            entry=_as_debugged(rank_entry(launch.entry, local_rank), launch.python_exec),
            env=environment,
            unset=(),
            stdout=logs.stdout,
            stderr=logs.stderr,
            error_file=logs.error_file,
            numa=launch.numa_binding or "",
            numa_may_fail=launch.numa_may_fail,
            monitor=monitor,
        )

    async def foresee(
        self, start: Start, own: Mapping[int, Mapping[str, str]], monitors: Mapping[int, str]
    ) -> list[spawning.SpawnStandby]:
        """The orders for standbys of this later start; none if the files cannot be foreseen.
        Returns after the newest ranks were requested: a standby that the spawner starts before them
        would be taken for theirs."""
        if self._attempt is not None and self._attempt.starting is not None:
            await asyncio.wait([self._attempt.starting])
        environments = {
            rank: rank_environment(self._node, start, rank, os.environ, own[rank]) for rank in own
        }
        number = start.round.number - 1
        found = await in_thread(
            lambda: self._output.foresee(number, environments), limit=DISK_LIMIT, name="logs"
        )
        return [
            spawning.SpawnStandby(
                0,
                self._order(rank, environments[rank], later, monitors[rank]),
                now.stdout,
                now.stderr,
                idle=self._launch.standby > 0,
            )
            for rank, (later, now) in found.items()
        ]

    async def _open_logs(
        self, attempt: _Attempt, environments: dict[int, dict[str, str]]
    ) -> dict[int, RankLogs]:

        def work() -> dict[int, RankLogs]:
            oom_watcher()
            return self._output.open_attempt(attempt.number, environments)

        try:
            return await in_thread(
                work,
                limit=DISK_LIMIT,
                name="logs",
                slow="the ranks wait for their log folders: the disk does not answer",
            )
        except NoThread:
            raise
        except TimeoutError:
            words = f"log folders could not be made in {DISK_LIMIT:g} s: the disk does not answer"
            raise LogsUnusable(words) from None

    # ------------------------------------------------------------ exits

    def _queue_exit(self, child: Child, event: Coroutine[Any, Any, RankExited]) -> None:
        task = self._tasks.start(event, "explaining the exit of a rank")
        self._exits.put_nowait((child, task))

    async def _report_exits(self) -> None:
        """Deliver exits in the order in which they happened, however long each explanation takes:
        the first one is the cause."""
        while True:
            child, task = await self._exits.get()
            event = await task
            if self._attempt is not None and child in self._attempt.children:
                self._node.deliver(event)

    async def _explain(
        self, attempt: _Attempt, local_rank: int, message: spawning.Exited, *, log: bool
    ) -> RankExited:
        """The exit of a rank with its cause. `log`: it exited by itself, which is logged at
        once."""
        if message.code == 0:
            return RankExited(local_rank, 0, None)
        signum = -message.code
        # a rank may have died before our signal, and be reaped only now
        ended_us = min(message.time_us, self._recoverables.lost_us.pop(local_rank, message.time_us))
        since = ended_us - self._sent_us.get(signum, ended_us + 1)
        stopping = since >= 0 and (
            attempt.signalled.get(local_rank) == signum or since < STOP_MEMORY * 1e6
        )
        bare = self._bare_failure(attempt, local_rank, message.code, message.time_us)
        bare = replace(bare, pid=message.pid)
        unread = replace(bare, error_file="")
        read = partial(describe, bare, stopping=stopping)
        try:
            failure = await in_thread(read, limit=DESCRIBE_LIMIT, name="error-file")
        except NoThread as error:
            logger.warning("cannot read the error file of local rank %d: %s", local_rank, error)
            failure = describe(unread, stopping=stopping)
        except TimeoutError:
            logger.warning("reading the error file of local rank %d timed out", local_rank)
            failure = describe(unread, stopping=stopping)
        except Exception:  # the exit is reported even without a cause
            logger.exception("a bug in elasticrun: no cause for local rank %d", local_rank)
            failure = bare
        if log and not self._defers_signal(local_rank, signum):
            self._log_failure(failure)
        return RankExited(local_rank, message.code, failure)

    def _log_failure(self, failure: Failure) -> None:
        """Log in our words and in torchrun's, which people and tools search for.

        The loss of a peer is only logged as INFO, because the peer's own failure matters. An
        exception is not repeated if its traceback is on the terminal."""
        level = logging.INFO if failure.kind in ECHOES else logging.ERROR
        shown = failure.traceback and self._output.shows_stderr(failure.local_rank)
        logger.log(
            level,
            "%s; failed (exitcode: %d) local_rank: %d (pid: %d) of binary: %s",
            f"rank {failure.rank} raised an exception" if shown else text(reason_of(failure)),
            failure.exitcode,
            failure.local_rank,
            failure.pid,
            self._binary(),
        )
        if failure.kind is FailureKind.SIGNAL and failure.exitcode == -signal.SIGKILL:
            looking = self._killers.log_killer(failure)
            self._tasks.start(looking, "looking for who killed a rank", on_failure=logger.warning)

    def _bare_failure(self, attempt: _Attempt, local_rank: int, code: int, time_us: int) -> Failure:
        logs = attempt.logs.get(local_rank)
        return Failure(
            host=self._node.host,
            rank=attempt.start.first_rank + local_rank,
            local_rank=local_rank,
            pid=attempt.pids.get(local_rank, 0),
            exitcode=code,
            time_us=time_us,
            kind=FailureKind.SCRIPT,
            message="",
            traceback="",
            error_file=logs.error_file if logs else "",
        )

    def _binary(self) -> str:
        entry = self._launch.entry
        if entry.kind is EntryKind.COMMAND:
            return entry.target
        return self._launch.python_exec or sys.executable

    @staticmethod
    def _log_signal(pid: int | None, signum: int, before: int | None) -> None:
        if signum == signal.SIGKILL:
            logger.warning(
                "Unable to shutdown process %s via %s, forcefully exiting via %s",
                pid,
                int(before) if before is not None else int(signal.SIGTERM),
                int(signum),
            )
        else:
            name = signal.Signals(signum).name
            logger.info("Sending process %s closing signal %s", pid, name)


def _left_by_ranks(left: spawning.Lingering) -> str:
    """A text such as `1 process that ranks have left running: 4711 (sh upload.sh)`."""
    named = zip(left.pids, left.commands, strict=False)
    shown = [f"{pid} ({command})" for pid, command in named][:MOST_LINGERING]
    shown += ["..."] if len(left.pids) > len(shown) else []
    what = "1 process" if len(left.pids) == 1 else f"{len(left.pids)} processes"
    return f"{what} that ranks have left running: {', '.join(shown)}"


async def _ready(event: RankExited) -> RankExited:
    return event
