"""Watches this node's GPUs and network ports while the job runs.

A child process (`host/accelerators/watch_child.py`) reads drivers and sysfs, because their calls
may block forever. It starts once the master has accepted this node, on machines with an NVIDIA
driver or InfiniBand, and ends with this agent. If it ends or falls silent it is started again, a
few times.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from elasticrun.agent.runtime import Tasks
from elasticrun.core.health.devices import DeviceJudge, DeviceState
from elasticrun.host.accelerators import nvidia
from elasticrun.host.log import logger
from elasticrun.host.system.sandbox import kill
from elasticrun.wire import debugger

if TYPE_CHECKING:
    from elasticrun.agent.context import NodeContext
    from elasticrun.agent.health.reports import HealthReporter

POLL: Final = 10.0
"""Seconds between two states without an event."""

SILENCE: Final = 60.0
"""Seconds without a state after which the child hangs in a driver, and is replaced."""

PAUSES: Final = (1.0, 10.0, 60.0)
"""Seconds before each restart of the child; then the devices are no longer watched."""

MAX_LINE: Final = 256 * 1024
"""Maximum bytes of a state; one of 64 GPUs and 64 ports has a tenth of that."""

SYS: Final = "/sys"

_CHILD: Final = os.path.join(os.path.dirname(nvidia.__file__), "watch_child.py")
_SOURCE: Final = "devices"


class DeviceWatch:
    """The watch of one node's devices; no-op where there is nothing to watch."""

    def __init__(self, node: NodeContext, reporter: HealthReporter, sys_root: str = SYS) -> None:
        self._node = node
        self._reporter = reporter
        self._sys = sys_root
        self._judge = DeviceJudge()
        self._tasks = Tasks(logger.warning)

    def start(self) -> None:
        """Start the child, if this machine has devices to watch."""
        launch = self._node.launch
        gpus = launch.accelerator in ("", "nvidia") and nvidia.has_driver()
        has_ports = os.path.isdir(os.path.join(self._sys, "class/infiniband"))
        if launch.watch_devices != "off" and (gpus or has_ports):
            self._tasks.start(self._watch(gpus), "watching the devices of this node")

    def close(self) -> None:
        """Stop; the child is killed."""
        self._tasks.close()

    async def _watch(self, gpus: bool) -> None:
        why = await self._run_child(gpus)
        for pause in PAUSES:
            logger.debug("the devices of this node are watched again in %g s: %s", pause, why)
            await asyncio.sleep(pause)
            why = await self._run_child(gpus)
        self._reporter.found(_SOURCE, notices=(f"its devices are no longer watched: {why}",))

    async def _run_child(self, gpus: bool) -> str:
        """Run a child until it ends or is silent for too long; why, as a clause."""
        try:
            process = self._start_child(gpus)
        except OSError as error:
            return f"its process cannot be started: {error.strerror}"
        try:
            return await self._read(process)
        finally:
            if process.returncode is None:
                kill(process.pid)
            self._node.reaper.spared.discard(process.pid)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _start_child(self, gpus: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", _CHILD, str(POLL), self._sys, *(["--gpus"] * gpus)]
        with debugger.without_debugger():
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._node.reaper.watch(process, lambda code: None)
        self._node.reaper.spared.add(process.pid)
        return process

    async def _read(self, process: subprocess.Popen[bytes]) -> str:
        """Process the child's states until it ends; why it did."""
        loop = asyncio.get_running_loop()
        lines, why = asyncio.StreamReader(MAX_LINE), "its process ended"
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), process.stdout
        )
        with contextlib.closing(transport):
            while True:
                try:
                    line = await asyncio.wait_for(lines.readline(), SILENCE)
                except TimeoutError:
                    return f"the driver has not answered for {SILENCE:g} s"
                except ValueError:
                    return f"its process printed a line of more than {MAX_LINE} bytes"
                if not line:
                    return why
                try:
                    self._judge_state(msgspec.json.decode(line, type=DeviceState))
                except msgspec.MsgspecError:
                    why = line.decode(errors="replace").strip()[:200] or why

    def _judge_state(self, state: DeviceState) -> None:
        listed = os.environ.get(nvidia.Nvidia.visible_variable)
        used = nvidia.visible(listed, [gpu.uuid for gpu in state.gpus])
        fault, notices = self._judge.judge(state, used)
        if fault and self._node.launch.watch_devices == "tell":
            fault, notices = "", (fault, *notices)
        self._reporter.found(_SOURCE, fault=fault, notices=notices)
