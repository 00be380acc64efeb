"""Ranks that say the same but for numbers; rank 2 says something of its own, and rank 3 prints a
traceback, while the others say more. Each says more when there is a file `more` in the working
folder, and ends when there is a file `go`."""

from __future__ import annotations

import os
import sys
import traceback

from inotify_simple import INotify, flags


def main() -> None:
    """Speak, wait, speak again."""
    rank = int(os.environ["RANK"])
    with INotify() as watch:
        watch.add_watch(".", flags.CREATE)
        open(f"here-{rank}", "x").close()
        while not all(os.path.exists(f"here-{one}") for one in range(4)):
            watch.read()
        sys.stdout.write(f"step 100 of 500: loss 2.3{rank}\n")
        sys.stdout.flush()
        while not os.path.exists("more"):
            watch.read()
        if rank == 2:
            sys.stdout.write("nfs: server not responding\n")
        if rank == 3:
            try:
                int("three")
            except ValueError:
                sys.stdout.write(traceback.format_exc())
        for state in range(1, 4):
            sys.stdout.write(f"{state}/3 |{'#' * state}{' ' * (3 - state)}| 9 it/s\r")
        sys.stdout.write(f"\nno end {rank}")
        sys.stdout.flush()
        while not os.path.exists("go"):
            watch.read()
        sys.stdout.write(" at all")


if __name__ == "__main__":
    main()
