"""The server's own life: its command line, its first message, getting ready, serving."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from elasticrun.forkserver import linux
from elasticrun.forkserver.child import Birth
from elasticrun.forkserver.lazy import Baseline
from elasticrun.forkserver.loop import EXIT_CONFUSED, Server, complain
from elasticrun.forkserver.preload import ONE_BY_ONE, Poisoned
from elasticrun.forkserver.prepare import Prepared, prepare
from elasticrun.forkserver.protocol import Conversation, Lost
from elasticrun.wire.frames import FrameBuffer, encode
from elasticrun.wire.serverstart import SHIELDED
from elasticrun.wire.spawner import Configure, Notice, SpawnerReady, ToSpawner
from elasticrun.wire.title import FORK_SERVER, set_title

if TYPE_CHECKING:
    from elasticrun.forkserver.warm.keeper import Stock

MAX_BEGINNINGS = 8
"""How often the server begins anew without a module that spoiled it; after that it stops at the
last such module."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line that `wire.serverstart` writes, and what we add when we begin anew."""

    fd: int
    parent: int
    ignored: frozenset[int]
    blocked: frozenset[int]
    configure_fd: int
    refused: tuple[str, ...]

    @classmethod
    def parse(cls, words: Sequence[str]) -> Arguments:
        given: dict[str, str] = {}
        refused = []
        for word in words:
            name, _, value = word.strip().removeprefix("--").partition("=")
            if name == "refused":
                refused.append(value)
            elif name:
                given[name] = value

        def numbers(name: str) -> frozenset[int]:
            return frozenset(int(n) for n in given.get(name, "").split(",") if n)

        return cls(
            fd=int(given["fd"]),
            parent=int(given["parent"]),
            ignored=numbers("ignored-signals"),
            blocked=numbers("blocked-signals"),
            configure_fd=int(given.get("configure-fd", "-1")),
            refused=tuple(refused),
        )


def live(words: Sequence[str], modules: Collection[str]) -> NoReturn:
    """Until the agent is gone; raises BecomeRank in forked children."""
    for signum in SHIELDED:
        signal.signal(signum, signal.SIG_IGN)
    stock = None
    if words and words[0].startswith("--warm="):
        from elasticrun.forkserver.warm.keeper import keep

        words, stock = keep(words, modules)  # returns where an agent has asked for a fork server
    try:
        arguments = Arguments.parse(words)
        sock = socket.socket(fileno=arguments.fd)
    except (KeyError, ValueError, OSError):
        complain("this program is started by elasticrun and speaks to it alone")
        sys.exit(EXIT_CONFUSED)
    signal.pthread_sigmask(signal.SIG_SETMASK, arguments.blocked)
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != arguments.parent:
        sys.exit(1)
    linux.set_name(b"elasticrun-fork")
    set_title(FORK_SERVER)
    linux.become_subreaper()
    sock.set_inheritable(False)
    gc.disable()  # imports make hardly any garbage; ranks have the collector on
    baseline = Baseline(modules) if stock is None else stock.baseline
    birth = Birth(os.getpid(), arguments.ignored, arguments.blocked, baseline)
    talk = Conversation(sock)
    try:
        configure, early = _first_message(talk, arguments.configure_fd)
        prepared = _prepare(configure, birth, arguments, sock, stock)
        _say_ready(talk, prepared)
    except Lost as lost:
        if str(lost):
            complain(str(lost))
        sys.exit(1 if lost.clean else EXIT_CONFUSED)
    if prepared.mode == "fork":
        prepared.stash.hide()
    gc.freeze()  # keeps the collector from touching, and so copying, what all ranks share
    Server(talk, prepared).run(early)


def _first_message(talk: Conversation, kept_fd: int) -> tuple[Configure, list[ToSpawner]]:
    """Configure, and what came with it; from `kept_fd` where we have begun anew."""
    if kept_fd >= 0:
        with open(kept_fd, "rb") as kept:
            first, *early = FrameBuffer(ToSpawner).feed(kept.read())
    else:
        first, early = talk.read_first()
    if not isinstance(first, Configure):
        raise Lost(f"the first message is a {type(first).__name__} and not a Configure")
    return first, early


def _prepare(
    configure: Configure,
    birth: Birth,
    arguments: Arguments,
    sock: socket.socket,
    stock: Stock | None,
) -> Prepared:
    """Get ready; begin anew, by exec, without a module that has spoiled this process."""
    names = [word.partition(":")[0] for word in arguments.refused]
    if len(names) >= MAX_BEGINNINGS:
        names += _from(names[-1], configure.preload)
    try:
        prepared = prepare(configure, birth, names, stock)
    except Poisoned as poison:
        _begin_anew(configure, poison, sock, birth)
    for word in arguments.refused:
        name, _, reason = word.partition(":")
        if name == ONE_BY_ONE:
            continue
        prepared.remarks.append(f"{name} is not preloaded: {reason}")
    if len(arguments.refused) >= MAX_BEGINNINGS:
        prepared.remarks.append("what comes after it is not preloaded: too many were refused")
    return prepared


def _from(refused: str, names: Sequence[str]) -> list[str]:
    """The names from the one that was refused on; those before it have been seen to be sound."""
    below = [n for n, name in enumerate(names) if (name + ".").startswith(refused + ".")]
    return list(names[below[0] :]) if below else []


def _begin_anew(
    configure: Configure, poison: Poisoned, sock: socket.socket, birth: Birth
) -> NoReturn:
    kept = os.memfd_create("configure", 0)
    os.write(kept, encode(configure))
    os.lseek(kept, 0, os.SEEK_SET)
    sock.set_inheritable(True)
    words = [w for w in sys.orig_argv if not w.startswith("--configure-fd=")]
    words += [f"--configure-fd={kept}", f"--refused={poison.module}:{poison.reason}"]
    os.execve(sys.executable, words, birth.baseline.environ)


def _say_ready(talk: Conversation, prepared: Prepared) -> None:
    talk.send(
        SpawnerReady(
            pid=os.getpid(),
            mode=prepared.mode,
            reason=prepared.reason,
            torch=prepared.torch,
            import_seconds=prepared.import_seconds,
        )
    )
    for remark in prepared.remarks:
        talk.send(Notice(remark))
