"""Ends in the way its first argument names, on the ranks of its second (default: all).

0, N: sys.exit(N) · text: SystemExit("text") · raise: ValueError · chained: one raised from another
signal:N: kills itself · os_exit:N · late: waits for SIGTERM (its second argument names who ends
with 7 before)
"""

from __future__ import annotations

import os
import signal
import sys


def end(how: str) -> None:
    """Do it."""
    word, _, number = how.partition(":")
    if word == "text":
        raise SystemExit("a sentence for the shell")
    if word == "raise":
        raise ValueError("boom")
    if word == "chained":
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("could not look it up") from error
    if word == "signal":
        os.kill(os.getpid(), int(number))
        signal.pause()
    if word == "os_exit":
        os._exit(int(number))
    sys.exit(int(how))


def main() -> None:
    """End, or wait to be ended if this rank is not among those that end first."""
    how = sys.argv[1]
    ranks = sys.argv[2].split(",") if len(sys.argv) > 2 else [os.environ["RANK"]]
    if os.environ["RANK"] in ranks:
        end(how)
    if "--peer-ends-well" in sys.argv:
        sys.exit(0)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
