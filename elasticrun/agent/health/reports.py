"""What this node reports about its machine: one NodeHealth, put together from several sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrun.host.log import logger
from elasticrun.wire import messages as m

if TYPE_CHECKING:
    from elasticrun.agent.context import NodeContext


class HealthReporter:
    """Keeps what each source has found, and sends the whole to the master when it changes."""

    def __init__(self, node: NodeContext) -> None:
        self._node = node
        self._faults: dict[str, str] = {}  # by source; the first one counts
        self._notices: dict[str, tuple[str, ...]] = {}
        self._standby = ""
        self._sent = m.NodeHealth()

    def standby(self, state: str) -> None:
        """Replace what is known of the standbys, a clause."""
        self._standby = state
        self._send()

    def found(self, source: str, *, fault: str = "", notices: tuple[str, ...] = ()) -> None:
        """Replace what this source has found. A fault remains, because it ends the node; notices
        are logged when they appear."""
        known = self._notices.get(source, ())
        for notice in notices:
            if notice not in known:
                logger.warning("this machine: %s", notice)
        self._notices[source] = notices
        if fault and source not in self._faults:
            logger.warning("this machine is unfit: %s", fault)
            self._faults[source] = fault
        self._send()

    def resend(self) -> None:
        """Send everything again, to a master that may not know it."""
        self._sent = m.NodeHealth()
        self._send()

    def _send(self) -> None:
        shown = [notice for source in self._notices.values() for notice in source]
        fault = next(iter(self._faults.values()), "")
        report = m.NodeHealth(fault, tuple(shown[-m.MAX_NOTICES :]), self._standby)
        if report != self._sent:
            self._sent = report
            self._node.link.send(report)
