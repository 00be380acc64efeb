"""Bare hosts and ssh: what docs/bare-hosts.md says. Each host has an sshd; from `login` somebody
starts things on them."""

from __future__ import annotations

import shlex
import shutil
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
from tests.compat.live import PUPPET, allreduce, finish, summing
from tests.detection.environments import BATCH
from tests.further import further
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

pytestmark = pytest.mark.slow

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
    sshd = shutil.which("sshd", path=PATH)
    if sshd is None or shutil.which("ssh") is None:
        needs.lacking("there is no sshd here (Debian: openssh-server, openssh-client)")
    return Town(world, lab, sshd)


MEET = "--rdzv-backend=c10d --rdzv-endpoint=h1:29400 --rdzv-id=tr"


@further("test_a_connection_that_is_cut")
def test_a_loop_over_hosts_trains(town: Town, world: World) -> None:
    """The same command on each; the loop knows how every host has ended."""
    loop = town.types(f"""
        for host in h1 h2 h3; do
            ssh -n $host elasticrun --nnodes=3 {MEET} {PUPPET} &
        done
        code=0; for started in $(jobs -p); do wait $started || code=$?; done; exit $code
    """)
    peers = world.hub.ranks(3, world_size=3)
    assert sorted(town.host_of(peer) for peer in peers) == ["h1", "h2", "h3"]
    assert allreduce(world, peers) == [3, 3, 3]
    finish(peers, loop)
    town.until_nothing_runs("h1", "h2", "h3")


@further("cli/test_bare")
def test_a_loop_of_a_batch_script_that_takes_its_variables_along(town: Town, world: World) -> None:
    """Each host believes to be the batch script's. A bare command is one node there, as under
    torchrun, and says so; flags make one job of them, and nobody takes itself for node 0."""
    variables = "\n".join(f"export {name}={shlex.quote(text)}" for name, text in BATCH.items())

    def loop(flags: str) -> tuple[Launched, list[Peer]]:
        known = {peer.pid for peer in world.hub.peers}
        started = town.types(f"""
            {variables}
            for host in h1 h2; do
                ssh -n -o SendEnv='SLURM_*' $host elasticrun {flags} {PUPPET} &
            done
            code=0; for started in $(jobs -p); do wait $started || code=$?; done; exit $code
        """)
        return started, world.hub.ranks(2, pid=lambda pid: pid not in known)

    bare, alone = loop("")
    assert [peer.world_size for peer in alone] == [1, 1]
    assert sorted(town.host_of(peer) for peer in alone) == ["h1", "h2"]
    finish(alone, bare)
    assert bare.stderr.count("nothing has been started on the other node, so this is a job") == 2
    assert bare.stderr.count("--srun makes one job of all nodes") == 2

    said, two = loop(f"--nnodes=2 {MEET}")
    assert [peer.world_size for peer in two] == [2, 2]
    assert sorted(town.host_of(peer) for peer in two) == ["h1", "h2"]
    assert allreduce(world, two) == [2, 2]
    finish(two, said)
    town.until_nothing_runs("h1", "h2")


def test_a_connection_that_is_cut(town: Town, world: World) -> None:
    """Without a terminal the agent does not notice and goes on; with one (`-tt`) it is hung up on,
    leaves, and the others go on. Nobody stays behind its job."""
    # a host that is a minute late is let in all the same
    start = f"elasticrun --nnodes=1:2 --max-restarts=0 --grow=now {MEET} {PUPPET}"
    town.types(f"ssh -n h1 {start}")
    town.types(f"ssh -n -tt h2 {start}")
    peers = summing(world, 2, world_size=2)

    town.hang_up("h1")
    assert allreduce(world, peers) == [2, 2]

    known = {peer.pid for peer in world.hub.peers}
    town.hang_up("h2")
    again = world.hub.ranks(1, world_size=1, pid=lambda pid: pid not in known)
    town.until_nothing_runs("h2")
    assert [town.host_of(peer) for peer in again] == ["h1"]
    finish(again)
    town.until_nothing_runs("h1")
