"""Which hosts a job runs on, as `--hosts` and host files have it. Pure.

`host slots=N` is Open MPI's and DeepSpeed's, `host:N` MPICH's; a number behind the colon is slots
everywhere, as for mpirun, and never a port: a port belongs into ssh's config. A host that stands
there again has the slots of both lines, one each where none are said (so do PBS and Slurm write
their files).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MOST_CHARS: Final = 1024 * 1024
"""Of a host file."""

_WORD = re.compile(
    r"(?:(?P<user>[\w.][\w.+-]*)@)?"
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<six>[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[\w:.%]*)"
    r"|(?P<name>\w[\w.-]*))"
    r"(?::(?P<slots>\S*))?\Z"
)
_IGNORED: Final = ("max_slots", "max-slots")
"""Keys of Open MPI's that say nothing here: a host has no more ranks than its slots."""


class HostsError(ValueError):
    """A text that names no hosts; one sentence, with the line."""


@dataclass(frozen=True, slots=True)
class NamedHost:
    """One host. name: as it is looked up, without brackets. slots: ranks there, 0: not said."""

    name: str
    user: str = ""
    slots: int = 0

    @property
    def for_ssh(self) -> str:
        return f"{self.user}@{self.name}" if self.user else self.name


def listed(text: str) -> tuple[NamedHost, ...]:
    """The hosts of `--hosts`: `a,b:4,user@c,[2001:db8::1]:8`. HostsError."""
    words = [word.strip() for word in text.split(",")]
    return _together(_host(word, "--hosts") for word in words if word)


def in_file(text: str, path: str) -> tuple[NamedHost, ...]:
    """The hosts of a host file, one a line; `#` begins a comment. HostsError."""
    if len(text) > MOST_CHARS:
        raise HostsError(f"{path} has more than {MOST_CHARS} characters: that is no list of hosts")
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
    return _together(found)


def _host(word: str, where: str) -> NamedHost:
    found = _WORD.match(word)
    if found is None:
        raise HostsError(f"{where}: {word!r} is no host: write HOST, HOST:SLOTS or USER@HOST")
    name = found["bracketed"] or found["six"] or found["name"]
    slots = found["slots"]
    return NamedHost(name, found["user"] or "", 0 if slots is None else _slots(slots, where))


def _slots(text: str, where: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise HostsError(
            f"{where}: {text!r} is no number of ranks (a port of ssh belongs into ~/.ssh/config)"
        )
    return int(text)


def _together(hosts: Iterable[NamedHost]) -> tuple[NamedHost, ...]:
    """Each once, in the order of their first lines."""
    found: dict[tuple[str, str], NamedHost] = {}
    for host in hosts:
        key = (host.user, host.name)
        if before := found.get(key):
            host = NamedHost(host.name, host.user, (before.slots or 1) + (host.slots or 1))
        found[key] = host
    return tuple(found.values())
