"""Runs TensorBoard (`--tensorboard --logdir DIR`) in a child process that ends with the master.

`python -m elasticrun.master.outward.tensorboard PID ...` is that child: it sets its parent-death
signal (PID is the master's), and becomes TensorBoard.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Final

from elasticrun.host.log import NOTICE
from elasticrun.host.system.processes import die_with_parent
from elasticrun.host.system.sandbox import start_thread

_URL: Final = re.compile(r"http://\S+/")
MAX_LINE_CHARS: Final = 4096

logger = logging.getLogger("elasticrun")


class TensorBoard:
    """One TensorBoard process, on a free port of `host`."""

    def __init__(self, logdir: str, host: str, on_url: Callable[[str], None]) -> None:
        """`on_url`: called in a thread with TensorBoard's URL, and with "" if it exits by
        itself."""
        self._logdir = logdir
        self._on_url = on_url
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        if importlib.util.find_spec("tensorboard") is None:
            logger.warning(
                "--tensorboard: %s has no TensorBoard: pip install tensorboard",
                sys.executable,
            )
            return
        words = ("-m", __name__, str(os.getpid()))
        flags = ("--logdir", logdir, "--host", host, "--port", "0")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *words, *flags],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True, errors="replace",
            )  # fmt: skip
            self._thread = start_thread(self._read, "tensorboard")
        except OSError as wrong:  # including NoThread
            logger.warning("--tensorboard: cannot start TensorBoard: %s", wrong.strerror or wrong)
            self.close(0.0)

    def close(self, limit: float) -> None:
        """Terminate TensorBoard, with SIGKILL after `limit` seconds. Blocks; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._thread is not None:
            self._thread.join(limit)

    def _read(self) -> None:
        """Read TensorBoard's stderr for its URL until it exits. Runs in the thread."""
        assert self._process is not None
        process, last, url = self._process, "", ""
        assert process.stderr is not None
        while line := process.stderr.readline(MAX_LINE_CHARS):
            last = line.strip() or last
            if not url and (found := _URL.search(line)):
                url = found[0]
                logger.log(NOTICE, "TensorBoard of %s: %s", self._logdir, url)
                self._on_url(url)
        process.wait()
        if self._process is not None:  # `close` was not called
            logger.warning("TensorBoard exited: %s", last[:300] or "it printed nothing")
            self._on_url("")


def main() -> None:
    """Become TensorBoard, unless the parent has already exited."""
    parent, *flags = sys.argv[1:]
    die_with_parent(signal.SIGKILL)  # on SIGTERM it would write to a closed pipe
    if os.getppid() != int(parent):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's SIGINT is for the job
    sys.argv = ["tensorboard", *flags]
    from tensorboard.main import run_main

    with contextlib.suppress(KeyboardInterrupt):
        run_main()


if __name__ == "__main__":
    main()
