"""Join codes on the master's side: creation, exchange for the job's token, rate limit."""

from __future__ import annotations

import logging
import time
from typing import Final

from elasticrun.config import JoinCommand
from elasticrun.wire.auth import (
    CODE_EXPIRED,
    NO_CODES,
    AuthServer,
    Denied,
    JoinAnswer,
    join_code,
    seal,
)
from elasticrun.wire.messages import Reply
from elasticrun.wire.types import dumps

MAX_TRIES: Final = 300.0
"""Maximum burst of join attempts: enough for a rack whose machines join together."""

TRIES_PER_SECOND: Final = 1.0
"""Rate at which that burst refills."""

NO_COMMAND: Final = (
    "this job has no join codes, because its endpoint was given (--rdzv-endpoint, --master-addr): "
    "run the other nodes' command on the new machine"
)

logger = logging.getLogger("elasticrun")


class Joining:
    """Handles the join codes of one master."""

    def __init__(self, job_id: str, token: str, command: JoinCommand | None) -> None:
        """`command`: what a joining node runs; None if the master does not know it."""
        self._job_id = job_id
        self._token = token
        self._command = command
        self._tries_left = MAX_TRIES
        self._refilled_at = time.monotonic()

    def admit(self) -> None:
        """Count one join attempt. Raises Denied if there were too many."""
        now = time.monotonic()
        self._tries_left = min(
            MAX_TRIES, self._tries_left + (now - self._refilled_at) * TRIES_PER_SECOND
        )
        self._refilled_at = now
        if self._tries_left < 1.0:
            raise Denied(
                "too many machines have tried to join at once: try again in a minute",
                "a joining machine was refused: too many attempts",
            )
        self._tries_left -= 1.0

    def new_code(self) -> Reply:
        """Create a join code for an operator; a refusal if the job has no token or no command."""
        if not self._token:
            return Reply(False, NO_CODES)
        if self._command is None:
            return Reply(False, NO_COMMAND)
        return Reply(True, "", str(join_code(self._token, time.time())))

    def answer(self, auth_server: AuthServer, peer: str) -> Reply:
        """Reply to a machine that has proved its code: the job's token and command, encrypted; a
        refusal if the master does not know the command. Raises Denied if the code has expired."""
        code = auth_server.code
        if time.time() > code.until:
            raise Denied(CODE_EXPIRED, "a machine with an expired join code was refused")
        command = self._command
        if command is None:
            return Reply(False, NO_COMMAND)
        answer = JoinAnswer(
            self._job_id, self._token, command.words, command.program_at, command.folder
        )
        # The log is the audit trail: who got the token, and when.
        logger.warning("%s used a join code and received the job's token", peer)
        return Reply(True, "", seal(code.secret, auth_server.nonces, dumps(answer).encode()))
