"""Writes all that a rank can see of its start to $DUMP_DIR/<rank>.<restart>.json.

DUMP_FAIL_UNTIL=N: exits with 3 in every life before the N-th (all ranks), once all ranks of that
life have written theirs: the first to fail is the end of the others.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any


def signal_table() -> dict[str, str]:
    """Disposition of each signal, as its number or the interpreter's word for a handler."""
    table = {}
    for number in sorted(signal.valid_signals()):
        try:
            table[signal.Signals(number).name] = str(signal.getsignal(number))
        except ValueError:  # a real-time signal without a name
            continue
    return {name: text for name, text in table.items() if " at 0x" not in text}


def kind_of_fd(fd: int) -> str:
    """What stands behind a descriptor, without its number or path."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return "closed"
    kinds = {
        "file": stat.S_ISREG,
        "pipe": stat.S_ISFIFO,
        "socket": stat.S_ISSOCK,
        "device": stat.S_ISCHR,
    }
    return next((name for name, test in kinds.items() if test(mode)), "other")


def picture(module: dict[str, Any]) -> dict[str, object]:
    """The rank's world in one dictionary."""
    os.umask(mask := os.umask(0))
    return {
        "environ": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path0": sys.path[0],
        "cwd": os.getcwd(),
        "umask": mask,
        "own_group": os.getpgid(0) == os.getpid(),
        "own_session": os.getsid(0) == os.getpid(),
        "name": module["__name__"],
        "file": module["__file__"],
        "spec": getattr(module["__spec__"], "name", None),
        "package": module["__package__"],
        "unbuffered": sys.stdout.write_through,
        "executable": sys.executable,
        "stdin": kind_of_fd(0),
        "stdin_target": os.readlink("/proc/self/fd/0"),
        "fds": {str(fd): kind_of_fd(fd) for fd in range(3, 64) if kind_of_fd(fd) != "closed"},
        "signals": signal_table(),
        "blocked": sorted(int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_STACK")
        },
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
    }


def main(module: dict[str, Any]) -> None:
    """Write the picture, then fail if this life is to fail."""
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    folder = Path(os.environ["DUMP_DIR"])
    done = folder / f"{os.environ['RANK']}.{restart}.json"
    begun = done.with_suffix(".part")
    begun.write_text(json.dumps(picture(module)))
    begun.rename(done)
    if restart < int(os.environ.get("DUMP_FAIL_UNTIL", "0")):
        ranks = range(int(os.environ["WORLD_SIZE"]))
        while not all((folder / f"{rank}.{restart}.json").exists() for rank in ranks):
            time.sleep(0.01)
        sys.exit(3)


if __name__ == "__main__":
    main(globals())
