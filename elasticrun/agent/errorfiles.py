"""What a rank died of, read from what it left behind: error.json, its exit code, the kernel's word.

The error file is written by the rank (torch's `@record`, or the fork server for scripts without
it), so whatever stands in it is the user's: it is read with a bound, and rubbish is described, not
raised. Everything here touches the disk; call it in a thread.
"""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from elasticrun.agent.oom import OomKills
from elasticrun.core.failures import NO_TRACEBACK, classify
from elasticrun.wire import env
from elasticrun.wire.messages import MAX_TEXT, Failure

MAX_ERROR_FILE_BYTES: Final = 1024 * 1024
"""A longer error file is not parsed; a traceback of a thousand frames is a tenth of this."""

MAX_MESSAGE_CHARS: Final = 1024
"""One line; what is longer is cut, the traceback has the rest."""


@cache
def oom_kills() -> OomKills:
    """To be called, in a thread, before there are ranks: it compares with the count of then."""
    return OomKills()


@dataclass(frozen=True, slots=True)
class ErrorFile:
    """What an error file says. `data` is None if there was none; `problem` says why it could not
    be read although it is there."""

    data: dict[str, Any] | None = None
    message: str = ""
    traceback: str = ""
    time_us: int = 0  # 0: it does not say
    problem: str = ""


def describe(
    *,
    host: str,
    rank: int,
    local_rank: int,
    pid: int,
    exitcode: int,
    time_us: int,
    error_file: str,
    stopping: bool,
) -> Failure:
    """One failed rank as a Failure. Never raises for what stands in the file.

    `exitcode` is negative for a signal, `time_us` is when the rank was reaped, `stopping` says that
    its agent had been stopping it. The failure's time is the error file's where there is one: a
    rank may have spent seconds in its exit handlers since.
    """
    found = read_error_file(error_file)
    oom = exitcode == -signal.SIGKILL and not stopping and oom_kills().near(time_us)
    message = found.message
    if not message:
        message = _without_file(exitcode, pid, oom)
        if found.problem:
            message = f"{message} ({found.problem})"
    return Failure(
        host=host,
        rank=rank,
        local_rank=local_rank,
        pid=pid,
        exitcode=exitcode,
        time_us=min(found.time_us, time_us) if found.time_us else time_us,
        kind=classify(exitcode, message, stopping=stopping, oom=oom),
        message=message,
        traceback=found.traceback,
        error_file=error_file if found.data is not None or found.problem else "",
    )


def read_error_file(path: str) -> ErrorFile:
    """Read an error file in either of torch's formats: `message` as an object with `extraInfo`, or
    as a plain string with an optional `timestamp` beside it."""
    if not path:
        return ErrorFile()
    try:
        text, modified_us = _read_bounded(path)
    except FileNotFoundError:
        return ErrorFile()
    except (OSError, ValueError) as error:
        return ErrorFile(problem=f"its error file cannot be read: {_reason(error)}")
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
        words, stack, stamp = (
            message.get("message"),
            extra.get("py_callstack"),
            extra.get("timestamp"),
        )
    else:
        words, stack, stamp = message, "", data.get("timestamp")
    words, stack = _text(words), _text(stack)
    if not stack and "\n" in words.strip():
        stack = words
    return ErrorFile(
        data=data,
        message=one_line(words),
        traceback=cut_middle(stack.rstrip("\n"), MAX_TEXT),
        time_us=_when(stamp, modified_us),
    )


def write_own(failure: Failure, environ: Mapping[str, str]) -> str:
    """Describe the root cause in the launcher's own TORCHELASTIC_ERROR_FILE, if it has one, for the
    scheduler above: the rank's file with `errorCode` added, or, where that lies on another node,
    the same shape made from what is known. Returns the path, or "" if nothing was written."""
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
    """Describe an end of the launcher that no rank caused, as torch's `@record` on its main does:
    `kind` is the name of torchrun's exception (SignalException, RendezvousTimeoutError, ...)."""
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
    """At most `limit` characters of `text`: its beginning and, since the last lines of a traceback
    say most, three times as much of its end."""
    if len(text) <= limit:
        return text
    gap = "\n… cut …\n"
    head = (limit - len(gap)) // 4
    return text[:head] + gap + text[len(text) - (limit - len(gap) - head) :]


def signal_name(exitcode: int) -> str:
    """The name of the signal behind a negative exit code, `<N/A>` for one without a name."""
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
    """Text and time of modification (µs). O_NONBLOCK, because a FIFO of that name would block."""
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
    """The file says whole seconds; where its modification falls into that second (or the next,
    since it is written after the stamp was taken), that is the same instant to the microsecond."""
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
    """Write a file in one piece; an older one of that name is overwritten."""
    fresh = f"{target}.{os.getpid()}"
    try:
        with open(fresh, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(data, file)
        os.replace(fresh, target)
    except OSError:
        try:
            os.unlink(fresh)
        except OSError:
            pass
        return ""
    return target


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else repr(value)[:MAX_TEXT]


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
