"""Helpers for writing sentences."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from elasticrun.wire.types import write_ranges

MAX_NAMES = 4
"""Maximum number of nodes that a sentence lists by name. If there are more, it names the first
three and counts the rest."""


def plural(count: int, thing: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def rank_names(ranks: Collection[int], *, pairs: bool = False) -> str:
    """`rank 3`, `ranks 0-7`; `pairs`: as for `write_ranges`."""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {write_ranges(ranks, pairs=pairs)}"


def span(seconds: float) -> str:
    """`0.41 s`, `12 s`, `3.5 min`, `2.1 h`, `4.0 d`."""
    if seconds < 10.0:
        return f"{seconds:.2f} s"
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * size:
            count = seconds / size
            return f"{count:.0f} {unit}" if count >= 10.0 else f"{count:.1f} {unit}"
    return f"{seconds:.0f} s"


def recovery_times(restarted: float, first_step: float) -> str:
    """`restarted in 0.41 s, first step after 1.20 s`; a part whose value is -1.0 is omitted."""
    parts = ((restarted, "restarted in"), (first_step, "first step after"))
    return ", ".join(f"{words} {span(seconds)}" for seconds, words in parts if seconds >= 0.0)


def plain(text: str) -> str:
    """Replace characters that are not printable: texts come from scripts and must not contain
    terminal escape sequences."""
    return "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in text)


Lasting = tuple[str | int, ...]
"""A sentence in pieces. A number is the seconds for which an ongoing condition has lasted."""


def render_lasting(pieces: Lasting, later: float = 0.0) -> str:
    """Render a sentence `later` seconds after its numbers were measured."""
    return "".join(
        piece if isinstance(piece, str) else f" for {piece + later:.0f} s" for piece in pieces
    )


def names(nodes: Sequence[str]) -> str:
    """`n0`, `n0 and n1`, `n0, n1 and n2`, `n0, n1, n2 and 7 others`."""
    if len(nodes) > MAX_NAMES:
        return f"{', '.join(nodes[: MAX_NAMES - 1])} and {len(nodes) - MAX_NAMES + 1} others"
    if len(nodes) < 2:
        return "".join(nodes)
    return f"{', '.join(nodes[:-1])} and {nodes[-1]}"


def index_of(word: str) -> str:
    """The index of a node from its name in Arena: `JOB-master-0` is 0, `JOB-worker-0` is 1; other
    words are returned unchanged."""
    found = re.fullmatch(r".+-(?:master-0|worker-(\d{1,6}))", word)
    return word if found is None else str(int(found[1]) + 1 if found[1] else 0)


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """A clause that suggests the correction of a mistyped word; "" if no name is similar."""
    import difflib

    names = list(names)
    if word in names:
        return ""
    longer = sorted(name for name in names if len(word) > 3 and name.startswith(word))
    swapped = sorted(name for name in names if sorted(name) == sorted(word))
    close = difflib.get_close_matches(word, names, 1, 0.75)
    cut = len(word) - 1  # the beginning of a longer name, with one letter too many
    found = (
        longer[:1]
        or swapped[:1]
        or close
        or sorted(name for name in names if cut > 3 and name.startswith(word[:cut]))[:1]
    )
    return f"; did you mean {found[0]}?" if found else ""


SMALL_JOB_NODES = 64
"""In a job that needs at most this many nodes, every join is counted at once."""

FIRST_COUNT_INTERVAL = 2.0
"""Seconds for which a larger job keeps the first count that it reports; the interval then doubles
each time."""

MAX_COUNT_INTERVAL = 60.0
"""Maximum of that interval in seconds; agents log what they wait for once a minute."""


class ShownCount:
    """The number of nodes that are present, as sentences state it.

    A sentence that changes with every join costs n messages to each of n nodes. In a large job the
    reported count is therefore kept for some seconds, so the number of messages to a node depends
    on how long it waits, not on the number of nodes.
    """

    def __init__(self) -> None:
        self.shown = 0
        self._shown_at: float | None = None
        self._pause = FIRST_COUNT_INTERVAL

    def restart(self) -> None:
        """Make the next `update` take effect at once."""
        self._shown_at = None

    def update(self, present: int, needed: int, now: float) -> float | None:
        """Update the count: `present` of `needed` nodes are there. Return when to call again if the
        update is postponed, else None."""
        if self._shown_at is None:
            self._pause = FIRST_COUNT_INTERVAL
        elif present == self.shown:
            return None
        elif needed > SMALL_JOB_NODES and self.shown > 0:  # a count of 0 is updated at once
            due = self._shown_at + self._pause
            if now < due:
                return due
            self._pause = min(2.0 * self._pause, MAX_COUNT_INTERVAL)
        self.shown, self._shown_at = present, now
        return None
