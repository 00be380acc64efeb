"""`python -m elasticrun.agent --config-fd N [--spawner-fd M] --result-fd K`: an agent for a caller
of the Python API (`elasticrun.launcher`).

It is a separate process, so that the caller can fork without gRPC's threads. With `--spawner-fd`
the caller starts the ranks itself.

Input: a CalledLaunch as JSON (`wire.types`). Output, at the end: core.events.Exit as JSON on K, one
end of a socketpair. EOF on K means that the caller has exited.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading

from elasticrun.config import EXIT_USAGE, MAX_CONFIG_BYTES, CalledLaunch
from elasticrun.host.system.title import AGENT, set_title
from elasticrun.wire.types import dumps, loads


def main(argv: list[str]) -> int:
    """Run the agent and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m elasticrun.agent")
    parser.add_argument("--config-fd", type=int, required=True)
    parser.add_argument("--spawner-fd", type=int, default=-1)
    parser.add_argument("--result-fd", type=int, required=True)
    args = parser.parse_args(argv)
    try:
        with open(args.config_fd, "rb") as pipe:
            called = loads(pipe.read(MAX_CONFIG_BYTES), CalledLaunch)
        for fd in set(called.caller.console_fds) - {1, 2}:
            os.set_inheritable(fd, False)
        result = socket.socket(fileno=args.result_fd)
        result.set_inheritable(False)
        spawner = None
        if args.spawner_fd >= 0:
            spawner = socket.socket(fileno=args.spawner_fd)
            spawner.set_inheritable(False)
    except (OSError, ValueError) as error:
        print(f"python -m elasticrun.agent: {error}", file=sys.stderr)
        return EXIT_USAGE
    set_title(AGENT)
    from elasticrun.agent.main import run_agent

    if spawner is None:
        threading.Thread(target=_die_with_caller, args=(result,), daemon=True).start()
    outcome = run_agent(called.launch, called.place, called.identity, called.caller, spawner)
    with contextlib.suppress(OSError):
        result.sendall(dumps(outcome).encode())
        result.shutdown(socket.SHUT_WR)
    return outcome.code


def _die_with_caller(result: socket.socket) -> None:
    """Kill this agent when the caller exits.

    The caller never writes to K, so recv returns only when the caller has exited. No cleanup is
    needed: when this agent's socket closes, the spawner kills and reaps its descendants."""
    with contextlib.suppress(OSError):
        result.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
