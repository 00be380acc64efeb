"""The agent's process: the steps before the event loop, and the exit code.

The order matters. Signal handlers come first, before anything can block. The spawner starts next,
so that it imports torch in parallel; then the master, if this node certainly hosts it. asyncio and
grpc are imported last.

torchrun installs its handlers when it starts the first ranks: an earlier SIGTERM ends it without
cleanup, and SIGUSR1 kills it while its ranks keep running. Here the handlers are installed before
anything can block, and SIGUSR1 and SIGUSR2 are forwarded to the ranks.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from elasticrun.agent.boot import (
    Reaper,
    SignalInbox,
    SpawnerProcess,
    misplanted,
    start_spawner,
)
from elasticrun.agent.link.trust import unusable, with_trust
from elasticrun.agent.warm import leave_behind
from elasticrun.config import EXIT_FAILED, EXIT_USAGE, AgentConfig
from elasticrun.host import log
from elasticrun.host.runs.last_word import LastWord, leave
from elasticrun.host.system.network import no_loopback
from elasticrun.host.system.processes import become_subreaper
from elasticrun.host.system.sandbox import refused
from elasticrun.wire import debugger
from elasticrun.wire.spawning import ignored_signals, is_kept_ignored

if TYPE_CHECKING:
    import asyncio

    from elasticrun.agent.rendezvous.finding import FoundJob
    from elasticrun.core.events import Exit


def run(config: AgentConfig) -> int:
    """Run this node's part of a job to its end; returns the launcher's exit code.

    Call it in the main thread. It leaves no processes, and no files except logs."""
    return run_agent(config, None).code


def run_agent(config: AgentConfig, channel: socket.socket | None) -> Exit:
    """The same, with the whole outcome. `channel`: our end of the `wire.spawning` socket to a
    caller that starts the ranks itself (`elastic_launch`); EOF on it means that the caller has
    exited."""
    from elasticrun.core.events import Exit

    fill_standard_fds()
    writer = log.set_up()
    config = with_trust(config)
    if threading.current_thread() is not threading.main_thread():
        return _said(Exit(EXIT_FAILED, "an agent has to run in the main thread", (), 0))
    if config.tls is not None and (wrong := unusable(config.tls)):
        return _said(Exit(EXIT_USAGE, wrong, (), 0))
    if wrong := misplanted():
        return _said(Exit(EXIT_USAGE, wrong, (), 0))
    if wrong := refused():
        return _said(Exit(EXIT_FAILED, wrong, (), 0))
    if wrong := no_loopback():
        return _said(Exit(EXIT_FAILED, wrong, (), 0))
    config = _for_debugger(config) if debugger.follows() else config
    # Death signals are caught here; exec resets caught signals to their default. Ranks ignore the
    # signals that we keep ignoring.
    caught = {getattr(signal, name, None) for name in config.signals_to_handle}
    ignored = tuple(n for n in ignored_signals() if n not in caught or is_kept_ignored(n))
    inbox = SignalInbox(config.signals_to_handle)
    inbox.install()
    try:
        become_subreaper()
        reaper = Reaper()
        try:
            if channel is None:
                spawner = start_spawner(config, ignored)
            else:
                spawner = SpawnerProcess(channel, None)
        except OSError as error:
            return _said(Exit(EXIT_FAILED, f"the fork server cannot be started: {error}", (), 0))
        from elasticrun.agent.link.master_process import early_master

        master = early_master(config)
        from elasticrun.agent.node import Early, run_node

        found: FoundJob | None = None
        if config.rendezvous.kind in ("file", "open"):
            from elasticrun.agent.rendezvous.finding import find

            config, found = _runner().run(find(config, inbox))
        try:
            early = Early(inbox, reaper, spawner, writer, ignored, master, found)
            outcome = _runner().run(run_node(config, early))
            if config.warm:
                leave_behind(config)
                writer.flush(1.0)
            return outcome
        finally:
            if found is not None:
                found.close()
    finally:
        inbox.restore()


@cache
def _runner() -> asyncio.Runner:
    """One event loop for all agents that a process runs one after another (accelerate calls us in
    its own process): grpc.aio may fail in a second loop once the first is closed."""
    import asyncio
    import atexit

    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


def _for_debugger(config: AgentConfig) -> AgentConfig:
    """Adapt to a debugger: a rank at a breakpoint is not a hang."""
    log.logger.log(
        log.NOTICE,
        "a debugger is in this process: it follows into the ranks, which are exec'd for it",
    )
    watch = config.spec.watch
    if config.spec.max_nodes == 1 and watch.on_hang == "auto":  # otherwise all nodes have to agree
        spec = msgspec.structs.replace(
            config.spec, watch=msgspec.structs.replace(watch, on_hang="tell")
        )
        return dataclasses.replace(config, spec=spec)
    return config


def fill_standard_fds() -> None:
    """Open /dev/null for standard streams that our caller has closed (`2>&-`). Otherwise the next
    socket would get that number, and print would write into it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # open() takes the lowest free number, which is this one: all below it are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _said(outcome: Exit) -> Exit:
    log.last_word(outcome.reason)
    leave(LastWord(outcome.reason))
    log.set_up().flush(1.0)
    return outcome
