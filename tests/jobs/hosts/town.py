"""Hosts with an sshd each, and one from which somebody logs in on them."""

from __future__ import annotations

import functools
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import pytest

from elasticrun.testing import processes
from elasticrun.testing.hosts import Lab
from tests import needs
from tests.harness import (
    LIMIT,
    MARK,
    PATIENT,
    SOCKET,
    Launched,
    Peer,
    World,
    clean_environment,
    host_of,
    own_folders,
)

LOGIN: Final = "login"
HOSTS: Final = ("h1", "h2", "h3")
PATH: Final = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"

SSHD: Final = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
AcceptEnv SLURM_*
SetEnv {variables}
"""
"""The variables are what a user's profile on that host would set."""

SSH: Final = """
IdentityFile {folder}/user_key
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
"""

BOOT: Final = 'mount -t tmpfs run /run && mkdir -m 755 /run/sshd && exec "$@"'
"""sshd wants an empty folder that is root's; this machine's own stays as it is."""


class Town:
    """Bare hosts: nothing knows them all but whoever logs in."""

    def __init__(self, world: World, lab: Lab, sshd: str) -> None:
        self._world, self._lab = world, lab
        self._folder = world.scratch / "ssh"
        self._folder.mkdir()
        for key in ("host_key", "user_key"):
            words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / key))
            subprocess.run(words, check=True, timeout=LIMIT)
        (self._folder / "config").write_text(SSH.format(folder=self._folder))
        self._lab.add(LOGIN)
        daemons = [self._start(name, sshd) for name in HOSTS]
        for daemon in daemons:
            daemon.until_text("Server listening")

    def _start(self, name: str, sshd: str) -> Launched:
        host = self._lab.add(name)
        variables = {
            "PATH": PATH,
            "LOGLEVEL": "INFO",
            **PATIENT,
            **own_folders(self._folder / name),
            "XDG_STATE_HOME": str(self._folder / name / "state"),
            MARK: self._world.marker,
            SOCKET: self._world.hub.path,
        }
        told = " ".join(f"{key}={value}" for key, value in variables.items())
        conf = self._folder / f"{name}.conf"
        conf.write_text(SSHD.format(address=host.address, folder=self._folder, variables=told))
        command = (*self._lab.prefix(name), "sh", "-c", BOOT, "sh", sshd, "-D", "-e", "-f")
        return self._world.command((*command, str(conf)), env=clean_environment())

    def types(self, line: str) -> Launched:
        """A line of shell that somebody types on the login host; `ssh` is as in their profile."""
        shell = f'ssh() {{ command ssh -F "{self._folder}/config" "$@"; }}\n{line}'
        env = {**clean_environment(), "PATH": PATH}
        return self._world.command((*self._lab.prefix(LOGIN), "bash", "-c", shell), env=env)

    def host_of(self, peer: Peer) -> str:
        return host_of(peer, self._lab)

    def running(self, name: str) -> list[str]:
        """The command lines of what runs on a host beside its sshd and login sessions."""
        found = [processes.command(pid) for pid in self._lab.hosts[name].pids()]
        return [words for words in found if words and not words.startswith(("sshd", "/usr/sbin"))]

    def states(self) -> list[Path]:
        """The files that launchers by --hosts have left on hosts."""
        return [one for one in self._folder.glob("*/state/elasticrun/hosts/**/*") if one.is_file()]

    def types_hosts(self, words: str) -> Launched:
        """`elasticrun` with these words, as the login host's own process."""
        env = {**clean_environment(), "PATH": PATH}
        env["ELASTICRUN_SSH"] = f"ssh -F {self._folder}/config"
        before = (*self._lab.prefix(LOGIN), "elasticrun")
        return self._world.command((*before, *shlex.split(words)), env=env)

    def logged_in(self, name: str) -> list[int]:
        """The sessions of this host's sshd."""
        pids = self._lab.hosts[name].pids()
        return [pid for pid in pids if processes.command(pid).startswith("sshd: root")]

    def break_off(self, name: str) -> None:
        """Kill them."""
        assert self.logged_in(name), f"nobody is logged in on {name}"
        assert not processes.kill_all(functools.partial(self.logged_in, name), LIMIT)

    def kill_agent(self, name: str) -> None:
        pids = self._lab.hosts[name].pids()
        (agent,) = [pid for pid in pids if " -m elasticrun --" in processes.command(pid)]
        os.kill(agent, signal.SIGKILL)

    def hang_up(self, name: str) -> None:
        """The connections from the login host to this one are cut, by the end of the clients."""
        clients = [
            pid
            for pid in self._lab.hosts[LOGIN].pids()
            if (words := processes.command(pid)).startswith("ssh ") and f" {name} " in words
        ]
        assert clients, f"nobody is logged in on {name}"
        left = processes.kill_all(lambda: clients, LIMIT)
        assert not left

    def until_nothing_runs(self, *names: str) -> None:
        """Nobody tells of the end of other people's processes."""
        deadline = time.monotonic() + LIMIT
        while left := [words for name in names for words in self.running(name)]:
            assert time.monotonic() < deadline, f"still there: {left}"
            threading.Event().wait(0.05)


@pytest.fixture
def town(world: World, lab: Lab) -> Town:
    """Skipped, with the reason, where there can be no such hosts."""
    sshd = needs.program("sshd", package="openssh-server", path=PATH)
    needs.program("ssh", package="openssh-client")
    return Town(world, lab, sshd)
