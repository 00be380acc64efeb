"""The base of every test with real processes: start, read messages, wait for events, leave nothing.

A `World` belongs to one test. Everything that it starts has the test's own marker in its
environment, so that at the end each remaining process can be found and named, whatever its parent
is now. Scripts under tests/scripts connect to the world's `Hub` (a Unix socket) and report what
they see; a test waits for these messages, for exits (pidfd) and for lines in files (inotify), never
for time to pass. `LIMIT` is how long an event may take on a busy machine, not how long it should
take.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from inotify_simple import INotify, flags

from elasticrun.cli.main import main
from elasticrun.testing import node, processes
from elasticrun.testing.hosts import Lab
from elasticrun.wire.env import SHM_DIR

LIMIT = 240.0
"""Seconds for any awaited event before the test fails; generous, because the machine is shared."""

MARK = "ELASTICRUN_TEST_MARK"
SOCKET = "ELASTICRUN_TEST_SOCKET"
SCRIPTS = Path(__file__).parent / "scripts"
SHM = "/dev/shm"

TORCHRUN = "torchrun"
ELASTICRUN = "elasticrun"
COMMANDS = {
    TORCHRUN: (sys.executable, "-m", "torch.distributed.run"),
    ELASTICRUN: (sys.executable, "-m", "elasticrun"),
}

PATIENT = {"ELASTICRUN_RDZV_CONF": "heartbeat_timeout=60"}
"""The environment of a job whose restarts are counted: an agent that stands still for a while is
not declared dead."""

COLD = {"ELASTICRUN_WARM_SERVER": "off"}
"""The environment of a job whose fork server is not forked from the run's warm process."""

CHECKPOINTING = {"ELASTICRUN_PRELOAD": "torch.distributed.checkpoint"}
"""The environment of a job whose ranks have a Checkpointer and start often: each would spend a
second on what that imports."""

TRAINING = {"ELASTICRUN_PRELOAD": "torch.distributed.checkpoint,torch._dynamo"}
"""The same for ranks that have DDP or an optimizer too."""

_FOREIGN = (
    "PET_",
    "TORCHELASTIC_",
    "TORCH_",
    "ELASTICRUN_",
    "DLROVER_",
    "SLURM_",
    "KUBERNETES_",
    "LWS_",
    "VC_",
    "SKYPILOT_",
    "OMP_",
    "PYTHON",
)
_FOREIGN_NAMES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NODE_NUM"),
    "JOB_COMPLETION_INDEX",
    *("LOGLEVEL", "CUDA_VISIBLE_DEVICES", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"),
}


def clean_environment() -> dict[str, str]:
    """This process's environment without variables that a launcher would read as settings."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN)
    }


def warm_server() -> dict[str, str]:
    """The variable by which a job that a test starts by itself is forked from the run's warm
    process."""
    return processes.warm_process(clean_environment())


def free_port() -> int:
    """A TCP port that is free on loopback and outside the kernel's ephemeral range: it is bound
    seconds later, while other tests run."""
    return node.free_port()


def await_exit(pids: Iterable[int], limit: float = LIMIT) -> set[int]:
    """Wait until these processes (of any parent) have exited. Returns the pids that have not."""
    return processes.await_end(pids, limit)


def program(
    *words: str, env: Mapping[str, str] | None = None, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words until it exits. Returns its output. `before`: runs in the child
    before exec."""
    return subprocess.run(
        [sys.executable, *words],
        env=env,
        preexec_fn=before,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def ran(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `elasticrun` with these words until it exits. Returns its output."""
    return program("-m", "elasticrun", *words, env=clean_environment() if env is None else env)


def ran_here(*words: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """The same in this process, for verbs that only ask and print: most of what such a verb takes
    is its imports."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(env)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(list(words))
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        os.environ.clear()
        os.environ.update(before)
    said = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(words, code, *said)


def status_of(*words: str, env: Mapping[str, str] | None = None) -> str:
    """The output of `elasticrun status` with these words, once the master answers; the verb itself
    waits at most five seconds for a master that does not respond."""
    printed: list[str] = []

    def answered() -> bool:
        done = ran("status", *words, env=env)
        printed[:] = [done.stdout]
        return done.returncode == 0

    await_true(answered, "answer to `elasticrun status`")
    return printed[0]


def passed(request: pytest.FixtureRequest) -> bool:
    """For fixtures: whether their test has passed."""
    report = getattr(request.node, "report_call", None)
    return report is not None and bool(report.passed)


def await_true(condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Poll for a condition that sends no notification. A condition that starts a process is asked
    less often, because each process takes CPU time from those that it waits for."""
    end = time.monotonic() + limit
    began = time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now < end, f"no {what} within {limit:g} s"
        threading.Event().wait(min(max(0.02, 2 * (now - began)), 1.0))
        began = time.monotonic()


def await_listener(port: int) -> None:
    """Wait until a process listens on this TCP port, without connecting to it."""
    number = f":{port:04X}"

    def listens() -> bool:
        tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
        rows = [row.split() for table in tables for row in table.read_text().splitlines()[1:]]
        return any(row[1].endswith(number) and row[3] == "0A" for row in rows)

    await_true(listens, f"listener on port {port}")


def is_alive(pid: int) -> bool:
    """Whether a process with this pid runs (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Peer:
    """One process of the job that reports to the test; `gone`: its socket has closed."""

    connection: socket.socket
    hello: dict[str, Any] = field(default_factory=dict)
    said: list[dict[str, Any]] = field(default_factory=list)
    gone: bool = False

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["hello"][name]
        except KeyError:
            raise AttributeError(name) from None

    def order(self, do: str, **more: Any) -> None:
        """Order the script's next action (see tests/scripts/puppet.py)."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.sendall(json.dumps({"do": do, **more}).encode() + b"\n")


class Hub:
    """The socket to which scripts connect, with all their messages in the order of arrival."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="er-hub-")
        self.path = os.path.join(self.folder, "s")
        self.peers: list[Peer] = []
        self._changed = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(256)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(Peer(connection),), daemon=True).start()

    def _read(self, peer: Peer) -> None:
        with contextlib.suppress(OSError), peer.connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                with self._changed:
                    if not peer.hello:
                        peer.hello = message
                        self.peers.append(peer)
                    peer.said.append(message)
                    self._changed.notify_all()
        with self._changed:
            peer.gone = True
            self._changed.notify_all()

    def until(self, condition: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
        """Wait until `condition()` is true (checked after each message or disconnect) and return
        it."""
        with self._changed:
            result = self._changed.wait_for(condition, limit)
        assert result, f"no {what} within {limit:g} s; heard: {[p.said for p in self.peers]}"
        return result

    def ranks(self, count: int, limit: float = LIMIT, **wanted: Any) -> list[Peer]:
        """The first `count` peers, sorted by rank, whose hello matches all of `wanted` (values may
        be functions); waits for them."""

        def enough() -> list[Peer]:
            found = [p for p in self.peers if _fits(p.hello, wanted)]
            return (
                sorted(found[:count], key=lambda p: p.hello["rank"]) if len(found) >= count else []
            )

        return list(self.until(enough, f"{count} ranks with {_words(wanted)}", limit))

    def word(
        self, peer: Peer, event: str, limit: float = LIMIT, nth: int = 1, **wanted: Any
    ) -> dict[str, Any]:
        """The first (`nth`) message of this peer named `event`; waits for it."""

        def there() -> dict[str, Any] | None:
            found = [m for m in list(peer.said) if m["event"] == event and _fits(m, wanted)]
            if len(found) >= nth:
                return found[nth - 1]
            assert not peer.gone, f"rank {peer.hello} went without saying {event!r}"
            return None

        result = self.until(there, f"{event!r} of {peer.hello}", limit)
        assert isinstance(result, dict)
        return result

    def lost(self, peers: Iterable[Peer], limit: float = LIMIT) -> None:
        peers = list(peers)
        self.until(lambda: all(p.gone for p in peers), "end of the peers", limit)

    def close(self) -> None:
        """Stop listening and close all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self.peers:
            peer.connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _fits(message: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(
        name in message and (want(message[name]) if callable(want) else message[name] == want)
        for name, want in wanted.items()
    )


def _words(wanted: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in wanted.items()) or "any hello"


def descriptors_of(file: int) -> int:
    """How many descriptors of this process refer to the file of this one. Their total says less:
    earlier tests' descriptors are closed with their garbage, at any time."""
    same, found = os.fstat(file), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now
            found += os.path.samestat(os.fstat(int(name)), same)
    return found


class Launched:
    """One launcher that a test has started, with its console in two files."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.process = process
        self.pid = process.pid
        self._out, self._err = out, err

    @property
    def stdout(self) -> str:
        """The standard output of the launcher and its ranks so far."""
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace") if self._err.exists() else ""

    def wait(self, limit: float = LIMIT) -> int:
        """Its exit code, as in subprocess, within `limit` seconds."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the launcher did not end within {limit:g} s; stderr:\n{self.stderr[-4000:]}"
            ) from None

    def ended(self) -> bool:
        return self.process.poll() is not None

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def signal_group(self, signum: int) -> None:
        """Send a signal to its whole process group, as a terminal does."""
        os.killpg(self.pid, signum)

    def below(self) -> list[psutil.Process]:
        return processes_of(processes.below(self.pid))

    def children(self) -> list[psutil.Process]:
        """The descendants that it started itself, or that were forked for it."""
        return processes_of(processes.children(self.pid))

    def until_text(self, text: str, limit: float = LIMIT, stream: str = "stderr") -> str:
        """Wait until the console shows `text`. Returns all its text."""
        return until_file(
            self._err if stream == "stderr" else self._out, lambda t: text in t, limit
        )


def own_folders(folder: Path) -> dict[str, str]:
    """The variables of a host that has these folders for itself."""
    for name in ("tmp", "run"):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    own = {"TMPDIR": "tmp", "XDG_RUNTIME_DIR": "run", "ELASTICRUN_RUNS": "runs"}
    return {name: str(folder / place) for name, place in own.items()}


def host_of(peer: Peer, lab: Lab) -> str:
    return next(name for name, host in lab.hosts.items() if peer.pid in host.pids())


def agent_of(peer: Peer, jobs: Iterable[Launched]) -> Launched:
    return next(job for job in jobs if peer.pid in processes.below(job.pid))


def until_file(path: Path, good: Callable[[str], bool], limit: float = LIMIT) -> str:
    """Wait (inotify) until the text of `path` satisfies `good`. Returns the text."""
    end = time.monotonic() + limit
    with INotify() as watcher:
        watcher.add_watch(path.parent, flags.CREATE | flags.MODIFY | flags.MOVED_TO)
        while True:
            text = path.read_text(errors="replace") if path.exists() else ""
            if good(text):
                return text
            rest = end - time.monotonic()
            assert rest > 0, f"{path} did not become what was awaited; it holds:\n{text[-3000:]}"
            watcher.read(timeout=int(rest * 1000) + 1)


class World:
    """The processes of one test and their socket; none of them may remain."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.marker = uuid.uuid4().hex
        self.hub = Hub()
        self.jobs: list[Launched] = []
        self.tmp = scratch / "tmp"
        for folder in (self.tmp, scratch / "run"):
            folder.mkdir(parents=True, exist_ok=True)
        self.memory = processes.new_folder(SHM, "world")
        """The folder of the snapshots of its jobs."""

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a launcher in this world."""
        environ = {
            **clean_environment(),
            MARK: self.marker,
            SOCKET: self.hub.path,
            "TMPDIR": str(self.tmp),
            "XDG_RUNTIME_DIR": str(self.scratch / "run"),
            "ELASTICRUN_RUNS": str(self.scratch / "runs"),
            SHM_DIR: str(self.memory),
            **(more or {}),
        }
        return {**environ, **processes.warm_process(environ)}

    def command(
        self,
        argv: Iterable[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        umask: int = -1,
        ignoring: str = "",
    ) -> Launched:
        """Start any command in its own session; its console goes to files unless given.

        `ignoring`: signals by their short names, ignored as after `nohup` and `&` in a script."""
        if ignoring:
            argv = ("sh", "-c", f'trap "" {ignoring}; exec "$@"', "sh", *argv)
        number = len(self.jobs)
        out, err = self.scratch / f"console-{number}.out", self.scratch / f"console-{number}.err"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                list(argv),
                env=self.environment(env),
                cwd=cwd or self.scratch,
                stdin=stdin,
                stdout=out_file if stdout is None else stdout,
                stderr=err_file if stderr is None else stderr,
                start_new_session=True,
                umask=umask,
            )
        job = Launched(process, out, err)
        self.jobs.append(job)
        return job

    def launch(self, launcher: str, *args: str, **how: Any) -> Launched:
        """Start torchrun or elasticrun (a name from COMMANDS) with these arguments."""
        return self.command((*COMMANDS[launcher], *args), **how)

    def survivors(self) -> list[psutil.Process]:
        """Every process with this world's marker, except zombies."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
                if f"{MARK}={self.marker}".encode() in environ:
                    found.append(process)
        return found

    def nothing_left(self, limit: float = LIMIT) -> None:
        """Assert that within `limit` seconds no process of this world lives."""
        end = time.monotonic() + limit
        while living := self.survivors():
            await_exit([p.pid for p in living], max(0.0, end - time.monotonic()))
            if time.monotonic() >= end:
                break
        assert not living, f"still there after {limit:g} s: {[describe(p) for p in living]}"

    def kill_all(self) -> None:
        """SIGKILL everything with the marker, until nothing is left; all at the same moment, so
        that no process observes another's death."""
        for _ in range(20):
            if not self.survivors():
                return
            processes.kill_all(lambda: [process.pid for process in self.survivors()], 5)

    def close(self, *, strict: bool) -> None:
        """End everything; with `strict`, fail if something had not ended by itself."""
        try:
            for job in self.jobs:
                if not job.ended():
                    job.process.kill()
                    job.process.wait()
            if strict:
                self.nothing_left()
                left = left_in(self.memory)
                assert not left, f"left in shared memory: {left}"
        finally:
            self.kill_all()
            shutil.rmtree(self.memory, ignore_errors=True)
            self.hub.close()


def processes_of(pids: Iterable[int]) -> list[psutil.Process]:
    """Those that still live."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def describe(process: psutil.Process) -> str:
    """A description of one process, for a failing assertion."""
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} (parent {process.ppid()}): {' '.join(process.cmdline())[:160]}"
    return f"{process.pid} (gone)"


def left_in(folder: Path, limit: float = LIMIT) -> list[str]:
    """What is in a folder of snapshots. What is being removed has `limit` seconds."""
    end = time.monotonic() + limit
    with INotify() as watcher:
        watcher.add_watch(folder, flags.DELETE | flags.MOVED_FROM)
        while left := sorted(os.listdir(folder)):
            rest = end - time.monotonic()
            if rest <= 0:
                break
            watcher.read(timeout=int(rest * 1000) + 1)
    return left


@contextlib.contextmanager
def world_in(scratch: Path) -> Iterator[World]:
    """A world for the duration of a block; strict about leftovers only if the block succeeded."""
    world = World(scratch)
    try:
        yield world
    except BaseException:
        world.close(strict=False)
        raise
    world.close(strict=True)
