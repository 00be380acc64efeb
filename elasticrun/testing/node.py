"""One node of a job under test: a real agent, its console in a file, and all that runs below it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from elasticrun.testing import plugin as warm, processes
from elasticrun.testing.cgroups import Group
from elasticrun.testing.hosts import Host
from elasticrun.wire.env import PRELOAD, RANK_VARIABLES

KILL_LIMIT: Final = 60.0
"""Seconds for a process to be gone after SIGKILL; one in uninterruptible sleep is told about."""

TAIL_LINES: Final = 60
"""Lines of a console that a failing test shows."""

FOREIGN_PREFIXES: Final = ("PET_", "TORCHELASTIC_", "ELASTICRUN_", "DLROVER_", "SLURM_")
FOREIGN: Final = RANK_VARIABLES | {"NODE_RANK", "NODE_NUM", "LOGLEVEL"}
"""Variables of this process that a launcher would take for settings of its own."""


def environment(scratch: Path, mark: str, more: Mapping[str, str]) -> dict[str, str]:
    """What a launcher under test is started with; `scratch` stands for the host's own folders."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN and not name.startswith(FOREIGN_PREFIXES)
    }
    for folder in ("tmp", "run"):
        (scratch / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    environ = {
        **kept,
        "TMPDIR": str(scratch / "tmp"),
        "XDG_RUNTIME_DIR": str(scratch / "run"),
        "LOGLEVEL": "INFO",
        PRELOAD: "off",  # a second fork server would only cost a test time
        **more,
        processes.MARK: mark,
    }
    return {**environ, **warm.named(environ)}


class Node:
    """An agent (or a master by hand) that a test has started, and what it started in its turn."""

    def __init__(self, name: str, mark: str, console: Path, host: Host | None) -> None:
        self.name = name
        """Its `--node-id`; its host's name where it has a host of its own."""
        self.console = console
        self.host = host
        self.killed = False
        """Whether the test has killed it, so that its exit code says nothing."""
        self.frozen = False
        self.off = False
        """Whether the test has powered its host off."""
        self.group: Group | None = None
        """The limits of CPU time and memory that its processes have, where they have some."""
        self.mark = mark
        self.command: Sequence[str] = ()
        self.env: Mapping[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], prefix: Sequence[str]
    ) -> None:
        """Start it, again where it had ended. It dies with this process, however that ends."""
        # By a program: what runs in the child between fork and exec must not be Python here, since
        # the process of the tests may have any threads.
        setpriv = shutil.which("setpriv")
        guard = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        limits = self.group.prefix() if self.group is not None else []
        with self.console.open("ab") as console:
            self._process = subprocess.Popen(
                [*guard, *limits, *prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=dict(environ),
                start_new_session=True,
            )
        self.killed = self.frozen = False

    @property
    def pid(self) -> int:
        """Of the agent's process."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The agent's, as subprocess has it; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def output(self) -> str:
        """What the agent and its ranks have written to their standard streams so far."""
        return self.console.read_text(errors="replace")

    def tail(self) -> str:
        """The last lines of that."""
        return "\n".join(self.output().splitlines()[-TAIL_LINES:])

    def pids(self, *, masters: bool = True) -> list[int]:
        """Every process of this node; all that runs on its host, where it has one of its own."""
        found = self.host.pids() if self.host else processes.marked(self.mark)
        return found if masters else [pid for pid in found if not processes.is_master(pid)]

    def kill(self, *, masters: bool) -> float:
        """SIGKILL everything of this node at once; when that was (CLOCK_MONOTONIC). A master is
        spared where `masters` is false. RuntimeError if the kernel lets something live."""
        self.killed = True
        at = time.clock_gettime(time.CLOCK_MONOTONIC)
        left = processes.kill_all(lambda: self.pids(masters=masters), KILL_LIMIT)
        if left:
            raise RuntimeError(f"{self.name}: processes that SIGKILL did not end: {sorted(left)}")
        if self._process is not None:
            self._process.wait()
        return at

    def signal(self, number: int) -> float:
        """Send a signal to the agent alone; when that was."""
        at = time.clock_gettime(time.CLOCK_MONOTONIC)
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
        if number == signal.SIGKILL:
            self.killed = True
            if self._process is not None:
                self._process.wait()
        return at

    def signal_everything(self, number: int, *, masters: bool) -> float:
        """Send a signal to every process of this node; when that was."""
        at = time.clock_gettime(time.CLOCK_MONOTONIC)
        processes.signal_all(lambda: self.pids(masters=masters), number)
        return at

    def outcome(self) -> str:
        """How it ended, in words."""
        code = self.exit_code
        if code is None:
            return "still runs"
        if self.killed:
            return "killed by the test"
        if code == 0:
            return "succeeded"
        return f"died of signal {-code}" if code < 0 else f"failed with exit code {code}"


ELASTICRUN: Final = (sys.executable, "-m", "elasticrun")
"""The command under test, with the interpreter of the tests."""
