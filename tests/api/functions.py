"""Entry points for ranks; a module of its own, because spawned ranks import it by name."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any


def places() -> dict[str, Any]:
    """What a rank can see of itself."""
    names = (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME",
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
    )  # fmt: skip
    return {name: os.environ.get(name) for name in names} | {
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "sigterm": signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None),
    }


def reduce_sum(more: int) -> tuple[int, float]:
    """A gloo all_reduce over all ranks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.full((1,), float(dist.get_rank() + more))
    dist.all_reduce(value)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank, value.item()


def fail_on_rank(which: str) -> str:
    """Rank `which` raises; the others wait to be stopped."""
    if os.environ["RANK"] == which:
        raise KeyError(f"rank {which} has lost its key")
    signal.pause()
    return "never"


def fail_once() -> tuple[str, str]:
    """In the first life rank 1 dies by a signal."""
    rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if life == "0":
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    return rank, life


def end_early(how: str) -> str:
    """Rank 0 ends without a result."""
    if os.environ["RANK"] == "0":
        if how == "sys.exit(0)":
            sys.exit(0)
        if how == "os._exit(0)":
            os._exit(0)
        sys.exit(int(how))
    return "result"


def big(size: int) -> bytes:
    """A result larger than any pipe."""
    return bytes([int(os.environ["RANK"])]) * size


def echo(*args: Any) -> tuple[Any, ...]:
    """What arrived."""
    return args


def no_pickle() -> Any:
    """A result that no process can be sent."""
    return lambda: None


def say() -> None:
    """Output on both streams, above and below Python's buffers."""
    print("rank", os.environ["RANK"], "to stdout")
    os.write(2, b"rank %s to stderr\n" % os.environ["RANK"].encode())


def wait_with_child(folder: str) -> None:
    """Start a process in a session of its own, say so, and wait for a signal."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                             start_new_session=True)  # fmt: skip
    rank = os.environ["RANK"]
    path = Path(folder)

    def saved(signum: int, _frame: object) -> None:
        time.sleep(0.2)  # a save takes a while; who does not wait for it loses it
        (path / f"saved-{rank}").write_text(str(signum))
        sys.exit(0)

    signal.signal(signal.SIGTERM, saved)
    (path / f"new-{rank}").write_text(f"{os.getpid()} {child.pid}")
    (path / f"new-{rank}").rename(path / f"ready-{rank}")
    while True:
        signal.pause()


def leave_a_child(folder: str) -> int:
    """Return at once and leave a process behind, in a session of its own."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                             start_new_session=True)  # fmt: skip
    return child.pid


def return_before_the_other(folder: str) -> float:
    """Local rank 0 notes when its process ends; 1 returns after it, and later than that unless rank
    0 waits for it. Its answer is when that was."""
    mine = Path(folder) / "pid"
    if os.environ["LOCAL_RANK"] == "0":
        ends = Path(folder) / "ended"
        Finalize(None, lambda: ends.write_text(str(time.monotonic())), exitpriority=0)
        mine.with_suffix(".new").write_text(str(os.getpid()))
        mine.with_suffix(".new").rename(mine)
        return 0.0
    while not mine.exists():
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(mine.read_text()))], [], [], 0.5)
    return time.monotonic()
