"""`python -m elasticrun.master --config-fd N`: a job master, as an agent starts it."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory: a `grpc/` in it must not shadow the package
    import signal

    # First, because a Ctrl-C may arrive during the imports below.
    for number in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, number), signal.SIG_IGN)
    from elasticrun.host.system.processes import die_with_parent

    # Wakes a stopped master when its agent dies, so that it reads EOF on its lifeline.
    die_with_parent(signal.SIGCONT)
    from elasticrun.master.main import hosted_main

    sys.exit(hosted_main(sys.argv[1:]))
