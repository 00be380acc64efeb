"""A folder in which every call hangs (stat, open, listing, realpath): a FUSE mount that nobody
serves, like a network file system whose server is away. A layer within Python would miss the calls
that do not go through it.

    python -m tests.hanging FOLDER

mounts it, prints `hangs`, and takes it away again when its standard input ends: calls that hang get
ENOTCONN then."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import needs

APART = ("unshare", "-rm")
"""What stands before a command for which a folder is to hang: it has mounts of its own."""

_DETACH = 2  # MNT_DETACH


def mount(folder: str) -> int:
    """Have all calls below this folder hang until the descriptor is closed. OSError."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    words = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hanging", os.fsencode(folder), b"fuse", 0, words.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), folder)
    return fd


def require() -> None:
    """The test is skipped where no file system of this kind can be mounted."""
    needs.namespaces("-rm")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        needs.lacking("/dev/fuse cannot be opened here")


@contextlib.contextmanager
def hanging(folder: Path, pid: int, inside: Sequence[str] = ("-U", "-m")) -> Iterator[None]:
    """In the mounts of this process, which was started `APART`."""
    enter = ("nsenter", "-t", str(pid), *inside, "--preserve-credentials", "--wd=" + os.getcwd())
    command = [*enter, sys.executable, "-m", __name__, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as helper:
        assert helper.stdout is not None
        try:
            assert helper.stdout.readline() == b"hangs\n"
            yield
        finally:
            helper.communicate()


if __name__ == "__main__":
    held = mount(sys.argv[1])
    print("hangs", flush=True)
    sys.stdin.read()
    os.close(held)
    ctypes.CDLL(None).umount2(os.fsencode(sys.argv[1]), _DETACH)
