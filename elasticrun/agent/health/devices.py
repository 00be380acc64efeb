"""Watches this node's GPUs and network ports while the job runs.

A child process (`host/accelerators/watch_child.py`) reads drivers and sysfs, because their calls
may block forever. It starts once the master has accepted this node, on machines with an NVIDIA
driver or InfiniBand, and ends with this agent. If it ends or falls silent it is started again, a
few times. Before ranks are started again, it also tells whose memory of GPUs is not free yet: that
of the ranks before, and of processes that these had started and that were seen on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import msgspec

from elasticrun.agent.runtime import Tasks
from elasticrun.core.health.devices import DeviceJudge, DeviceState, GpuProcesses, Holder
from elasticrun.host.accelerators import base, nvidia
from elasticrun.host.log import NOTICE, logger
from elasticrun.host.system.processes import read_process
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

ANSWER_LIMIT: Final = 2.0
"""Seconds for the child to list the processes of GPUs."""

FREE_LIMIT: Final = 30.0
"""Seconds to wait for the memory of ranks that have exited; NVRx waits 50 s."""

FREE_AGAIN: Final = 0.1
"""Seconds between two questions meanwhile. NVML has no event for memory that becomes free."""

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
        self._child: subprocess.Popen[bytes] | None = None  # one that watches GPUs
        self._asked: asyncio.Future[GpuProcesses] | None = None
        self._ours: set[int] = set()  # descendants that hold memory of a GPU

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

    async def wait_until_free(self, exited: Collection[int]) -> None:
        """Wait until none of these processes of ours, which have exited, holds memory of a GPU, nor
        one that they had started: the driver releases it later, and ranks started before may run
        out of it. Returns after FREE_LIMIT, and at once if it is unknown."""
        loop = asyncio.get_running_loop()
        end, is_told = loop.time() + FREE_LIMIT, False
        while held := (await self._processes()).held_by({*exited, *self._ours_exited()}):
            left = end - loop.time()
            if left <= 0:
                logger.warning(
                    "starting the ranks although memory of exited ranks is not free after %g s: %s",
                    FREE_LIMIT,
                    held,
                )
                return
            if not is_told:
                is_told = True
                sentence = "waiting up to %g s until the GPU memory of exited ranks is free: %s"
                logger.log(NOTICE, sentence, FREE_LIMIT, held)
            await asyncio.sleep(min(FREE_AGAIN, left))

    async def _processes(self) -> GpuProcesses:
        """The processes that hold memory of GPUs, as far as that is known now."""
        unknown = GpuProcesses()
        if self._child is None or self._child.stdin is None:
            return unknown
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_future()
            try:
                os.write(self._child.stdin.fileno(), b"processes\n")
            except OSError:
                return unknown  # it has just ended
        try:
            return await asyncio.wait_for(asyncio.shield(self._asked), ANSWER_LIMIT)
        except TimeoutError:
            return unknown

    def _ours_exited(self) -> list[int]:
        """Descendants of ours that hold memory although they have exited."""
        found = {pid: read_process(pid) for pid in self._ours}
        return [pid for pid, process in found.items() if process is None or process.has_ended]

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
        self._child = process if gpus else None
        try:
            return await self._read(process)
        finally:
            self._child = None
            self._answer(GpuProcesses())
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
                    self._heard(msgspec.json.decode(line, type=dict[str, object]))
                except msgspec.MsgspecError:
                    why = line.decode(errors="replace").strip()[:200] or why

    def _heard(self, said: dict[str, object]) -> None:
        """Process a line of the child. Raises MsgspecError."""
        if "gpus" in said:
            state = msgspec.convert(said, DeviceState)
            self._note_ours(state.processes)
            self._judge_state(state)
        else:
            self._answer(msgspec.convert(said, GpuProcesses))

    def _note_ours(self, found: Collection[Holder]) -> None:
        """Note which of these processes are ours, which is known only while they live."""
        pids = {pid for _, pid, _ in found}
        self._ours = pids & self._ours | {pid for pid in pids if base.descends_from_us(pid)}

    def _answer(self, found: GpuProcesses) -> None:
        self._note_ours(found.processes)
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(found)

    def _judge_state(self, state: DeviceState) -> None:
        listed = os.environ.get(nvidia.Nvidia.visible_variable)
        used = nvidia.visible(listed, [gpu.uuid for gpu in state.gpus])
        fault, notices = self._judge.judge(state, used)
        if fault and self._node.launch.watch_devices == "tell":
            fault, notices = "", (fault, *notices)
        self._reporter.found(_SOURCE, fault=fault, notices=notices)
