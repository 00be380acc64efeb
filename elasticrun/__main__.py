"""Entry point of the command `elasticrun` and of `python -m elasticrun`.

Until the agent installs its own handlers, Ctrl-C kills the process without output. (Python's
default handler would print a traceback that ends in our imports.) The first process of a container
is not killed by a signal that it does not handle, so there a handler exits with 130.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes longer to import
import os

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    is_pid_1 = os.getpid() == 1
    _signal.signal(_signal.SIGINT, (lambda *_: os._exit(130)) if is_pid_1 else _signal.SIG_DFL)

import sys

from elasticrun.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
