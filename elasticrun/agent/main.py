"""The agent's process: the steps before the event loop, and the exit code.

The order matters. Signal handlers come before the first child process. The spawner starts next, so
that it imports torch in parallel; then the master, if this node certainly hosts it. asyncio and
grpc are imported last.

torchrun installs its handlers when it starts the first ranks: an earlier SIGTERM ends it without
cleanup, and SIGUSR1 kills it while its ranks keep running. Here the handlers are installed before
anything needs cleanup, and SIGUSR1 and SIGUSR2 are forwarded to the ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from functools import cache
from typing import TYPE_CHECKING

from elasticrun.agent.boot import (
    Reaper,
    SignalInbox,
    SpawnerProcess,
    fault_error,
    start_spawner,
)
from elasticrun.agent.link.trust import why_unusable, with_token
from elasticrun.agent.warm import leave_behind
from elasticrun.config import EXIT_FAILED, EXIT_USAGE, Caller, Identity, Launch, Place
from elasticrun.host import log
from elasticrun.host.runs.last_word import LastWord, write
from elasticrun.host.system.network import loopback_problem
from elasticrun.host.system.processes import become_subreaper
from elasticrun.host.system.sandbox import launcher_problem
from elasticrun.wire import debugger
from elasticrun.wire.spawning import ignored_signals, is_kept_ignored

if TYPE_CHECKING:
    import asyncio

    from elasticrun.agent.rendezvous.finding import FoundJob
    from elasticrun.core.events import Exit


def run(launch: Launch, place: Place, identity: Identity) -> int:
    """Run this node's part of a job to its end; returns the launcher's exit code.

    Call it in the main thread. It leaves no process except a warm one that was requested, and no
    files except logs."""
    return run_agent(launch, place, identity).code


def run_agent(
    launch: Launch,
    place: Place,
    identity: Identity,
    caller: Caller | None = None,
    channel: socket.socket | None = None,
) -> Exit:
    """Like `run`, but return the whole outcome. `caller`: the Python program that has started this
    process, if one has. `channel`: our end of the `wire.spawning` socket to a caller that starts
    the ranks itself (`elastic_launch`); EOF on it means that the caller has exited."""
    from elasticrun.core.events import Exit

    fill_standard_fds()
    writer = log.set_up()
    identity = with_token(launch, place, identity)
    if (no := _why_impossible(identity)) is not None:
        return _log_outcome(no)
    if debugger.is_following():
        log.logger.log(
            log.NOTICE,
            "a debugger is attached: ranks start by exec so that it attaches to them too",
        )
    # Death signals are caught here; exec resets caught signals to their default. Ranks ignore the
    # signals that we keep ignoring.
    caught = {getattr(signal, name, None) for name in launch.signals_to_handle}
    ignored = tuple(n for n in ignored_signals() if n not in caught or is_kept_ignored(n))
    inbox = SignalInbox(launch.signals_to_handle)
    inbox.install()
    try:
        become_subreaper()
        reaper = Reaper()
        try:
            if channel is None:
                spawner = start_spawner(launch, ignored)
            else:
                spawner = SpawnerProcess(channel, None)
        except OSError as error:
            return _log_outcome(
                Exit(EXIT_FAILED, f"the fork server cannot be started: {error}", (), 0)
            )
        from elasticrun.agent.link.master_process import early_master

        master = early_master(launch, place, identity)
        from elasticrun.agent.node import Early, run_node

        found = _find_job(launch, place, identity, inbox)
        if found is not None:
            place, identity = found.place, found.identity
        try:
            early = Early(inbox, reaper, spawner, writer, ignored, caller, master, found)
            outcome = _runner().run(run_node(launch, place, identity, early))
            if launch.warm:
                leave_behind(launch)
                writer.flush(1.0)
            return outcome
        finally:
            if found is not None:
                found.close()
    finally:
        inbox.restore()


def _why_impossible(identity: Identity) -> Exit | None:
    """The outcome if no agent can run here; None if one can. Blocks on TLS files."""
    from elasticrun.core.events import Exit

    if threading.current_thread() is not threading.main_thread():
        return Exit(EXIT_FAILED, "an agent must run in the main thread", (), 0)
    if identity.tls is not None and (wrong := why_unusable(identity.tls)):
        return Exit(EXIT_USAGE, wrong, (), 0)
    if wrong := fault_error():
        return Exit(EXIT_USAGE, wrong, (), 0)
    if wrong := launcher_problem() or loopback_problem():
        return Exit(EXIT_FAILED, wrong, (), 0)
    return None


def _find_job(
    launch: Launch, place: Place, identity: Identity, inbox: SignalInbox
) -> FoundJob | None:
    """Find the job and its master if the user has not named the master's host; else None."""
    if place.kind not in ("file", "open"):
        return None
    from elasticrun.agent.rendezvous.finding import find_job

    return _runner().run(find_job(launch, place, identity, inbox))


@cache
def _runner() -> asyncio.Runner:
    """One event loop for all agents that a process runs one after another (accelerate calls us in
    its own process): grpc.aio may fail in a second loop once the first is closed."""
    import asyncio
    import atexit

    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


def fill_standard_fds() -> None:
    """Open /dev/null for standard streams that are closed (`2>&-`). Otherwise the next socket would
    get that number, and print would write into it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # open() takes the lowest free number, which is this one: all below it are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _log_outcome(outcome: Exit) -> Exit:
    log.log_last_word(outcome.reason)
    write(LastWord(outcome.reason))
    log.set_up().flush(1.0)
    return outcome
