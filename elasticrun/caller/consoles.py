"""Tee'd output of ranks, where the caller's `sys.stdout` is not the process' own.

Under torch's launcher a thread of the caller prints it, so `redirect_stdout`, a notebook and pytest
see it. The agent is another process: it writes into a pipe then, and a thread of the caller prints
what comes out. Where `sys.stdout` is descriptor 1 the agent has that itself, and nothing is here.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from typing import TextIO


class Consoles:
    """Where an agent shows what is tee'd, as descriptors to hand to it."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self.fds = tuple(
            self._shown_by(stream, own) for stream, own in ((sys.stdout, 1), (sys.stderr, 2))
        )

    def _shown_by(self, stream: TextIO | None, own: int) -> int:
        with contextlib.suppress(OSError, ValueError):  # it has no descriptor, or is closed
            if stream is None or stream.closed or stream.fileno() == own:
                return own
        assert stream is not None
        self._copies.append(_Copy(stream))
        return self._copies[-1].write_end

    def begin(self) -> None:
        """The agent has its ends; ours are closed, so that its end is heard."""
        for copy in self._copies:
            os.close(copy.write_end)
            copy.thread.start()

    def wait(self) -> None:
        """Until all that the agent has written is printed; call it once the agent has ended."""
        for copy in self._copies:
            copy.thread.join()


class _Copy:
    """One pipe and the thread that prints what comes out of it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._read_end, self.write_end = os.pipe()
        self.thread = threading.Thread(target=self._run, name="elasticrun-shown", daemon=True)

    def _run(self) -> None:
        """Reads to the end also where the stream takes nothing any more: an agent that writes is
        not to wait for it."""
        taken = True
        with io.TextIOWrapper(io.FileIO(self._read_end), "utf-8", errors="replace") as lines:
            for line in lines:
                if taken:
                    try:
                        self._stream.write(line)
                        self._stream.flush()
                    except (OSError, ValueError):  # closed meanwhile
                        taken = False
