"""All agents of a job, one per host: starts them, follows them, forwards signals, and determines
the job's exit code.

An unreachable host is retried for some minutes; the others begin if they are at least the minimum
number of nodes. When a connection breaks, the agent continues, and a later connection finds it. A
killed agent is restarted while others run. The job's exit code is that of the last agent to end,
ignoring agents whose node was bad (75).
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from elasticrun.config import EXIT_BAD_NODE, EXIT_FAILED
from elasticrun.core.words import plural
from elasticrun.host.log import columns_of, cut_to, open_line
from elasticrun.host.system.network import routed_address
from elasticrun.jobs.hosts.far import STREAMS
from elasticrun.jobs.hosts.hostfile import NamedHost
from elasticrun.jobs.hosts.ssh import CannotStart, ConnectionCut, SshConnection, address_of, is_here
from elasticrun.wire.spawning import is_kept_ignored
from elasticrun.wire.types import Endpoint

DELAYS: Final = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0, 30.0)
"""Seconds before each further attempt to reach a host. After the last one the host is given up,
unless its agent was started and other agents run; then the last delay is repeated."""

MAX_STARTS: Final = 4
"""Maximum number of times that an agent is started on a host where it is killed."""

TOO_FEW_LIMIT: Final = 30.0
"""Seconds that the remaining agents have to end by themselves, when a failure leaves too few."""

SHOW_AFTER: Final = 0.3
"""Seconds after which an unfinished line is shown."""

MAX_LINE: Final = 64 * 1024

_KILLED: Final = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class HostsPlan:
    """What to start on which host. argv: the words of each host's agent. least: the minimum number
    of nodes. port: the master's port on the first reachable host; 0: the words name the rendezvous
    endpoint. variables: sent to every host."""

    job: str
    hosts: tuple[NamedHost, ...]
    argv: tuple[tuple[str, ...], ...]
    least: int
    port: int
    variables: Mapping[str, str]
    ssh: tuple[str, ...]
    token: str = field(repr=False)


def rendezvous_flags(host: str, port: int) -> tuple[str, ...]:
    """The flags for a rendezvous at this endpoint."""
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint={Endpoint(host, port)}")


def run(plan: HostsPlan, notify: Callable[[str], None]) -> int:
    """Start the job and follow it to its end. Returns its exit code."""

    async def follow() -> int:
        return await Fleet(plan, notify).run()

    return asyncio.run(follow())


class Fleet:
    """The agents of one job, and the decisions that concern them all."""

    def __init__(self, plan: HostsPlan, notify: Callable[[str], None]) -> None:
        self.plan = plan
        self.notify = notify
        self.run_id = f"{uuid.uuid4().hex[:12]}"
        self.cwd = os.getcwd()
        self.screen = Screen()
        self.signals: list[int] = []
        self.members = [HostAgent(self, number) for number in range(len(plan.hosts))]
        self._rendezvous: asyncio.Future[str] = asyncio.Future()
        self._first: HostAgent | None = None
        self._codes: list[int] = []
        self._failed = False

    async def run(self) -> int:
        """Run until all agents have ended. Returns the job's exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if is_kept_ignored(number):
                continue
            loop.add_signal_handler(number, self._signalled, number)
        async with asyncio.TaskGroup() as group:
            for member in self.members:
                member.task = group.create_task(member.run())
        self.screen.print_unfinished()
        good = [code for code in self._codes if code != EXIT_BAD_NODE] or self._codes
        return EXIT_FAILED if self._failed or not good else good[-1]

    async def rendezvous_host(self, member: HostAgent) -> str:
        """The address of the rendezvous, on the first host of the list that could be reached. Waits
        until all hosts before `member` have been tried."""
        earlier = self.members[: member.number]
        for one in earlier:
            await one.tried.wait()
        if self._first is None and not any(one.was_reached for one in earlier):
            self._first = member
            self._rendezvous.set_result(await self._address(member.host))
        return await asyncio.shield(self._rendezvous)

    async def _address(self, host: NamedHost) -> str:
        if not is_here(host):
            return await address_of(host, self.plan.ssh)
        alone = all(map(is_here, self.plan.hosts))
        return "127.0.0.1" if alone else routed_address() or host.name

    # ------------------------------------------------------------ reports of members

    def agent_ended(self, member: HostAgent, code: int) -> None:
        """Handle an agent that has exited and is not restarted."""
        self._codes.append(code)
        if not any(one.is_running for one in self.members):
            self._cancel_unstarted()
        elif code and self._unfinished_count() < self.plan.least:
            asyncio.get_running_loop().call_later(TOO_FEW_LIMIT, self._terminate)

    def give_up(self, member: HostAgent, why: str) -> None:
        """Handle a host that is given up: continue without it, or end the job if too few are left
        or the rendezvous was to be there."""
        left, least = self._unfinished_count(), self.plan.least
        if member.was_started:
            self.notify(
                f"{member.name} is no longer reachable: {why}; its agent may keep running there"
            )
        elif left >= least and member is not self._first:
            self.notify(f"{member.name} cannot be used: {why}; the job continues without it")
        elif not self._failed and not self.signals:
            self._failed = True
            need = (
                f"the job needs {plural(least, 'host')}"
                if left < least
                else "the others meet there"
            )
            self.notify(f"{member.name} cannot be used: {why}; {need}, so it ends")
            self._cancel_unstarted()
            self._send(signal.SIGTERM)
        if member.was_started and not any(one.is_running for one in self.members):
            self._cancel_unstarted()

    def should_retry(self, member: HostAgent, failures: int) -> bool:
        """Whether to retry a host that failed this many times in a row."""
        if member.was_started and any(one.is_running for one in self.members if one is not member):
            return True
        return failures < len(DELAYS)

    def has_running_others(self, member: HostAgent) -> bool:
        return not self.signals and any(one.is_running for one in self.members if one is not member)

    def _unfinished_count(self) -> int:
        return sum(not one.is_over for one in self.members)

    def _cancel_unstarted(self) -> None:
        """Cancel the agents that have not been started."""
        for one in self.members:
            if not one.was_started and one.task is not None:
                one.is_over = True
                one.task.cancel()

    # ------------------------------------------------------------ signals

    def _signalled(self, number: int) -> None:
        """Forward the first signal, at which the job saves and stops; for the second, SIGKILL."""
        signum = signal.SIGTERM if number == signal.SIGHUP else number
        self._send(signal.SIGKILL if self.signals else signum)
        self._cancel_unstarted()
        for one in self.members:
            if len(self.signals) > 1 and one.task and one.is_running and not one.is_connected:
                one.task.cancel()
                self.notify(
                    f"{one.name} is unreachable; its agent may keep running: end it with "
                    "elasticrun stop"
                )

    def _terminate(self) -> None:
        """Send SIGTERM unless a signal was sent: a second one makes agents exit without saving."""
        if not self.signals:
            self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        self.signals.append(number)
        for one in self.members:
            one.forward_signals()


class HostAgent:
    """One host and the agent on it."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self._fleet = fleet
        self.number = number
        self.host = fleet.plan.hosts[number]
        self.name = self.host.name
        self.task: asyncio.Task[None] | None = None
        self.tried = asyncio.Event()
        self.was_reached = False
        self.was_started = False
        self.is_over = False
        self._starts = 1
        self._failures = 0
        self._received = dict.fromkeys(STREAMS, 0)
        self._connection: SshConnection | None = None

    @property
    def is_running(self) -> bool:
        return self.was_started and not self.is_over

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    async def run(self) -> None:
        """Run until the agent has ended for good, or its host is given up."""
        while not self.is_over:
            try:
                code = await self._follow()
            except CannotStart as why:
                self._give_up(str(why))
            except ConnectionCut as why:
                await self._pause(str(why))
            else:
                await self._ended(code)

    def _give_up(self, why: str) -> None:
        self.is_over = True
        self.tried.set()
        self._fleet.give_up(self, why)

    async def _pause(self, why: str) -> None:
        """Wait before the next attempt, or give up."""
        self.tried.set()
        self._failures += 1
        if not self._fleet.should_retry(self, self._failures):
            return self._give_up(why)
        if self._failures == 1:
            what = (
                "its agent keeps running"
                if self.was_started
                else "other hosts may start without it"
            )
            state = "is not connected" if self.was_started else "cannot be reached"
            self._fleet.notify(f"{self.name} {state}: {why}; {what}; retrying")
        await asyncio.sleep(DELAYS[min(self._failures, len(DELAYS)) - 1])
        return None

    async def _ended(self, code: int) -> None:
        """Report the end of the agent, or prepare its restart if it was killed."""
        if (
            code != _KILLED
            or self._starts >= MAX_STARTS
            or not self._fleet.has_running_others(self)
        ):
            self.is_over = True
            return self._fleet.agent_ended(self, code)
        self._fleet.notify(f"the agent on {self.name} was killed; restarting it")
        await asyncio.sleep(DELAYS[self._starts - 1])
        self._starts += 1
        self._received = dict.fromkeys(STREAMS, 0)
        return None

    async def _follow(self) -> int:
        """Follow the agent over one connection until it ends. Returns its exit code. Raises
        ConnectionCut, CannotStart."""
        fleet = self._fleet
        async with SshConnection(self.host, fleet.plan.ssh) as connection:
            self.was_reached = True
            self.tried.set()
            order = await self._order()
            self.was_started, self._connection = True, connection
            try:
                connection.send({**order, "signals": fleet.signals})
                async for head, data in connection.frames():
                    if self._failures:
                        fleet.notify(f"{self.name} is reachable again")
                        self._failures = 0
                    if "code" in head or "lost" in head:
                        connection.send({"done": True})
                        return int(head.get("code", _KILLED))
                    if "error" in head:
                        self.was_started = self._received["out"] + self._received["err"] > 0
                        raise CannotStart(head["error"])
                    for stream in self._received.keys() & head:
                        self._received[stream] += len(data)
                        fleet.screen.show(self.name, stream, data)
            finally:
                self._connection = None
        raise AssertionError("frames end by an exception")

    async def _order(self) -> dict[str, object]:
        plan = self._fleet.plan
        argv = plan.argv[self.number]
        if plan.port:
            argv = (*rendezvous_flags(await self._fleet.rendezvous_host(self), plan.port), *argv)
        return {
            "id": f"{plan.job}-{self._fleet.run_id}-{self.number}-{self._starts}",
            "argv": argv,
            "cwd": self._fleet.cwd,
            "variables": plan.variables,
            "token": plan.token,
            "told": self._received,
        }

    def forward_signals(self) -> None:
        if self._connection is not None:
            self._connection.send({"signals": self._fleet.signals})


class Screen:
    """Prints lines of all hosts, each prefixed with the host's name. An unfinished line is shown
    after SHOW_AFTER; on a terminal the states of a progress bar overwrite each other."""

    def __init__(self) -> None:
        self._rest: dict[tuple[str, str], bytes] = {}
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}

    def show(self, name: str, stream: str, data: bytes) -> None:
        """Print the complete lines of this output, and keep the unfinished one. Of the states of a
        progress bar, print the newest."""
        of = (name, stream)
        *lines, rest = (self._rest.pop(of, b"") + data).split(b"\n")
        if len(rest) > MAX_LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            self._write(of, line, ends=True)
        if rest:
            self._rest[of] = rest
            if of not in self._timers:
                loop = asyncio.get_running_loop()
                self._timers[of] = loop.call_later(SHOW_AFTER, self._show_unfinished, of)

    def print_unfinished(self) -> None:
        """Print all unfinished lines, at the end of the job."""
        for timer in self._timers.values():
            timer.cancel()
        for of, rest in self._rest.items():
            self._write(of, rest, ends=True)
        self._rest.clear()

    def _show_unfinished(self, of: tuple[str, str]) -> None:
        """Show the beginning of a line, or the newest state of a bar."""
        del self._timers[of]
        rest = self._rest.get(of, b"")
        if rest and (b"\r" not in rest or columns_of(_fd(of))):
            self._write(of, rest, ends=False)

    def _write(self, of: tuple[str, str], line: bytes, *, ends: bool) -> None:
        fd, shown = _fd(of), line.removesuffix(b"\r").rpartition(b"\r")[2]
        text, columns = b"[%s] %s" % (os.fsencode(of[0]), shown), columns_of(fd)
        if not ends and b"\r" in line:
            text = cut_to(text, columns)
        text = open_line(fd).bytes_to_write(of, text + b"\n" * ends, ends=ends, columns=columns)
        try:
            while text:
                text = text[os.write(fd, text) :]
        except OSError:  # the reader has exited; the job does not depend on it
            pass


def _fd(of: tuple[str, str]) -> int:
    return 2 if of[1] == "err" else 1
