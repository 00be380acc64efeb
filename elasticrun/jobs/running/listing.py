"""`elasticrun stacks`: what the ranks of a job are doing now, grouped, smallest group first;
`elasticrun events`: the job's events, one per line, by this host's clock.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from elasticrun.cli.verbs.columns import wrapped_on_terminal
from elasticrun.core.sight.picture import EventRow, Picture, StackRow
from elasticrun.core.words import plain, plural
from elasticrun.jobs.connection import JobConnection, NotAnswered
from elasticrun.jobs.rows import as_json
from elasticrun.jobs.running.master_lookup import (
    end_sentence,
    ended_run,
    parse_flags,
    parser,
    run,
    with_master,
)
from elasticrun.jobs.running.top import is_hang_watch_off
from elasticrun.wire.messages import MAX_RANKS
from elasticrun.wire.types import read_ranges

POLL: Final = 1.0
"""Seconds between two polls of `events -f`."""


MAX_AGE_DIFFERENCE: Final = 2.0
"""Maximum difference in seconds between the ages of one event in the master and in the run
folder."""


def stacks(argv: Sequence[str]) -> int:
    """The `stacks` verb."""
    made = parser("stacks", "Show where the ranks of a running job are, grouped by their stacks.")
    text = "only of this rank"
    made.add_argument("--rank", type=rank_number, default=-1, metavar="R", help=text)

    def show(line: JobConnection, ns: argparse.Namespace) -> int:
        picture = line.picture("stacks")
        groups = [one for one in picture.stacks if ns.rank < 0 or has_rank(one, ns.rank)]
        if ns.output == "json":
            shown = {"stacks": groups, "stacks_missing": picture.stacks_missing}
            print(as_json(shown))
        elif lines := stack_lines(picture, groups):
            print("\n".join(lines))
        if groups:
            return 0
        of, size = "of any rank" if ns.rank < 0 else f"of rank {ns.rank}", picture.status.world_size
        why = picture.stacks_missing or picture.status.outcome or picture.status.reason
        if is_hang_watch_off(picture):
            why = "the ranks are not watched (--on-hang=off)"
        elif 0 < size <= ns.rank:
            why = f"the job has {plural(size, 'rank')}, from 0 on"
        print(f"{made.prog}: no stack {of} was obtained{why and f': {why}'}", file=sys.stderr)
        return 1

    return run(made, argv, show)


def rank_number(text: str) -> int:
    """A rank number as typed. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a rank")
    return int(text)


def has_rank(group: StackRow, rank: int) -> bool:
    """Whether the group contains a thread of this rank."""
    try:
        return rank in read_ranges(group.ranks, MAX_RANKS)
    except ValueError:
        return False


def stack_lines(picture: Picture, groups: Sequence[StackRow]) -> list[str]:
    """The text for people: the verdict, the groups, what is missing."""
    lines = [picture.verdict.sentence, ""] if picture.verdict else []
    for group in groups:
        thread = f", {group.thread}" if group.thread else ""
        one = f"rank {group.ranks}" if group.count == 1 else f"ranks {group.ranks}"
        count = "" if group.count == 1 else f" ({plural(group.count, 'rank')})"
        lines.append(f"{one}{thread}{count}")
        lines += [f"  {frame}" for frame in group.text.splitlines()]
        lines.append("")
    if picture.stacks_missing and groups:
        lines += [f"missing: {picture.stacks_missing}", ""]
    return lines[:-1]


# ---------------------------------------------------------------- events


def events(argv: Sequence[str]) -> int:
    """The `events` verb."""
    made = parser("events", "Show the events of a job that runs or has ended.")
    text = "keep printing new events until the job ends"
    made.add_argument("-f", "--follow", action="store_true", help=text)

    def show(line: JobConnection, ns: argparse.Namespace) -> int:
        last = 0
        while True:
            try:
                picture = line.picture()
            except NotAnswered as why:
                if not last:
                    left = line.run.events(time.time()) if line.run is not None else []
                    if not left:
                        raise
                    _print(left, ns)
                    print(
                        f"{made.prog}: {why}; the events shown are from its run folder",
                        file=sys.stderr,
                    )
                    return 0
                line.sleep(POLL)  # the master writes the result after its last reply
                if not (end := end_sentence(line.run) if line.run is not None else ""):
                    raise
                _print([EventRow(last + 1, 0.0, "", end, "info")], ns)
                return 0
            new = new_events(picture.events, last)
            if not last and line.run is not None:
                new = [*older_events(line.run.events(time.time()), new), *new]
            _print(new, ns)
            last = picture.events[-1].number if picture.events else last
            if not ns.follow or picture.status.outcome:
                return 0
            sys.stdout.flush()
            line.sleep(POLL)

    flags = parse_flags(made, argv)
    try:
        if (left := ended_run(flags.ns.job)) is not None:
            _print(left.events(time.time()), flags.ns)
            return 0
        return with_master(flags, show)
    except NotAnswered as why:
        print(f"{made.prog}: {why}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # how the user ends `-f`
        return 0


def _print(rows: list[EventRow], ns: argparse.Namespace) -> None:
    if ns.output == "json" and not ns.follow:
        print(as_json(rows))
    elif ns.output == "json":
        for row in rows:
            print(msgspec.json.encode(row).decode())
    else:
        for text in wrapped_on_terminal(event_lines(rows, time.time()), " " * 19):
            print(text, flush=ns.follow)


def older_events(left: Sequence[EventRow], reported: Sequence[EventRow]) -> list[EventRow]:
    """Events in the run folder that are older than all that its master reports: those of earlier
    masters and starts, and those that this master has dropped. Each master numbers its events from
    1, and the two ages of one event differ slightly."""
    if not reported:
        return list(left)
    first = reported[0]
    for at, row in reversed(list(enumerate(left))):
        if row.number == first.number and abs(row.age - first.age) < MAX_AGE_DIFFERENCE:
            return list(left[:at])
    return [row for row in left if row.age > first.age]


def new_events(rows: Sequence[EventRow], last: int) -> list[EventRow]:
    """The rows after number `last`. A new master numbers from 1 again: if its last number is below
    `last`, all its rows are new."""
    if rows and rows[-1].number < last:
        return list(rows)
    return [row for row in rows if row.number > last]


def event_lines(rows: Sequence[EventRow], now: float) -> list[str]:
    """Lines like `12:04:31  warning  node b is excluded ...`, with the date if that is not today.
    `now`: this host's time in seconds since 1970."""
    lines, today = [], time.localtime(now)[:3]
    for row in rows:
        when = time.localtime(now - row.age)
        at = time.strftime("%H:%M:%S" if when[:3] == today else "%Y-%m-%d %H:%M:%S", when)
        node = f"{row.node}: " if row.node else ""
        lines.append(f"{at}  {row.level:<7}  {node}{plain(' '.join(row.text.split()))}")
    return lines
