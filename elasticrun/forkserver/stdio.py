"""sys.stdin, sys.stdout and sys.stderr of a forked child, made anew as `python -u` makes them.

The server's own stream objects remember things about its own descriptors (whether one can seek,
how large its blocks are); after a redirect they would be wrong.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO


def redirect(descriptor: int, path: str) -> None:
    """Put a fresh file (or /dev/null) under `descriptor`; an empty path leaves what is there."""
    if not path:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    opened = os.open(path, flags, 0o666)
    if opened == descriptor:
        os.set_inheritable(opened, True)
        return
    os.dup2(opened, descriptor)
    os.close(opened)


def renew() -> None:
    """Replace the three standard streams by new ones on descriptors 0, 1 and 2."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old: Any = getattr(sys, name)
        stream = _open(descriptor, name, mode, old) if old is not None else None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _open(descriptor: int, name: str, mode: str, old: TextIO) -> TextIO | None:
    import io

    try:
        os.fstat(descriptor)
    except OSError:  # closed: the interpreter has None there
        return None
    writing = mode == "w"
    buffering = 0 if writing else -1
    raw: Any = open(descriptor, mode + "b", buffering, closefd=False)  # noqa: SIM115
    (raw if writing else raw.raw).name = f"<{name}>"
    stream: Any = io.TextIOWrapper(
        raw,
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        line_buffering=False,
        write_through=True,
    )
    stream.mode = mode
    result: TextIO = stream
    return result
