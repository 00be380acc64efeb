"""What every way to meet has: the master that this node hosts, if it does, and the two addresses
that the node asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from elasticrun.agent.helpers import MasterHost
from elasticrun.agent.processes import Reaper
from elasticrun.config import AgentConfig
from elasticrun.operator_log import StderrWriter
from elasticrun.wire.ids import Endpoint

RESOLVE_AGAIN: Final = 1.0
"""Seconds until a name that is needed to meet is tried again for the first time: pods get theirs
late."""

RESOLVE_CAP: Final = 5.0
"""The longest such wait: name servers remember for some seconds that a name was not there."""


def resolve_again(tries: int) -> float:
    """Seconds until a name that did not resolve is tried again, after so many tries."""
    return float(min(RESOLVE_CAP, RESOLVE_AGAIN * 2.0 ** min(tries - 1, 10)))


OVER_LIMIT: Final = 3.0
"""Seconds for a hosted master to end when the job is over: then its port is free again when the
command returns."""

LEAVE_LIMIT: Final = 1.0
"""The same when only this node leaves: the master may live on for the others."""


class MeetingBase:
    """`met` is called when the master's place is known and whenever one serves there anew;
    `fatal(sentence)` when it cannot be had."""

    def __init__(
        self,
        config: AgentConfig,
        reaper: Reaper,
        writer: StderrWriter,
        met: Callable[[], None],
        fatal: Callable[[str], None],
    ) -> None:
        self._config = config
        self._reaper = reaper
        self._writer = writer
        self._met = met
        self._fatal = fatal
        self._master: MasterHost | None = None
        self.dial = Endpoint(config.rendezvous.host, config.rendezvous.port)
        """What the link dials."""
        self.address = ""
        """What other nodes dial to reach a store here, or a master; "" until settled."""

    def pids(self) -> set[int]:
        """Helpers that a sweep must spare."""
        pid = self._master.pid if self._master else None
        return set() if pid is None else {pid}

    async def _let_master_go(self, *, job_over: bool) -> None:
        if self._master is not None:
            await self._master.close(OVER_LIMIT if job_over else LEAVE_LIMIT)
