"""A claim file: one of several machines that share a folder claims a role with it (decision 029).

It relies on link(2) only, which is atomic on network file systems too and fails if the name exists.
It uses no flock, trusts no file time, and compares no clocks of two hosts.

A claim is written completely into a draft and published by link. Its last line is a counter that
the holder increments in place, through the descriptor of the linked file, so that it can never
write into a successor's claim. Readers open the file anew, which makes NFS ask its server. A claim
counts as not renewed after many reads in a row with the same counter.

To replace claim X, a candidate links `NAME.after.X`; only one candidate can. From then on every
reader of X takes that file as the claim, and it is then renamed over NAME, which removes X. X is
the random id of a holder and is never reused, so a decision about X never applies to another claim.

Nodes use such a file to find their job's master (`shared_file`). One in the checkpoint folder
decides which job may write there (`FolderClaim`).
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
"""Maximum number of claims that replaced each other without one being renamed to NAME."""

RENEW_EVERY: Final = 2.0
"""Seconds between two renewals."""

READ_EVERY: Final = 1.0
"""Seconds between two reads of a claim whose holder does not answer."""

STALE_READS: Final = 10
"""Reads in a row with the same counter after which a claim is stale. A read that took longer than
LOOK_EVERY does not count: the file system was stuck, perhaps for the holder too."""

CLOSE_LIMIT: Final = 2.0
"""Seconds to wait for a renewal in progress."""

NAME: Final = "elasticrun.claim"
"""The claim file in a checkpoint folder."""

FILE_LIMIT: Final = 30.0
"""Seconds for one read or change of a shared folder; after that it counts as hung."""

FOLDER_CLOSE_LIMIT: Final = 5.0
"""The same at shutdown."""

PATIENCE: Final = 3.0 * STALE_READS * READ_EVERY
"""Seconds that a checkpoint waits to find out whether another job still claims the folder."""

MOST_TERMS: Final = 64
"""Maximum number of earlier master terms that a claim lists."""

_HOLDER: Final = re.compile(r"[0-9a-f]{16}\Z")
_LITTER: Final = re.compile(r"\.[0-9a-f]{16}(\.new)?\Z")
_KEPT, _LEFT = "kept", "left"


class ClaimError(Exception):
    """A claim can neither be read nor created; the text is a sentence."""


class NotWritable(ClaimError):
    """No file can be created in the claim's folder."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The content of a claim file. `holder`: the random id of its holder. `words`: its data.
    `left`: its holder has exited, and others may still need the data."""

    holder: str
    words: Mapping[str, Any] = field(repr=False)  # includes the job's token
    count: int = 0
    left: bool = False

    def text(self, name: str) -> str:
        """A string from `words`; "" if missing."""
        value = self.words.get(name, "")
        return value if isinstance(value, str) else ""

    def is_of(self, holder: str, term: int) -> bool:
        """Whether this holder created it under the master of this term."""
        return (self.holder, self.number("term")) == (holder, term)

    def number(self, name: str) -> int:
        """An integer from `words`; 0 if missing."""
        value = self.words.get(name, 0)
        return value if type(value) is int else 0


def new_claim(words: Mapping[str, Any]) -> Claim:
    """A claim with a new holder id, held by this process."""
    return Claim(secrets.token_hex(8), {**words, "process": msgspec.to_builtins(ProcessId.own())})


def died_here(claim: Claim) -> bool:
    """Whether its holder is known to have exited, so that nobody needs to wait for it. A holder
    from another boot does not count: it may run on another machine with the same host name, and two
    masters are worse than a wait."""
    try:
        holder = msgspec.convert(claim.words.get("process"), ProcessId)
    except msgspec.ValidationError:
        return False
    return holder.pid > 0 and holder.boot == boot_id() and holder.is_alive() is False


class SharedFiles:
    """The calls on the shared folder, in one object: tests replace it with a slow one."""

    def read(self, path: str) -> tuple[bytes, os.stat_result]:
        """The file as the server has it now, opened anew. OSError."""
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
    """The claim file at `path`, as this process sees it. Methods block, and raise ClaimError.

    `private`: nobody else may read it, and it is trusted only if its owner is the owner of the
    files that we create there."""

    def __init__(
        self, path: str, *, private: bool = True, files: SharedFiles | None = None
    ) -> None:
        self.path = path
        self._private = private
        self._files = files or SharedFiles()
        self._owner = -1  # our uid on this file system, which may map users
        # The file that we linked. It is a file object because shutdown does not wait for a renewer
        # thread that hangs: once closed, it rejects the thread's write, while a plain descriptor
        # number might be reused for another file.
        self._held: io.FileIO | None = None
        self._at = 0
        self.mine: Claim | None = None
        """The claim that we hold."""

    # ------------------------------------------------------------ reading

    def read(self) -> Claim | None:
        """The valid claim; None if there is none."""
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
            # ESTALE: removed on another host while we opened it
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None
            raise ClaimError(f"{path} cannot be read: {error.strerror}") from None
        if self._private:
            self._check_private(path, found)
        try:
            text, count, word = data.decode().removesuffix("\n").rsplit(" ", 2)
            body, _, renewed = text.rpartition("\n")
            content = json.loads(body)
            holder, words = content["holder"], content["words"]
            if renewed != "renewed" or word not in (_KEPT, _LEFT) or not _HOLDER.match(holder):
                raise ValueError(word)
            return Claim(holder, dict(words), int(count), word == _LEFT)
        except (ValueError, KeyError, TypeError):
            raise ClaimError(
                f"{path} is no claim of elasticrun's: remove it, or name another file"
            ) from None

    def _check_private(self, path: str, found: os.stat_result) -> None:
        """Whoever can write the file could make this node join a job of theirs."""
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
        """Publish this claim: where there is none, or in place of `instead`. False if somebody was
        faster, or if `instead` is no longer valid."""
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
        self.release()
        self._held, self._at = io.FileIO(fd, "r+"), len(body.encode())
        self.mine = claim
        return True

    def _succeed(self, name: str, claim: Claim, instead: Claim) -> bool:
        """Rename the file `name` over the old claim. Our view of that may be outdated, so it is
        read again after a change of ours to the folder."""
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
        """Create a draft file with this content, synced to the server's disk."""
        draft = f"{self.path}.{secrets.token_hex(8)}.new"
        try:
            fd = self._files.create(draft, 0o600 if self._private else 0o666)
        except FileNotFoundError:
            # The folder is not created: with a missing mount every machine would have its own.
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
            # NFS may send a request twice; the second reply is then EEXIST. The link count tells
            # whether the first one succeeded.
            return os.fstat(fd).st_nlink == 2
        except FileNotFoundError:
            return False  # whoever removed the claim also removed our draft
        except OSError as error:
            raise ClaimError(
                f"the file system of {self.path} has no hard links ({error.strerror}), by which "
                "machines claim a file: use --rdzv-endpoint=HOST:PORT"
            ) from None

    # ------------------------------------------------------------ holding

    def renew(self) -> Claim | None:
        """Increment the counter of our claim; returns None, or another claim that is now valid. A
        claim that somebody removed is created again."""
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
        """Mark our claim as no longer renewed, but perhaps still needed."""
        self._write(0, _LEFT)
        self.release()

    def remove(self, holder: str = "") -> None:
        """Remove our claim, or this holder's, if it is still valid. Also removes files left by
        processes that were killed while claiming."""
        target = holder or (self.mine.holder if self.mine is not None else "")
        folder, name = os.path.split(self.path)
        with contextlib.suppress(ClaimError, OSError):
            current = self._read(self.path)
            if target and current is not None and current.holder == target:
                self._files.unlink(self.path)
                for other in self._files.names(folder):
                    if other.startswith(f"{name}.") and _LITTER.search(other):
                        self._discard(os.path.join(folder, other))
        self.release()

    def release(self) -> None:
        """Stop writing to our claim."""
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


class Renewals:
    """Reads a claim whose holder does not answer, to see whether it is renewed."""

    def __init__(self) -> None:
        self._seen: tuple[str, int] = ("", 0)
        self.same = 0
        """Reads in a row without a renewal."""
        self.renewed = False
        """Whether the current holder has renewed it while we watched."""

    def observe(self, claim: Claim, took: float) -> None:
        """`took`: seconds that the read took."""
        seen = (claim.holder, claim.count)
        if seen != self._seen:
            self.renewed = seen[0] == self._seen[0]
            self._seen, self.same = seen, 0
        elif took <= READ_EVERY:
            self.same += 1

    def is_stale(self, claim: Claim) -> bool:
        """Whether nobody holds it any more, as far as the file shows."""
        return claim.left or died_here(claim) or self.same >= STALE_READS


class ClaimRenewer:
    """Renews a claim in its own thread until it is closed.

    The callbacks run in that thread: `lost(claim)` when another claim has replaced it,
    `trouble(sentence)` when renewing fails, and `trouble("")` when it works again."""

    def __init__(self, file: ClaimFile) -> None:
        self._file = file
        self._lost: Callable[[Claim], None] | None = None
        self._trouble: Callable[[str], None] = lambda sentence: None
        self._other: Claim | None = None
        self._over = threading.Event()
        self._thread = start_thread(self._keep, "claim")

    def attach(self, lost: Callable[[Claim], None], trouble: Callable[[str], None]) -> None:
        """Set the callbacks; a loss that has already happened is reported at once."""
        self._lost, self._trouble = lost, trouble
        if self._other is not None:  # set before _lost is read, so one of us calls it
            lost(self._other)

    def close(self) -> None:
        """Stop renewing. Blocks for CLOSE_LIMIT at most: a renewal in progress would re-create a
        claim that is being removed."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_LIMIT)

    def remove(self) -> None:
        """Stop renewing and remove the claim."""
        self.close()
        self._file.remove()

    def _keep(self) -> None:
        reported = ""
        while not self._over.wait(RENEW_EVERY):
            wrong, other = "", None
            try:
                other = self._file.renew()
            except ClaimError as error:
                wrong = str(error)
            if self._over.is_set():
                return
            if wrong != reported:
                reported = wrong
                self._trouble(wrong)
            if other is not None:
                self._other = other
                if self._lost is not None:
                    self._lost(other)
                return


def timed_read(file: ClaimFile) -> tuple[Claim | None, float]:
    """Read the file; returns the claim and the seconds that the read took."""
    began = time.monotonic()
    return file.read(), time.monotonic() - began


async def on_disk(work: Callable[[], T]) -> T:
    """The result of work on a shared folder. TimeoutError."""
    return await in_thread(work, limit=FILE_LIMIT, name="claim")


class NotOurs(Exception):
    """Another job, or another master of this one, writes there; the text is a sentence."""


class FolderClaim:
    """This node's claim on the checkpoint folder, if it has one. The folder belongs to one job, and
    within that job to one master. Used in the loop's thread only.

    Two jobs with the same folder, or two halves of a partitioned job, would remove and replace each
    other's checkpoints. So the node of rank 0 claims the folder when its ranks have reported it,
    and a node verifies the claim before it has a marker written.

        the claim there      what this node does
        none, or stale       takes it
        of this job          takes it, unless its own master has been replaced: the claim lists the
                             terms of all masters before the one that took it last
        of another job that  writes nothing there, reports who claims it, and checks again
        renews it
    """

    def __init__(self, job_id: str, term: Callable[[], int]) -> None:
        """`term`: returns the term of the master that this node follows."""
        self._job_id = job_id
        self._term = term
        self._path = ""
        self._file: ClaimFile | None = None
        self._renewer: ClaimRenewer | None = None
        self._renewals = Renewals()
        self._why = ""  # why the folder is not ours, once that is certain
        self._once = Once(MOST_TERMS)
        self._tasks = Tasks(logger.error)
        self._checking: asyncio.Task[bool] | None = None
        self._watch: asyncio.Task[None] | None = None

    def start(self, url: str) -> None:
        """The ranks of this node, including rank 0, have their checkpoints there."""
        if self._watch is None or self._watch.done():
            self._watch = self._tasks.start(self._hold(url), "claiming the folder of checkpoints")

    async def verify(self, url: str) -> None:
        """Return when this node may write a marker there. NotOurs, after PATIENCE at most."""
        end = asyncio.get_running_loop().time() + PATIENCE
        while not await self._check(url):
            if self._why or asyncio.get_running_loop().time() >= end:
                raise NotOurs(self._why or f"it is not known whose {url} is")
            await asyncio.sleep(READ_EVERY)

    async def close(self) -> None:
        """Release the claim: nothing is written any more."""
        if self._watch is not None:
            self._watch.cancel()
        if self._checking is not None and not self._checking.done():
            await asyncio.wait({self._checking}, timeout=FOLDER_CLOSE_LIMIT)
        try:
            await self._leave(FOLDER_CLOSE_LIMIT)
        except TimeoutError:
            path = os.path.join(self._path, NAME)
            logger.warning("%s was not removed: its file system does not answer", path)

    async def _leave(self, limit: float) -> None:
        """Stop renewing our claim and remove it. TimeoutError."""
        renewer, self._renewer = self._renewer, None
        if renewer is not None:
            await in_thread(renewer.remove, limit=limit, name="claim")

    # ------------------------------------------------------------ looking

    async def _hold(self, url: str) -> None:
        """Check until the folder is ours; log an obstacle as soon as it is known."""
        while not await self._check(url):
            if self._why:
                self._once.log(f"no checkpoint is written: {self._why}")
            await asyncio.sleep(READ_EVERY * random.uniform(1.0, 1.25))

    async def _check(self, url: str) -> bool:
        """Whether the folder is ours, or needs no claim. Only one check runs at a time, and it is
        never cancelled: a new claim has to be renewed even if nobody waits for it any more."""
        while self._checking is not None and not self._checking.done():
            await asyncio.wait({self._checking})
        self._checking = self._tasks.start(self._check_once(url), "looking at a folder's claim")
        return await asyncio.shield(self._checking)

    async def _check_once(self, url: str) -> bool:
        path = _local(url)
        if path is None:
            words = f"{url} is no folder of a file system, so no job claims it"
            self._once.log(words, logging.INFO)
            return True
        try:
            return await self._try(path)
        except NotWritable as wrong:
            remedy = "name a folder that this node can write to"
            self._once.log(f"no checkpoint can be written: {wrong}; {remedy}")
            return True
        except ClaimError as wrong:
            self._once.log(f"checkpoints are written without a claim of their folder: {wrong}")
            return True
        except TimeoutError:
            self._why = f"{path} has not answered for {FILE_LIMIT:g} s"
            return False

    async def _try(self, path: str) -> bool:
        if self._file is None or self._path != path:
            await self._leave(FILE_LIMIT)  # the ranks use another folder now
            self._path, self._renewals = path, Renewals()
            self._file = ClaimFile(os.path.join(path, NAME), private=False)
        file = self._file
        claim, took = await on_disk(partial(_first, file, path))
        term = self._term()
        if claim is not None and claim.words.get("job") != self._job_id:
            self._renewals.observe(claim, took)
            if not self._renewals.is_stale(claim):
                if self._renewals.renewed:
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
        if not await on_disk(partial(file.take, new_claim(words), claim)):
            return False
        self._why = ""
        self._renewer = ClaimRenewer(file)
        loop = asyncio.get_running_loop()
        self._renewer.attach(
            lambda other: threadsafe(loop, self._lost, other), lambda sentence: None
        )
        return True

    def _lost(self, other: Claim) -> None:
        """The claim was taken over: by another node of this job, which is normal, or by another
        job."""
        self._renewer = None
        if other.words.get("job") != self._job_id:
            self._once.log(
                f"{self._path} was taken over by job {other.text('job')} on {other.text('host')}, "
                "which has seen no renewal of this job's claim"
            )


def _local(url: str) -> str | None:
    """The path of a folder in a file system; None for URLs that only fsspec can open."""
    if "://" not in url:
        return url
    return url.removeprefix("file://") if url.startswith("file:///") else None


def _first(file: ClaimFile, path: str) -> tuple[Claim | None, float]:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise NotWritable(f"{path} cannot be made: {error.strerror}") from None
    return timed_read(file)


def _terms(claim: Claim) -> list[int]:
    found = claim.words.get("before", [])
    return [one for one in found if type(one) is int] if isinstance(found, list) else []
