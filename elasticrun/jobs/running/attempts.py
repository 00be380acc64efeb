"""Finds the rank that failed first in an attempt, according to the job's master, and the ranks that
failed only because they lost their connection to a peer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticrun.core.rounds.failures import SIGNALS, classify
from elasticrun.core.sight.picture import IncidentRow
from elasticrun.core.words import rank_names
from elasticrun.host.runs.layout import INCIDENTS, RunFolder
from elasticrun.master.outward.run_files import read
from elasticrun.wire.messages import FailureKind

MAX_BYTES: Final = 256 * 1024
"""Bytes read from an error file; the message comes first."""

MAX_CHARS: Final = 1000
"""Characters shown of a rank's own error message."""

NO_FAILURE: Final = ("operator", "scaled", "master")
"""Causes of incidents in which nothing failed."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The log folder of one rank in one attempt."""

    rank: int
    folder: Path

    def failure(self) -> tuple[float, str]:
        """Time (seconds since 1970) and message of the rank's failure; infinity and "" if the rank
        recorded none."""
        file = self.folder / "error.json"
        try:
            with file.open("rb") as text:
                message = json.loads(text.read(MAX_BYTES))["message"]
            when = file.stat().st_mtime
        except (OSError, ValueError, LookupError, TypeError):
            return float("inf"), ""
        if isinstance(message, dict):
            message = message.get("message", "")
        return when, " ".join(str(message).split())[:MAX_CHARS]


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """What ended an attempt, according to the master."""

    sentence: str
    rank: int = -1  # -1: no rank
    ended: str = ""  # how the rank ended, such as "exit code 3"; "": only in the sentence

    def with_error(self, own: str) -> str:
        """The end as one line. `own`: the rank's own error message."""
        if own and self.ended:
            return f"rank {self.rank} failed: {own} ({self.ended})"
        return self.sentence


@dataclass(frozen=True, slots=True)
class AttemptTitles:
    """The ranks of one attempt, first failure first, and the title above each rank's output."""

    ranks: tuple[RankFiles, ...]
    titles: Mapping[int, str]  # by rank
    why: str = ""  # what ended the attempt, if it was none of these ranks


def attempt_titles(found: Sequence[RankFiles], end: AttemptEnd | None) -> AttemptTitles:
    """Order the ranks and write their titles. `end`: None if the master recorded none (yet)."""
    failed = {files.rank: (*files.failure(), files) for files in found}
    first = end.rank if end is not None else -1
    lost = {rank for rank, (_, why, _) in failed.items() if rank != first and _is_peer_loss(why)}
    titles = {rank: f"rank {rank} failed: {why}" for rank, (_, why, _) in failed.items() if why}
    order = sorted(failed, key=lambda rank: (rank != first, rank in lost, failed[rank][0], rank))
    titled = {-1: ""}
    if end is not None and first in failed:
        titled = {first: end.with_error(failed[first][1])}
    elif end is not None:
        titled = {-1: end.sentence}
    elif titles.keys() - lost:
        titled = {order[0]: titles[order[0]]}
    if lost and any(titled.values()):
        who = rank_names(lost)
        then = f"; then {who} lost {'their' if len(lost) > 1 else 'its'} connection"
        titles = {rank: title for rank, title in titles.items() if rank not in lost}
        titled = {rank: title + then for rank, title in titled.items()}
    titles |= titled
    return AttemptTitles(tuple(failed[rank][2] for rank in order), titles, titles.pop(-1, ""))


def attempt_ends(
    folder: RunFolder | None, attempts: Sequence[tuple[int, float]]
) -> list[AttemptEnd | None]:
    """The end of each attempt; None if the master recorded none. `attempts`: each one's number and
    its start in seconds since 1970, ascending.

    An incident belongs to the attempt of its round. Each start of a job counts attempts from 0, so
    the time of an incident tells which start it belongs to. It does not tell attempts apart: they
    may follow within a tenth of a second, and an incident's file may be written later than that.
    `attempts` may be those of the newest start alone, which began when the job's record says so.
    """
    found: list[AttemptEnd | None] = [None] * len(attempts)
    if folder is None or not attempts:
        return found
    now, job = time.time(), folder.job()
    newest = job.began if job is not None else 0.0
    for row in read(folder.path / INCIDENTS, now):
        at = now - row.age
        same = [
            index
            for index, (number, began) in enumerate(attempts)
            if number == row.round - 1 and (began >= newest) == (at >= newest)
        ]
        if row.cause not in NO_FAILURE and same:
            begun = [index for index in same if attempts[index][1] <= at]
            index = begun[-1] if begun else same[0]
            found[index] = found[index] or _end_of_row(row)
    result = folder.result()
    if found[-1] is None and result is not None and result.failed_rank >= 0:
        sentence = f"rank {result.failed_rank} failed ({result.failed_how})"
        found[-1] = AttemptEnd(sentence, result.failed_rank)
    return found


def _end_of_row(row: IncidentRow) -> AttemptEnd:
    if row.cause == "hang" or row.rank < 0 or row.kind == FailureKind.PEER_LOST:
        return AttemptEnd(row.sentence, row.rank)
    code = row.exitcode
    ended = f"signal {SIGNALS.get(-code, str(-code))}" if code < 0 else f"exit code {code}"
    # 1 is Python's own code for an exception, which the sentence names
    return AttemptEnd(row.sentence, row.rank, "" if code in (0, 1) else ended)


def _is_peer_loss(why: str) -> bool:
    return classify(1, why, stopping=False, oom=False) is FailureKind.PEER_LOST
