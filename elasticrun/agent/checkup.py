"""Checks this machine: `elasticrun.host.doctor` while the agent starts, and what `agent/health`
watches from then on.

Nothing waits for the doctor's checks, except with --precheck: then a failed check ends the agent
before it joins. Checks that need the master start at least ASK_AFTER seconds after it has accepted
this node. They never end a node: the network check excludes a node with a bad link.

The thread that runs the checks imports them, so that they do not delay the agent's start.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from elasticrun import __version__
from elasticrun.agent.health.command import HealthCommand
from elasticrun.agent.health.devices import DeviceWatch
from elasticrun.agent.health.reports import HealthReporter
from elasticrun.agent.link.trust import trust_of
from elasticrun.agent.runtime import Tasks, in_thread
from elasticrun.host.doctor.verdict import as_line, failures
from elasticrun.host.log import logger
from elasticrun.host.system.network import names_this_host_only
from elasticrun.wire import auth
from elasticrun.wire.auth import TlsError, reader_token
from elasticrun.wire.messages import MAX_RANKS
from elasticrun.wire.rpc.channel import LinkError, reach_me
from elasticrun.wire.types import Endpoint, Finding, Level

if TYPE_CHECKING:
    from elasticrun.agent.context import NodeContext
    from elasticrun.config import Launch, Place
    from elasticrun.host.doctor.checkup import Subject
    from elasticrun.host.doctor.reach import Answer

ASK_AFTER: Final = 3.0
"""Minimum seconds from the master's Welcome to our request, so that the request does not disturb
the first round."""

ASKS_PER_SECOND: Final = 50
"""Average number of nodes per second that send their request to the master, each on a new
connection; random delays spread them."""

AGENT_CONTINUES: Final = "; the agent continues"
"""Appended to a log line about a failed check that does not end the agent."""

ANSWER_LIMIT: Final = 6.0
"""Seconds to wait for one answer from the master, which dials this node's ports for up to two
seconds."""


class Checkup:
    """The checkup of one agent; call `start` once, in the agent's loop."""

    def __init__(self, node: NodeContext) -> None:
        self._node = node
        self._findings: asyncio.Task[list[Finding]] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._tasks = Tasks(logger.error)
        self.reporter = HealthReporter(node)
        self.command = HealthCommand(node, self.reporter)
        self.devices = node.memory = DeviceWatch(node, self.reporter)
        node.parts.append(self.command)

    def start(self) -> None:
        """Start the checks in a thread; their findings are logged."""
        self._findings = self._tasks.start(self._run_checks(), "checking this machine")
        self.command.start()

    async def why_unfit(self) -> str:
        """Return why no rank may start on this node; "" if ranks may start. Waits for the findings
        with --precheck, and for the first run of --health-cmd."""
        if unfit := await self.command.why_unfit():
            return f"this node is unhealthy: {unfit}"
        if self._node.launch.precheck < 1 or self._findings is None:
            return ""
        failed = failures(await self._findings)
        if not failed:
            return ""
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return f"--precheck found this machine unfit: {as_line(failed[0])}{more}"

    def on_welcome(self, master: Endpoint) -> None:
        """Called when a master accepts this node. Starts the watch of devices, and schedules a
        request that the master dial this node's ports, unless the job has a single node."""
        self.devices.start()
        most = self._node.launch.spec.max_nodes
        if most > 1 and self._node.place.kind != "standalone":
            delay = ASK_AFTER + random.uniform(0, most / ASKS_PER_SECOND)
            asking = self._ask(master, delay)
            what = "asking the master about this node's ports"
            self._asking = self._tasks.start(asking, what)

    def close(self) -> None:
        """Cancel the checks; threads that hang are abandoned."""
        self._tasks.close()
        self.command.close()
        self.devices.close()

    async def _run_checks(self) -> list[Finding]:
        node = self._node
        try:
            findings = await in_thread(lambda: run_checks(node.launch, node.place), name="checkup")
        except (OSError, RuntimeError) as wrong:  # no working directory; no more threads
            logger.warning("the checks of this machine did not run: %s", wrong)
            return []
        log_findings(
            findings,
            "" if self._node.launch.precheck else f"{AGENT_CONTINUES}: --precheck=1 would end it",
        )
        return findings

    async def _ask(self, master: Endpoint, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            trust = trust_of(self._node.place, self._node.identity)
            reader = reader_token(trust.token)
            answers, dialled = await ask(master, reader, trust.files, trust.name)
            log_findings(
                await in_thread(lambda: _judged(answers, dialled), name="checkup"), AGENT_CONTINUES
            )
        except (LinkError, TlsError, OSError, RuntimeError) as nothing:  # no more threads
            logger.info("the master did not check this node's ports: %s", nothing)


def run_checks(launch: Launch, place: Place) -> list[Finding]:
    """Run the checks for an agent of this launch. Blocks for a bounded time."""
    from elasticrun.host.doctor import checkup

    return checkup.run(checkup.checks(subject(launch, place)))


def _judged(answers: list[Answer], dialled: str) -> list[Finding]:
    from elasticrun.host.doctor import checkup

    return checkup.reachability(answers, dialled)


def subject(launch: Launch, place: Place) -> Subject:
    """What the checks need to know about an agent of this launch."""
    from elasticrun.host.doctor import disk
    from elasticrun.host.doctor.checkup import Subject

    spec = launch.spec
    several = spec.max_nodes > 1 and place.kind != "standalone"
    return Subject(
        nproc=launch.nproc_per_node,
        ranks=min(MAX_RANKS, spec.max_nodes * launch.nproc_per_node),
        several=several and not names_this_host_only(place.host),
        folders=tuple(disk.folders(os.environ, log_dir=launch.logs.log_dir)),
        accelerator=launch.accelerator,
        environ=dict(os.environ),
        starts=True,
    )


def log_findings(findings: Iterable[Finding], and_then: str) -> None:
    """Log one line per finding; `and_then` is the consequence appended to a failure."""
    for finding in findings:
        if finding.state is Level.WARNING:
            logger.warning("this machine: %s", as_line(finding))
        elif finding.state is Level.FAILED:
            logger.warning("this machine is unfit: %s%s", as_line(finding), and_then)
        else:
            logger.debug("this machine: %s", as_line(finding))


async def ask(
    master: Endpoint, reader: str, files: auth.Files | None, name: str = ""
) -> tuple[list[Answer], str]:
    """Ask the master to dial some ports of this host, one at a time; returns its answers and its
    numeric address.

    `reader`: a reader's token; `name`: the name that the master's certificate must contain. Raises
    LinkError and TlsError; OSError if no port can be opened; RuntimeError if no thread can
    start."""
    from elasticrun.host.doctor import reach
    from elasticrun.host.doctor.reach import Answer

    pem = None if files is None else await in_thread(lambda: auth.read_pem(files), name="tls")
    answers = []
    for _ in range(reach.TRIES):
        with reach.open_port() as opened:
            sent = time.time_ns() // 1000
            reached = await reach_me(
                master,
                ANSWER_LIMIT,
                opened,
                token=reader,
                tls=pem,
                name=name,
                version=__version__,
            )
        answers.append(Answer(opened.port, reached, sent, time.time_ns() // 1000))
    return answers, await in_thread(lambda: numeric_address(master), name="resolve")


def numeric_address(where: Endpoint) -> str:
    """The first address of an endpoint's host; "" if it does not resolve. Blocks."""
    try:
        found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return str(found[0][4][0])
