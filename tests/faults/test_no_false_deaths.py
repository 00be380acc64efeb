"""The opposite bars: what only looks like a death costs no round and no node.

Every test runs one job of three nodes, does the thing, and asserts that one and the same world went
on to the end. A bar on speed alone would buy false deaths, and each of those restarts everybody.
The durations are shorter in `make test` than in `make soak`, but always longer than the silence
after which a node that really is silent is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticrun.host.system.processes import state
from tests import needs
from tests.counting import Counting, let_pass, rank_on, times
from tests.further import further
from tests.harness import LIMIT, SCRIPTS, SOCKET, Hub, await_true

pytestmark = pytest.mark.slow

CHUNK = 64 * 1024


class Relay:
    """Listens on `port` of loopback and passes on to `target`, in a thread with its own loop.

    While it is paused nothing passes in either direction and new connections get no answer, as on a
    cable that is out: nothing is lost that TCP would not send again, nobody gets a FIN or RST."""

    def __init__(self, target: int) -> None:
        self.taken: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One entry for each connection taken."""
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_server(self._take, sock=self._listener))
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken.put(None)
        await self._flowing.wait()
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._open |= {writer, back}
        try:
            await asyncio.gather(self._carry(reader, back), self._carry(there, writer))
        finally:
            for end in (writer, back):
                self._open.discard(end)
                end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
            await self._flowing.wait()
            if writer.can_write_eof():
                writer.write_eof()

    def _call(self, what: Callable[[], None]) -> None:
        async def body() -> None:
            what()

        asyncio.run_coroutine_threadsafe(body(), self._loop).result(LIMIT)

    def pause(self, seconds: float) -> None:
        """Let nothing pass for so long."""
        self._call(self._flowing.clear)
        let_pass(seconds)
        self._call(self._flowing.set)

    def reset(self) -> None:
        """Break every connection with an RST on both sides, as a NAT that forgets does, and wait
        until the next one comes."""

        def body() -> None:
            for writer in list(self._open):
                ends = writer.get_extra_info("socket")
                if ends is not None:
                    ends.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()

        while not self.taken.empty():
            self.taken.get()
        self._call(body)
        self.taken.get(timeout=LIMIT)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(240)
        self._listener.close()


@contextmanager
def relay_to(target: int) -> Iterator[Relay]:
    relay = Relay(target)
    try:
        yield relay
    finally:
        relay.close()


SILENCE = times(heartbeat_timeout=10)
"""A node that says nothing at all is dead after so long: not after the default of 5 s, for which
any other process of the job may stand still on a busy machine."""

SHORT = 12.0
"""Seconds of a stall in `make test`, longer than such a silence."""


def durations(short: float, full: float) -> pytest.MarkDecorator:
    """The test twice: scaled down, and in full length in `make soak`."""
    both = [pytest.param(short, id="short"), pytest.param(full, id="full", marks=pytest.mark.soak)]
    return pytest.mark.parametrize("seconds", both)


def start(counting: Counting, nodes: int, **more: str) -> None:
    """A job of three nodes whose master is started by hand; so many of them for a start."""
    outside = times(heartbeat_timeout=10, is_host=0)
    words = {"master": True, "master_options": ["--nnodes=1:3", SILENCE], "env": more}
    counting.start("1:3", outside, nodes=nodes, **words)


@contextmanager
def linked(counting: Counting) -> Iterator[Relay]:
    """One more node, which reaches the master by a relay."""
    with relay_to(int(counting.endpoint.rpartition(":")[2])) as relay:
        counting.job.add_node(options=[f"--rdzv-endpoint=127.0.0.1:{relay.port}"])
        yield relay


def unharmed(counting: Counting, harm: Callable[[], object]) -> None:
    """When three nodes train, do the harm: the same world goes on, nobody was given up, and no node
    left its place."""
    first = counting.first(3)
    harm()
    counting.goes_on(first, 20)
    assert [world.round for world in counting.finish()] == [first.round]
    assert " is dead" not in counting.said()


class Stall:
    """Blocks the loop (`loop`) or the interpreter (`gil`) of an agent or master that has `env`, by
    its name and for so long; waits until that is over."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.env = {SOCKET: self.hub.path}

    def __call__(self, name: str, how: str, seconds: float) -> None:
        (peer,) = self.hub.ranks(1, name=name)
        before = len(peer.said)
        peer.order(how, seconds=seconds)
        over = f"end of the stall of {name}"
        self.hub.until(lambda: len(peer.said) > before, over, seconds + LIMIT)


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    """Agents and masters of this test are real ones that can be blocked."""
    command = (sys.executable, str(SCRIPTS / "stalling.py"))
    monkeypatch.setattr("elasticrun.testing.job.ELASTICRUN", command)
    made = Stall()
    yield made
    made.hub.close()


def test_one_job_bears_one_stall_after_another(counting: Counting, stall: Stall) -> None:
    """An agent's loop, then the master's, then resets of a link in a row: the tests below, shorter,
    befall one and the same world."""
    start(counting, 2, **stall.env)
    with linked(counting) as relay:

        def harm() -> None:
            for node in ("master", "node1"):
                stall(node, "loop", SHORT)
                counting.goes_on(counting.job.worlds()[-1], 20)
            again_and_again(relay, counting, 10.0)

        unharmed(counting, harm)


@further("test_one_job_bears_one_stall_after_another")
@durations(SHORT, 30.0)
@pytest.mark.parametrize("how", ["loop", "gil"])
@pytest.mark.parametrize("who", ["node1", "master"])
def test_a_process_that_is_blocked(
    counting: Counting, stall: Stall, who: str, how: str, seconds: float
) -> None:
    """An agent's loop: gRPC's own threads answer the master's pings, and the beats alone are
    missing. Its interpreter: no Python thread of it runs at all; the transport's threads are not
    Python's. The master hears nobody for longer than anybody may be silent, and holds that against
    none of them: silence counts only while the listener listened."""
    start(counting, 3, **stall.env)
    unharmed(counting, lambda: stall(who, how, seconds))


@further("test_one_job_bears_one_stall_after_another")
def test_a_link_that_is_out_for_three_seconds(counting: Counting) -> None:
    start(counting, 2)
    with linked(counting) as relay:
        unharmed(counting, lambda: relay.pause(3.0))


@further("test_one_job_bears_one_stall_after_another")
@durations(10.0, 300.0)
def test_a_stream_that_is_reset_again_and_again(counting: Counting, seconds: float) -> None:
    """A NAT or a mesh that forgets connections: every 10 s for 5 minutes, or each second for 10."""
    start(counting, 2)
    with linked(counting) as relay:
        unharmed(counting, lambda: again_and_again(relay, counting, seconds))


def again_and_again(relay: Relay, counting: Counting, seconds: float) -> None:
    """Resets, ten or thirty of them in so many seconds; nothing piles up in the agent, that of the
    last node."""
    open_files = Path(f"/proc/{counting.job.nodes[-1].pid}/fd")
    before = len(os.listdir(open_files))
    pause = 10.0 if seconds > 60 else 1.0
    for _ in range(int(seconds / pause)):
        relay.reset()
        let_pass(pause)
    assert len(os.listdir(open_files)) <= before + 8


@further("agent/logs/test_logs")
@durations(SHORT, 30.0)
def test_a_log_folder_that_is_frozen(counting: Counting, tmp_path: Path, seconds: float) -> None:
    """The file system under `--log-dir` takes no write for a while, as NFS without its server: who
    writes there sleeps in the kernel and cannot even be killed. Those are the ranks that print,
    and nobody else."""
    with volume(tmp_path) as folder:
        job = counting.start("1:3", SILENCE, nodes=2)
        logs = [f"--log-dir={folder / 'logs'}", "--tee=3"]
        job.add_node(options=logs, env={"COUNTS_PRINTS": "1"})

        def harm() -> None:
            world = job.worlds()[-1]
            pid = world.pids[rank_on(world, 2)]

            def last() -> int:
                return max(step.step for step in job.steps() if step.pid == pid)

            with frozen_volume(folder):
                await_true(lambda: state(pid) == "D", "rank asleep in the kernel")
                held = last()
                let_pass(seconds)
                assert last() == held  # the disk holds the rank that prints

        unharmed(counting, harm)


@contextmanager
def volume(scratch: Path) -> Iterator[Path]:
    """A small file system that can be frozen; skips the test where none is."""
    needs.program("mkfs.ext4", package="e2fsprogs")
    needs.program("umount", package="mount")
    image, folder = scratch / "volume.img", scratch / "volume"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (
        ["mkfs.ext4", "-q", "-F", str(image)],
        ["mount", "-o", "loop", str(image), str(folder)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this host does not let us mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def frozen_volume(folder: Path) -> Iterator[None]:
    """No write to the file system passes within the block. It is thawed by a process of its own,
    so that no end of this test leaves somebody asleep in the kernel for ever."""
    code = (
        "import fcntl, os, select, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "fcntl.ioctl(fd, 0xC0045877, 0)\n"  # FIFREEZE
        "print('frozen', flush=True)\n"
        "select.select([0], [], [], 240)\n"
        "fcntl.ioctl(fd, 0xC0045878, 0)\n"  # FITHAW
    )
    freezer = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert freezer.stdin is not None
    assert freezer.stdout is not None
    if freezer.stdout.readline() != b"frozen\n":
        freezer.wait()
        pytest.skip("this file system cannot be frozen")
    try:
        yield
    finally:
        freezer.stdin.close()
        freezer.wait()
        freezer.stdout.close()
