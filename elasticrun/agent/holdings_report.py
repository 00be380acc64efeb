"""Telling the master what this node holds: always all of it, and not too often."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from elasticrun.agent.link import Link
from elasticrun.wire.messages import Holdings

REPORTS_PER_SECOND: Final = 50.0
"""That a master hears from all nodes of a round."""

ALONE: Final = 1.0
"""Seconds between the reports of a node that is the only one: it knows by itself what is whole, and
what matters is said at once (`now`)."""


class HoldingsReport:
    """`look` makes the report as it is now, `nodes` is how many the round has."""

    def __init__(
        self, link: Callable[[], Link], look: Callable[[], Holdings], nodes: Callable[[], int]
    ) -> None:
        self._link = link
        self._look = look
        self._nodes = nodes
        self._said: Holdings | None = None
        self._said_at = -math.inf
        self._due: asyncio.TimerHandle | None = None
        self._closed = False

    def changed(self) -> None:
        """Tell it soon; of what changes within a moment only the last."""
        loop = asyncio.get_running_loop()
        nodes = self._nodes()
        due = self._said_at + (nodes / REPORTS_PER_SECOND if nodes > 1 else ALONE)
        if due <= loop.time():
            self._offer()
        elif self._due is None and not self._closed:
            self._due = loop.call_at(due, self._offer)

    def now(self, *, again: bool = False) -> None:
        """Tell it before anything that is said from now on; `again`: also where nothing is new."""
        self._cancel()
        report = self._look()
        if self._nothing(report) or (report == self._said and not again):
            return
        self._link().say(report)
        self._told(report)

    def close(self) -> None:
        self._closed = True
        self._cancel()

    def _offer(self) -> None:
        self._cancel()
        report = self._look()
        if self._closed or self._nothing(report) or report == self._said:
            return
        link = self._link()
        if link.offer(report):
            self._told(report)
        elif link.beat_interval:  # it is busy; without a session, the next one is told all
            loop = asyncio.get_running_loop()
            self._due = loop.call_later(1 / REPORTS_PER_SECOND, self._offer)

    def _nothing(self, report: Holdings) -> bool:
        """As far as anybody knows, no script of this job takes snapshots."""
        return self._said is None and not report.held and report.saver is None

    def _told(self, report: Holdings) -> None:
        self._said, self._said_at = report, asyncio.get_running_loop().time()

    def _cancel(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
