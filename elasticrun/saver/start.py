"""How the saver of a node is born: forked where torch can be shared, else exec'd.

Either way it imports this package anew, by `saver_main.py`: the fork server itself is spared the
modules, and a forked saver differs from an exec'd one in nothing but that it has torch already.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

from elasticrun.system import processes as linux
from elasticrun.system.title import set_title
from elasticrun.wire.frames import FrameBuffer, encode
from elasticrun.wire.spawning import SHIELDED, SpawnSaver, ToSpawner

MAIN_FILE: Final = Path(__file__).with_name("main.py")

NAME: Final = b"elasticrun-save"
TITLE: Final = b"elasticrun: saver"

ONE_THREAD: Final = {b"OMP_NUM_THREADS": b"1", b"MKL_NUM_THREADS": b"1"}
"""A saver's share of the node's cores; over what the order says, since ranks' words are in it."""


def fork_saver(order: SpawnSaver) -> NoReturn:
    """In a fresh fork that has its environment, and torch: be the saver, and end."""
    _attach()
    file = order_file(order)
    spec = importlib.util.spec_from_file_location("elasticrun_saver_main", MAIN_FILE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(file, os.getppid())
    os._exit(0)


def exec_instead(order: SpawnSaver, environ: Mapping[bytes, bytes]) -> NoReturn:
    """In a fresh fork: become `python -u saver_main.py`. Raises OSError."""
    _attach()
    file = order_file(order)
    os.set_inheritable(file, True)
    command = exec_command(file, os.getppid())
    os.execve(command[0], command, {**environ, **ONE_THREAD})


def order_file(order: SpawnSaver) -> int:
    """The order in a memfd: a secret does not belong on a command line."""
    kept = os.memfd_create("saver")
    os.write(kept, encode(order))
    os.lseek(kept, 0, os.SEEK_SET)
    return kept


def exec_command(file: int, parent: int) -> list[str]:
    """The command line of a saver that is exec'd; it inherits the descriptor."""
    return [sys.executable, "-u", str(MAIN_FILE), str(file), str(parent)]


def _attach() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what a library prints must not stand among a script's results


def enter(order_fd: int, parent: int) -> NoReturn:
    """What `saver_main.py` does, in a process of its own."""
    from elasticrun.saver import saver

    for signum in SHIELDED:
        signal.signal(signum, signal.SIG_IGN)
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    linux.set_name(NAME)
    set_title(TITLE)
    with open(order_fd, "rb") as file:
        (order,) = FrameBuffer(ToSpawner).feed(file.read())
    assert isinstance(order, SpawnSaver)
    if order.cpus:
        with _said("it is not bound to the cores that were asked for"):
            os.sched_setaffinity(0, order.cpus)
    saver.run(order)


@contextmanager
def _said(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        print(f"elasticrun saver: {what}: {error.strerror}", file=sys.stderr)
