"""Folds the lines of several ranks between the files' readers and the console."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from elasticrun.agent.logs import masks
from elasticrun.agent.logs.console import ConsoleWriter, Text
from elasticrun.agent.logs.fold import Fold, FoldedLines, SharedLine
from elasticrun.wire.types import spans_of

MOST_OF_A_RANK = 8
"""Number of each rank's newest lines that `fold_texts` uses."""


@dataclass(slots=True)
class Writers:
    """The ranks that wrote a line: the first one's file, and a prefix that names all of them."""

    path: str
    prefix: bytes
    bar: bytes = b""
    """The key of their progress bar, empty if the line is not a bar. The terminal shows a bar's
    newest state on one line, whichever of its ranks has written it."""

    @property
    def owner(self) -> object:
        """As in `console.Source`."""
        return self.bar or (self.path, self.prefix)


class FoldedConsole:
    """Shows one stream of one attempt, folded. Used only by the thread that reads the files."""

    def __init__(self, console: ConsoleWriter, ranks: Mapping[int, int], paths: Mapping[int, str]):
        """`ranks`: global ranks by local rank; `paths`: the files that are read, by local rank."""
        self.console = console
        self._places = {local_rank: place for place, local_rank in enumerate(sorted(paths))}
        self._ranks = [ranks[local_rank] for local_rank in sorted(paths)]
        self._paths = [paths[local_rank] for local_rank in sorted(paths)]
        self._fold = Fold(len(self._places))
        self._bar = b""  # key of the bar shown last
        self._writers = lru_cache(maxsize=1024)(self._name)

    def add(self, local_rank: int, lines: Sequence[tuple[bytes, bool]]) -> None:
        """Add lines of one rank, without their ends, each with whether a carriage return ended
        it."""
        self._show(self._fold.add(self._places[local_rank], lines, time.monotonic()))

    def add_partial(self, local_rank: int, text: bytes, *, is_bar: bool) -> None:
        """Add the beginning of an unfinished line, or the newest state of a bar."""
        place, now = self._places[local_rank], time.monotonic()
        if is_bar:
            self._show(self._fold.add(place, [(text, True)], now))
            return
        self._show(self._fold.release(place, now))
        writers = self._writers(1 << place)
        self.console.show(writers.prefix + text, writers, Text.PARTIAL)

    def due(self) -> float | None:
        """When to call `tick`, on the monotonic clock."""
        return self._fold.due()

    def tick(self) -> None:
        """Show lines that have waited long enough."""
        self._show(self._fold.tick(time.monotonic()))

    def ended(self, local_rank: int) -> None:
        """Call when this rank's file is no longer read."""
        self._show(self._fold.ended(self._places[local_rank], time.monotonic()))

    def flush(self) -> None:
        """Show all held lines. Call when no file is read any longer."""
        self._show(self._fold.flush(time.monotonic()))

    def _show(self, folded: list[FoldedLines]) -> None:
        for who, lines, is_bar, same_as in folded:
            writers = self._writers(who)
            if same_as >= 0:
                lines = [f"the same traceback as rank {self._ranks[same_as]}".encode()]
            before = writers.prefix
            if is_bar or (self._bar and masks.bar_key(lines[0]) == self._bar):
                bar = self._bar = masks.bar_key(lines[0])
                writers = Writers(writers.path, before, bar)
            if is_bar:
                self.console.show(before + lines[0], writers, Text.BAR)
                continue
            self._bar = b""
            self.console.put(
                [before + line.replace(b"\n", b"\n" + before) + b"\n" for line in lines], writers
            )

    def _name(self, who: int) -> Writers:
        places = [place for place in range(len(self._ranks)) if who >> place & 1]
        words = ranges(self._ranks[place] for place in places)
        return Writers(self._paths[places[0]], f"[{words}] ".encode())


def fold_texts(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Fold the last lines of ranks: each line once, in order, with all ranks that wrote it at the
    same moment of training. A progress bar appears with its newest state."""
    ranks = sorted(texts)
    order: list[tuple[bytes, int]] = []
    held: dict[tuple[bytes, int], SharedLine] = {}
    for place, rank in enumerate(ranks):
        lines = texts[rank].encode().replace(b"\r\n", b"\n").split(b"\n")
        shown = [masks.bare(line.rstrip(b"\r").rpartition(b"\r")[2]) for line in lines]
        at, after = len(order), Counter[bytes]()
        for line in reversed([line for line in shown if line][-MOST_OF_A_RANK:]):
            key = masks.moment_of(line)
            after[key] += 1
            name = (key, after[key])
            if name in held:
                at = order.index(name)
                held[name].join(place, line)
            else:
                order.insert(at, name)
                held[name] = SharedLine(0, key, line, 1 << place, 0.0)
    return [
        (
            [rank for place, rank in enumerate(ranks) if held[name].who >> place & 1],
            held[name].words().decode(errors="replace"),
        )
        for name in order
    ]


def ranges(ranks: Iterable[int]) -> str:
    """Ranks as text, such as `0-5,7`."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans_of(ranks))
