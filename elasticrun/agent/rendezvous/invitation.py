"""Prints how other machines join a job for which the user has named no host."""

from __future__ import annotations

import os
import shlex
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticrun.agent.context import NodeContext
from elasticrun.agent.runtime import in_thread
from elasticrun.config import JoinCommand
from elasticrun.host.log import logger
from elasticrun.wire.auth import JOIN_CODE_LIFE, join_code
from elasticrun.wire.types import Endpoint

if TYPE_CHECKING:
    from elasticrun.host.user_folder import LaunchFolder

TOKEN_NAME: Final = "token"
"""The file with the job's token in this launch's folder; users copy it from there."""

WRITE_LIMIT: Final = 5.0
"""Seconds for writing that file."""


class Invitation:
    """Prints the command with which others join, once the master serves."""

    def __init__(self, node: NodeContext, *, given: bool) -> None:
        """`given`: the user gave the token."""
        self._node = node
        self._given = given

    async def show(self, endpoint: Endpoint, record: LaunchFolder | None) -> None:
        """Print how others join the master there. The token itself is never printed: users copy it
        from a private file in the folder of `record`."""
        launch, identity = self._node.launch, self._node.identity
        spec, target, to_join = launch.spec, launch.entry.target, launch.master.to_join
        by_api = JoinCommand((f"--nnodes={spec.min_nodes}:{spec.max_nodes}", target), 1, "")
        command = to_join or by_api
        if file := self._node.place.path:
            words = shlex.join(command.words)
            self._print(f"to join, on a machine with this folder: elasticrun {words}")
            self._print(f"machines find each other by {file}, which has the job's token")
            return
        flags = [f"--rdzv-endpoint={endpoint}"]
        if f"--rdzv-id={identity.job_id}" not in command.words:
            flags.append(f"--rdzv-id={identity.job_id}")
        path = None if self._given else await self._token_file(record)
        by_hand = shlex.join(("elasticrun", *command.with_flags(*flags)))
        if to_join is None:
            secret = path or "your ELASTICRUN_TOKEN or --token-file"
            self._print(f"to join, on another machine with the job's token ({secret}): {by_hand}")
            return
        code = join_code(identity.token, time.time())
        minutes = JOIN_CODE_LIFE // 60
        self._print(f"to add a machine, run this on it within {minutes} minutes:")
        # On its own line, so that it can be copied whole.
        self._node.writer.write(f"    elasticrun join {endpoint} {code}\n")
        logger.info("or, with the job's token (%s) on it: %s", path or "as given here", by_hand)

    async def _token_file(self, record: LaunchFolder | None) -> Path | None:
        if record is None:
            return None
        path = record.path / TOKEN_NAME
        try:
            write = partial(_write_private, path, self._node.identity.token)
            await in_thread(write, limit=WRITE_LIMIT)
        except (OSError, TimeoutError):
            return None
        return path

    def _print(self, sentence: str) -> None:
        self._node.writer.write(f"elasticrun: {sentence}\n")


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")
