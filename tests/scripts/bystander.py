"""Rank 1 dies when told to; rank 0 notices by the end of a pipe and raises at once, with a time
stamp."""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from stage import Stage  # isort: skip


@record
def main() -> None:
    """argv[1] is a named pipe that rank 1 holds open for writing as long as it lives."""
    stage = Stage()
    if os.environ["RANK"] == "1":
        os.open(sys.argv[1], os.O_WRONLY)
        next(stage.orders())
        os._exit(7)
    with open(sys.argv[1], "rb") as pipe_in:
        pipe_in.read()
    raise ConnectionError("connection reset by peer")


if __name__ == "__main__":
    try:
        main()
    except ConnectionError:
        os._exit(1)
