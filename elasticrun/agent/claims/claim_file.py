"""A claim file, with which one of the machines that share a folder claims a role (decision 029).

For mutual exclusion it relies only on link(2), which is atomic on network file systems too and
fails if the name exists. It uses no flock, trusts no file time, and compares no clocks of two
hosts.

A claim is written completely into a draft and published by link. Its last line is a counter that
the holder increments in place, through the descriptor of the linked file, so that it can never
write into a successor's claim. Readers reopen the file for each read, so that an NFS client fetches
it from the server. A claim is stale after STALE_READS reads in a row with the same counter.

To replace claim X, a candidate links `NAME.after.X`; only one candidate can. From then on every
reader of X takes that file as the claim. It is then renamed over NAME, which removes X. X is the
random id of a holder and is never reused, so a decision about X never applies to another claim.

Nodes use a claim file to find their job's master (`rendezvous.shared_file`). Another, in the
checkpoint folder, decides which job may write there (`folder_claim`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from elasticrun.agent.runtime import in_thread
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
READ_EVERY does not count: the file system was stuck, perhaps for the holder too."""

CLOSE_LIMIT: Final = 2.0
"""Seconds that closing a renewer waits for a renewal in progress."""

FILE_LIMIT: Final = 30.0
"""Seconds for one read or change of a shared folder; after that it counts as hung."""

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
    `left`: its holder no longer renews it, but others may still need the data."""

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


def has_died_here(claim: Claim) -> bool:
    """Whether the claim's holder is known to have exited, so that nobody needs to wait for it. A
    holder from another boot does not count: it may run on another machine with the same host name,
    and two masters are worse than a wait."""
    try:
        holder = msgspec.convert(claim.words.get("process"), ProcessId)
    except msgspec.ValidationError:
        return False
    return holder.pid > 0 and holder.boot == boot_id() and holder.is_alive() is False


class SharedFiles:
    """The file operations on the shared folder, as one object that tests replace with a slow
    one."""

    def read(self, path: str) -> tuple[bytes, os.stat_result]:
        """Open the file anew, so that NFS asks the server; returns its first MAX_BYTES + 1 bytes
        and its stat. Raises OSError."""
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
    """The claim file at `path`, as this process sees it. Its methods block, and raise ClaimError.

    `private`: only its owner may have access to it, and it is trusted only if its owner is the
    owner of the files that we create there."""

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
        """The claim that we hold; None if we hold none."""

    # ------------------------------------------------------------ reading

    def read(self) -> Claim | None:
        """Return the claim that is valid now, or None. Follows takeovers that are not renamed
        yet."""
        found, path = self._read(self.path), self.path
        for _ in range(MAX_CHAIN):
            if found is None:
                return None
            path = self._successor_path(found)
            later = self._read(path)
            if later is None:
                return found
            found = later
        raise ClaimError(f"{self.path} was taken over repeatedly: remove it and {path}")

    def _successor_path(self, claim: Claim) -> str:
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
                f"{path} is not an elasticrun claim file: remove it, or use another path"
            ) from None

    def _check_private(self, path: str, found: os.stat_result) -> None:
        """Raise ClaimError unless the file is ours and nobody else has access to it: whoever can
        write it could make this node join another job."""
        if self._owner < 0:
            draft, fd = self._draft(b"")
            os.close(fd)
            self._discard(draft)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != self._owner:
            raise ClaimError(f"{path} belongs to another user: use your own file")
        if found.st_mode & 0o077:
            raise ClaimError(
                f"{path} can be read or written by others, and readers can join the job: remove "
                "it, "
                "or use a file whose mode can be 0600"
            )

    # ------------------------------------------------------------ claiming

    def take(self, claim: Claim, instead: Claim | None = None) -> bool:
        """Publish this claim where there is none, or in place of `instead`. Returns False if
        another process was faster, or if `instead` is no longer valid."""
        body = json.dumps({"holder": claim.holder, "words": dict(claim.words)}) + "\n"
        data = (body + _line(0, _KEPT)).encode()
        name = self.path if instead is None else self._successor_path(instead)
        draft, fd = self._draft(data)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                linked = self._publish_draft(draft, fd, name)
            finally:
                self._discard(draft)
            if not linked or (instead is not None and not self._replace(name, claim, instead)):
                return False
            undo.pop_all()
        self.release()
        self._held, self._at = io.FileIO(fd, "r+"), len(body.encode())
        self.mine = claim
        return True

    def _replace(self, name: str, claim: Claim, instead: Claim) -> bool:
        """Rename `name`, which contains `claim`, over the claim `instead`. Returns False if a third
        claim is valid. Reads the folder again first: NFS may have shown us an outdated one until we
        changed it."""
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
        """Create a draft file with this content, synced to the server's disk; returns its path and
        descriptor. Also notes which owner our files have there."""
        draft = f"{self.path}.{secrets.token_hex(8)}.new"
        try:
            fd = self._files.create(draft, 0o600 if self._private else 0o666)
        except FileNotFoundError:
            # The folder is not created: with a missing mount every machine would have its own.
            raise ClaimError(
                f"there is no folder {os.path.dirname(self.path)} here: create or mount it"
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
                        f"the file system of {self.path} ignores file modes, so the job's token "
                        "would not be private there: use "
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

    def _publish_draft(self, draft: str, fd: int, name: str) -> bool:
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
                f"the file system of {self.path} does not support hard links ({error.strerror}), "
                "which claims need: use --rdzv-endpoint=HOST:PORT"
            ) from None

    # ------------------------------------------------------------ holding

    def renew(self) -> Claim | None:
        """Increment the counter of our claim, or create the claim again if somebody removed it.
        Returns the claim that has replaced ours, or None."""
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
        """Mark our claim as no longer renewed but perhaps still needed, and release it."""
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
        """Close our claim's file without removing it; the claim is no longer renewed."""
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
    """Observes whether a claim whose holder does not answer is still renewed."""

    def __init__(self) -> None:
        self._seen: tuple[str, int] = ("", 0)
        self.same = 0
        """Reads in a row without a renewal."""
        self.renewed = False
        """Whether the current holder has renewed it since we began to watch."""

    def observe(self, claim: Claim, took: float) -> None:
        """Record one read of the claim, which took `took` seconds. A slow read does not count as
        one without a renewal."""
        seen = (claim.holder, claim.count)
        if seen != self._seen:
            self.renewed = seen[0] == self._seen[0]
            self._seen, self.same = seen, 0
        elif took <= READ_EVERY:
            self.same += 1

    def is_stale(self, claim: Claim) -> bool:
        """Whether the holder has left, has died on this host, or has not renewed the claim for
        STALE_READS reads."""
        return claim.left or has_died_here(claim) or self.same >= STALE_READS


class ClaimRenewer:
    """Renews a claim in its own thread until it is closed or another claim replaces it.

    The callbacks run in that thread: `lost(claim)` when another claim has replaced ours,
    `trouble(sentence)` when renewing fails, and `trouble("")` when it works again."""

    def __init__(self, file: ClaimFile) -> None:
        self._file = file
        self._lost: Callable[[Claim], None] | None = None
        self._trouble: Callable[[str], None] = lambda sentence: None
        self._other: Claim | None = None
        self._over = threading.Event()
        self._thread = start_thread(self._keep, "claim")

    def attach(self, lost: Callable[[Claim], None], trouble: Callable[[str], None]) -> None:
        """Set the callbacks. A loss that has already happened is reported at once, from here."""
        self._lost, self._trouble = lost, trouble
        if self._other is not None:  # set before _lost is read: at least one thread calls it
            lost(self._other)

    def close(self) -> None:
        """Stop renewing. Waits up to CLOSE_LIMIT for a renewal in progress, which might otherwise
        re-create a claim that is being removed."""
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
    """Run `work`, which blocks on a shared folder, in a thread and return its result. Raises
    TimeoutError after FILE_LIMIT."""
    return await in_thread(work, limit=FILE_LIMIT, name="claim")
