"""Explains a rank's exit: from its error.json, its exit code, and the kernel's OOM records.

The rank writes the error file (torch's `@record`, or the fork server for scripts without it), so
its content is the user's: it is read up to a size limit, and invalid content is described instead
of raised. After a SIGKILL, the kernel's count of OOM kills and its log are read. What reads or
writes files blocks: call it in a thread, except `KillLog`, which starts one itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from elasticrun.agent.runtime import Once, in_thread
from elasticrun.core.rounds.failures import NO_TRACEBACK, classify
from elasticrun.wire import env
from elasticrun.wire.messages import Failure
from elasticrun.wire.spawning import CANNOT_LOAD
from elasticrun.wire.types import MAX_TEXT

READ_LIMIT: Final = 5.0
"""Seconds for reading the kernel log; nothing waits for it."""

NEAR_US: Final = 10_000_000
"""Microseconds within which an increased count explains a death. Ranks of one job die together, so
reading the count for the first must not hide it from the second."""

MAX_ERROR_FILE_BYTES: Final = 1024 * 1024
"""A longer error file is not parsed; a traceback of a thousand frames is a tenth of this."""

MAX_MESSAGE_CHARS: Final = 1024
"""Maximum length of the message line; the traceback has the rest."""


class KillLog:
    """Logs who killed a rank, each finding once. `root`: the root of the kernel's files."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._once = Once()

    async def log_killer(self, failure: Failure) -> None:
        """Log what the kernel log says about a rank that died of a SIGKILL that no agent here has
        sent."""
        from elasticrun.host.doctor import kernel  # late: needed only after a SIGKILL

        def read() -> kernel.KillReport:
            return kernel.explain_kill(failure.pid, self._root)

        try:
            word = await in_thread(read, limit=READ_LIMIT, name="kernel-log")
        except TimeoutError:
            return
        level = logging.INFO if word.clear else logging.WARNING
        self._once.log(f"rank {failure.rank}: {word.text}", level, kind=word.text)


class OomKills:
    """Watches the `oom_kill` counts of this process's own cgroup, or, if there is no cgroup count,
    of the whole host.

    It reads cgroup v2, then v1. Where the kernel has `memory.events.local`, it excludes child
    groups, which belong to other processes. Counts are compared with those at construction. A count
    that was not visible then, because this process was moved to another cgroup later, starts at 0.
    """

    def __init__(self, files: Callable[[], Iterable[Path]] | None = None) -> None:
        self._files = files or _candidates
        self._counts = {file: count for file in self._files() if (count := _read(file)) is not None}
        self._rose_us = 0

    def has_risen_near(self, time_us: int) -> bool:
        """Read the counts again; returns whether one has increased since the last call, or did so
        near `time_us`, the time of the death to explain (microseconds since the epoch)."""
        for file in self._files():
            count = _read(file)
            if count is None:
                continue
            if count > self._counts.get(file, 0):
                self._rose_us = time_us
            self._counts[file] = count
            break
        return self._rose_us > 0 and abs(time_us - self._rose_us) <= NEAR_US


def _read(file: Path) -> int | None:
    """The count in a file, None if it has none."""
    with contextlib.suppress(OSError, ValueError), file.open() as lines:
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def _candidates() -> list[Path]:
    try:
        return count_files(Path("/proc/self/cgroup").read_text())
    except OSError:
        return count_files("")


def count_files(groups: str) -> list[Path]:
    """The files that may contain the count for a process in these cgroups (the text of
    /proc/PID/cgroup, see cgroups(7)), nearest first."""
    files = []
    for line in groups.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            group = Path("/sys/fs/cgroup" + path)
            files += [group / "memory.events.local", group / "memory.events"]
        elif "memory" in controllers.split(","):
            files.append(Path("/sys/fs/cgroup/memory" + path) / "memory.oom_control")
            files.append(Path("/sys/fs/cgroup/memory/memory.oom_control"))
    files.append(Path("/proc/vmstat"))
    return files


@cache
def oom_watcher() -> OomKills:
    """The watcher of this process, created at the first call. Make that call in a thread before any
    rank starts, because the watcher then records the initial count."""
    return OomKills()


@dataclass(frozen=True, slots=True)
class ErrorFile:
    """The content of an error file. `data` is None if there is none; `problem` says why an
    existing file cannot be read."""

    data: dict[str, Any] | None = None
    message: str = ""
    traceback: str = ""
    time_us: int = 0  # 0: not given
    problem: str = ""
    cannot_load: bool = False  # the program, or a module that it imports


def describe(bare: Failure, *, stopping: bool) -> Failure:
    """The failure of a rank with the content of its error file. Never raises because of that
    content.

    `bare`: its time is when the rank was reaped; `stopping`: its agent was stopping it. The result
    has the error file's time if there is one, because a rank may have spent seconds in its exit
    handlers since."""
    code, reaped_us = bare.exitcode, bare.time_us
    found = read_error_file(bare.error_file)
    oom = code == -signal.SIGKILL and not stopping and oom_watcher().has_risen_near(reaped_us)
    message = found.message
    if not message:
        message = _without_file(code, bare.pid, oom)
        if found.problem:
            message = f"{message} ({found.problem})"
    return replace(
        bare,
        time_us=min(found.time_us, reaped_us) if found.time_us else reaped_us,
        kind=classify(code, message, stopping=stopping, oom=oom),
        message=message,
        traceback=found.traceback,
        error_file=bare.error_file if found.data is not None or found.problem else "",
    )


def read_error_file(path: str) -> ErrorFile:
    """Read an error file in either of torch's formats: `message` as an object with `extraInfo`, or
    as a string with an optional `timestamp` beside it."""
    if not path:
        return ErrorFile()
    try:
        text, modified_us = _read_bounded(path)
    except FileNotFoundError:
        return ErrorFile()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        return ErrorFile(problem=f"its error file cannot be read: {why}")
    if not text:
        return ErrorFile(problem="its error file is empty, as on a disk that is full")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return ErrorFile(problem="its error file is not JSON")
    if not isinstance(data, dict) or "message" not in data:
        return ErrorFile(problem="its error file has no message")
    message = data["message"]
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        extra = extra if isinstance(extra, dict) else {}
        words, stack = message.get("message"), extra.get("py_callstack")
        stamp, cannot_load = extra.get("timestamp"), CANNOT_LOAD in extra
    else:
        words, stack, stamp, cannot_load = message, "", data.get("timestamp"), False
    words, stack = _text(words), _text(stack)
    if not stack and "\n" in words.strip():
        stack = words
    return ErrorFile(
        data=data,
        message=one_line(words),
        traceback=cut_middle(stack.rstrip("\n"), MAX_TEXT),
        time_us=_when(stamp, modified_us),
        cannot_load=cannot_load,
    )


def write_own(failure: Failure, environ: Mapping[str, str]) -> str:
    """Write the root cause to the launcher's own TORCHELASTIC_ERROR_FILE, if set, for the scheduler
    above. Copies the rank's error file and adds `errorCode`; if that file is on another node,
    writes the known fields in the same format. Returns the path, or "" if nothing was written."""
    target = environ.get(env.ERROR_FILE, "")
    found = read_error_file(failure.error_file)
    data = found.data
    if not target or (data is None and not failure.error_file and not failure.traceback):
        return ""
    if data is None:
        data = _record(failure.message, failure.traceback, failure.time_us)
    if isinstance(data["message"], dict) and failure.exitcode:
        data["message"]["errorCode"] = failure.exitcode
    return _replace(target, data)


def write_own_words(kind: str, sentence: str, time_us: int, environ: Mapping[str, str]) -> str:
    """Write an error file for a launcher failure that no rank caused, as torch's `@record` on its
    main does. `kind`: torchrun's exception (SignalException, RendezvousTimeoutError, ...)."""
    target = environ.get(env.ERROR_FILE, "")
    if not target:
        return ""
    words = f"{kind}: {sentence}"
    return _replace(target, _record(words, words, time_us))


def one_line(text: str) -> str:
    """`text` as one line of at most MAX_MESSAGE_CHARS characters."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"


def cut_middle(text: str, limit: int) -> str:
    """At most `limit` characters of `text`: its beginning, and three times as much of its end,
    because the last lines of a traceback matter most."""
    if len(text) <= limit:
        return text
    gap = "\n… cut …\n"
    head = (limit - len(gap)) // 4
    return text[:head] + gap + text[len(text) - (limit - len(gap) - head) :]


def signal_name(exitcode: int) -> str:
    """The name of the signal of a negative exit code, `<N/A>` if it has none."""
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return "<N/A>"


def _without_file(exitcode: int, pid: int, oom: bool) -> str:
    if exitcode >= 0:
        return NO_TRACEBACK
    words = f"Signal {-exitcode} ({signal_name(exitcode)}) received by PID {pid}"
    return f"{words}: the kernel was out of memory and killed it" if oom else words


def _read_bounded(path: str) -> tuple[str, int]:
    """Read a plain file of at most MAX_ERROR_FILE_BYTES; returns its text and modification time
    (µs). Raises OSError and ValueError. O_NONBLOCK, because a FIFO of that name would block."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is not a plain file")
        data = file.read(MAX_ERROR_FILE_BYTES + 1)
    if len(data) > MAX_ERROR_FILE_BYTES:
        raise ValueError(f"it is longer than {MAX_ERROR_FILE_BYTES} bytes")
    return data.decode(errors="replace"), about.st_mtime_ns // 1000


def _when(stamp: object, modified_us: int) -> int:
    """The time in microseconds; 0 if it is unknown. The file has whole seconds; if its modification
    time is in that second or the next (it is written after the stamp is taken), that is the more
    precise time."""
    try:
        seconds = int(str(stamp))
    except ValueError:
        return 0
    if not 0 < seconds < 1 << 40:
        return 0
    return (
        modified_us if 0 <= modified_us - seconds * 1_000_000 < 2_000_000 else seconds * 1_000_000
    )


def _record(message: str, traceback: str, time_us: int) -> dict[str, Any]:
    extra = {"py_callstack": traceback, "timestamp": str(time_us // 1_000_000)}
    return {"message": {"message": message, "extraInfo": extra}}


def _replace(target: str, data: dict[str, Any]) -> str:
    """Replace a file atomically; returns its path, or "" if that failed."""
    fresh = f"{target}.{os.getpid()}"
    try:
        with open(fresh, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(data, file)
        os.replace(fresh, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        return ""
    return target


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else repr(value)[:MAX_TEXT]
