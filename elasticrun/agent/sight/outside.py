"""Reads stacks of a process that does not answer, because C code holds its interpreter lock, it is
stopped, or it has no answering thread (started by exec, or a data loader worker).

py-spy reads them, if it is on PATH. It does not stop the process, because a killed reader would
leave the rank stopped. No signal is sent, because one that faulthandler handles can crash a running
interpreter. Without py-spy, or if the kernel forbids it, only /proc is used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from elasticrun.agent.sight.stacks import Frame
from elasticrun.host.system import processes

TRIES: Final = 3
"""Maximum number of tries. A read fails if the process changes its stack during the read."""

MAX_OUTPUT: Final = 4 * 1024 * 1024
MAX_THREADS: Final = 64
MAX_CHILDREN: Final = 16
"""Maximum number of descendants read per rank; the first ones that it started."""

Threads = dict[str, tuple[Frame, ...]]
"""Frames by thread name, innermost first; "" is the main thread."""


def stacks_of(pid: int, limit: float) -> tuple[Threads, str]:
    """The stacks of this process, read within `limit` seconds, and ""; or no stacks and the reason
    as a clause. Blocks."""
    reader = shutil.which("py-spy")
    if reader is None:
        return {}, "py-spy, which could read it, is not on PATH"
    end = time.monotonic() + limit
    why = "py-spy took too long"
    for _ in range(TRIES):
        left = end - time.monotonic()
        if left <= 0:
            break
        found, why = _read([reader, "dump", "--nonblocking", "--json", "--pid", str(pid)], left)
        if found or "ermission" in why:
            return found, why
    return {}, why


def stacks_below(pid: int, limit: float) -> Threads:
    """The main-thread stacks of the Python processes that a rank has started, as "loader 1" and so
    on in order of start; empty if they cannot be read. Blocks."""
    found: Threads = {}
    if shutil.which("py-spy") is None:
        return found
    end = time.monotonic() + limit
    children = sorted(processes.descendants(pid), key=lambda one: (one.started, one.pid))
    for number, child in enumerate(children[:MAX_CHILDREN], 1):
        left = end - time.monotonic()
        threads, _ = stacks_of(child.pid, left) if left > 0 else ({}, "")
        if "" in threads:
            found[f"loader {number}"] = threads[""]
    return found


def facts(pid: int) -> Iterator[str]:
    """What the kernel reports of each thread of a process, one line each."""
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError:
        return
    for thread in threads[:MAX_THREADS]:
        state = _state(pid, thread)
        of = f"task/{thread}"
        name, place = (processes.text_of(pid, f"{of}/{what}") for what in ("comm", "wchan"))
        switches = [
            line.replace("_ctxt_switches:\t", " switches ")
            for line in processes.text_of(pid, f"{of}/status").splitlines()
            if "ctxt" in line
        ]
        yield f"{thread} {name}: {state} {place}, {', '.join(switches)}"
    left = len(threads) - MAX_THREADS
    if left > 0:
        yield f"and {left} threads more"


def _read(command: list[str], limit: float) -> tuple[Threads, str]:
    try:
        ran = subprocess.run(command, capture_output=True, timeout=limit, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {}, "py-spy took too long"
    except OSError as error:
        return {}, f"py-spy cannot be run: {error.strerror}"
    try:
        threads = _threads(msgspec.json.decode(ran.stdout[:MAX_OUTPUT], type=list[dict[str, Any]]))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        threads = {}
    lines = ran.stderr.decode(errors="replace").strip().splitlines()
    return threads, "" if threads else f"py-spy: {lines[-1][:200] if lines else 'read nothing'}"


def _threads(rows: list[dict[str, Any]]) -> Threads:
    found: Threads = {}
    for row in rows[:MAX_THREADS]:
        main = row["os_thread_id"] == row["pid"]
        name = "" if main else str(row["thread_name"] or f"thread {row['os_thread_id']}")[:100]
        if name not in found:
            found[name] = tuple(
                (str(frame["filename"]), int(frame["line"]), str(frame["name"]).rsplit(".", 1)[-1])
                for frame in row["frames"]
            )
    return found


def _state(pid: int, thread: str) -> str:
    try:
        return processes.stat_fields(f"{pid}/task/{thread}")[0].decode()
    except OSError:
        return "gone"
