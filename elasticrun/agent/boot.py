"""Starts the spawner (the fork server) and tells it at once how to get ready.

Nothing heavy is imported here: this runs in the agent's first millisecond, so that torch is
imported in the spawner while the agent imports grpc and the nodes find each other.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from elasticrun.agent.warm import WarmChild, fork_server
from elasticrun.config import AgentConfig, Learning
from elasticrun.wire import env, frames
from elasticrun.wire.spawning import Configure, start_server


@dataclass
class SpawnerProcess:
    """A spawner that was started, or a caller of elastic_launch that plays one (no process)."""

    channel: socket.socket
    process: subprocess.Popen[bytes] | WarmChild | None

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid


def configure_message(
    config: AgentConfig, learned: tuple[str, ...] = (), *, aside: bool = False
) -> Configure:
    """How the spawner is to get ready; `learned` modules come beside what the user named. `aside`:
    with cores that nobody else wants."""
    return Configure(
        launch=config.launch,
        preload=tuple(dict.fromkeys(config.preload + learned)),
        learn=config.preload_learn is not Learning.NEVER,
        entry=config.entry,
        start_method=config.start_method,
        numa=config.numa_binding is not None or config.numa_affinity,
        aside=aside,
    )


def start_spawner(
    config: AgentConfig,
    ignored: tuple[int, ...],
    learned: tuple[str, ...] = (),
    *,
    aside: bool = False,
) -> SpawnerProcess:
    """Start a spawner; `ignored` are the signals that this process was born ignoring. OSError."""
    environ = dict(os.environ)
    if config.set_omp_threads:
        # torch sizes its thread pools at import; the ranks get the same value.
        environ[env.OMP_NUM_THREADS] = "1"
    if config.python_exec:
        environ[env.PYTHON_EXEC] = config.python_exec
    process: subprocess.Popen[bytes] | WarmChild
    warm = fork_server(environ, ignored) if can_be_warm(config) else None
    process, channel = warm or start_server(ignored=ignored, env=environ)
    try:
        channel.sendall(frames.encode(configure_message(config, learned, aside=aside)))
    except OSError:  # it died at once: the reading side will tell
        pass
    return SpawnerProcess(channel, process)


def can_be_warm(config: AgentConfig) -> bool:
    """Whether a fork of another process may serve: not where ranks are never forked, and not for
    another interpreter than ours."""
    return config.launch != "exec" and config.python_exec in (None, "", sys.executable)
