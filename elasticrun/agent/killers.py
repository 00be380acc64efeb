"""By whom a rank was killed, as far as the kernel's log tells where no count of its own does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from elasticrun.agent.threads import in_thread
from elasticrun.operator_log import logger
from elasticrun.wire.messages import Failure

LOOK_LIMIT: Final = 5.0
"""Seconds for reading the log; nothing waits for it."""


class Killers:
    """Of the ranks here; it says one thing once. `root`: where the kernel's files are."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._told: set[str] = set()

    async def look(self, failure: Failure) -> None:
        """Tell what the log says of this rank, which a SIGKILL ended that nobody here has sent."""
        from elasticrun.doctor import kernel  # only where a rank was killed

        def read() -> kernel.Word:
            return kernel.of_a_kill(failure.pid, self._root)

        try:
            word = await in_thread(read, limit=LOOK_LIMIT, name="kernel-log")
        except TimeoutError:
            return
        level = logging.INFO if word.clear else logging.WARNING
        if word.text not in self._told:
            self._told.add(word.text)
            logger.log(level, "rank %d: %s", failure.rank, word.text)
