"""The rendezvous of a job without an endpoint: the first node hosts the master.

It publishes the master's address in a rendezvous file (`--rdzv-endpoint=file://...`), or prints it
for people ("open").

The holder renews its claim. If the master is gone and nobody renews the claim, one of the job's
agents takes it over and starts the next master, which adopts the round that the agents report; all
agents follow the file to it. A holder whose claim was taken over stops its own master and follows
too. The claim is removed when the job ends. If its holder leaves earlier, it marks the claim so,
and whichever node is there at the end removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from elasticrun.agent.context import NodeContext
from elasticrun.agent.link.identity import offered_address
from elasticrun.agent.link.master_process import (
    MasterHost,
    MasterProcess,
    new_record,
    sweep_records,
)
from elasticrun.agent.rendezvous import finding
from elasticrun.agent.rendezvous.claims import (
    LOOK_EVERY,
    Claim,
    ClaimError,
    ClaimRenewer,
    Looks,
    timed,
)
from elasticrun.agent.rendezvous.finding import FoundJob, on_file, place_of
from elasticrun.agent.rendezvous.place import HostError
from elasticrun.agent.runtime import Tasks, in_thread, threadsafe
from elasticrun.config import FIRST_PORT, JoinCommand
from elasticrun.core.events import AgentEvent, LinkBack, LinkLost, Ordered
from elasticrun.host.log import logger
from elasticrun.host.user_folder import LaunchFolder
from elasticrun.wire.auth import JOIN_CODE_LIFE, join_code
from elasticrun.wire.messages import End, Refused
from elasticrun.wire.types import Endpoint

CLOSE_LIMIT: Final = 5.0
"""Seconds for updating or removing the file at the end."""

TOKEN_NAME: Final = "token"
"""The file with the job's token in this launch's folder; users copy it from there."""


class FileRendezvous:
    """Like `c10d.C10dRendezvous`, for the result of `finding`. A job without a file has a host and
    no claim."""

    def __init__(self, node: NodeContext, met: Callable[[], None], found: FoundJob) -> None:
        self._node = node
        self._met = met
        self._launch, self._where, self._identity = node.launch, node.place, node.identity
        self._tasks = Tasks(node.fatal)
        self._chores = Tasks(node.fatal)  # shutdown waits for these
        self._master: MasterHost | None = None
        self._record: LaunchFolder | None = None
        self._found = found
        self._file = found.file
        self._renewer = found.renewer
        self._claim = found.claim
        self._own = self._where.host if found.ours else ""
        self._told = False
        self._over = False
        self._said = ""
        self._following: asyncio.Task[None] | None = None
        self.dial = Endpoint(self._where.host, self._where.port)
        """The address that the link dials."""
        self.address = ""
        """The address at which other nodes reach a store or a master here; "" until settled."""

    async def settle(self, early: MasterProcess | None) -> None:
        """Host the master if the claim is ours, else follow the claim. HostError."""
        if self._found.interrupted:
            await asyncio.get_running_loop().create_future()  # the state machine handles the signal
        if self._found.wrong:
            raise HostError(self._found.wrong)
        where = self._where
        if self._found.ours:
            self.address = self._launch.local_addr or where.host
            await self._begin(where.port)
            return
        self.address = offered_address(self._launch.local_addr, where.host, where.host)
        self._met()
        self._follow()

    # ------------------------------------------------------------ hosting

    async def _begin(self, port: int) -> None:
        """Start a master here, at this port or the next free one."""
        sweep_records()
        if self._renewer is not None:
            loop = asyncio.get_running_loop()
            self._renewer.attach(
                lambda claim: threadsafe(loop, self._deposed, claim),
                lambda sentence: threadsafe(loop, self._trouble, sentence),
            )
        self._record = await in_thread(new_record, name="record")
        if self._over:
            return
        self._master = MasterHost(self._node, self, Endpoint(self._own, port), self._record)
        self._master.start()

    def master_serves(self, endpoint: Endpoint) -> None:
        self.dial = endpoint
        if not self._told and self._launch.spec.max_nodes > 1:
            self._told = True
            self._chores.start(self._tell(endpoint), "meeting by a file")
        self._met()

    def master_taken(self, sentence: str) -> None:
        """The port is taken: use the next free one."""
        logger.info("%s; the next free port is taken", sentence)
        self._master = None
        port = self.dial.port or self._where.port
        self._chores.start(self._elsewhere(port), "meeting by a file")

    async def _elsewhere(self, port: int) -> None:
        try:
            free = await in_thread(partial(finding.free_port, self._own, port + 1), name="resolve")
            if self._file is not None and not await self._take(free, self._file.mine):
                raise HostError(f"{self._file.path} was taken over by another host")
        except (HostError, ClaimError) as wrong:
            self._node.fatal(str(wrong))
            return
        await self._begin(free)

    async def _take(self, port: int, instead: Claim | None) -> bool:
        """Publish our claim with this port."""
        assert self._file is not None
        file, renewer = self._file, self._renewer
        mine = finding.claim_of(self._identity, self._own, port, given=self._found.given)
        if renewer is not None:
            await in_thread(renewer.close, name="claim")
        if not await on_file(partial(file.take, mine, instead), file):
            return False
        self._claim, self._renewer = mine, ClaimRenewer(file)
        return True

    async def _tell(self, endpoint: Endpoint) -> None:
        """Print how others join. The token itself is never printed."""
        spec, job_id = self._launch.spec, self._identity.job_id
        target = self._launch.entry.target
        by_api = JoinCommand((f"--nnodes={spec.min_nodes}:{spec.max_nodes}", target), 1, "")
        command = self._launch.master.to_join or by_api
        if self._file is not None:
            words = shlex.join(command.words)
            self._say(f"to join, on a machine with this folder: elasticrun {words}")
            self._say(f"machines meet by {self._file.path}, which has the job's token")
            return
        flags = [f"--rdzv-endpoint={endpoint}"]
        if f"--rdzv-id={job_id}" not in command.words:
            flags.append(f"--rdzv-id={job_id}")
        path = None if self._found.given else await self._token_file()
        by_hand = shlex.join(("elasticrun", *command.with_flags(*flags)))
        if self._launch.master.to_join is None:
            secret = path or "your ELASTICRUN_TOKEN or --token-file"
            self._say(f"to join, on another machine with the job's token ({secret}): {by_hand}")
            return
        code = join_code(self._identity.token, time.time())
        minutes = JOIN_CODE_LIFE // 60
        self._say(f"to add a machine, run this on it within {minutes} minutes:")
        # On its own line, so that it can be copied whole.
        self._node.writer.write(f"    elasticrun join {endpoint} {code}\n")
        logger.info("or, with the job's token (%s) on it: %s", path or "as given here", by_hand)

    async def _token_file(self) -> Path | None:
        if self._record is None:
            return None
        path = self._record.path / TOKEN_NAME
        try:
            await in_thread(partial(_write_private, path, self._identity.token), limit=CLOSE_LIMIT)
        except (OSError, TimeoutError):
            return None
        return path

    def _say(self, sentence: str) -> None:
        self._node.writer.write(f"elasticrun: {sentence}\n")

    # ------------------------------------------------------------ holding a claim

    def _trouble(self, sentence: str) -> None:
        if sentence:
            logger.warning("%s; others may take this job's master for lost", sentence)
        else:
            logger.warning("the rendezvous file is renewed again")

    def _deposed(self, claim: Claim) -> None:
        """Another host has taken the job over, because it saw no renewal of ours."""
        if self._over or self._file is None or self._renewer is None:
            return
        logger.warning(
            "%s has taken this job over, as %s says: the job master here ends, and this node "
            "follows that one",
            claim.text("host"), self._file.path,
        )  # fmt: skip
        self._file.let_go()
        self._renewer = None
        old, self._master = self._master, None
        if old is not None:
            old.kill()
            self._chores.start(old.close(job_over=False), "meeting by a file")
        self._turn_to(claim)
        self._follow()

    # ------------------------------------------------------------ following a claim

    def heard(self, event: AgentEvent) -> None:
        """Handle an event of the link."""
        if isinstance(event, LinkLost):
            self._follow()
        elif isinstance(event, LinkBack):
            self._follow_no_more()
        elif isinstance(event, Ordered) and isinstance(event.order, End | Refused):
            self._over = True

    def _follow(self) -> None:
        if self._master is not None or self._file is None or self._over:
            return
        if self._following is None or self._following.done():
            work = self._look_after(Looks())
            self._following = self._tasks.start(work, "looking after the rendezvous file")

    def _follow_no_more(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None

    async def _look_after(self, looks: Looks) -> None:
        """Until the link is back: follow the file to another master, or take over."""
        assert self._file is not None
        while not self._over:
            await asyncio.sleep(LOOK_EVERY * random.uniform(1.0, 1.25))
            try:
                claim, took = await on_file(partial(timed, self._file), self._file)
            except ClaimError as wrong:
                self._remark(str(wrong))
                continue
            if claim is None:
                self._remark(f"{self._file.path} is gone: its holder has ended the job, or left it")
            elif self._claim is None or claim.holder != self._claim.holder:
                looks = Looks()
                self._turn_to(claim)
            else:
                looks.look(claim, took)
                if looks.is_stale(claim) and await self._succeed(claim):
                    return

    def _remark(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            logger.warning("%s; this node dials on", sentence)

    def _turn_to(self, claim: Claim) -> None:
        """Follow this claim's master, if it is of this job."""
        token = claim.text("token")
        mine = claim.text("job") == self._identity.job_id
        if not mine or (token and token != self._identity.token):
            self._remark(f"another job has begun by that file ({claim.text('job')})")
            return
        self._claim = claim
        self.dial = place_of(claim)
        self._met()

    async def _succeed(self, claim: Claim) -> bool:
        """Take over a claim that nobody renews, if its master does not answer; returns whether it
        is ours."""
        where = self._where
        if where.is_host is False or await finding.answers(claim, self._identity):
            return False
        try:
            self._own = await in_thread(
                partial(finding.own_address, self._launch.local_addr), name="resolve"
            )
            port = await in_thread(
                partial(finding.free_port, self._own, FIRST_PORT), name="resolve"
            )
            if not await self._take(port, claim):
                return False
        except (HostError, ClaimError) as wrong:
            self._remark(str(wrong))
            return False
        logger.warning(
            "no job master is left at %s, and nobody renews %s: this agent starts one",
            place_of(claim), self._file.path if self._file else "",
        )  # fmt: skip
        self._following = None  # we host it now: the link's return must not cancel what follows
        self._told = True
        await self._begin(port)
        return True

    # ------------------------------------------------------------ shutdown

    async def close(self, *, job_over: bool) -> None:
        """Release the master, and update or remove the claim."""
        self._over = True
        self._follow_no_more()
        if self._renewer is not None:
            with contextlib.suppress(TimeoutError):
                await in_thread(self._renewer.close, limit=CLOSE_LIMIT, name="claim")
        if self._master is not None:
            await self._master.close(job_over=job_over)
        await self._chores.over(CLOSE_LIMIT)
        if self._file is not None:
            lives_on = self._master is not None and self._master.lives and not job_over
            with contextlib.suppress(TimeoutError, ClaimError):
                work = partial(self._leave_file, lives_on=lives_on, job_over=job_over)
                await in_thread(work, limit=CLOSE_LIMIT, name="claim")

    def _leave_file(self, *, lives_on: bool, job_over: bool) -> None:
        assert self._file is not None
        if self._file.mine is not None and lives_on:
            self._file.leave()
        elif self._file.mine is not None:
            self._file.remove()
        elif job_over and self._claim is not None:
            current = self._file.read()
            if current is not None and current.left and current.holder == self._claim.holder:
                self._file.remove(current.holder)


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")
