"""Hosts made of network namespaces, each connected by a cable to one switch, and network faults.

A `Lab` is a switch (a bridge in a separate namespace) and hosts with the addresses 192.0.2.1,
192.0.2.2, ... from a range reserved for documentation, so no packet can leave. `prefix` runs a
command on a host, with the host's own network, name and /etc/hosts, which lists all hosts. As in a
pod, the hostname is the part of the host's name before the first dot.

A pulled cable is a link that is down. `line.py` implements all other faults (a pair that cannot
reach each other, one-way connectivity, loss, delay, low bandwidth, flapping). It is inserted
between cable and switch on first use, and needs neither netfilter nor netem, which a kernel may
lack.

The names of namespaces identify the process that made them, so several processes can have labs at
the same time. A keeper process removes the lab when that process ends. If both are killed, the next
lab removes what is left.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from elasticrun.testing import processes

NETNS: Final = Path("/run/netns")
NETWORK: Final = "192.0.2."
MAX_HOSTS: Final = 250
COMMAND_LIMIT: Final = 120.0
"""Timeout in seconds of one `ip` command; it takes milliseconds."""

KILL_LIMIT: Final = 60.0
"""Seconds for the processes of a host to exit after SIGKILL."""

ENTER: Final = (
    'mount --bind "$1" /etc/hosts && echo "$2" >/proc/sys/kernel/hostname && shift 2 && exec "$@"'
)


class Impossible(Exception):
    """This machine lacks what a test needs; the message is one sentence."""


class LabError(Exception):
    """A lab could not be made or changed; the message is one sentence."""


def require() -> None:
    """Raise Impossible if hosts cannot be made here."""
    if why := _why_no_hosts():
        raise Impossible(f"hosts of network namespaces cannot be made here: {why}")


@functools.cache
def _why_no_hosts() -> str:
    if not sys.platform.startswith("linux"):
        return "this is not Linux"
    if os.geteuid() != 0:
        return "that needs root"
    missing = [name for name in ("ip", "nsenter", "unshare") if not _program(name)]
    if missing:
        return f"there is no {' and no '.join(missing)} (Debian: iproute2, util-linux)"
    name = processes.new_name("probe")
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "br0", "type", "bridge")
            _ip("-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
        finally:
            _ip("netns", "del", name)
    except LabError as error:
        return str(error)
    return ""


def require_lines() -> None:
    """Raise Impossible if the kernel lacks TAP devices, which the relay needs."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        raise Impossible(
            f"loss and delay need TAP devices: /dev/net/tun: {error.strerror}"
        ) from None


class Host:
    """One host of a lab."""

    def __init__(self, name: str, number: int, namespace: str) -> None:
        self.name = name
        self.number = number
        self.namespace = namespace
        self.address = f"{NETWORK}{number}"
        self.mac = f"02:00:00:00:00:{number:02x}"
        self.deaf: set[str] = set()
        """MAC addresses of hosts whose frames it does not receive."""
        self.mute: set[str] = set()
        """MAC addresses of hosts that do not receive its frames."""
        self.on_line = False
        """Whether the relay is between its cable and the switch."""

    @property
    def names(self) -> list[str]:
        """The names by which other hosts find it; the last one is its hostname."""
        return list(dict.fromkeys((self.name, self.name.partition(".")[0])))

    @property
    def netns(self) -> str:
        """The file of its network namespace."""
        return str(NETNS / self.namespace)

    def pids(self) -> list[int]:
        """The processes that run on it."""
        return processes.in_network(self.netns)


class Lab:
    """A switch and its hosts. Raises Impossible, LabError. Must be closed."""

    def __init__(self, scratch: Path) -> None:
        """`scratch`: an existing folder, for the hosts' /etc/hosts."""
        require()
        sweep()
        self._prefix = processes.new_name("")
        self._switch = f"{self._prefix}switch"
        self._scratch = scratch
        self._relay: subprocess.Popen[bytes] | None = None
        self._keeper = processes.start_keeper(__name__, self._prefix)
        self._table = scratch / "hosts"
        self._numbers = itertools.count(1)
        self.hosts: dict[str, Host] = {}
        try:
            _ip("netns", "add", self._switch)
            self._sw("link", "set", "lo", "up")
            self._sw("link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
            self._sw("link", "set", "br0", "up")
        except LabError:
            self.close()
            raise

    def add(self, name: str) -> Host:
        """Add a host, at the next address."""
        number = next(self._numbers)
        if number > MAX_HOSTS:
            raise LabError(f"a lab has {MAX_HOSTS} hosts at most")
        host = Host(name, number, f"{self._prefix}{number}")
        self.hosts[name] = host
        _ip("netns", "add", host.namespace)
        cable = (f"v{number}", "netns", self._switch, "type", "veth", "peer", "name", "eth0")
        _ip("link", "add", *cable, "address", host.mac, "netns", host.namespace)
        self._sw("link", "set", f"v{number}", "master", "br0", "up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")
        self._name_all()
        return host

    def remove(self, name: str) -> None:
        """Remove a host abruptly, with its address, name and processes. `add` can make another host
        with that name, at another address."""
        host = self.hosts.pop(name)
        self._sw("link", "set", f"v{host.number}", "down")
        _remove([host.namespace])
        self._name_all()

    def _name_all(self) -> None:
        """Write the names of all hosts into /etc/hosts, in place, because the hosts mount this
        file."""
        rows = [f"{h.address} {' '.join(h.names)}" for h in self.hosts.values()]
        self._table.write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))

    @property
    def keeper(self) -> int:
        """The pid of the process that removes the lab when the tests' process ends."""
        return self._keeper.pid

    def prefix(self, name: str) -> list[str]:
        """Words to put before a command, to run it on this host (they exec it)."""
        host = self.hosts[name]
        enter = ["nsenter", f"--net={host.netns}", "unshare", "--mount", "--uts"]
        return [*enter, "sh", "-c", ENTER, "sh", str(self._table), host.names[-1]]

    # ------------------------------------------------------------ faults of cables

    def cut(self, name: str) -> None:
        """Pull the cable of one host."""
        self._sw("link", "set", f"v{self.hosts[name].number}", "down")

    def mend(self) -> None:
        """Plug in every cable, and remove all faults from every line."""
        for host in self.hosts.values():
            self._sw("link", "set", f"v{host.number}", "up")
            host.deaf.clear()
            host.mute.clear()
            if host.on_line:
                plain = {"delay": 0, "loss": 0, "rate": 0, "down": 0, "up": 0}
                self._send_command({"host": host.number, "deaf": [], "mute": [], **plain})

    def plug(self, name: str) -> None:
        """Plug in the cable of one host."""
        self._sw("link", "set", f"v{self.hosts[name].number}", "up")

    def disconnect(self, one: str, other: str) -> None:
        """Disconnect these two hosts from each other; all others reach both."""
        self._rule(one, lambda h: h.deaf.add(self.hosts[other].mac))
        self._rule(one, lambda h: h.mute.add(self.hosts[other].mac))

    def one_way(self, sender: str, receiver: str) -> None:
        """Drop what `sender` sends to `receiver`; the other direction works."""
        self._rule(receiver, lambda h: h.deaf.add(self.hosts[sender].mac))

    def loss(self, name: str, share: float) -> None:
        """Drop this share (0 to 1) of the packets to a host."""
        self._send_command({"host": self._on_line(name).number, "loss": share})

    def delay(self, name: str, seconds: float) -> None:
        """Delay every packet to or from a host by `seconds`."""
        self._send_command({"host": self._on_line(name).number, "delay": seconds})

    def slow(self, name: str, rate: float) -> None:
        """Limit the cable of a host to `rate` bytes per second, each way; 0: no limit."""
        self._send_command({"host": self._on_line(name).number, "rate": rate})

    def flap(self, name: str, down: float, up: float) -> None:
        """Toggle the link of a host again and again: down for `down` seconds, up for `up`
        seconds."""
        self._send_command({"host": self._on_line(name).number, "down": down, "up": up})

    # ------------------------------------------------------------ lines

    def _rule(self, name: str, change: Callable[[Host], None]) -> None:
        host = self._on_line(name)
        change(host)
        self._send_command(
            {"host": host.number, "deaf": sorted(host.deaf), "mute": sorted(host.mute)}
        )

    def _on_line(self, name: str) -> Host:
        """Insert the relay between a host's cable and the switch, if that is not done yet; returns
        the host."""
        host = self.hosts[name]
        if host.on_line:
            return host
        n = host.number
        self._send_command({"line": n})
        self._sw("link", "add", f"br{n}", "type", "bridge", "mcast_snooping", "0")
        self._sw("link", "set", f"br{n}", "up")
        self._sw("link", "set", f"far{n}", "master", f"br{n}", "up")
        self._sw("link", "set", f"near{n}", "master", "br0", "up")
        self._sw("link", "set", f"v{n}", "master", f"br{n}")
        host.on_line = True
        return host

    def _send_command(self, words: dict[str, Any]) -> None:
        if self._relay is None:
            require_lines()
            program = [sys.executable, "-I", str(Path(__file__).with_name("line.py"))]
            self._relay = subprocess.Popen(
                ["nsenter", f"--net={NETNS / self._switch}", *program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._relay.stdin.write(json.dumps(words).encode() + b"\n")
            self._relay.stdin.flush()
        answer = self._relay.stdout.readline().decode().strip()
        if answer != "ok":
            raise LabError(f"the network relay failed: {answer or 'it exited'}")

    def _sw(self, *words: str) -> None:
        _ip("-n", self._switch, *words)

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Kill the hosts' processes and remove everything. Idempotent."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
            self._relay = None
        _remove(f"{self._prefix}{host.number}" for host in self.hosts.values())
        _remove([self._switch])
        self.hosts.clear()
        self._keeper.communicate()


def keep(prefix: str) -> None:
    """Remove all namespaces whose names begin with `prefix`; called by the keeper."""
    for name in sorted(os.listdir(NETNS)):
        if name.startswith(prefix):
            with contextlib.suppress(LabError, OSError):  # another process removed it first
                _remove([name])


def sweep() -> None:
    """Remove the labs whose makers have ended."""
    if not NETNS.is_dir():
        return
    for name in sorted(os.listdir(NETNS)):
        if processes.is_orphaned(name):
            with contextlib.suppress(LabError, OSError):  # another process removed it first
                _remove([name])


def _remove(namespaces: Iterable[str]) -> None:
    for name in namespaces:
        path = NETNS / name
        if path.exists():
            processes.kill_all(functools.partial(processes.in_network, str(path)), KILL_LIMIT)
            _ip("netns", "del", name)


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _ip(*words: str) -> None:
    done = subprocess.run(
        [_program("ip") or "ip", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT,
        check=False,
    )
    if done.returncode != 0:
        raise LabError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")
