"""The spawner for ranks that run a function: the caller itself, in its own thread.

Exchanges `wire.spawning` messages with the agent, as the fork server does, and starts ranks by
multiprocessing with the requested start method. One event loop handles the agent, exits of
processes and results; it never waits for a single rank.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import pickle
import selectors
import signal
import socket
import string
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from elasticrun.config import STUCK_AFTER
from elasticrun.forkserver.functions.agent_process import AgentProcess
from elasticrun.forkserver.functions.helpers import Helpers
from elasticrun.forkserver.functions.rank_process import ForkGuard, FunctionRank, RankPlan, run_rank
from elasticrun.forkserver.helpers.helper import ProbeHelper, SaverHelper
from elasticrun.host.system import processes
from elasticrun.host.system.sweep import MAX_REPORTED, Sweep, SweepStage, kill_group, kill_leftovers
from elasticrun.wire import debugger, env, spawning
from elasticrun.wire.frames import Connection, FrameError, NotRead

MAX_UNSENT: Final = 1024 * 1024
"""Bytes of reports that may wait for the agent to read them. A report has about a hundred bytes, so
an agent with this backlog has not read for thousands of reports.
"""

logger = logging.getLogger("elasticrun")


class FunctionSpawner:
    """Starts ranks that call `function(*args)`, as the agent orders."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], start_method: str, mark: bytes
    ) -> None:
        """`mark` is `NAME=value`, a variable that only the ranks have in their environment.

        Raises ValueError for a start method that this platform does not have."""
        self._function = function
        self._args = args
        self._method = start_method
        self._context: Any = multiprocessing.get_context(start_method)
        self._mark = mark
        self.handlers: Mapping[int, Any] = {}
        """Signal handlers that forked ranks restore (see `signals_passed_on`)."""
        self._fork_guard = ForkGuard()
        ours, self.agents_end = socket.socketpair()
        self._connection = Connection(ours, spawning.ToSpawner, max_bytes=MAX_UNSENT)
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, FunctionRank] = {}
        fork = self._fork if start_method == "fork" else None
        self._helpers = Helpers(self._selector, self._send, fork)
        self._last_ranks: dict[int, FunctionRank] = {}
        self._pids: dict[int, int] = {}  # key -> pid, until swept
        self._sweep: tuple[tuple[int, ...], Sweep] | None = None
        self._waiting_sweeps: list[spawning.SweepOrder] = []
        self._lingers = False
        self._keepalive_until: float | None = None
        self._connected = True

    # ---------------------------------------------------------------- for the launcher

    def serve(self, agent: AgentProcess) -> None:
        """Carry out the agent's orders until it has exited; then end all remaining children."""
        self.agents_end.close()
        self._selector.register(self._connection, selectors.EVENT_READ, self._read_orders)
        listening = True

        def read_result() -> None:
            nonlocal listening
            if not agent.read():
                listening = False
                self._selector.unregister(agent)

        self._agent = agent
        self._selector.register(agent, selectors.EVENT_READ, read_result)
        try:
            self._helpers.start_spare_store()
            while listening:
                self._turn()
        finally:
            self._end_all()

    def results(self) -> dict[int, Any]:
        """What the function returned in the last round, by global rank. None for a rank that exited
        with 0 without returning (sys.exit, os._exit). Raises what unpickling raises."""
        found = {}
        for rank in sorted(self._last_ranks.values(), key=lambda rank: rank.rank):
            payload = rank.payload()
            found[rank.rank] = None if payload is None else pickle.loads(payload)
        return found

    # ---------------------------------------------------------------- the loop

    def _turn(self) -> None:
        timeout = None
        deadlines = [self._keepalive_until] if self._keepalive_until is not None else []
        if self._sweep is not None:
            deadlines.append(self._sweep[1].deadline)
        if deadlines:
            timeout = max(0.0, min(deadlines) - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if self._selector.get_map().get(key.fd) is key:  # another callback may have removed it
                key.data()
        self._overdue()

    def _overdue(self) -> None:
        now = time.monotonic()
        if self._keepalive_until is not None and now >= self._keepalive_until:
            self._keepalive_until = None
            logger.error("the agent does not respond; killing its ranks")
            self._kill_all()
        if self._sweep is not None and now >= self._sweep[1].deadline:
            before = list(self._sweep[1].watch)
            stuck = self._sweep[1].deadline_passed()
            self._report_lingering(*self._sweep)
            if stuck:
                for pidfd in before:
                    self._selector.unregister(pidfd)
                self._swept(stuck)

    def _read_orders(self) -> None:
        self._connection.flush()
        self._watch()
        try:
            messages = self._connection.receive()
        except OSError:
            self._hang_up()
            return
        try:
            for message in messages or ():
                self._obey(message)
        except FrameError as error:
            logger.error("cannot parse the agent's message: %s", error)
            self._hang_up()

    def _hang_up(self) -> None:
        """Close the connection and kill the ranks, because the agent has exited or is about
        to."""
        if self._connected:
            self._connected = False
            self._selector.unregister(self._connection)
            self._connection.close()
            self._kill_all()
            self._helpers.kill(SaverHelper)

    def _kill_all(self) -> None:
        for key in self._ranks:
            kill_group(self._pids[key], signal.SIGKILL)
        self._helpers.kill(ProbeHelper)

    def _send(self, message: spawning.FromSpawner) -> None:
        if not self._connected:
            return
        try:
            self._connection.send(message)
        except NotRead:
            logger.error("the agent does not read its messages; killing its ranks")
            self._hang_up()
            return
        self._watch()

    def _watch(self) -> None:
        """Wait for writability while messages are unsent."""
        write = selectors.EVENT_WRITE if self._connection.unsent else 0
        self._selector.modify(self._connection, selectors.EVENT_READ | write, self._read_orders)

    def _obey(self, message: spawning.ToSpawner) -> None:
        match message:
            case spawning.Configure():
                mode = "fork" if self._method == "fork" else "exec"
                torch = sys.modules.get("torch")
                version = str(getattr(torch, "__version__", ""))
                self._send(spawning.SpawnerReady(os.getpid(), mode, "", version, 0.0))
            case spawning.SpawnRank():
                self._start_rank(message)
            case spawning.SpawnStore() | spawning.SpawnProbe() | spawning.SpawnSaver():
                self._helpers.start(message)
            case spawning.SendSignal(key, signum, alone):
                if key in self._ranks:
                    kill_group(self._pids[key], signum, alone=alone)
                self._helpers.send_signal(key, signum)
            case spawning.SweepOrder():
                self._waiting_sweeps.append(message)
                self._next_sweep()
            case spawning.CloseStore(key):
                self._helpers.send_signal(key, signal.SIGKILL)
            case spawning.Keepalive(limit):
                self._keepalive_until = time.monotonic() + limit
            case spawning.Quit():
                self._hang_up()

    # ---------------------------------------------------------------- ranks

    def _start_rank(self, order: spawning.SpawnRank) -> None:
        fill = string.Template.safe_substitute
        args = tuple(
            fill(string.Template(arg), local_rank=order.local_rank) if isinstance(arg, str) else arg
            for arg in self._args
        )
        forked = self._method == "fork"
        plan = RankPlan(
            order=order,
            # A rank of the start method forkserver is the child of multiprocessing's own server.
            parent=0 if self._method == "forkserver" else os.getpid(),
            agent=self._agent.process.pid,
            handlers=dict(self.handlers) if forked else {},
        )
        reader, writer = self._context.Pipe()
        close = self._close_in_fork if forked else None
        process = self._context.Process(
            target=run_rank,
            args=(plan, writer, self._function, args, close),
            name=f"rank {order.env.get(env.RANK, order.local_rank)}",
        )
        try:
            with self._fork_guard.forking():
                process.start()
        except Exception as error:  # pickling raises anything; no memory: OSError
            reader.close()
            writer.close()
            reason = " ".join(str(error).split()) or type(error).__name__
            self._send(spawning.SpawnFailed(order.key, f"the function cannot be started: {reason}"))
            return
        writer.close()
        os.set_blocking(reader.fileno(), False)
        rank = int(order.env.get(env.RANK, order.local_rank))
        of = int(order.env.get(env.LOCAL_WORLD_SIZE, 1))
        started = FunctionRank(order.key, order.local_rank, rank, of, process, reader)
        self._ranks[order.key] = started
        self._pids[order.key] = process.pid
        if order.local_rank in self._last_ranks:  # the first rank of the next round
            self._last_ranks.clear()
        self._last_ranks[order.local_rank] = started
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._read_result(started))
        self._selector.register(
            process.sentinel, selectors.EVENT_READ, lambda: self._rank_ended(started)
        )
        self._send(spawning.Spawned(order.key, process.pid, True))

    def _read_result(self, rank: FunctionRank) -> None:
        if not rank.read():
            self._selector.unregister(rank.results)
        self._maybe_release()

    def _maybe_release(self) -> None:
        """Let the ranks exit once all local ranks have returned, as torch's children do: an earlier
        exit would close connections that other ranks may still be using."""
        ranks = self._last_ranks.values()
        if all(len(ranks) == rank.of and rank.has_returned() for rank in ranks):
            for rank in ranks:
                rank.release()

    def _rank_ended(self, rank: FunctionRank) -> None:
        self._selector.unregister(rank.process.sentinel)
        rank.process.join()
        code = rank.process.exitcode
        while rank.results.fileno() in self._selector.get_map():  # what is still in the pipe
            before = len(rank.received)
            if not rank.read() or len(rank.received) == before:
                self._selector.unregister(rank.results)
        rank.results.close()
        rank.ended_well = code == 0
        self._maybe_release()
        del self._ranks[rank.key]
        pid = self._pids[rank.key]
        rank.process.close()
        now_us = time.time_ns() // 1000
        self._send(spawning.Exited(rank.key, pid, 1 if code is None else code, now_us))
        self._maybe_swept()

    def _close_in_fork(self) -> None:
        """In a fork: close what would keep the agent from noticing that we exit."""
        self._fork_guard.in_fork()
        self._connection.close()
        self._agent.close()
        self._selector.close()
        for rank in self._ranks.values():
            rank.results.close()
        self._helpers.close_in_fork()

    def _fork(self, become: Callable[[], NoReturn]) -> int:
        """Fork a child that runs `become`; return its pid. The child never leaves this block (see
        `ForkGuard`)."""
        with self._fork_guard.forking(), debugger.without_debugger():
            pid = os.fork()
            if pid == 0:
                try:
                    self._close_in_fork()
                    become()
                finally:
                    os._exit(1)
        return pid

    # ---------------------------------------------------------------- sweeps

    def _next_sweep(self) -> None:
        if self._sweep is not None or not self._waiting_sweeps:
            return
        order = self._waiting_sweeps.pop(0)
        pids = [self._pids[key] for key in order.keys if key in self._pids]
        for pid in pids if order.linger <= 0 else ():
            kill_group(pid, signal.SIGKILL)
        now, linger = time.monotonic(), order.linger
        sweep = Sweep(
            pids, self._mark, grace=order.grace, patience=STUCK_AFTER, now=now, linger=linger
        )
        self._sweep = (order.keys, sweep)
        self._lingers = linger > 0
        self._watch_sweep(sweep)

    def _report_lingering(self, keys: tuple[int, ...], sweep: Sweep) -> None:
        """Report processes that may run a while longer: first that they run, then that they are
        being ended."""
        if (
            self._lingers
            and sweep.watch
            and sweep.stage in (SweepStage.REPORTED, SweepStage.TERMINATED)
        ):
            pids = tuple(sorted(sweep.watch.values())[:MAX_REPORTED])
            commands, ending = (
                tuple(map(processes.command, pids)),
                sweep.stage is SweepStage.TERMINATED,
            )
            self._send(spawning.Lingering(keys, pids, commands, ending))

    def _watch_sweep(self, sweep: Sweep) -> None:
        for pidfd in sweep.watch:
            if pidfd not in self._selector.get_map():
                self._selector.register(
                    pidfd, selectors.EVENT_READ, functools.partial(self._process_exited, pidfd)
                )
        self._maybe_swept()

    def _maybe_swept(self) -> None:
        if self._sweep is None or self._sweep[1].watch:
            return
        if not any(key in self._ranks for key in self._sweep[0]):  # killed and reaped
            self._swept(())

    def _process_exited(self, pidfd: int) -> None:
        assert self._sweep is not None
        self._selector.unregister(pidfd)
        self._sweep[1].process_exited(pidfd)
        self._watch_sweep(self._sweep[1])

    def _swept(self, stuck: tuple[int, ...]) -> None:
        assert self._sweep is not None
        keys, _ = self._sweep
        self._sweep = None
        for key in keys:
            self._pids.pop(key, None)
        self._send(spawning.Swept(keys, stuck))
        self._next_sweep()

    # ---------------------------------------------------------------- the end

    def _end_all(self) -> None:
        """Kill and reap everything that is left."""
        self._hang_up()
        for rank in self._ranks.values():
            kill_group(self._pids[rank.key], signal.SIGKILL)
            rank.process.join(STUCK_AFTER)
            rank.results.close()
        self._helpers.close()
        if self._sweep is not None:
            self._sweep[1].close()
        if self._pids:
            kill_leftovers(self._pids.values(), self._mark, STUCK_AFTER)
        self._selector.close()
