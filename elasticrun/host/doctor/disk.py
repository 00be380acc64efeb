"""Checks the folders that a job writes to (permission, space), and its data folders."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticrun.host.doctor.verdict import GIB, MIB, amount, failed, ok, warning
from elasticrun.host.user_folder import network_file_system
from elasticrun.wire.types import Finding

BLOCK: Final = 4096
"""Bytes written to test whether a folder is writable: only a write reveals an exhausted quota."""

FEW_INODES: Final = 10_000
"""Number of available inodes below which to warn: a job's logs and a cache of compiled code take a
few hundred per rank.
"""

NO_INODES: Final = 100


@dataclass(frozen=True, slots=True)
class JobFolder:
    """A folder of a job. `warn_below`: free bytes below which to warn; `fail_below`: free bytes
    below which no rank should start. `needed`: ranks fail if it is not writable. `created`: the job
    creates it if it is missing."""

    role: str
    path: str
    warn_below: int = GIB
    fail_below: int = 64 * MIB
    needed: bool = True
    created: bool = True

    @property
    def check(self) -> str:
        """The name of its check."""
        return f"disk, {self.role} folder"


_SET_BY: Final = {
    "log": "--log-dir",
    "temporary": "TMPDIR",
    "user's": "XDG_RUNTIME_DIR",
    "checkpoint": "the script's own setting",
}


def folders(
    environ: Mapping[str, str], *, log_dir: str | None = None, checkpoints: str = ""
) -> list[JobFolder]:
    """The folders of a job started with these settings. `log_dir`: None if the logs are below the
    temporary folder; `checkpoints`: "" if unknown."""
    try:
        temporary = environ.get("TMPDIR") or tempfile.gettempdir()
    except FileNotFoundError:  # none is writable: use the one that Python tries last
        temporary = os.getcwd()
    found = [JobFolder("temporary", temporary, created=False)]
    if log_dir and log_dir != os.devnull:
        found.append(JobFolder("log", log_dir))
    if checkpoints:
        found.append(JobFolder("checkpoint", checkpoints, warn_below=10 * GIB, fail_below=GIB))
    own = environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isdir(own):
        own = os.path.join("~", ".cache")
    # It has the master's record: a few megabytes, without which a job runs as well.
    run = os.path.join(own, "elasticrun")
    return [*found, JobFolder("user's", run, warn_below=64 * MIB, fail_below=0, needed=False)]


def examine(folder: JobFolder) -> list[Finding]:
    """Whether a job can write to a folder, and how much. Blocks as long as the file system does."""
    todo = f"give a folder that this user can write to ({_SET_BY[folder.role]})"
    bad = failed if folder.needed else warning
    try:
        path = Path(folder.path).expanduser().absolute()
    except RuntimeError:
        seen = f"{folder.path} cannot be found: this user has no home folder"
        return [bad(folder.check, seen, todo)]
    place = _existing(path)
    if place != path and not folder.created:
        return [warning(folder.check, f"there is no folder {path}", todo)]
    where = str(path) if place == path else f"{path} (to be created in {place})"
    refusal = _refusal(place)
    if refusal:
        seen = f"cannot write to {where}: {refusal}"
        return [bad(folder.check, seen, todo)]
    found = os.statvfs(place)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    seen = f"{amount(free)} of {amount(total)} are free in {where}"
    # Root may use its reserved space, and some file systems, such as btrfs, do not count inodes.
    inodes = found.f_favail if found.f_files else None
    if inodes is not None:
        seen += f", with inodes for {inodes} files"
    todo = f"free some space, or use another folder ({_SET_BY[folder.role]})"
    if free < folder.fail_below or (folder.needed and inodes is not None and inodes < NO_INODES):
        return [failed(folder.check, seen, todo)]
    if free < folder.warn_below or (inodes is not None and inodes < FEW_INODES):
        return [warning(folder.check, seen, todo)]
    return [ok(folder.check, seen)]


def examine_data(name: str, path: str) -> list[Finding]:
    """Whether a folder of --data is readable here, and whether it is on a network file system.
    Blocks as long as the file system does."""
    check, todo = f"data, {name}", "mount it on this host, or use another folder (--data)"
    if not os.path.isdir(path):
        return [failed(check, f"there is no folder {path}", todo)]
    if not os.access(path, os.R_OK | os.X_OK):
        return [failed(check, f"{path} is not readable", "let this user read it")]
    with os.scandir(path) as inside:
        if next(inside, None) is None:
            return [warning(check, f"{path} is empty", todo)]
    found, network = os.statvfs(path), network_file_system(Path(path))
    may = "read-write" if os.access(path, os.W_OK) else "read-only"
    seen = f"{path} is {may}; {amount(found.f_bavail * found.f_frsize)} are free; "
    whose = f"on {network}" if network else "on a local disk, so other nodes have different content"
    return [ok(check, seen + whose)]


def _existing(path: Path) -> Path:
    """The path itself, or its nearest ancestor that exists and is visible."""
    # Not path.exists(), which raises if an ancestor is not searchable.
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def _refusal(place: Path) -> str:
    """Why the folder is not writable, "" if it is; leaves nothing behind."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(BLOCK))
            file.flush()
    except OSError as wrong:
        full = wrong.errno in (errno.ENOSPC, errno.EDQUOT)
        return "it is full" if full else (wrong.strerror or str(wrong)).lower()
    return ""
