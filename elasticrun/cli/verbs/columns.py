"""Tables for the terminal.

A name is never truncated: a name too wide for its column gets its own line, as in `df`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

Row = tuple[str, ...]


def duration(seconds: float) -> str:
    """`45s`, `12m`, `3h05m`, `2d04h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole // 60 % 60:02d}m"
    return f"{whole // 86400}d{whole // 3600 % 24:02d}h"


def lines(titles: Row, rows: Sequence[Row], columns: int) -> list[str]:
    """The lines of the table, no wider than `columns` unless a single name is. The first column has
    the names."""
    table = [titles, *rows]
    most = [max(len(row[at]) for row in table) for at in range(1, len(titles))]
    room = columns - sum(width + 2 for width in most)
    wide = max((len(row[0]) for row in table if len(row[0]) <= room), default=0)
    drawn = []
    for row in table:
        if len(row[0]) > wide:
            drawn.append(row[0])
        name = row[0] if len(row[0]) <= wide else ""
        rest = (word.ljust(width) for word, width in zip(row[1:], most, strict=True))
        drawn.append("  ".join((name.ljust(wide), *rest)).rstrip())
    return drawn


def wrapped(line: str, columns: int, indent: str = "  ") -> list[str]:
    """The line, broken between words only, so that a name or path can be copied."""
    import textwrap

    return textwrap.wrap(
        line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def wrapped_on_terminal(lines: Iterable[str], indent: str = "  ") -> list[str]:
    """The lines as they fit on the terminal; unchanged for a pipe or a file, whose reader may count
    them."""
    if not sys.stdout.isatty():
        return list(lines)
    columns = shutil.get_terminal_size().columns
    return [part for line in lines for part in wrapped(line, columns, indent) or [""]]


def width() -> int | None:
    """The table width for a pipe or a file: $COLUMNS if it is at least 40, else 100. None on a
    terminal, whose width rich measures."""
    columns = os.environ.get("COLUMNS", "")
    if sys.stdout.isatty():
        return None
    return int(columns) if columns.isdecimal() and int(columns) >= 40 else 100


def table_width() -> int:
    """The width for `lines`: as `width`, but at least 80."""
    return max(80, width() or shutil.get_terminal_size().columns)


def print_table(titles: Row, rows: Sequence[Sequence[Text]]) -> None:
    """Print a table whose cells are broken between words only; it is wider than the terminal if the
    longest words need more."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, width=width())
    table = [[Text(title, "bold") for title in titles], *rows]
    widths = _widths([[cell.plain for cell in row] for row in table], console.width)
    for row in table:
        parts = [wrapped(cell.plain, most, "") for cell, most in zip(row, widths, strict=True)]
        for words in zip_longest(*parts, fillvalue=""):
            found = zip(words, row, widths, strict=True)
            line = Text("  ").join(Text(word.ljust(most), cell.style) for word, cell, most in found)
            line.rstrip()
            console.print(line, soft_wrap=True)


def _widths(table: Sequence[Sequence[str]], room: int) -> list[int]:
    """The widths of columns that together have `room`, but at least that of their longest words."""
    columns = list(zip(*table, strict=True))
    widths = [max(len(word) for cell in column for word in cell.split()) for column in columns]
    spare = room - sum(widths) - 2 * (len(widths) - 1)
    wants = {at: max(map(len, column)) - widths[at] for at, column in enumerate(columns)}
    for left, at in enumerate(sorted(wants, key=wants.__getitem__)):
        more = max(0, min(wants[at], spare // (len(wants) - left)))
        widths[at] += more
        spare -= more
    return widths
