"""`elasticrun top`: what the ranks of a job are doing, refreshed every two seconds.

It shows the verdict, the time accounting, and a table that stays readable at a thousand ranks,
because ranks in the same state share a line.
"""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from elasticrun.cli.verbs.columns import duration, width, wrapped
from elasticrun.core.sight.picture import Picture, RankRow
from elasticrun.core.words import plural
from elasticrun.jobs.connection import JobConnection, NotAnswered
from elasticrun.jobs.rows import as_json, state_of
from elasticrun.jobs.running.master_lookup import end_sentence, parser, run
from elasticrun.jobs.running.status import name_of
from elasticrun.wire.types import write_ranges

if TYPE_CHECKING:
    import argparse

EVERY: Final = 2.0
"""Seconds between two refreshes."""

MAX_UNGROUPED: Final = 16
"""Maximum number of ranks that each get their own line."""

MAX_NODES: Final = 3
"""Maximum number of nodes that a line names."""

UNSUSPICIOUS_STATES: Final = ("stepping", "waiting", "ended")
"""States listed last, in this order: they are normal, or caused by another rank's state."""

OPTIONAL_COLUMNS: Final = ("GPU", "MEMORY", "CPU", "STEP TIME", "STEP", "NODE")
"""Columns omitted, in this order, if the terminal is too narrow. DOES matters most: it is truncated
only after all these columns are omitted."""


def main(argv: Sequence[str]) -> int:
    """The `top` verb; `top nodes` shows hosts."""
    if argv[:1] == ["nodes"]:
        from elasticrun.jobs.manage import nodes

        return nodes.main(argv[1:])
    does = "Show what a running job's ranks are doing, every two seconds, until q or Ctrl-C; "
    made = parser("top", does + "`top nodes`: your jobs' usage of each host.")
    made.add_argument("--once", action="store_true", help="print it once, as if to a pipe")

    def show(line: JobConnection, ns: argparse.Namespace) -> int:
        picture = line.picture(live=True)
        if ns.output == "json":
            print(as_json(picture))
        elif ns.once or not sys.stdout.isatty():
            print("\n".join(page(picture, width() or 100)))
        else:
            _refresh(line, picture)
        return 0

    try:
        return run(made, argv, show)
    except KeyboardInterrupt:  # how the user ends it
        return 0


def _refresh(line: JobConnection, picture: Picture) -> None:
    """Refresh on a terminal until the job ends. Raises NotAnswered when its master no longer
    answers."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)

    def drawn(rest: str = "") -> Text:
        lines = page(picture, console.width)
        room = max(4, console.height - 2)
        if len(lines) > room:
            lines = [*lines[: room - 1], f"... {len(lines) - room + 1} more lines (use --once)"]
        return Text("\n".join([*lines, *([rest] if rest else [])]), no_wrap=True, overflow="crop")

    with (
        _single_keys() as keys,
        Live(drawn(), console=console, auto_refresh=False, screen=False) as live,
    ):
        while not picture.status.outcome:
            if _quits_within(EVERY, keys):
                return
            try:
                picture = line.picture(live=True)
            except NotAnswered as why:  # a master that ends may stop answering before it has told
                end = "" if line.run is None else end_sentence(line.run)
                live.update(drawn(end or f"no answer: {why}"), refresh=True)
                if end:
                    return
                raise
            live.update(drawn(), refresh=True)


@contextlib.contextmanager
def _single_keys() -> Iterator[list[int]]:
    """The descriptor from which keys are read without Enter; none if standard input is no
    terminal."""
    if not sys.stdin.isatty():
        yield []
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd, termios.TCSANOW)
    try:
        yield [fd]
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)


def _quits_within(seconds: float, keys: Sequence[int]) -> bool:
    """Wait, for less if a key is pressed. Returns whether it was q, or the terminal is gone."""
    ready, _, _ = select.select(keys, [], [], seconds)
    return any(not (read := os.read(fd, 64)) or b"q" in read.lower() for fd in ready)


# ---------------------------------------------------------------- the page


def page(picture: Picture, columns: int) -> list[str]:
    """The lines of the whole page, no wider than `columns` unless a single name is."""
    lines = [part for line in head(picture) for part in wrapped(line, columns)]
    if picture.ranks:
        lines += ["", *table(picture.ranks, columns)]
    elif not picture.status.outcome:
        off = "the ranks are not watched (--on-hang=off)"
        lines += [
            "",
            off if is_hang_watch_off(picture) else "the ranks have not been inspected yet",
        ]
    return lines


def is_hang_watch_off(picture: Picture) -> bool:
    """Whether the job was started with --on-hang=off."""
    return any((one.name, one.value) == ("on_hang", '"off"') for one in picture.settings)


def head(picture: Picture) -> list[str]:
    """The job in one line, what holds it up, and its time accounting."""
    status = picture.status
    step = max([status.step, *(row.step for row in picture.ranks)])
    words = [
        f"{name_of(status.job_id, '', status.name) or 'job'}: {state_of(status)}",
        f"round {status.round.number}" if status.round else "no round yet",
        plural(status.world_size, "rank"),
        f"step {step}" if step >= 0 else "",
        f"{status.restart_count} of {status.max_restarts} restarts",
        duration(status.age),
    ]
    lines = [", ".join(word for word in words if word)]
    if picture.verdict is not None:
        verdict = picture.verdict
        lines.append(
            f"{'no hang' if verdict.says else f'hang ({verdict.klass})'}: {verdict.sentence}"
        )
        lines += [verdict.then] if verdict.then else []
    elif status.outcome:
        lines.append(f"ended: {status.outcome}")
    elif status.reason:
        lines.append(f"waits: {status.reason}")
    lines += [f"slow: {why}" for why in picture.slow]
    lines += [f"node {one.node}: {why}" for one in status.nodes for why in one.notices]
    lines += [f"standbys of {one.node}: {one.standby}" for one in status.nodes if one.standby]
    if picture.goodput is not None and picture.goodput.line:
        lines.append(picture.goodput.summary)
    return lines


# ---------------------------------------------------------------- the table


def table(rows: Sequence[RankRow], columns: int) -> list[str]:
    """The table of ranks. If there are more than MAX_UNGROUPED, those in the same state share a
    line, anomalous states first."""
    groups = group_ranks(rows) if len(rows) > MAX_UNGROUPED else [[row] for row in rows]
    drawn = [[cell(group) for cell in CELLS.values()] for group in groups]
    titles = list(CELLS)
    shown = [at for at in range(len(titles)) if any(line[at] not in ("", "-") for line in drawn)]
    if len({row.node for row in rows}) == 1:
        shown = [at for at in shown if titles[at] != "NODE"]
    most = [max(len(line[at]) for line in [titles, *drawn]) for at in range(len(titles))]
    for name in OPTIONAL_COLUMNS:
        at = titles.index(name)
        if at in shown and sum(most[one] + 2 for one in shown) - 2 > columns:
            shown.remove(at)
    words = ["  ".join(line[at].ljust(most[at]) for at in shown) for line in [titles, *drawn]]
    room = max(columns, sum(most[at] + 2 for at in shown if titles[at] != "DOES") + len("DOES"))
    return [line[:room].rstrip() for line in words]


def group_ranks(rows: Sequence[RankRow]) -> list[list[RankRow]]:
    """Group ranks that are in the same state, at the same place, and wait for the same ranks;
    anomalous states first, then smaller groups."""
    groups: dict[tuple[str, str, str], list[RankRow]] = {}
    for row in rows:
        groups.setdefault((row.state, row.waits_for, row.place), []).append(row)

    def turn(group: list[RankRow]) -> tuple[int, int, int]:
        state = group[0].state
        calm = UNSUSPICIOUS_STATES.index(state) + 1 if state in UNSUSPICIOUS_STATES else 0
        return (calm, len(group), group[0].rank)

    return sorted(groups.values(), key=turn)


def _ranks(group: Sequence[RankRow]) -> str:
    text = write_ranges(row.rank for row in group)
    first, comma, _ = text.partition(",")
    return text if len(text) <= 20 or not comma else f"{first},... ({len(group)})"


def _nodes(group: Sequence[RankRow]) -> str:
    names = list(dict.fromkeys(row.node for row in group))
    return ",".join(names) if len(names) <= MAX_NODES else plural(len(names), "node")


def _steps(group: Sequence[RankRow]) -> str:
    steps = [row.step for row in group if row.step >= 0]
    if not steps:
        return "-"
    return f"{min(steps)}-{max(steps)}" if min(steps) < max(steps) else str(steps[0])


def _step_time(group: Sequence[RankRow]) -> str:
    times = [row.step_seconds for row in group if row.step_seconds > 0]
    return f"{statistics.median(times):.3g}s" if times else "-"


def _gpu(group: Sequence[RankRow]) -> str:
    known = [row for row in group if row.gpu >= 0]
    if not known:
        return "-"
    share = statistics.mean(row.gpu for row in known)
    return f"{share:.0f}% {_size(max(row.gpu_mib for row in known))}"


def _size(mib: int) -> str:
    return f"{mib}M" if mib < 10_000 else f"{mib / 1024:.0f}G"


def _activity(group: Sequence[RankRow]) -> str:
    places = list(dict.fromkeys(row.place or row.call for row in group))
    return places[0] if len(places) == 1 else ""


CELLS: Final[dict[str, Callable[[Sequence[RankRow]], str]]] = {
    "RANK": _ranks,
    "NODE": _nodes,
    "STATE": lambda group: group[0].state,
    "WAITS FOR": lambda group: group[0].waits_for or "-",
    "STEP": _steps,
    "STEP TIME": _step_time,
    "QUIET": lambda group: duration(max(row.quiet for row in group)),
    "CPU": lambda group: f"{statistics.mean(row.cpu for row in group):.1f}",
    "MEMORY": lambda group: _size(max(row.rss for row in group)),
    "GPU": _gpu,
    "DOES": _activity,
}
"""Each column's title and cell text. For several ranks: the mean of CPU and GPU, the median of step
times, the longest quiet time, the largest memory."""
