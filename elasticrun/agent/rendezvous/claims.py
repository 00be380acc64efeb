"""A file by which one of several machines that share a folder says: this is mine (decision 029).

Everything rests on link(2), which is atomic on network file systems too, and refuses where the name
is there; no flock is used, no time of a file is believed and no clocks of two hosts are compared.

A claim is written whole into a draft and appears by link. Its last line is a count that its holder
raises in place, through the descriptor of the very file that was linked: it cannot write into the
claim of a successor. Who reads opens the file afresh, which is when NFS asks its server. That a
claim is not renewed is seen by looking at it again and again: the count stayed the same so often.

To take the place of claim X, `NAME.after.X` is linked: of all who want to succeed X one can. It is
the claim from then on, for everybody who reads X, and is renamed over NAME, which removes X. X is
the life of a holder and is never used twice, so what was decided about X is never true of another.

By such a file nodes find their job's master (`finding`, `file`), and by one in the folder of
checkpoints it is settled whose that is (`FolderClaim`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import logging
import os
import random
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from elasticrun.agent.runtime import Once, Tasks, in_thread, threadsafe
from elasticrun.host.log import logger
from elasticrun.host.system.processes import ProcessId, boot_id
from elasticrun.host.system.sandbox import start_thread

T = TypeVar("T")

MAX_BYTES: Final = 64 * 1024
"""A longer file is not one of ours."""

MAX_CHAIN: Final = 64
"""Claims that succeeded each other without one of them being renamed into its place."""

RENEW_EVERY: Final = 2.0
"""Seconds between two renewals."""

LOOK_EVERY: Final = 1.0
"""Seconds between two looks at a claim whose holder does not answer."""

STALE_LOOKS: Final = 10
"""So many looks in a row that find the same count make a claim one that nobody renews. A look that
took longer than LOOK_EVERY is none: the file system stood still, and the holder's may have too."""

CLOSE_LIMIT: Final = 2.0
"""Seconds for a renewal that is under way."""

NAME: Final = "elasticrun.claim"
"""The file in a folder of checkpoints."""

FILE_LIMIT: Final = 30.0
"""Seconds for one look at a shared folder, or one change of it, until it is said to hang."""

FOLDER_CLOSE_LIMIT: Final = 5.0
"""The same at the end."""

PATIENCE: Final = 3.0 * STALE_LOOKS * LOOK_EVERY
"""Seconds that a checkpoint waits until it is known whether another job still has the folder."""

MOST_TERMS: Final = 64
"""Masters before the present one that a claim names."""

_HOLDER: Final = re.compile(r"[0-9a-f]{16}\Z")
_LITTER: Final = re.compile(r"\.[0-9a-f]{16}(\.new)?\Z")
_KEPT, _LEFT = "kept", "left"


class ClaimError(Exception):
    """A claim can neither be read nor made; the text is a sentence."""


class NotWritable(ClaimError):
    """Nothing can be made in its folder, be it a claim or anything else."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What stands in the file. `holder`: the life of whoever made it. `words`: what it says.
    `left`: its holder has gone, and somebody else may still need what it says."""

    holder: str
    words: Mapping[str, Any] = field(repr=False)  # the job's token among them
    count: int = 0
    left: bool = False

    def text(self, name: str) -> str:
        """A word of it, "" for none."""
        value = self.words.get(name, "")
        return value if isinstance(value, str) else ""

    def is_of(self, holder: str, term: int) -> bool:
        """Whether this holder made it under the master of this term."""
        return (self.holder, self.number("term")) == (holder, term)

    def number(self, name: str) -> int:
        """A number of it, 0 for none."""
        value = self.words.get(name, 0)
        return value if type(value) is int else 0


def fresh(words: Mapping[str, Any]) -> Claim:
    """A claim of a new holder, which is this process."""
    return Claim(secrets.token_hex(8), {**words, "process": msgspec.to_builtins(ProcessId.own())})


def died_here(claim: Claim) -> bool:
    """Whether its holder is known to have ended: nobody needs to wait for it. One of another boot
    may be another machine's of the same host name, and two masters would be worse than a wait."""
    try:
        holder = msgspec.convert(claim.words.get("process"), ProcessId)
    except msgspec.ValidationError:
        return False
    return holder.pid > 0 and holder.boot == boot_id() and holder.is_alive() is False


class SharedFiles:
    """The calls on the shared folder, in one object: a test can make them those of a slow one."""

    def read(self, path: str) -> tuple[bytes, os.stat_result]:
        """The file as the server has it now: opened afresh. OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb", buffering=0) as file:
            return file.read(MAX_BYTES + 1), os.fstat(fd)

    def create(self, path: str, mode: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, mode)

    def link(self, path: str, name: str) -> None:
        os.link(path, name, follow_symlinks=False)

    def rename(self, path: str, name: str) -> None:
        os.rename(path, name)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def names(self, folder: str) -> list[str]:
        return os.listdir(folder)


class ClaimFile:
    """The file at `path`, as this process sees it. Methods block, and raise ClaimError.

    `private`: nobody else may read it, and it is believed only if it is of the same owner as what
    we make there."""

    def __init__(
        self, path: str, *, private: bool = True, files: SharedFiles | None = None
    ) -> None:
        self.path = path
        self._private = private
        self._files = files or SharedFiles()
        self._owner = -1  # as this file system shows our files: it may map users
        # What we have linked. A file object: closed by an end that did not wait for a renewer's
        # thread which hangs, it is written to no more, and its number may be another file's.
        self._held: io.FileIO | None = None
        self._at = 0
        self.mine: Claim | None = None
        """What we have claimed, and not let go since."""

    # ------------------------------------------------------------ reading

    def read(self) -> Claim | None:
        """The claim that counts, None if there is none."""
        found, path = self._read(self.path), self.path
        for _ in range(MAX_CHAIN):
            if found is None:
                return None
            path = self._after(found)
            later = self._read(path)
            if later is None:
                return found
            found = later
        raise ClaimError(f"{self.path} was taken over again and again: remove it and {path}")

    def _after(self, claim: Claim) -> str:
        return f"{self.path}.after.{claim.holder}"

    def _read(self, path: str) -> Claim | None:
        try:
            data, found = self._files.read(path)
        except OSError as error:
            # ESTALE: it was removed on another host while we opened it
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None
            raise ClaimError(f"{path} cannot be read: {error.strerror}") from None
        if self._private:
            self._check_private(path, found)
        try:
            text, count, word = data.decode().removesuffix("\n").rsplit(" ", 2)
            body, _, renewed = text.rpartition("\n")
            said = json.loads(body)
            holder, words = said["holder"], said["words"]
            if renewed != "renewed" or word not in (_KEPT, _LEFT) or not _HOLDER.match(holder):
                raise ValueError(word)
            return Claim(holder, dict(words), int(count), word == _LEFT)
        except (ValueError, KeyError, TypeError):
            raise ClaimError(
                f"{path} is no claim of elasticrun's: remove it, or name another file"
            ) from None

    def _check_private(self, path: str, found: os.stat_result) -> None:
        """Who could have written it could have this node join a job of theirs."""
        if self._owner < 0:
            draft, fd = self._draft(b"")
            os.close(fd)
            self._discard(draft)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != self._owner:
            raise ClaimError(f"{path} is of another user: name a file of your own")
        if found.st_mode & 0o077:
            raise ClaimError(
                f"{path} can be read or written by others, and who can read it can join the job: "
                "remove it, or name a file where its mode can be 0600"
            )

    # ------------------------------------------------------------ claiming

    def take(self, claim: Claim, instead: Claim | None = None) -> bool:
        """Make this the claim that counts: where there is none, or in the place of `instead`.
        False if somebody was faster, or `instead` counts no more."""
        body = json.dumps({"holder": claim.holder, "words": dict(claim.words)}) + "\n"
        data = (body + _line(0, _KEPT)).encode()
        name = self.path if instead is None else self._after(instead)
        draft, fd = self._draft(data)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                linked = self._linked(draft, fd, name)
            finally:
                self._discard(draft)
            if not linked or (instead is not None and not self._succeed(name, claim, instead)):
                return False
            undo.pop_all()
        self.let_go()
        self._held, self._at = io.FileIO(fd, "r+"), len(body.encode())
        self.mine = claim
        return True

    def _succeed(self, name: str, claim: Claim, instead: Claim) -> bool:
        """Put the file `name` in the place of the claim before. What we saw of that may be old: it
        is looked at again, after a change of ours to the folder."""
        try:
            current = self.read()
            if current is None or current.holder != claim.holder:
                self._files.unlink(name)
                return False
            self._files.rename(name, self.path)
            return True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ClaimError(
                f"{self.path} cannot be taken over from {instead.text('host')}: {error.strerror}"
            ) from None

    def _draft(self, data: bytes) -> tuple[str, int]:
        """A file of ours with this in it, on the server's disk."""
        draft = f"{self.path}.{secrets.token_hex(8)}.new"
        try:
            fd = self._files.create(draft, 0o600 if self._private else 0o666)
        except FileNotFoundError:
            # It is not made: where a mount is missing, every machine would have one of its own.
            raise ClaimError(
                f"there is no folder {os.path.dirname(self.path)} here: make it, or mount it"
            ) from None
        except OSError as error:
            raise NotWritable(
                f"{os.path.dirname(self.path)} cannot be written to: {error.strerror}"
            ) from None
        with contextlib.ExitStack() as undo:
            undo.callback(self._discard, draft)
            undo.callback(os.close, fd)
            try:
                self._owner = os.fstat(fd).st_uid
                if self._private and os.fstat(fd).st_mode & 0o077:
                    raise ClaimError(
                        f"the file system of {self.path} shows files to others whatever their "
                        "mode, so the job's token cannot be kept in it: use "
                        "--rdzv-endpoint=HOST:PORT"
                    )
                os.write(fd, data)
                os.fsync(fd)
            except OSError as error:
                raise ClaimError(f"{self.path} cannot be written: {error.strerror}") from None
            undo.pop_all()
        return draft, fd

    def _discard(self, path: str) -> None:
        with contextlib.suppress(OSError):
            self._files.unlink(path)

    def _linked(self, draft: str, fd: int, name: str) -> bool:
        try:
            self._files.link(draft, name)
            return True
        except FileExistsError:
            # Of a request that NFS has sent twice the second answer is this one: the number of
            # names says what the first one did.
            return os.fstat(fd).st_nlink == 2
        except FileNotFoundError:
            return False  # whoever has removed the claim has swept our draft away too
        except OSError as error:
            raise ClaimError(
                f"the file system of {self.path} has no hard links ({error.strerror}), by which "
                "machines claim a file: use --rdzv-endpoint=HOST:PORT"
            ) from None

    # ------------------------------------------------------------ holding

    def renew(self) -> Claim | None:
        """Raise the count of our claim; None then. Where another claim counts by now, that one. One
        that was removed by somebody is made again."""
        mine = self.mine
        if mine is None:
            return None
        current = self.read()
        if current is None:
            again = Claim(mine.holder, mine.words)
            return None if self.take(again) else self.read()
        if current.holder != mine.holder:
            return current
        self._write(current.count + 1, _KEPT)
        return None

    def leave(self) -> None:
        """Say that nobody renews our claim any more, and that it may still be needed."""
        self._write(0, _LEFT)
        self.let_go()

    def remove(self, holder: str = "") -> None:
        """Remove our claim, or that of this holder, if it is still the one that counts, and what
        was left beside it by those who were killed while they claimed."""
        wanted = holder or (self.mine.holder if self.mine is not None else "")
        folder, name = os.path.split(self.path)
        with contextlib.suppress(ClaimError, OSError):
            current = self._read(self.path)
            if wanted and current is not None and current.holder == wanted:
                self._files.unlink(self.path)
                for other in self._files.names(folder):
                    if other.startswith(f"{name}.") and _LITTER.search(other):
                        self._discard(os.path.join(folder, other))
        self.let_go()

    def let_go(self) -> None:
        """Write into it no more."""
        held, self._held = self._held, None
        self.mine = None
        if held is not None:
            held.close()

    def _write(self, count: int, word: str) -> None:
        held = self._held
        if held is None:
            return
        try:
            held.seek(self._at)
            held.write(_line(count, word).encode())
            os.fsync(held.fileno())
        except OSError as error:
            raise ClaimError(f"{self.path} cannot be renewed: {error.strerror}") from None
        except ValueError:  # closed meanwhile
            return


def _line(count: int, word: str) -> str:
    return f"renewed {count:012d} {word}\n"


class Looks:
    """Looks at a claim whose holder does not answer: whether it is renewed."""

    def __init__(self) -> None:
        self._seen: tuple[str, int] = ("", 0)
        self.same = 0
        """Looks in a row that found no renewal."""
        self.renewed = False
        """Whether the present holder was seen to renew it."""

    def look(self, claim: Claim, took: float) -> None:
        """`took`: seconds that the reading took."""
        seen = (claim.holder, claim.count)
        if seen != self._seen:
            self.renewed = seen[0] == self._seen[0]
            self._seen, self.same = seen, 0
        elif took <= LOOK_EVERY:
            self.same += 1

    def is_stale(self, claim: Claim) -> bool:
        """Whether nobody holds it any more, as far as its file can say."""
        return claim.left or died_here(claim) or self.same >= STALE_LOOKS


class ClaimRenewer:
    """Renews a claim in a thread of its own until it is closed. Who attaches is told, in that
    thread, once or twice: `lost(claim)` when another one has taken its place, `trouble(sentence)`
    when it cannot be renewed, with "" when it can again."""

    def __init__(self, file: ClaimFile) -> None:
        self._file = file
        self._lost: Callable[[Claim], None] | None = None
        self._trouble: Callable[[str], None] = lambda sentence: None
        self._other: Claim | None = None
        self._over = threading.Event()
        self._thread = start_thread(self._keep, "claim")

    def attach(self, lost: Callable[[Claim], None], trouble: Callable[[str], None]) -> None:
        """Be told from now on, and what has happened before."""
        self._lost, self._trouble = lost, trouble
        if self._other is not None:  # the thread does it the other way round: one of us tells
            lost(self._other)

    def close(self) -> None:
        """Renew no more. Blocks, CLOSE_LIMIT at most: what is renewed in this moment would make a
        claim again that is removed."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_LIMIT)

    def remove(self) -> None:
        """The same, and the claim is removed."""
        self.close()
        self._file.remove()

    def _keep(self) -> None:
        told = ""
        while not self._over.wait(RENEW_EVERY):
            wrong, other = "", None
            try:
                other = self._file.renew()
            except ClaimError as error:
                wrong = str(error)
            if self._over.is_set():
                return
            if wrong != told:
                told = wrong
                self._trouble(wrong)
            if other is not None:
                self._other = other
                if self._lost is not None:
                    self._lost(other)
                return


def timed(file: ClaimFile) -> tuple[Claim | None, float]:
    """A look at the file, and how many seconds it took."""
    began = time.monotonic()
    return file.read(), time.monotonic() - began


async def on_disk(work: Callable[[], T]) -> T:
    """The result of work on a shared folder. TimeoutError."""
    return await in_thread(work, limit=FILE_LIMIT, name="claim")


class NotOurs(Exception):
    """Another job, or another master of this one, writes there; the text is a sentence."""


class FolderClaim:
    """This node's claim of the folder of checkpoints, if it has one: that is one job's, and of that
    job one master's. Belongs to the loop's thread.

    Two jobs that name one folder, or the halves of a job that has split, would remove and replace
    each other's checkpoints. So the node of rank 0 claims the folder when its ranks have said which
    it is, and a node that has a marker written makes sure of the claim before.

        the claim there      what this node does
        none, or nobody      takes it
        renews it
        of this job          takes it, unless its own master has been succeeded: the claim names the
                             terms of all masters before the one that took it last
        of another job that  writes nothing there, says by whom it is claimed, and looks again
        renews it
    """

    def __init__(self, job_id: str, term: Callable[[], int]) -> None:
        """`term`: of the master that this node follows."""
        self._job_id = job_id
        self._term = term
        self._path = ""
        self._file: ClaimFile | None = None
        self._renewer: ClaimRenewer | None = None
        self._looks = Looks()
        self._why = ""  # why it is not ours, as far as that is settled
        self._told = Once(MOST_TERMS)
        self._tasks = Tasks(logger.error)
        self._looking: asyncio.Task[bool] | None = None
        self._watch: asyncio.Task[None] | None = None

    def want(self, url: str) -> None:
        """The ranks of this node, rank 0 among them, have their checkpoints there."""
        if self._watch is None or self._watch.done():
            self._watch = self._tasks.start(self._hold(url), "claiming the folder of checkpoints")

    async def sure(self, url: str) -> None:
        """Return when this node may write a marker there. NotOurs, after PATIENCE at most."""
        end = asyncio.get_running_loop().time() + PATIENCE
        while not await self._look(url):
            if self._why or asyncio.get_running_loop().time() >= end:
                raise NotOurs(self._why or f"it is not known whose {url} is")
            await asyncio.sleep(LOOK_EVERY)

    async def close(self) -> None:
        """Nothing is written any more."""
        if self._watch is not None:
            self._watch.cancel()
        if self._looking is not None and not self._looking.done():
            await asyncio.wait({self._looking}, timeout=FOLDER_CLOSE_LIMIT)
        try:
            await self._leave(FOLDER_CLOSE_LIMIT)
        except TimeoutError:
            path = os.path.join(self._path, NAME)
            logger.warning("%s was not removed: its file system does not answer", path)

    async def _leave(self, limit: float) -> None:
        """Renew and keep our claim no more. TimeoutError."""
        renewer, self._renewer = self._renewer, None
        if renewer is not None:
            await in_thread(renewer.remove, limit=limit, name="claim")

    # ------------------------------------------------------------ looking

    async def _hold(self, url: str) -> None:
        """Until it is ours; what is in the way is said as soon as it is known."""
        while not await self._look(url):
            if self._why:
                self._told.tell(f"no checkpoint is written: {self._why}")
            await asyncio.sleep(LOOK_EVERY * random.uniform(1.0, 1.25))

    async def _look(self, url: str) -> bool:
        """Whether it is ours, or nobody's to claim. One look at a time, each to its end: a claim
        that was made has to be renewed, whoever waits for it no more."""
        while self._looking is not None and not self._looking.done():
            await asyncio.wait({self._looking})
        self._looking = self._tasks.start(self._look_once(url), "looking at a folder's claim")
        return await asyncio.shield(self._looking)

    async def _look_once(self, url: str) -> bool:
        path = _local(url)
        if path is None:
            words = f"{url} is no folder of a file system, so no job claims it"
            self._told.tell(words, logging.INFO)
            return True
        try:
            return await self._try(path)
        except NotWritable as wrong:
            remedy = "name a folder that this node can write to"
            self._told.tell(f"no checkpoint can be written: {wrong}; {remedy}")
            return True
        except ClaimError as wrong:
            self._told.tell(f"checkpoints are written without a claim of their folder: {wrong}")
            return True
        except TimeoutError:
            self._why = f"{path} has not answered for {FILE_LIMIT:g} s"
            return False

    async def _try(self, path: str) -> bool:
        if self._file is None or self._path != path:
            await self._leave(FILE_LIMIT)  # another folder is named now
            self._path, self._looks = path, Looks()
            self._file = ClaimFile(os.path.join(path, NAME), private=False)
        file = self._file
        claim, took = await on_disk(partial(_first, file, path))
        term = self._term()
        if claim is not None and claim.words.get("job") != self._job_id:
            self._looks.look(claim, took)
            if not self._looks.is_stale(claim):
                if self._looks.renewed:
                    self._why = (
                        f"{path} is claimed by job {claim.text('job')} on {claim.text('host')}, "
                        "which renews its claim: end that job, or name another folder"
                    )
                return False
        elif claim is not None and term in _terms(claim):
            self._why = (
                f"{path} is claimed by another master of this job, on {claim.text('host')}: the "
                "one that this node follows was succeeded"
            )
            return False
        elif claim is not None and file.mine is not None and claim.is_of(file.mine.holder, term):
            self._why = ""
            return True
        return await self._take(file, claim, term)

    async def _take(self, file: ClaimFile, claim: Claim | None, term: int) -> bool:
        if self._renewer is not None:
            await on_disk(self._renewer.close)
            self._renewer = None
        past: list[int] = []
        if claim is not None and claim.words.get("job") == self._job_id:
            past = [one for one in (*_terms(claim), claim.number("term")) if one != term]
        words: dict[str, Any] = {
            "job": self._job_id,
            "host": os.uname().nodename,
            "term": term,
            "before": past[-MOST_TERMS:],
        }
        if not await on_disk(partial(file.take, fresh(words), claim)):
            return False
        self._why = ""
        self._renewer = ClaimRenewer(file)
        loop = asyncio.get_running_loop()
        self._renewer.attach(
            lambda other: threadsafe(loop, self._lost, other), lambda sentence: None
        )
        return True

    def _lost(self, other: Claim) -> None:
        """Another node of this job has it now, which is as it should be; or another job."""
        self._renewer = None
        if other.words.get("job") != self._job_id:
            self._told.tell(
                f"{self._path} was taken over by job {other.text('job')} on {other.text('host')}, "
                "which has seen no renewal of this job's claim"
            )


def _local(url: str) -> str | None:
    """The path of a folder in a file system; None for what only fsspec reaches."""
    if "://" not in url:
        return url
    return url.removeprefix("file://") if url.startswith("file:///") else None


def _first(file: ClaimFile, path: str) -> tuple[Claim | None, float]:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise NotWritable(f"{path} cannot be made: {error.strerror}") from None
    return timed(file)


def _terms(claim: Claim) -> list[int]:
    found = claim.words.get("before", [])
    return [one for one in found if type(one) is int] if isinstance(found, list) else []
