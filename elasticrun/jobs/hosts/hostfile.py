"""Parses the hosts of a job from `--hosts` and host files. Pure.

`host slots=N` is the syntax of Open MPI and DeepSpeed, `host:N` that of MPICH. A number after the
colon always means slots, as for mpirun, and never a port, which belongs in ssh's configuration. A
repeated host gets the sum of its slots; each line without slots then counts as one (PBS and Slurm
write such files).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MAX_CHARS: Final = 1024 * 1024
"""Maximum characters of a host file."""

_WORD = re.compile(
    r"(?:(?P<user>[\w.][\w.+-]*)@)?"
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<six>[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[\w:.%]*)"
    r"|(?P<name>\w[\w.-]*))"
    r"(?::(?P<slots>\S*))?\Z"
)
_IGNORED: Final = ("max_slots", "max-slots")
"""Open MPI keys without effect here: a host never gets more ranks than its slots."""


class HostsError(ValueError):
    """The text is no valid list of hosts; the message is a sentence that names the line."""


@dataclass(frozen=True, slots=True)
class NamedHost:
    """One host. name: its name or address, without brackets. slots: ranks there; 0: not given."""

    name: str
    user: str = ""
    slots: int = 0

    @property
    def for_ssh(self) -> str:
        return f"{self.user}@{self.name}" if self.user else self.name


def parse_hosts(text: str) -> tuple[NamedHost, ...]:
    """The hosts of `--hosts`: `a,b:4,user@c,[2001:db8::1]:8`. Raises HostsError."""
    words = [word.strip() for word in text.split(",")]
    return _merge(_host(word, "--hosts") for word in words if word)


def parse_hostfile(text: str, path: str) -> tuple[NamedHost, ...]:
    """The hosts of a host file, one per line; `#` begins a comment. Raises HostsError."""
    if len(text) > MAX_CHARS:
        raise HostsError(
            f"{path} has more than {MAX_CHARS} characters: this is not a list of hosts"
        )
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        word, *keys = line.partition("#")[0].split() or [""]
        if not word:
            continue
        where = f"{path}, line {number}"
        host = _host(word, where)
        for key in keys:
            name, equals, value = key.partition("=")
            if name == "slots" and equals and not host.slots:
                host = NamedHost(host.name, host.user, _slots(value, where))
            elif name not in _IGNORED:
                raise HostsError(f"{where}: {key!r} is not known: write `host slots=N` or `host:N`")
        found.append(host)
    return _merge(found)


def _host(word: str, where: str) -> NamedHost:
    found = _WORD.match(word)
    if found is None:
        raise HostsError(f"{where}: {word!r} is not a host: write HOST, HOST:SLOTS or USER@HOST")
    name = found["bracketed"] or found["six"] or found["name"]
    slots = found["slots"]
    return NamedHost(name, found["user"] or "", 0 if slots is None else _slots(slots, where))


def _slots(text: str, where: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise HostsError(
            f"{where}: {text!r} is not a number of ranks (set an ssh port in ~/.ssh/config)"
        )
    return int(text)


def _merge(hosts: Iterable[NamedHost]) -> tuple[NamedHost, ...]:
    """Merge repeated hosts, in the order in which they first appear."""
    found: dict[tuple[str, str], NamedHost] = {}
    for host in hosts:
        key = (host.user, host.name)
        if before := found.get(key):
            host = NamedHost(host.name, host.user, (before.slots or 1) + (host.slots or 1))
        found[key] = host
    return tuple(found.values())
