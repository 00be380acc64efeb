"""The command `elasticrun`, which `python -m elasticrun` is, too.

Until an agent has installed its handlers, Ctrl-C ends it like any program: by the signal, without
output. (Python's own way would print where in our imports it was.) The first process of a container
cannot be ended by a signal that it does not handle.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # below `signal`, whose import takes longer
import os

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    first = os.getpid() == 1
    _signal.signal(_signal.SIGINT, (lambda *_: os._exit(130)) if first else _signal.SIG_DFL)

import sys

from elasticrun.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
