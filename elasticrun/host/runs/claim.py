"""Ensures that only one process at a time starts, scales or removes a job of a given name.

A claim is a numbered symbolic link beside the run folders; its target identifies the owner. If
several processes create the same link, only one succeeds, even on NFS. The claim of a killed
process does not block others, because the next claim has a higher number.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from elasticrun.host.system.processes import ProcessId

FAR_LIMIT: Final = 600.0
"""Seconds for which the claim of a process on another host or in another PID namespace is valid.
"""


class Claimed(Exception):
    """Another process has the claim."""


@contextlib.contextmanager
def claimed(root: Path, name: str) -> Iterator[None]:
    """In this block no other process starts, scales or removes a job of this name. Raises Claimed
    if one does now. If `root` is not writable, nothing is claimed."""
    stem = f".{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-claim-"
    before = _claims(root, stem)
    own = root / f"{stem}{max(before, default=0) + 1}"
    _refuse_others(before, name)
    with contextlib.suppress(OSError):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    me = ProcessId.own()
    whose = f"{me.pid} {me.started} {me.namespace} {me.boot} {me.host}"
    try:
        own.symlink_to(whose)
    except FileExistsError:
        raise _claimed_error(name) from None
    except OSError:
        yield
        return
    try:
        after = _claims(root, stem)
        _refuse_others({number: path for number, path in after.items() if path != own}, name)
        yield
    finally:
        for path in (*before.values(), own):
            with contextlib.suppress(OSError):
                path.unlink()


def _claims(root: Path, stem: str) -> dict[int, Path]:
    numbers = re.compile(re.escape(stem) + r"(\d{1,9})")
    with contextlib.suppress(OSError):
        found = [(numbers.fullmatch(name), name) for name in os.listdir(root)]
        return {int(number[1]): root / name for number, name in found if number}
    return {}


def _refuse_others(claims: dict[int, Path], name: str) -> None:
    for path in claims.values():
        with contextlib.suppress(OSError, ValueError):  # it is being released
            pid, started, namespace, boot, host = os.readlink(path).split(" ", 4)
            alive = ProcessId(int(pid), int(started), boot, int(namespace), host).is_alive()
            if alive is None:
                alive = time.time() - path.lstat().st_mtime < FAR_LIMIT
            if alive:
                raise _claimed_error(name, f" (process {pid} of {host})")


def _claimed_error(name: str, whose: str = "") -> Claimed:
    return Claimed(f"another elasticrun{whose} is changing job {name} right now")
