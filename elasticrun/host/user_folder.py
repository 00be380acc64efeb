"""The user's own folder on this host, and where a master keeps its record.

The folder lists running masters as small files: a master writes one when it serves and removes it
when it exits; `elasticrun status` without an endpoint reads them. A file whose process has exited
shows that the master was killed, which agents on its host use (`agent.rendezvous`): every reader,
including `status`, marks such a file as dead and leaves it for DEAD_FILE_LIFE more seconds. The
folder may be shared with other hosts and PID namespaces, whose processes are not visible here:
their files count as alive while their masters renew them. Jobs run without any of this.

A record is on a local disk. The folder of a hosted master belongs to the launch of its agent. Agent
and master hold a shared lock on it as long as they live; the last one to exit removes it. A folder
that nobody has locked is stale, and is removed by whoever finds it. A folder named by a user
(`elasticrun master --state-dir`) stays; the master locks it exclusively, so that no two masters
write one record.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticrun.host.system.processes import ProcessId, home
from elasticrun.wire.types import Endpoint, dumps, loads

if TYPE_CHECKING:
    pass

MAX_FILE_BYTES: Final = 16 * 1024
"""Maximum bytes read of a file; ours are shorter."""

MAX_FILES: Final = 4096
"""Maximum number of files read; no user has that many jobs on one host."""

DEAD_FILE_LIFE: Final = 600.0
"""Seconds for which a file is kept after its master was first found dead: by then even an agent on
a busy host has noticed. A jump of the host's clock changes that time.
"""

RENEW_INTERVAL: Final = 60.0
"""Seconds between renewals of a file by its master: it sets the mtime, or rewrites a missing
file."""

FAR_LIMIT: Final = 600.0
"""Seconds after its last renewal for which the file of a process that is not visible here counts as
alive. If clocks differ by more, the file is marked as dead and its master writes a new one.
"""

LIVING, DEAD = "master-*.json", "dead-master-*.json"
"""Names of the files as masters write them, and after their masters were found dead."""


@dataclass(frozen=True, slots=True)
class Published:
    """The content of a master's file.

    `reader` proves the right to read the job's status (`auth.reader_token`; "" for a job without a
    token), `operator` the right to operate the job (`auth.operator_token`). Only this user can
    access the folder, and neither token admits a node."""

    job_id: str
    host: str
    port: int
    status_url: str
    process: ProcessId
    reader: str = field(default="", repr=False)
    operator: str = field(default="", repr=False)
    tls: bool = False
    began: float = 0.0  # start of the job on this host, in seconds since 1970; 0.0: unknown
    run: str = ""  # its run folder
    name: str = ""  # the job's name for people

    @property
    def pid(self) -> int:
        """The master's pid in its PID namespace."""
        return self.process.pid

    @property
    def endpoint(self) -> Endpoint:
        """Where the master serves gRPC."""
        return Endpoint(self.host, self.port)


def user_folder(environ: Mapping[str, str]) -> Path:
    """$XDG_RUNTIME_DIR/elasticrun, or ~/.cache/elasticrun if that is not set or unusable; created
    with mode 0700. Raises OSError if there is no folder that only this user can access."""
    base = Path(environ.get("XDG_RUNTIME_DIR", ""))
    if not (base.is_absolute() and base.is_dir() and os.access(base, os.W_OK)):
        base = home() / ".cache"
    folder = base / "elasticrun"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(f"{folder} is not a folder of this user")
    folder.chmod(0o700)
    return folder


def publish(folder: Path, master: Published) -> Path:
    """Write the file of a master; returns its path. Removes files of dead masters of the same job
    and port, which it succeeds. Raises OSError."""
    path = folder / _name(master.process)
    _write(path, master)
    for left, before in _published_by(folder, master.job_id, master.port):
        if left != path and not _is_live(left, before):
            with contextlib.suppress(OSError):  # another master has removed it
                left.unlink()
    return path


def renew(path: Path, master: Published) -> None:
    """Renew a master's file at `path`; rewrite it if it is missing. Raises OSError."""
    try:
        os.utime(path)
    except FileNotFoundError:  # it was marked as dead, or the folder was emptied
        _write(path, master)


def _name(process: ProcessId) -> str:
    """The name of a master's file, unique among all hosts and PID namespaces that share the
    folder."""
    where = f"{process.boot} {process.namespace} {process.host}".encode()
    return f"master-{process.pid}-{process.started}-{hashlib.sha256(where).hexdigest()[:8]}.json"


def published(folder: Path) -> list[Published]:
    """The running masters, those of this host and PID namespace first, ordered by job id. Marks
    files of dead masters, and removes those that were marked DEAD_FILE_LIFE seconds ago."""
    living = []
    for path in _files(folder, LIVING):
        if (master := _read(path)) and _is_live(path, master):
            living.append(master)
        else:
            with contextlib.suppress(OSError):  # another reader has done that
                os.utime(path)
                path.rename(path.with_name(f"dead-{path.name}"))
    now = time.time()
    for path in _files(folder, DEAD):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > DEAD_FILE_LIFE:
                path.unlink()
    return sorted(living, key=lambda one: (not one.process.is_local, one.job_id, one.pid))


def began_before(folder: Path, job_id: str, port: int) -> float:
    """When a job began (seconds since 1970), from the files that its killed masters have left; 0.0:
    there is none."""
    began = [master.began for _, master in _published_by(folder, job_id, port) if master.began > 0]
    return min(began, default=0.0)


def was_killed(folder: Path, job_id: str, port: int) -> bool:
    """Whether the masters of this job have all died without removing their files, and there is such
    a file. A master that exits normally removes its file: its job is over."""
    alive = [_is_live(path, master) for path, master in _published_by(folder, job_id, port)]
    return bool(alive) and not any(alive)


def _published_by(folder: Path, job_id: str, port: int) -> list[tuple[Path, Published]]:
    files = _files(folder, LIVING) + _files(folder, DEAD)
    found = [(path, master) for path in files if (master := _read(path))]
    return [(path, own) for path, own in found if (own.job_id, own.port) == (job_id, port)]


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))[:MAX_FILES]


def _is_live(path: Path, master: Published) -> bool:
    alive = master.process.is_alive()
    if alive is not None:
        return alive
    with contextlib.suppress(OSError):
        renewed = time.time() - path.stat().st_mtime < FAR_LIMIT
        return renewed and not path.name.startswith("dead-")
    return False


def _read(path: Path) -> Published | None:
    """The content of a master's file; None if it is missing or invalid."""
    try:
        with path.open() as file:
            return loads(file.read(MAX_FILE_BYTES), Published)
    except (OSError, ValueError):
        return None


def _write(path: Path, record: Published) -> None:
    """Write atomically. Raises OSError."""
    draft = path.with_suffix(".new")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(dumps(record))
    draft.rename(path)


# ---------------------------------------------------------------- where a record may be stored

PREFIX: Final = "elasticrun-record-"
"""Prefix of the folders of launches; the rest of the name is random."""

MAX_SWEPT: Final = 256
"""Maximum number of folders in one sweep."""

ROOM: Final = 1024 * 1024
"""Bytes that must be free for a new record; the record of 1,000 nodes is smaller."""

MAX_TRIES: Final = 8
"""Maximum number of tries to make a folder: a sweep may remove a new one before it is locked."""

SHARED_MEMORY: Final = "/dev/shm"
"""The last resort for records: certainly local, but perhaps small."""

NETWORK_FILE_SYSTEMS: Final[Mapping[int, str]] = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x65735546: "FUSE",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x01021997: "9p",
    0x00C36400: "CephFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0xAAD7AAEA: "PanFS",
    0x20030528: "OrangeFS",
    0xBACBACBC: "VMware's shared folders",
    0x786F4256: "VirtualBox's shared folders",
}
"""Names of network file systems by their f_type of statfs(2), from its manual page, <linux/magic.h>
and the clients' sources. A record could be torn there; what is behind FUSE is unknown.
"""


class Unusable(OSError):
    """A folder cannot hold a record; the text is a sentence."""


def network_file_system(folder: Path) -> str:
    """The name of the network file system that contains `folder`, "" for a local one. Raises
    OSError."""
    return NETWORK_FILE_SYSTEMS.get(_file_system_type(folder) & 0xFFFFFFFF, "")


def _file_system_type(folder: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(512)  # struct statfs has 120 bytes and starts with f_type
    if libc.statfs(os.fsencode(folder), answer):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(folder))
    return int.from_bytes(answer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)


# ---------------------------------------------------------------- the folder of a launch


@dataclass
class LaunchFolder:
    """The record folder of a launch, locked by this process through `fd`."""

    path: Path
    fd: int

    def release(self) -> None:
        """Release the lock; others may still hold it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove(self) -> None:
        """Remove the folder with its content, and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


def make_launch_folder(environ: Mapping[str, str]) -> LaunchFolder:
    """Make and lock a private folder for a launch: in the user's folder or, if that is full or not
    on a local disk, in $TMPDIR or shared memory. Raises Unusable if there is no such place."""
    reasons = []
    for place in _places(environ):
        try:
            _check(place)
            return _make_in(place)
        except OSError as wrong:
            reasons.append(str(wrong) if isinstance(wrong, Unusable) else f"{place}: {wrong}")
    raise Unusable("; ".join(reasons) or "this user has no folder on this host")


def sweep_launch_folders(environ: Mapping[str, str]) -> int:
    """Remove folders of launches that nobody has locked; returns how many."""
    swept = 0
    for place in _places(environ):
        with contextlib.suppress(OSError):
            for path in sorted(place.glob(f"{PREFIX}*"))[:MAX_SWEPT]:
                swept += _remove_if_stale(path)
    return swept


def lock_folder(path: Path, *, alone: bool = False) -> int:
    """Lock a folder; returns a descriptor that holds the lock until it is closed or this process
    exits. `alone`: exclusively. Raises BlockingIOError if another lock prevents it; OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _places(environ: Mapping[str, str]) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield user_folder(environ)
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir())
    if os.path.isdir(SHARED_MEMORY):
        yield Path(SHARED_MEMORY)


def _check(place: Path) -> None:
    network = network_file_system(place)
    if network:
        raise Unusable(f"{place} is on a network file system ({network})")
    room = os.statvfs(place)
    if room.f_bavail * room.f_frsize < ROOM:
        raise Unusable(f"{place} is full")


def _make_in(place: Path) -> LaunchFolder:
    for _ in range(MAX_TRIES):
        path = place / f"{PREFIX}{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # a sweep removes it
            made = LaunchFolder(path, lock_folder(path))
            if path.exists():
                return made
            made.release()
    raise Unusable(f"{place}: new folders there are removed immediately")


def _remove_if_stale(path: Path) -> bool:
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        fd = lock_folder(path, alone=True)
    except OSError:
        return False
    LaunchFolder(path, fd).remove()
    return True


# ---------------------------------------------------------------- a folder named by a person


def prepare_folder(path: Path) -> None:
    """Create a folder that a user named for a record, and check that it is usable. Raises
    Unusable."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        network = network_file_system(path)
    except OSError as wrong:
        raise Unusable(f"{path} cannot be used: {wrong.strerror or wrong}") from None
    if network:
        raise Unusable(
            f"{path} is on a network file system ({network}), on which the record could be torn; "
            "name a folder on a disk of this host"
        )
    try:
        probe = path / f"{PREFIX}{secrets.token_hex(8)}"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        probe.unlink()
    except OSError as wrong:
        raise Unusable(f"{path} cannot be written to: {wrong.strerror or wrong}") from None
    _check(path)
