"""Writes known lines to both streams, some through the file descriptors, one without an end.

CHATTY_FAIL_UNTIL=N: exits with 3 in every life before the N-th, once all ranks have written (the
first to fail ends the others).
"""

from __future__ import annotations

import os
import sys

from inotify_simple import INotify, flags


def until_all_have_written(life: str, rank: str) -> None:
    """Each rank says so by a file in the working folder."""
    files = [f"written-{life}-{one}" for one in range(int(os.environ["WORLD_SIZE"]))]
    with INotify() as watch:
        watch.add_watch(".", flags.CREATE)
        open(f"written-{life}-{rank}", "x").close()
        while not all(map(os.path.exists, files)):
            watch.read()


def main() -> None:
    """Write, then end."""
    rank = os.environ["RANK"]
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    # one write a line: `print` under -u is two, and ranks on one console would tear each other's
    sys.stdout.write(f"out rank {rank} life {restart}\n")
    sys.stderr.write(f"err rank {rank} life {restart}\n")
    os.write(1, f"raw out {rank}\n".encode())
    os.write(2, f"raw err {rank}\n".encode())
    sys.stdout.write(f"needle out {rank}\n")
    sys.stderr.write(f"needle err {rank}\n")
    sys.stdout.write(f"a, comma out {rank}\n")
    sys.stdout.write("grün ✓ " + "x" * 3000 + f" {rank}\n")
    sys.stdout.write(f"no newline at the end {rank}")
    if int(restart) < int(os.environ.get("CHATTY_FAIL_UNTIL", "0")):
        sys.stdout.flush()
        until_all_have_written(restart, rank)
        sys.exit(3)


if __name__ == "__main__":
    main()
