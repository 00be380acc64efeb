"""Masters that run on this host, as small files in the user's own run folder.

A master writes one when it serves and removes it when it ends; `elasticrun status` without an
endpoint reads them. A file whose process is gone (no such pid, or another process by that pid now)
shows that a master was killed, and the agents of its host go by it (`agent.meeting`): whoever finds
one, `status` too, marks it as dead and leaves it for DEAD_KEPT more seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from elasticrun.wire.ids import Endpoint

MAX_FILE_BYTES: Final = 16 * 1024
"""A longer file is not one of ours."""

MAX_FILES: Final = 4096
"""Files looked at; nobody has that many jobs on one host."""

DEAD_KEPT: Final = 600.0
"""Seconds for which a file is kept after its master was first found dead: an agent of a busy host
has noticed the silence by then. A host's clock that jumps makes that longer or shorter."""

LIVING, DEAD = "master-*.json", "dead-master-*.json"
"""Names of the files as masters write them, and once somebody has found their masters dead."""


@dataclass(frozen=True, slots=True)
class Published:
    """One running master. `started` is the kernel's start time of `pid`, in clock ticks.

    `reader` proves that somebody may read its status (`proof.reader_token`; "" for a job without a
    token): the folder is this user's alone, and it opens nothing else."""

    job_id: str
    host: str
    port: int
    status_url: str
    pid: int
    started: int
    reader: str = field(default="", repr=False)
    tls: bool = False
    began: float = 0.0  # when the job did on this host, in seconds since 1970; 0.0: not known

    @property
    def endpoint(self) -> Endpoint:
        """Where `GetStatus` is answered."""
        return Endpoint(self.host, self.port)


def run_folder(environ: Mapping[str, str]) -> Path:
    """$XDG_RUNTIME_DIR/elasticrun, or ~/.cache/elasticrun where that is not set or not usable;
    made with mode 0700. OSError if there is none that is ours alone."""
    base = Path(environ.get("XDG_RUNTIME_DIR", ""))
    if not (base.is_absolute() and base.is_dir() and os.access(base, os.W_OK)):
        base = Path.home() / ".cache"
    folder = base / "elasticrun"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(f"{folder} is not a folder of this user")
    folder.chmod(0o700)
    return folder


def start_time(pid: int) -> int | None:
    """When the kernel started this process, in clock ticks since boot; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def publish(folder: Path, master: Published) -> Path:
    """Write the file of a master; returns its path. Files that dead masters of its job have left at
    its port go: it has taken their place. OSError if that cannot be done."""
    path = folder / f"master-{master.pid}-{master.started}.json"
    draft = path.with_suffix(".new")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(master), file)
    draft.rename(path)
    for left in _files(folder, LIVING) + _files(folder, DEAD):
        before = _read(left) if left != path else None
        if before is not None and _place(before) == _place(master) and not _lives(before):
            with contextlib.suppress(OSError):  # another master's start was faster
                left.unlink()
    return path


def published(folder: Path) -> list[Published]:
    """The masters that run now, in order of job id; what is left of dead ones is cleared away."""
    return sorted(_living(folder), key=lambda master: (master.job_id, master.pid))


def began_before(folder: Path, job_id: str, port: int) -> float:
    """When a job began whose master here was killed, before its file is removed; 0.0: unknown."""
    ours = _of(folder, job_id, port)
    return min((master.began for master in ours if master.began > 0), default=0.0)


def was_killed(folder: Path, job_id: str, port: int) -> bool:
    """Whether a master of this job ended here without taking its file away: one that did its work
    has, and its job is over."""
    ours = _of(folder, job_id, port)
    return bool(ours) and not any(map(_lives, ours))


def _of(folder: Path, job_id: str, port: int) -> list[Published]:
    found = map(_read, _files(folder, LIVING) + _files(folder, DEAD))
    return [master for master in found if master is not None and _place(master) == (job_id, port)]


def _place(master: Published) -> tuple[str, int]:
    return master.job_id, master.port


def _living(folder: Path) -> Iterator[Published]:
    for path in _files(folder, LIVING):
        master = _read(path)
        if master is not None and _lives(master):
            yield master
        else:
            with contextlib.suppress(OSError):  # another reader was faster
                os.utime(path)
                path.rename(path.with_name(f"dead-{path.name}"))
    now = time.time()
    for path in _files(folder, DEAD):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > DEAD_KEPT:
                path.unlink()


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))[:MAX_FILES]


def _lives(master: Published) -> bool:
    return start_time(master.pid) == master.started


def _read(path: Path) -> Published | None:
    try:
        with path.open() as file:
            fields: Any = json.loads(file.read(MAX_FILE_BYTES))
        master = Published(**fields)
    except (OSError, ValueError, TypeError):
        return None
    numbers = (master.port, master.pid, master.started)
    words = (master.job_id, master.host, master.status_url, master.reader)
    right = all(type(n) is int for n in numbers) and all(type(w) is str for w in words)
    right = right and type(master.tls) is bool and isinstance(master.began, int | float)
    return master if right else None
