"""The job master as a child process of this agent, and the host that keeps one running.

Like the port proxy it runs in its own session and ignores the signals sent to every process of a
job. When the agent's end of a pipe closes, however the agent ends, the master exits, or stays while
it serves agents on other nodes.

The agent pings it on that pipe. A master that makes no progress (SIGSTOP, a debugger, a frozen
cgroup) is killed and replaced by one that loads the same record (decision 037).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from elasticrun.agent.boot import Reaper
from elasticrun.config import (
    EXIT_NOT_LEADING,
    EXIT_PORT_TAKEN,
    Identity,
    Launch,
    MasterConfig,
    Place,
    spec_of,
)
from elasticrun.host import user_folder
from elasticrun.host.log import logger
from elasticrun.host.system import sandbox
from elasticrun.host.system.processes import cpu_ticks, is_stopped, why_unresponsive
from elasticrun.host.system.sandbox import NoThread, start_thread
from elasticrun.host.user_folder import LaunchFolder
from elasticrun.wire import debugger
from elasticrun.wire.spawning import SHIELDED
from elasticrun.wire.types import Endpoint, dumps

if TYPE_CHECKING:
    import asyncio

    from elasticrun.agent.context import NodeContext

PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[3])

NAMED_KINDS: Final = ("elastic", "file", "open")
"""Kinds of rendezvous in which other nodes know the master's port."""

SHARED_KINDS: Final = (*NAMED_KINDS, "etcd")
"""Kinds of rendezvous in which a master may keep serving other nodes after its agent has exited."""

RELAY_BYTES: Final = 64 * 1024

RESTARTS: Final = (0.0, 0.0, 0.1, 0.3, 1.0)
"""Seconds before a process that died is restarted; the last value applies from the fifth time
on."""

MAX_EARLY_DEATHS: Final = 4
"""Masters that may die before one has ever served; more than that means a broken installation."""

MAX_TAKEN: Final = 10
"""Consecutive failures, including a taken port, after which the port counts as another master's."""

HEALTHY_AFTER: Final = 10.0
"""Seconds after which a process counts as healthy: when it dies, it is restarted at once."""

PING_EVERY: Final = 5.0
"""Seconds between a master's answer and the next ping."""

ANSWER_LIMIT: Final = 20.0
"""Seconds for a master to answer a ping. One that uses no CPU time meanwhile is stuck and is
replaced."""

BUSY_LIMIT: Final = 60.0
"""Seconds for a master that uses CPU time: thousands of nodes or a slow machine may keep it
busy."""

RECORD_WAIT: Final = 15.0
"""Seconds for creating the record's folder, which may be on a network file system."""

OVER_LIMIT: Final = 3.0
"""Seconds for the master on this host to exit when the job is over, so that its port is free when
the command returns."""

LEAVE_LIMIT: Final = 1.0
"""The same when only this node leaves: the master may keep running for other nodes."""

ALONE_LIMIT: Final = 8.0
"""The same when there can be no other node: the master is then killed, and what it has not written
of the job's result and progress is lost. On a busy machine it may get no CPU time for seconds."""

RECORD_LIMIT: Final = 5.0
"""Seconds for removing a record at the end; after that the next run's sweep removes it."""


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Block the shielded signals in this thread, so that a child started inside cannot die of one
    before it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def new_record() -> LaunchFolder | None:
    """A folder for the record of this launch's masters; None, with a log line, if none can be
    created. Blocks for RECORD_WAIT seconds at most."""
    made: list[LaunchFolder | OSError] = []
    given_up = threading.Event()

    def work() -> None:
        try:
            folder = user_folder.make_launch_folder(os.environ)
        except OSError as wrong:
            made.append(wrong)
            return
        made.append(folder)
        if given_up.is_set():
            folder.remove()

    why: object = f"the disk has not answered for {RECORD_WAIT:g} s"
    try:
        start_thread(work, "record").join(RECORD_WAIT)
    except NoThread as wrong:
        why = wrong
    if not made:
        given_up.set()
    elif isinstance(made[0], LaunchFolder):
        return made[0]
    else:
        why = made[0]
    logger.warning("the job master keeps no record: %s", why)
    return None


def sweep_records() -> None:
    """Remove, in a thread, the records of launches that were killed together with their masters."""
    environ = dict(os.environ)
    with contextlib.suppress(NoThread):  # the next launch does it
        start_thread(user_folder.sweep_launch_folders, "sweep", (environ,))


@dataclass(frozen=True, slots=True)
class InEtcd:
    """What a master whose leadership is in etcd publishes about itself."""

    holder: str  # the incarnation of the agent that starts it
    advertise: str  # where other nodes dial it; may differ from where it listens


class MasterProcess:
    """One job master process and its pipes."""

    def __init__(
        self,
        launch: Launch,
        place: Place,
        identity: Identity,
        bind: Endpoint,
        record: LaunchFolder | None = None,
        in_etcd: InEtcd | None = None,
        *,
        replaces: str = "",
    ) -> None:
        """Start the process. This needs no loop, so it can run before asyncio is imported.

        Call it in the main thread: the kernel wakes a stopped master when the thread that started
        it ends. `replaces`: how the previous master here ended. Raises OSError."""
        self.record = record
        self._code: int | None = None
        self._on_exit: Callable[[int], None] | None = None
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:

            def pipe(*, read: bool) -> tuple[int, int]:
                """Our end and the master's. `read`: we read from ours; else we write."""
                ends = os.pipe() if read else os.pipe()[::-1]
                ours.callback(os.close, ends[0])
                theirs.callback(os.close, ends[1])
                return ends

            config_write, config_read = pipe(read=False)
            self.ready_fd, ready_write = pipe(read=True)
            self.lifeline_fd, lifeline_read = pipe(read=False)
            self.output_fd, output_write = pipe(read=True)
            os.set_blocking(self.lifeline_fd, False)
            master = replace(
                _master_config(launch, place, identity, bind, record, in_etcd),
                lifeline_fd=lifeline_read,
                ready_fd=ready_write,
                replaces=replaces,
            )
            with shielded(), debugger.without_debugger():
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "elasticrun.master", f"--config-fd={config_read}"],
                    stdin=subprocess.DEVNULL,
                    stdout=output_write,
                    stderr=output_write,
                    pass_fds=(config_read, ready_write, lifeline_read),
                    env=_environment(),
                    start_new_session=True,
                )
            ours.pop_all()
        with contextlib.suppress(BrokenPipeError), open(config_write, "wb") as config_pipe:
            config_pipe.write(dumps(master).encode())

    def watch(self, reaper: Reaper) -> None:
        """Have the reaper record the exit code. Call before anything is reaped; otherwise the exit
        is missed."""
        reaper.watch(self.process, self._exited)

    def on_exit(self, call: Callable[[int], None]) -> None:
        """Call `call(code)` when the process has exited, at once if it already has."""
        self._on_exit = call
        if self._code is not None:
            call(self._code)

    def _exited(self, code: int) -> None:
        self._code = code
        if self._on_exit is not None:
            self._on_exit(code)

    def end_lifeline(self) -> None:
        """Close the lifeline: the master exits now, or when the last agent it serves has left."""
        self._close_end("lifeline_fd")

    def close(self) -> None:
        """Close the lifeline and the pipes from which we read."""
        for name in ("lifeline_fd", "ready_fd", "output_fd"):
            self._close_end(name)

    def _close_end(self, name: str) -> None:
        fd = getattr(self, name)
        if fd >= 0:
            setattr(self, name, -1)
            os.close(fd)


def _master_config(
    launch: Launch,
    place: Place,
    identity: Identity,
    bind: Endpoint,
    record: LaunchFolder | None,
    in_etcd: InEtcd | None,
) -> MasterConfig:
    return MasterConfig(
        identity=identity,
        host=bind.host,
        port=bind.port,
        spec=spec_of(launch, identity),
        launch=launch.master,
        log_dir=_log_dir(launch),
        outlive=launch.spec.max_nodes > 1 and place.kind in SHARED_KINDS,
        record_dir=str(record.path) if record is not None else "",
        advertise=in_etcd.advertise if in_etcd is not None else "",
        holder=in_etcd.holder if in_etcd is not None else "",
    )


def _environment() -> dict[str, str]:
    """The environment of a master."""
    environ = dict(os.environ)
    # -P keeps the working directory off sys.path: a folder grpc/ there would be imported. So if
    # elasticrun is not installed, its own folder has to be named.
    paths = filter(None, [environ.get("PYTHONPATH", ""), PACKAGE_ROOT])
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    environ.pop("PYTHONINSPECT", None)  # meant for scripts; with it no program exits with 0
    return environ


def _log_dir(launch: Launch) -> str:
    """Where the master writes files for users; "" if no folder is configured."""
    named = launch.logs.log_dir
    return os.path.abspath(named) if named and named != os.devnull else ""


def early_master(launch: Launch, place: Place, identity: Identity) -> MasterProcess | None:
    """Start the master if this node certainly hosts it, which must be known without a name lookup,
    so that it is ready when this process has imported grpc. None if that is not certain, or if
    starting fails."""
    if place.kind == "standalone" or (place.kind == "static" and launch.node_rank <= 0):
        here = Endpoint("127.0.0.1", 0)
        with contextlib.suppress(OSError):
            return MasterProcess(launch, place, identity, here, record=new_record())
    return None


class MasterOwner(Protocol):
    """What a hosted master needs from its owner."""

    def master_serves(self, endpoint: Endpoint) -> None:
        """A master serves there, for the first time or again."""

    def master_taken(self, sentence: str) -> None:
        """Another process has the master's port or its leadership, so this agent is not the
        host."""


class MasterHost:
    """Keeps a master running at one address: starts it, reads its output, restarts it when it
    dies."""

    def __init__(
        self,
        node: NodeContext,
        owner: MasterOwner,
        bind: Endpoint,
        record: LaunchFolder | None,
        in_etcd: InEtcd | None = None,
    ) -> None:
        """`record`: the state of this launch's masters, removed when the last one exits."""
        self._node = node
        self._owner = owner
        self._bind = bind
        self._record = record
        self._in_etcd = in_etcd
        import asyncio  # late: the first master starts before this import

        from elasticrun.agent.runtime import Once, Patience, Timer

        self._loop = asyncio.get_running_loop()
        self._master: MasterProcess | None = None
        self._closing = False
        self._answer: dict[str, Any] = {}
        self._since = 0.0
        self._deaths = 0
        self._timer: asyncio.TimerHandle | None = None
        self._exited = asyncio.Event()
        self._exited.set()
        self._served = False
        self._how_it_ended = ""  # how the last master that served ended
        self._once = Once()
        self._ping = Timer()
        self._patience = Patience()

    @property
    def is_running(self) -> bool:
        """Whether a master process exists that has not been reaped."""
        return self._master is not None

    def start(self, first: MasterProcess | None = None) -> None:
        """Start a master, or adopt one that was already started (and is watched). A failed start is
        retried."""
        self._timer = None
        if first is not None:
            self._record = first.record
        try:
            master = first or MasterProcess(
                *(self._node.launch, self._node.place, self._node.identity),
                *(self._bind, self._record, self._in_etcd),
                replaces=self._how_it_ended if self._served else "",
            )
        except OSError as error:
            logger.warning("the job master cannot be started: %s", error)
            self._restart_later()
            return
        if first is None:
            master.watch(self._node.reaper)
        self._node.reaper.spared.add(master.process.pid)
        self._master = master
        self._answer = {}
        self._since = self._loop.time()
        self._exited.clear()
        os.set_blocking(master.ready_fd, False)
        os.set_blocking(master.output_fd, False)
        self._loop.add_reader(master.ready_fd, self._answered, master)
        self._loop.add_reader(master.output_fd, self._relay, master)
        self._patience.wait(ANSWER_LIMIT, self._on_not_ready, master)
        master.on_exit(lambda code: self._ended(master, code))

    async def close(self, *, job_over: bool) -> None:
        """Close the lifeline and wait briefly for the master to exit. It is killed at once if it
        does not serve yet, and after the wait if no other node can need it; otherwise it may keep
        running for other nodes. The record is removed unless a master still runs."""
        await self.close_within(OVER_LIMIT if job_over else LEAVE_LIMIT)

    async def close_within(self, limit: float) -> None:
        """Like `close`, but wait up to `limit` seconds for the exit."""
        import asyncio

        self._closing = True
        alone = self._node.launch.spec.max_nodes == 1
        if self._timer is not None:
            self._timer.cancel()
        if self._master is not None:
            self._ping.cancel()
            self._patience.cancel()
            self._master.end_lifeline()
            if not self._answer:
                self.kill()  # not even serving yet
            with contextlib.suppress(TimeoutError):
                wait = max(limit, ALONE_LIMIT) if alone else limit
                await asyncio.wait_for(self._exited.wait(), wait)
        if alone:
            self.kill()
        if self._master is not None:
            self._close_pipes(self._master)
        if self._master is not None and not alone:
            if self._record is not None:
                self._record.release()  # the master removes the folder itself
        elif (removed := self._remove_record()) is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(removed.wait(), RECORD_LIMIT)

    def _remove_record(self) -> asyncio.Event | None:
        """Remove the record in a thread. Returns an event that is set when that is done; None if
        there is no record or no thread."""
        import asyncio

        record, self._record = self._record, None
        if record is None:
            return None
        removed, loop = asyncio.Event(), self._loop

        def work() -> None:
            record.remove()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(removed.set)

        try:
            start_thread(work, "record")
        except NoThread:  # the next run sweeps it
            return None
        return removed

    def kill(self) -> None:
        """SIGKILL the master that runs here, whatever its state."""
        if self._master is not None:
            sandbox.kill(self._master.process.pid)

    def _answered(self, master: MasterProcess) -> None:
        """Read the ready line (it serves, or cannot) or, later, the answer to a ping."""
        if not (data := self._read(master, "ready_fd")):
            return
        if self._answer:
            self._ping_later(master)
            return
        try:
            answer = json.loads(data)
        except ValueError:
            return  # it died before it served; its exit is handled elsewhere
        self._answer = answer if isinstance(answer, dict) else {}
        port = self._answer.get("port")
        if isinstance(port, int):
            self._served = True
            self._how_it_ended = ""
            everywhere = self._bind.host in ("::", "0.0.0.0")
            host = "127.0.0.1" if everywhere else self._bind.host
            self._bind = Endpoint(self._bind.host, port)
            self._ping_later(master)
            self._owner.master_serves(Endpoint(host, port))

    def _read(self, master: MasterProcess, name: str) -> bytes:
        """The bytes available on the master's pipe `name` (an attribute); at EOF, stop reading
        it."""
        fd = getattr(master, name)
        if fd < 0:
            return b""
        try:
            data = os.read(fd, RELAY_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            self._loop.remove_reader(fd)
        return data

    # ------------------------------------------------------------ a master that is stuck

    def _ping_later(self, master: MasterProcess) -> None:
        """Schedule the next ping of a master that has answered, unless this agent is ending."""
        self._patience.cancel()
        if not self._closing:
            self._ping.after(PING_EVERY, self._send_ping, master)

    def _send_ping(self, master: MasterProcess) -> None:
        """Ping the master, to see whether its loop runs."""
        with contextlib.suppress(OSError):  # it is about to exit, which is handled elsewhere
            os.write(master.lifeline_fd, b"\n")
        used = cpu_ticks(master.process.pid)
        self._patience.wait(ANSWER_LIMIT, self._on_no_answer, master, used)

    def _on_no_answer(self, master: MasterProcess, used: int | None) -> None:
        """Handle a ping without an answer: extend the limit once for a busy master, else kill it.
        `used`: its CPU ticks at the ping; None if the limit has already been extended."""
        pid = master.process.pid
        if used is not None and cpu_ticks(pid) != used and not is_stopped(pid):
            self._patience.wait(BUSY_LIMIT - ANSWER_LIMIT, self._on_no_answer, master, None)
        else:
            self._kill_unresponsive(master, ANSWER_LIMIT if used is not None else BUSY_LIMIT)

    def _on_not_ready(self, master: MasterProcess) -> None:
        """Keep waiting for a master that does not serve yet, because a slow disk may delay it; kill
        it if it is stopped."""
        if is_stopped(master.process.pid):
            self._kill_unresponsive(master, ANSWER_LIMIT)
        else:
            self._patience.wait(ANSWER_LIMIT, self._on_not_ready, master)

    def _kill_unresponsive(self, master: MasterProcess, limit: float) -> None:
        how = why_unresponsive(master.process.pid)
        logger.warning("the job master has not responded for %g s: %s; killing it", limit, how)
        self._how_it_ended = (
            self._how_it_ended or f"gave no answer for {limit:g} s ({how}), and was killed"
        )
        self.kill()

    def _relay(self, master: MasterProcess) -> None:
        # Relayed by us, so that a master that outlives us does not hold the user's pipe open.
        if text := self._read(master, "output_fd"):
            self._node.writer.write(text.decode(errors="replace"))

    def _ended(self, master: MasterProcess, code: int) -> None:
        if self._master is not master:
            return
        if not self._answer:
            self._answered(master)
        self._ping.cancel()
        self._patience.cancel()
        self._relay(master)
        self._close_pipes(master)
        self._master = None
        # It may have been reaped before `start` spared it.
        self._node.reaper.spared.discard(master.process.pid)
        self._exited.set()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        self._how_it_ended = self._how_it_ended or how
        if self._closing or code == 0:
            return  # the job is over, or this agent ends
        if EXIT_NOT_LEADING in (code, self._answer.get("exit_code")):
            self._remove_record()
            self._owner.master_taken(
                str(self._answer.get("error", "the job master here no longer leads"))
            )
            return
        if self._answer.get("exit_code") == EXIT_PORT_TAKEN:
            self._port_taken()
            return
        if "error" in self._answer:
            self._cannot_serve(str(self._answer["error"]))
            return
        if not self._served and self._deaths >= MAX_EARLY_DEATHS:
            self._node.fatal(f"the job master cannot be started: it {how} each time")
            return
        logger.warning("the job master %s; starting a new one, the ranks keep running", how)
        self._restart_later()

    def _cannot_serve(self, sentence: str) -> None:
        """Handle a master that cannot serve. Before any master has served, this ends the node.
        Later, ranks are running and the cause may pass, so the start is retried; ranks continue for
        `master_lost_timeout`."""
        if not self._served:
            self._node.fatal(sentence)
            return
        self._once.log(f"no job master can be started here: {sentence}; retrying")
        self._restart_later()

    def _port_taken(self) -> None:
        if self._node.place.kind not in NAMED_KINDS and self._served:
            # On loopback only we know the port, so any other port works as well.
            self._bind = Endpoint(self._bind.host, 0)
            self._restart_later()
        elif self._served and (self._deaths < MAX_TAKEN or self._is_only_host):
            self._restart_later()  # the kernel may not have released the port yet
        else:
            self._remove_record()
            self._owner.master_taken(str(self._answer.get("error", "its port is taken")))

    @property
    def _is_only_host(self) -> bool:
        """Whether no other agent can start a master in place of ours."""
        where = self._node.place
        return where.kind == "elastic" and where.is_host is True

    def _restart_later(self) -> None:
        if self._loop.time() - self._since > HEALTHY_AFTER:
            self._deaths = 0
        wait = RESTARTS[min(self._deaths, len(RESTARTS) - 1)]
        self._deaths += 1
        self._timer = self._loop.call_later(wait, self.start)

    def _close_pipes(self, master: MasterProcess) -> None:
        for fd in (master.ready_fd, master.output_fd):
            if fd >= 0:
                self._loop.remove_reader(fd)
        master.close()
