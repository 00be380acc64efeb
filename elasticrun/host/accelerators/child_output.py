"""Runs a command in a child process with a time limit: its answer, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from subprocess import Popen

MAX_ANSWER: Final = 256 * 1024
"""Maximum bytes of output that are kept, the last ones; a table of 64 devices has a tenth of that.
"""

PIECE: Final = 64 * 1024
"""Bytes read at a time; the capacity of a pipe."""

KILL_GRACE: Final = 1.0
"""Seconds to wait for a killed child. A child in a driver call that cannot be interrupted exits
only when the driver returns; nothing waits for that.
"""


class NoAnswer(Exception):
    """The child gave no useful answer; the text is a clause that says why."""


def output_of(command: Sequence[str], environ: Mapping[str, str], limit: float) -> str:
    """What the command prints to stdout. Raises NoAnswer if that is nothing, or if it takes longer
    than `limit` seconds."""
    out, err = _run(command, environ, limit)
    if not out.strip():
        raise NoAnswer(_last_line(err) or "it printed nothing")
    return out


def json_of(
    command: Sequence[str], environ: Mapping[str, str], limit: float, *, lifeline: bool = False
) -> dict[str, object]:
    """The JSON object in the last line that the command prints. Raises NoAnswer if there is none
    within `limit` seconds. `lifeline`: its standard input is a pipe that ends with this process;
    without, it is empty."""
    import json

    out, err = _run(command, environ, limit, lifeline=lifeline)
    # The exit code is not used: in an agent, whose reaper collects every child, it may be lost.
    try:
        answer = json.loads(_last_line(out))
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise NoAnswer(_last_line(err)[:200] or "it printed no answer")
    return answer


def _run(
    command: Sequence[str], environ: Mapping[str, str], limit: float, *, lifeline: bool = False
) -> tuple[str, str]:
    import subprocess
    import time

    from elasticrun.wire import debugger

    try:
        with debugger.without_debugger():
            child = subprocess.Popen(
                command, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise NoAnswer(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        out, err = _read(child, time.monotonic() + limit)
    except (subprocess.TimeoutExpired, TimeoutError):
        _kill(child)
        raise NoAnswer(f"no answer within {limit:g} s") from None
    except BaseException:
        _kill(child)
        raise
    finally:
        if child.stdin is not None:
            child.stdin.close()
    return (out.decode(errors="replace"), err.decode(errors="replace"))


def _read(child: Popen[bytes], end: float) -> tuple[bytearray, bytearray]:
    """Wait for the child's exit; returns the last MAX_ANSWER bytes of stdout and of stderr. Not
    `communicate`, which keeps everything. Raises TimeoutError or TimeoutExpired after `end`."""
    import os
    import selectors
    import time

    assert child.stdout is not None
    assert child.stderr is not None
    out, err = bytearray(), bytearray()
    with child.stdout, child.stderr, selectors.PollSelector() as pipes:
        pipes.register(child.stdout, selectors.EVENT_READ, out)
        pipes.register(child.stderr, selectors.EVENT_READ, err)
        while pipes.get_map():
            left = end - time.monotonic()
            ready = pipes.select(left) if left > 0 else []
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                piece = os.read(key.fd, PIECE)
                if not piece:
                    pipes.unregister(key.fileobj)
                key.data.extend(piece)
                del key.data[:-MAX_ANSWER]
    child.wait(timeout=max(0.0, end - time.monotonic()))
    return out, err


def _kill(child: Popen[bytes]) -> None:
    """Kill the child's process group; wait for the child for KILL_GRACE at most."""
    import contextlib
    import os
    import signal
    import subprocess

    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=KILL_GRACE)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
