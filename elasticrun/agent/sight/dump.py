"""Writes all facts about hanging ranks to files for users: `hang-N/rank-R.txt`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from elasticrun.agent.sight.stacks import Frame
from elasticrun.host.runs.layout import LOGS
from elasticrun.host.user_folder import published, user_folder
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint

MAX_DUMP: Final = 256 * 1024
"""Maximum bytes of one rank's file; facts come first, then stacks."""


def write(parent: str, number: int, texts: Mapping[int, str]) -> str:
    """Write these ranks' texts; returns the absolute path of their folder below `parent`, or "" if
    nothing could be written or `parent` is "". Blocks on the disk."""
    if not parent or not texts:
        return ""
    folder = Path(parent) / f"hang-{number}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, text in texts.items():
            data = text.encode(errors="replace")[:MAX_DUMP]
            partial = folder / f".rank-{rank}.txt"
            partial.write_bytes(data)
            os.replace(partial, folder / f"rank-{rank}.txt")
    except OSError:
        return ""
    return str(folder.absolute())  # readers may be in another directory or host


def run_logs(environ: Mapping[str, str], job_id: str, master: Endpoint | None) -> str:
    """The log folder in the job's run folder if its master is on this host; else "". Blocks on the
    disk."""
    with contextlib.suppress(OSError):
        for one in published(user_folder(environ)):
            if master and one.run and (one.job_id, one.port) == (job_id, master.port):
                return str(Path(one.run) / LOGS)
    return ""


def describe(
    seen: m.RankSeen,
    groups: Sequence[m.GroupSeen],
    threads: Mapping[str, Sequence[Frame]],
    facts: Iterable[str],
    why: str = "",
) -> str:
    """The text about one rank, with all that is known of it. `why`: the reason for missing stacks,
    "" if they are here."""
    return "\n".join(_lines(seen, groups, threads, facts, why)) + "\n"


def _lines(
    seen: m.RankSeen,
    groups: Sequence[m.GroupSeen],
    threads: Mapping[str, Sequence[Frame]],
    facts: Iterable[str],
    why: str,
) -> Iterator[str]:
    yield f"rank {seen.rank}, process {seen.pid}: {seen.being}, {seen.kernel or 'on a CPU'}"
    yield (
        f"quiet for {seen.quiet:.0f} s; {seen.cpu:.2f} cores, {seen.io / 1e6:.1f} MB/s, "
        f"{seen.rss} MiB of memory"
    )
    if seen.place:
        yield f"at {seen.place}" + (f", in {seen.library}" if seen.library else "")
    if seen.holds:
        yield "does not answer: C code holds its interpreter lock"
    for at in seen.at:
        group = groups[at.group]
        call = f"; the oldest open one, {at.age:.0f} s: {at.call}" if at.call else ""
        name = f"{group.name} {group.title}".strip()
        yield f"group {name} ({group.members or 'all'}): {at.entered} called, {at.done} done{call}"
    if why:
        yield f"no stacks: {why}"
    for thread, frames in threads.items():
        yield ""
        yield f"{thread or 'main thread'}, innermost first:"
        yield from (f"  {file}:{line} {function}" for file, line, function in frames)
    yield ""
    yield "threads as the kernel sees them:"
    yield from facts
