"""What is wrong with this machine (`elasticrun.host.doctor`), looked for beside the agent's start.

Nothing waits for it, but with --precheck: then a failed finding ends the agent before it joins.
What only the job's master can tell is asked much later, when nodes have joined and ranks run; it
never ends a node: the network check is what keeps one with a bad link out.

The checks are imported late, in the thread that runs them: the agent's own start is as it was.
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
from elasticrun.agent.link.trust import trust_of
from elasticrun.agent.runtime import Tasks, in_thread
from elasticrun.config import AgentConfig
from elasticrun.host.doctor.verdict import failures, in_a_line
from elasticrun.host.log import logger
from elasticrun.host.system.network import names_this_host_only
from elasticrun.wire import auth
from elasticrun.wire.auth import TlsError, reader_token
from elasticrun.wire.messages import MAX_RANKS
from elasticrun.wire.rpc.channel import LinkError, reach_me
from elasticrun.wire.types import Endpoint, Finding, Level

if TYPE_CHECKING:
    from elasticrun.host.doctor.checkup import Subject
    from elasticrun.host.doctor.reach import Answer

ASK_AFTER: Final = 3.0
"""Seconds from the master's welcome to our question to it: the first round forms without us."""

ASKERS: Final = 50
"""Nodes of a job that ask its master in one second, spread by chance: each costs a connection."""

GOES_ON: Final = "; the agent goes on"
"""The end of a line on a failure that ends nothing."""

ANSWER_LIMIT: Final = 6.0
"""Seconds for one answer of the master, which dials us for two at most."""


class Checkup:
    """The checkup of one agent; `begin` it once, in its loop."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._findings: asyncio.Task[list[Finding]] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._tasks = Tasks(logger.error)

    def begin(self) -> None:
        """Look at this machine in threads, and tell what is wrong with it."""
        self._findings = self._tasks.start(self._look(), "looking at this machine")

    async def unfit(self) -> str:
        """Why no rank may be started here, "" if one may or nobody asked; waits for the findings
        where it matters."""
        if self._config.precheck < 1 or self._findings is None:
            return ""
        failed = failures(await self._findings)
        if not failed:
            return ""
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return f"--precheck found this machine unfit: {in_a_line(failed[0])}{more}"

    def welcomed(self, master: Endpoint) -> None:
        """A master has let us in: have it look at us from its side, a little later."""
        most = self._config.spec.max_nodes
        if most > 1 and self._config.rendezvous.kind != "standalone":
            delay = ASK_AFTER + random.uniform(0, most / ASKERS)
            asking = self._ask(master, delay)
            what = "asking the master about this node's ports"
            self._asking = self._tasks.start(asking, what)

    def close(self) -> None:
        """Look no further; threads that hang are left to themselves."""
        self._tasks.close()

    async def _look(self) -> list[Finding]:
        try:
            findings = await in_thread(lambda: look(self._config), name="checkup")
        except (OSError, RuntimeError) as wrong:  # no folder we are in; no more threads
            logger.warning("this machine was not looked at: %s", wrong)
            return []
        tell(findings, "" if self._config.precheck else f"{GOES_ON}: --precheck=1 would end it")
        return findings

    async def _ask(self, master: Endpoint, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            trust = trust_of(self._config)
            reader = reader_token(trust.token)
            answers, dialled = await ask(master, reader, trust.files, trust.name)
            tell(await in_thread(lambda: _judged(answers, dialled), name="checkup"), GOES_ON)
        except (LinkError, TlsError, OSError, RuntimeError) as nothing:  # no more threads
            logger.info("the master was not asked about this node's ports: %s", nothing)


def look(config: AgentConfig) -> list[Finding]:
    """What this machine shows to an agent with this configuration. Blocks, for a while at most."""
    from elasticrun.host.doctor import checkup

    return checkup.run(checkup.checks(subject(config)))


def _judged(answers: list[Answer], dialled: str) -> list[Finding]:
    from elasticrun.host.doctor import checkup

    return checkup.of_the_master(answers, dialled)


def subject(config: AgentConfig) -> Subject:
    """What an agent with this configuration wants of its machine."""
    from elasticrun.host.doctor import disk
    from elasticrun.host.doctor.checkup import Subject

    spec = config.spec
    several = spec.max_nodes > 1 and config.rendezvous.kind != "standalone"
    return Subject(
        nproc=config.nproc_per_node,
        ranks=min(MAX_RANKS, spec.max_nodes * config.nproc_per_node),
        several=several and not names_this_host_only(config.rendezvous.host),
        folders=tuple(disk.folders(os.environ, log_dir=config.logs.log_dir)),
        accelerator=config.accelerator,
        environ=dict(os.environ),
        starts=True,
    )


def tell(findings: Iterable[Finding], and_then: str) -> None:
    """One line for each that is not well; `and_then` says what follows from a failure."""
    for finding in findings:
        if finding.state is Level.WARNING:
            logger.warning("this machine: %s", in_a_line(finding))
        elif finding.state is Level.FAILED:
            logger.warning("this machine is unfit: %s%s", in_a_line(finding), and_then)
        else:
            logger.debug("this machine: %s", in_a_line(finding))


async def ask(
    master: Endpoint, reader: str, files: auth.Files | None, name: str = ""
) -> tuple[list[Answer], str]:
    """Have the master dial some ports of this host: its answers, and its address in numbers.

    `reader`: a reader's token; `name`: what its certificate must bear. LinkError, TlsError;
    OSError where no port can be opened, RuntimeError where no thread can be started."""
    from elasticrun.host.doctor import reach
    from elasticrun.host.doctor.reach import Answer

    pem = None if files is None else await in_thread(lambda: auth.read_pem(files), name="tls")
    answers = []
    for _ in range(reach.TRIES):
        with reach.open_port() as asked:
            sent = time.time_ns() // 1000
            reached = await reach_me(
                master,
                ANSWER_LIMIT,
                asked,
                token=reader,
                tls=pem,
                name=name,
                version=__version__,
            )
        answers.append(Answer(asked.port, reached, sent, time.time_ns() // 1000))
    return answers, await in_thread(lambda: numeric(master), name="resolve")


def numeric(where: Endpoint) -> str:
    """The first address of an endpoint's host, "" if it has none. Blocks."""
    try:
        found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return str(found[0][4][0])
