"""Ranks, store hosts, probes, the saver: how they are born, what they say, how they end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from elasticrun.forkserver import child, probes, store_host, trust
from elasticrun.forkserver.page import EXEC_NEXT, FAILED, IMPORTING, MODULE, NOTICE, Page
from elasticrun.forkserver.prepare import Prepared
from elasticrun.forkserver.program import BecomeRank
from elasticrun.saver import start as savers
from elasticrun.system import processes as linux
from elasticrun.system.title import set_title
from elasticrun.wire.spawning import (
    Exited,
    FromSpawner,
    Learned,
    Notice,
    Spawned,
    SpawnFailed,
    SpawnProbe,
    SpawnRank,
    SpawnSaver,
    SpawnStore,
    Stale,
    StoreListening,
)
from elasticrun.wire.types import EntryKind

QUIET = 2.0
"""Seconds without a new import after which what was learned is told: a script's own imports come
in one burst."""

_EVERY_SIGNAL = sorted(map(int, signal.valid_signals()))

FORKABLE = (EntryKind.SCRIPT, EntryKind.MODULE, EntryKind.RUN_PATH)


@dataclass
class _Child:
    key: int
    pid: int
    page: Page | None = None  # a rank's
    port: int = 0  # a store host's
    ready: int = -1  # its pipe, until it has said that it listens
    telling: probes.Telling | None = None  # a probe's
    saves: bool = False  # the saver
    failed: str = ""


class Nursery:
    """The server's children. `tell` sends a report; `in_child` closes the server's descriptors."""

    def __init__(
        self, prepared: Prepared, tell: Callable[[FromSpawner], None], in_child: Callable[[], None]
    ) -> None:
        self._prepared = prepared
        self._tell = tell
        self._in_child = in_child
        self._children: dict[int, _Child] = {}
        self._groups: dict[int, int] = {}
        self._exec_next: set[str] = set()
        self._stale = ""
        self._learned_at: float | None = None

    # ------------------------------------------------------------ birth

    def spawn_rank(self, order: SpawnRank) -> None:
        """Fork the rank where that can be trusted, else exec it; answer Spawned or SpawnFailed."""
        if order.entry.kind is EntryKind.FUNCTION:
            self._tell(SpawnFailed(order.key, "a function can only be run by its own caller"))
            return
        reason = self._against_fork(order)
        forked = self._prepared.mode == "fork" and not reason
        birth, stash = self._prepared.birth, self._prepared.stash
        # From the first rank on we outlive our parent until we have swept what ranks leave. This
        # tells of its death; and if we are stopped (SIGSTOP) by then, it wakes us up for it.
        linux.die_with_parent(signal.SIGCONT)
        page = None
        try:
            page = Page()
            with _signals_held():
                pid = os.fork()
                if pid == 0:
                    self._leave()
                    if forked:
                        _guarded(
                            page,
                            lambda: child.become_rank(
                                birth, order, page, stash, self._prepared.learn
                            ),
                        )
                    child.exec_rank(birth, order, page, self._prepared.python)
        except OSError as error:
            if page is not None:
                page.close()
            self._tell(SpawnFailed(order.key, f"no process could be started: {error.strerror}"))
            return
        self._children[pid] = _Child(order.key, pid, page=page)
        self._groups[order.key] = pid
        self._tell(Spawned(order.key, pid, forked))

    def _against_fork(self, order: SpawnRank) -> str:
        """Why this one rank is exec'd although forks are trusted in general."""
        if order.entry.kind not in FORKABLE or order.exec_prefix:
            return "a command"
        if order.entry.target in self._exec_next:
            return "told already"
        if order.cpus and trust.placement(os.environ):
            return "placement"
        if not self._stale and self._prepared.mode == "fork":
            self._stale = self._prepared.preloader.stale()
            if self._stale:
                self._tell(Stale(f"{self._stale} has changed since it was imported"))
        return self._stale

    def spawn_store(self, order: SpawnStore) -> None:
        """Fork or exec a store host; StoreListening or SpawnFailed comes when it has spoken."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            with _signals_held():
                pid = os.fork()
                if pid == 0:
                    self._leave()
                    os.close(reading)
                    self._become_store(order.port, writing)
        except OSError as error:
            os.close(reading)
            self._tell(SpawnFailed(order.key, f"no store could be started: {error.strerror}"))
            return
        finally:
            os.close(writing)
        self._children[pid] = _Child(order.key, pid, port=order.port, ready=reading)
        self._groups[order.key] = pid
        self._tell(Spawned(order.key, pid, self._prepared.can_fork_stores))

    def _become_store(self, port: int, writing: int) -> NoReturn:
        try:
            self._become_helper(b"elasticrun-stor", b"elasticrun: store")
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            if self._prepared.can_fork_stores:
                store_host.host(port, writing)
            os.set_inheritable(writing, True)
            words = [sys.executable, "-u", str(Path(store_host.__file__ or ""))]
            words += [str(port), str(writing), str(self._prepared.birth.server)]
            os.execve(words[0], words, self._prepared.birth.baseline.environ)
        finally:
            os._exit(1)

    def spawn_probe(self, order: SpawnProbe) -> None:
        """Fork or exec a probe; ProbeSaid comes for each phase and for its result, then Exited."""
        try:
            telling = probes.Telling(order.key)
        except OSError as error:
            self._tell(SpawnFailed(order.key, f"no probe could be started: {error.strerror}"))
            return
        try:
            with _signals_held():
                pid = os.fork()
                if pid == 0:
                    self._leave()
                    telling.close()
                    self._become_probe(order, telling)
        except OSError as error:
            telling.close()
            self._tell(SpawnFailed(order.key, f"no probe could be started: {error.strerror}"))
            return
        finally:
            telling.born()
        self._children[pid] = _Child(order.key, pid, telling=telling)
        self._groups[order.key] = pid
        self._tell(Spawned(order.key, pid, self._prepared.can_fork_stores))

    def _become_probe(self, order: SpawnProbe, telling: probes.Telling) -> NoReturn:
        try:
            self._become_helper(b"elasticrun-prob", b"elasticrun: probe")
            environ = child.environment(self._prepared.birth.baseline, order)
            if not self._prepared.can_fork_stores:
                probes.exec_instead(order, telling.words, telling.prints, environ)
            child.set_environ(environ)
            probes.fork_probe(order, telling.words, telling.prints)
        except OSError as error:
            os.write(telling.prints, str(error).encode(errors="replace"))
        finally:
            os._exit(1)

    def spawn_saver(self, order: SpawnSaver) -> None:
        """Fork or exec the saver; Spawned or SpawnFailed, then Exited at its end. One that is there
        already is killed: whoever orders another has given it up."""
        for each in self._children.values():
            if each.saves:
                self.send_signal(each.key, signal.SIGKILL)
        try:
            with _signals_held():
                pid = os.fork()
                if pid == 0:
                    self._leave()
                    self._become_saver(order)
        except OSError as error:
            self._tell(SpawnFailed(order.key, f"no saver could be started: {error.strerror}"))
            return
        self._children[pid] = _Child(order.key, pid, saves=True)
        self._groups[order.key] = pid
        self._tell(Spawned(order.key, pid, self._prepared.can_fork_stores))

    def _become_saver(self, order: SpawnSaver) -> NoReturn:
        try:
            self._become_helper(savers.NAME, savers.TITLE)
            environ = child.environment(self._prepared.birth.baseline, order)
            if not self._prepared.can_fork_stores:
                savers.exec_instead(order, environ)
            child.set_environ({**environ, **savers.ONE_THREAD})
            savers.fork_saver(order)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _become_helper(self, name: bytes, title: bytes) -> None:
        """In a fresh fork: a process of ours that is shielded, and ends with the server."""
        linux.die_with_parent(signal.SIGKILL)
        if os.getppid() != self._prepared.birth.server:
            os._exit(1)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        linux.set_name(name)
        set_title(title)

    def _leave(self) -> None:
        """In a fresh fork: drop what is the server's or another child's."""
        self._in_child()
        for other in self._children.values():
            if other.ready >= 0:
                os.close(other.ready)
            if other.page is not None:
                other.page.close()
            if other.telling is not None:
                other.telling.close()

    # ------------------------------------------------------------ life

    def living(self) -> list[int]:
        return list(self._children)

    def groups(self, keys: Iterable[int]) -> list[int]:
        return [self._groups[key] for key in keys if key in self._groups]

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._groups.pop(key, None)

    def send_signal(self, key: int, signum: int, *, alone: bool = False) -> None:
        """To the process group of a child that has not been reaped, or to it alone; else
        nothing."""
        pid = self._groups.get(key, 0)
        if pid not in self._children or not 0 <= signum < signal.NSIG:
            return
        with suppress(ProcessLookupError, PermissionError):
            if alone:
                os.kill(pid, signum)
                return
            try:
                os.killpg(pid, signum)
            except ProcessLookupError:  # it has not made its session yet
                os.kill(pid, signum)

    def kill_ranks(self) -> None:
        """Ranks, and probes: their partners are not to wait for a node that nobody hears of."""
        for each in list(self._children.values()):
            if each.page is not None or each.telling is not None:
                self.send_signal(each.key, signal.SIGKILL)

    def waiting_for(self) -> list[int]:
        """Pipes of probes, and of store hosts that have not said yet that they listen."""
        pipes = [each.ready for each in self._children.values() if each.ready >= 0]
        for each in self._children.values():
            if each.telling is not None:
                pipes += each.telling.descriptors()
        return pipes

    def read_helpers(self, ready: Iterable[int]) -> None:
        for each in self._children.values():
            if each.ready >= 0 and each.ready in ready:
                self._hear_store(each)
            if each.telling is not None:
                for descriptor in set(each.telling.descriptors()).intersection(ready):
                    self._relay(each.telling.read(descriptor))

    def _relay(self, said: Iterable[FromSpawner]) -> None:
        for message in said:
            self._tell(message)

    def _hear_store(self, store: _Child) -> None:
        line = os.read(store.ready, 4096).decode("utf-8", "replace").strip()
        os.close(store.ready)
        store.ready = -1
        word, _, rest = line.partition(" ")
        if word == "ok":
            self._tell(StoreListening(store.key, store.pid, store.port))
            if rest:
                self._tell(Notice(rest))
        else:
            store.failed = rest or "it ended before it listened"

    def read_pages(self) -> None:
        """What ranks have written since the last look; a poke is a SIGCHLD, so any may have."""
        for each in self._children.values():
            if each.page is not None:
                self._read_page(each)

    def _read_page(self, rank: _Child) -> None:
        assert rank.page is not None
        for kind, text in rank.page.read():
            if kind == NOTICE:
                self._tell(Notice(text))
            elif kind == EXEC_NEXT:
                self._exec_next.add(text)
            elif kind == FAILED:
                rank.failed = text
            elif kind == IMPORTING or (kind == MODULE and self._prepared.lessons.add(text)):
                self._learned_at = time.monotonic() + QUIET

    def next_deadline(self) -> float | None:
        return self._learned_at

    def tick(self, now: float) -> None:
        if self._learned_at is not None and now >= self._learned_at:
            self._learned_at = None
            self.read_pages()
            modules = () if self._learned_at is not None else self._prepared.lessons.told()
            if modules:
                self._tell(Learned(modules))

    # ------------------------------------------------------------ death

    def buried(self, pid: int, code: int) -> None:
        """A child was reaped; orphans of ranks come here too and are nobody's business."""
        each = self._children.pop(pid, None)
        if each is None:
            return
        if each.ready >= 0:
            self._hear_store(each)
        if each.page is not None:
            self._read_page(each)
            each.page.close()
        if each.telling is not None:
            self._relay(each.telling.last_words(code))
        if each.telling is not None or each.saves:
            self._groups.pop(each.key, None)  # nothing is swept after them
        if each.failed:
            self._groups.pop(each.key, None)
            what = each.failed if each.page is not None else f"no store: {each.failed}"
            self._tell(SpawnFailed(each.key, what))
        else:
            self._tell(Exited(each.key, pid, code, time.time_ns() // 1000))


def _guarded(page: Page, become: Callable[[], NoReturn]) -> None:
    """Run the way into the program; a defect of ours becomes a sentence, not a traceback."""
    try:
        become()
    except BecomeRank:
        raise
    except BaseException as error:
        child.fail(page, f"the fork could not be made ready ({type(error).__name__}: {error})")


@contextmanager
def _signals_held() -> Iterator[None]:
    """Block all signals over a fork. The child goes on with them blocked, and ends elsewhere."""
    server = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _EVERY_SIGNAL)
    try:
        yield
    finally:
        if os.getpid() == server:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
