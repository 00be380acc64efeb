"""A trace as a timeline for chrome://tracing and Perfetto: rounds, incidents, hangs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from elasticrun.core import events
from elasticrun.core.sight.picture import IncidentRow, VerdictRow
from elasticrun.wire import messages as m

BEFORE: Final = ("detect", "left")
"""Phases that are over when an incident is filed."""

MAX_SPANS: Final = 100_000
"""Maximum number of spans, and of incidents; later ones are left out."""

ROUNDS, INCIDENTS, PHASES, HANGS = 1, 2, 3, 4
ROWS: Final = {ROUNDS: "rounds", INCIDENTS: "incidents", PHASES: "the way back", HANGS: "hangs"}


class ChromeTrace:
    """Collects the effects of the state machine in order."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
            for row, name in ROWS.items()
        ]
        self._round: tuple[int, int, float] | None = None  # number, ranks, start
        self._hang: tuple[VerdictRow, float] | None = None  # the current hang, and its start
        self._began: float | None = None
        self._incidents: dict[int, tuple[float, IncidentRow]] = {}  # detected at, latest record

    def add(self, now: float, effects: Iterable[events.JobEffect]) -> None:
        """Add the effects at time `now` (seconds)."""
        self._began = now if self._began is None else self._began
        for effect in effects:
            if isinstance(effect, events.Filed):
                self._filed(effect.incident, now)
            elif isinstance(effect, events.Judged):
                self._hang_over(now)
                self._hang = None if effect.over else (effect.verdict, now - effect.verdict.since)
            elif isinstance(effect, events.JobOver):
                self._over(now)
            elif isinstance(effect, events.Send):
                order = effect.order
                if isinstance(order, m.Stop):
                    self._over(now)
                elif isinstance(order, m.Start) and order.round.number != self._number:
                    self._over(now)
                    self._round = (order.round.number, order.info.world_size, now)

    def write(self, path: Path, now: float) -> None:
        """End the open spans at `now` and write the timeline. Raises OSError."""
        self._over(now)
        self._hang_over(now)
        for noticed, row in self._incidents.values():
            self._incident(row, noticed)
        path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))

    @property
    def _number(self) -> int:
        return self._round[0] if self._round is not None else -1

    def _over(self, now: float) -> None:
        if self._round is not None:
            number, ranks, since = self._round
            self._span(ROUNDS, f"round {number}", since, now - since, {"ranks": ranks})
            self._round = None

    def _hang_over(self, now: float) -> None:
        if self._hang is not None:
            found, since = self._hang
            about = {"what": found.sentence, "ranks": found.ranks, "then": found.then}
            self._span(HANGS, f"{found.kind} ({found.klass})", since, now - since, about)
            self._hang = None

    def _filed(self, row: IncidentRow, now: float) -> None:
        """Add or update an incident, and end the round that it interrupted."""
        if row.number not in self._incidents and len(self._incidents) >= MAX_SPANS:
            return
        noticed, _ = self._incidents.get(row.number, (now - row.age, row))
        self._incidents[row.number] = (noticed, row)
        if row.round == self._number:  # also when no node is left to be stopped
            self._over(noticed)

    def _incident(self, row: IncidentRow, noticed: float) -> None:
        at = noticed - sum(phase.seconds for phase in row.phases if phase.name in BEFORE)
        about = {"cause": row.cause, "what": row.sentence, "decision": row.decision}
        whole = sum(phase.seconds for phase in row.phases)
        self._span(INCIDENTS, f"incident {row.number}", at, whole, about)
        for phase in row.phases:
            self._span(PHASES, phase.name, at, phase.seconds, {"incident": row.number})
            at += phase.seconds

    def _span(self, row: int, name: str, at: float, seconds: float, about: dict[str, Any]) -> None:
        if len(self._events) < MAX_SPANS:
            start = round(max(0.0, at - (self._began or 0.0)) * 1e6)
            span = {"ph": "X", "pid": 0, "tid": row, "ts": start, "dur": round(seconds * 1e6)}
            self._events.append({**span, "name": name, "args": about})
