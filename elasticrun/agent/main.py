"""The agent as a process: what happens before there is a loop, and its exit code.

The order matters. Signals are caught before anything can be waited for; the spawner is started
next, so that torch is imported while everything else goes on; then the master, where it is plain
that it is ours; only then asyncio and grpc are imported.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from functools import cache
from typing import TYPE_CHECKING

from elasticrun import operator_log
from elasticrun.agent.planted import misplanted
from elasticrun.agent.processes import Reaper, become_subreaper
from elasticrun.agent.signals import SignalInbox
from elasticrun.agent.spawner_process import SpawnerProcess, start_spawner
from elasticrun.agent.trust import unusable, with_trust
from elasticrun.agent.warm import leave_behind
from elasticrun.config import EXIT_FAILED, EXIT_USAGE, AgentConfig
from elasticrun.wire.serverstart import ignored_signals

if TYPE_CHECKING:
    import asyncio

    from elasticrun.agent.finding import Found
    from elasticrun.core.effects import Exit


def run(config: AgentConfig) -> int:
    """Run the node's part of a job to its end; the exit code of the launcher.

    To be called in the main thread. Leaves no process and no file behind but the logs."""
    return run_agent(config, None).code


def run_with_spawner(config: AgentConfig, spawner: socket.socket) -> Exit:
    """The same for a caller that starts the ranks itself (`elastic_launch`): `spawner` is our end
    of the conversation of `wire.spawner` with it. Its EOF is the end of the caller."""
    return run_agent(config, spawner)


def run_agent(config: AgentConfig, channel: socket.socket | None) -> Exit:
    """See `run` and `run_with_spawner`; the whole outcome."""
    from elasticrun.core.effects import Exit

    fill_standard_fds()
    writer = operator_log.set_up()
    config = with_trust(config)
    if threading.current_thread() is not threading.main_thread():
        return _said(Exit(EXIT_FAILED, "an agent has to run in the main thread", (), 0))
    if config.tls is not None and (wrong := unusable(config.tls)):
        return _said(Exit(EXIT_USAGE, wrong, (), 0))
    if wrong := misplanted():
        return _said(Exit(EXIT_USAGE, wrong, (), 0))
    # Death signals are caught here, and what is caught is back to its default in a new program:
    # under `nohup`, ranks of torchrun obey a SIGHUP, and so must these.
    caught = {getattr(signal, name, None) for name in config.signals_to_handle}
    ignored = tuple(number for number in ignored_signals() if number not in caught)
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
        from elasticrun.agent.helpers import early_master

        master = early_master(config)
        from elasticrun.agent.node import Node

        found: Found | None = None
        if config.rendezvous.kind in ("file", "open"):
            from elasticrun.agent.finding import find

            config, found = _runner().run(find(config, inbox))
        try:
            node = Node(config, inbox, reaper, spawner, master, writer, ignored, found)
            outcome = _runner().run(node.run())
            if config.warm:
                leave_behind(node.learned)
            return outcome
        finally:
            if found is not None:
                found.close()
    finally:
        inbox.restore()


@cache
def _runner() -> asyncio.Runner:
    """One event loop for all agents that a process runs one after another (accelerate calls us in
    its own process): grpc.aio may drop what belongs to a second loop once the first is closed."""
    import asyncio
    import atexit

    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


def fill_standard_fds() -> None:
    """Open /dev/null in the place of standard streams that our caller has closed (`2>&-`): else
    the next socket would get that number, and whoever prints would write into it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is taken, which is this one: all below it are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _said(outcome: Exit) -> Exit:
    operator_log.last_word(outcome.reason)
    operator_log.set_up().flush(1.0)
    return outcome
