"""Starts a launcher for a measurement, and receives the reports of its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from elasticrun.testing.node import free_port as free_port

TORCHRUN, ELASTICRUN, NVRX = "torchrun", "elasticrun", "nvrx"
COMMANDS = {
    TORCHRUN: (sys.executable, "-m", "torch.distributed.run"),
    ELASTICRUN: (sys.executable, "-m", "elasticrun"),
}
if python := os.environ.get("NVRX_PYTHON"):  # an environment with nvidia-resiliency-ext
    COMMANDS[NVRX] = (python,)
SCRIPTS = Path(__file__).parent / "scripts"
MARK = "BENCH_MARK"


class TookTooLong(Exception):
    """A measurement has reached its time limit, or cannot go on; the message says why."""


@dataclass(frozen=True)
class Fact:
    """What a rank reported (scripts/report.py). `time` is CLOCK_MONOTONIC in seconds, `life` the
    rank's restart count, `node` the number of its agent, `more` are further figures."""

    event: str
    rank: int
    life: int
    time: float
    pid: int
    world: int
    node: int
    more: Mapping[str, float] = field(default_factory=dict)


class Job:
    """The agents of one measurement, their temporary folder, and the facts from their ranks."""

    def __init__(self, launcher: str) -> None:
        self.launcher = launcher
        self.folder = Path(tempfile.mkdtemp(prefix="elasticrun-bench-"))
        self.marker = uuid.uuid4().hex
        self.facts: list[Fact] = []
        self.agents: list[subprocess.Popen[bytes]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.folder / "facts"))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.began = 0.0

    def environment(self) -> dict[str, str]:
        """The environment of the next agent and its processes."""
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC_"))},
            "ELASTICRUN_WARM_SERVER": "off",
            "OMP_NUM_THREADS": "1",
            "BENCH_SOCKET": str(self.folder / "facts"),
            MARK: self.marker,
            "BENCH_NODE": str(len(self.agents)),
            "BENCH_STEPS": str(self.folder),
            "TMPDIR": str(self.temporary),
        }

    def start(
        self,
        *flags: str,
        script: str,
        arguments: tuple[str, ...],
        own_store: bool = True,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """Start one agent. `began` is the time at which the first was started.

        `own_store` sets the variable that makes torchrun 2.13 give up its shared store. With the
        shared store about half of its restarts hang or fail, so that nothing can be measured."""
        command = (*COMMANDS[self.launcher], *flags, str(SCRIPTS / script), *arguments)
        environment = {**self.environment(), **(more or {})}
        if own_store and self.launcher == TORCHRUN:
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        console = (self.folder / f"console-{len(self.agents)}").open("wb")
        self.began = self.began or time.monotonic()
        self.agents.append(
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        console.close()

    def until(self, enough: Callable[[], bool], limit: float) -> None:
        """Receive facts until `enough` returns True or all agents have exited. Raises TookTooLong
        after `limit` seconds."""
        end = time.monotonic() + limit
        ends = [os.pidfd_open(agent.pid) for agent in self.agents if agent.poll() is None]
        try:
            while not enough():
                rest = end - time.monotonic()
                if rest <= 0:
                    raise TookTooLong(f"{self.launcher}: not within {limit:g} s\n{self.console()}")
                ready, _, _ = select.select([self._socket, *ends], [], [], rest)
                if self._socket in ready:
                    self.facts.append(Fact(**json.loads(self._socket.recv(4096))))
                elif ready:
                    ends = [fd for fd in ends if fd not in ready or os.close(fd)]
                    if not ends and not enough():
                        return
        finally:
            for fd in ends:
                os.close(fd)

    def of(self, event: str, life: int | None = None) -> list[Fact]:
        """The facts so far of this event and, if given, this life."""
        return [f for f in self.facts if f.event == event and life in (None, f.life)]

    def console(self) -> str:
        """The end of each agent's output."""
        return "".join(p.read_text(errors="replace")[-1500:] for p in self.folder.glob("console-*"))

    def processes(self) -> list[psutil.Process]:
        """Every living process of this job, whatever its parent, found by MARK in its
        environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
                if f"{MARK}={self.marker}".encode() in environ:
                    found.append(process)
        return found

    def end(self) -> None:
        """Kill all processes of the job and remove its folder."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        for _ in range(50):
            left = self.processes()
            if not left:
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=2)
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def job(launcher: str) -> Iterator[Job]:
    """A job whose processes and folder are removed at the end."""
    made = Job(launcher)
    try:
        yield made
    finally:
        made.end()
