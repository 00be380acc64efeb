"""The job master as a process of this agent, and what keeps one alive.

Like the port proxy it lives in a session of its own, ignores the signals that hit
every process of a job, and ends when the agent's end of a pipe is closed, by whatever death.

Its agent pings it on that pipe. A master that stands still (SIGSTOP, a debugger, a frozen cgroup)
is killed, and replaced by one that loads the same record (decision 037).
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
from elasticrun.config import EXIT_NOT_LEADING, EXIT_PORT_TAKEN, AgentConfig, MasterConfig
from elasticrun.host import user_folder
from elasticrun.host.log import logger
from elasticrun.host.system import sandbox
from elasticrun.host.system.processes import cpu_ticks, how_silent, is_stopped
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
"""Rendezvous of which other nodes know the master's port."""

SHARED_KINDS: Final = (*NAMED_KINDS, "etcd")
"""Rendezvous whose master may serve other nodes when its agent has gone."""

RELAY_BYTES: Final = 64 * 1024

RESTARTS: Final = (0.0, 0.0, 0.1, 0.3, 1.0)
"""Seconds before a helper that died is started again, the last one from the fifth time on."""

MAX_STILLBORN: Final = 4
"""Masters that died before the first one served; then the installation is broken, not the luck."""

MAX_TAKEN: Final = 10
"""Deaths and takings in a row after which a port that is taken is another master's for good."""

HEALTHY_AFTER: Final = 10.0
"""A helper that lived this long starts again at once."""

PING_EVERY: Final = 5.0
"""Seconds between a master's answer and the next ping."""

ANSWER_LIMIT: Final = 20.0
"""Seconds for a master to answer a ping. One that uses no processor time meanwhile stands still and
is replaced."""

BUSY_LIMIT: Final = 60.0
"""Seconds for one that uses some: thousands of nodes may keep it busy, or a slow machine."""

RECORD_WAIT: Final = 15.0
"""Seconds for making the folder of the record, which may be on a network."""

OVER_LIMIT: Final = 3.0
"""Seconds for a hosted master to end when the job is over: then its port is free again when the
command returns."""

LEAVE_LIMIT: Final = 1.0
"""The same when only this node leaves: the master may live on for the others."""

RECORD_LIMIT: Final = 5.0
"""Seconds that the removal of a record may take at the end; else the next run's sweep does it."""


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Block the shielded signals in this thread: a child started inside cannot die of one before
    it has said that it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def new_record() -> LaunchFolder | None:
    """A folder for the record of this launch's masters; None, with one line, where there can be
    none. Blocks, for RECORD_WAIT seconds at most."""
    made: list[LaunchFolder | OSError] = []
    given_up = threading.Event()

    def work() -> None:
        try:
            folder = user_folder.make(os.environ)
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
    logger.warning("the job's master keeps no record: %s", why)
    return None


def sweep_records() -> None:
    """Remove, in a thread, what launches have left that were killed together with their masters."""
    environ = dict(os.environ)
    with contextlib.suppress(NoThread):  # the next launch does it
        start_thread(user_folder.sweep, "sweep", (environ,))


@dataclass(frozen=True, slots=True)
class InEtcd:
    """What a master whose leadership is in etcd says of itself there."""

    holder: str  # the life of the agent that starts it
    advertise: str  # where other nodes dial it, which may not be where it listens


class MasterProcess:
    """One process of the job master, from its start to its ready line."""

    def __init__(
        self,
        config: AgentConfig,
        bind: Endpoint,
        record: LaunchFolder | None = None,
        in_etcd: InEtcd | None = None,
        *,
        replaces: str = "",
    ) -> None:
        """Starts it; needs no loop, so that it can be done before asyncio is imported. To be called
        in the main thread, at whose end the kernel wakes a stopped master. `replaces`: what
        became of the one that has served here before it. OSError."""
        self.record = record
        self._code: int | None = None
        self._heard: Callable[[int], None] | None = None
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:

            def pipe(*, read: bool) -> tuple[int, int]:
                """Our end, which we read or write, and the master's."""
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
                _master_config(config, bind, record, in_etcd),
                lifeline_fd=lifeline_read,
                ready_fd=ready_write,
                replaces=replaces,
            )
            with shielded(), debugger.escaped():
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
        """Remember how it ends; before anything is reaped, or its end is missed."""
        reaper.watch(self.process, self._end)

    def on_end(self, heard: Callable[[int], None]) -> None:
        """Call `heard(code)` when it has ended, at once if that is so already."""
        self._heard = heard
        if self._code is not None:
            heard(self._code)

    def _end(self, code: int) -> None:
        self._code = code
        if self._heard is not None:
            self._heard(code)

    def end_lifeline(self) -> None:
        """It ends now, or when no agent is left."""
        self._close_end("lifeline_fd")

    def close(self) -> None:
        """The same, and nothing more is heard of it."""
        for name in ("lifeline_fd", "ready_fd", "output_fd"):
            self._close_end(name)

    def _close_end(self, name: str) -> None:
        fd = getattr(self, name)
        if fd >= 0:
            setattr(self, name, -1)
            os.close(fd)


def _master_config(
    config: AgentConfig, bind: Endpoint, record: LaunchFolder | None, in_etcd: InEtcd | None
) -> MasterConfig:
    return MasterConfig(
        job_id=config.spec.job_id,
        host=bind.host,
        port=bind.port,
        spec=config.spec,
        status_port=config.status_port,
        log_dir=_log_dir(config),
        on_event=config.on_event,
        sources=config.sources,
        token=config.token,
        tls=config.tls,
        outlive=config.spec.max_nodes > 1 and config.rendezvous.kind in SHARED_KINDS,
        record_dir=str(record.path) if record is not None else "",
        master_store=config.master_store,
        advertise=in_etcd.advertise if in_etcd is not None else "",
        holder=in_etcd.holder if in_etcd is not None else "",
        run=config.run,
        to_join=config.to_join,
    )


def _environment() -> dict[str, str]:
    """The variables of a master."""
    environ = dict(os.environ)
    # -P keeps the working directory off the path: a folder grpc/ in it would be imported.
    # Where we are not installed our own folder has to be named.
    paths = filter(None, [environ.get("PYTHONPATH", ""), PACKAGE_ROOT])
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    environ.pop("PYTHONINSPECT", None)  # meant for scripts; no program ends with a 0 under it
    return environ


def _log_dir(config: AgentConfig) -> str:
    """Where the master writes what people read; "" where nobody has named a folder."""
    named = config.logs.log_dir
    return os.path.abspath(named) if named and named != os.devnull else ""


def early_master(config: AgentConfig) -> MasterProcess | None:
    """Start the master where no name has to be asked to know that it is ours: then it is ready
    when this process has imported grpc. None where that is not plain, or it fails for now."""
    kind = config.rendezvous.kind
    if kind == "standalone" or (kind == "static" and config.node_rank <= 0):
        with contextlib.suppress(OSError):
            return MasterProcess(config, Endpoint("127.0.0.1", 0), record=new_record())
    return None


class MasterOwner(Protocol):
    """Who has a master hosted."""

    def master_serves(self, endpoint: Endpoint) -> None:
        """One serves there, for the first time or again."""

    def master_taken(self, sentence: str) -> None:
        """Its port is another process's, so that this agent is not the host after all."""


class MasterHost:
    """Keeps a master alive at one place: starts it, hears it, starts it again when it dies."""

    def __init__(
        self,
        node: NodeContext,
        owner: MasterOwner,
        bind: Endpoint,
        record: LaunchFolder | None,
        in_etcd: InEtcd | None = None,
    ) -> None:
        """`record`: what this launch's masters remember; it is removed when the last one ends."""
        self._node = node
        self._config = node.config
        self._owner = owner
        self._bind = bind
        self._record = record
        self._in_etcd = in_etcd
        import asyncio  # the first master is started before it

        from elasticrun.agent.runtime import Once, Patience, Timer

        self._loop = asyncio.get_running_loop()
        self._master: MasterProcess | None = None
        self._closing = False
        self._answer: dict[str, Any] = {}
        self._since = 0.0
        self._deaths = 0
        self._timer: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()
        self._gone.set()
        self._served = False
        self._fate = ""  # what became of the last one that has served
        self._told = Once()
        self._ping = Timer()
        self._patience = Patience()

    @property
    def lives(self) -> bool:
        """Whether a process of the master has not been reaped yet."""
        return self._master is not None

    @property
    def serves(self) -> bool:
        """Whether a master runs here and has said that it serves."""
        return self._master is not None and "port" in self._answer

    def start(self, first: MasterProcess | None = None) -> None:
        """Start a master, or take over one that was started (and is watched) already."""
        self._timer = None
        if first is not None:
            self._record = first.record
        try:
            master = first or MasterProcess(
                *(self._config, self._bind, self._record, self._in_etcd),
                replaces=self._fate if self._served else "",
            )
        except OSError as error:
            logger.warning("the job master cannot be started: %s", error)
            self._again()
            return
        if first is None:
            master.watch(self._node.reaper)
        self._node.reaper.spared.add(master.process.pid)
        self._master = master
        self._answer = {}
        self._since = self._loop.time()
        self._gone.clear()
        os.set_blocking(master.ready_fd, False)
        os.set_blocking(master.output_fd, False)
        self._loop.add_reader(master.ready_fd, self._answered, master)
        self._loop.add_reader(master.output_fd, self._relay, master)
        self._patience.wait(ANSWER_LIMIT, self._not_ready, master)
        master.on_end(lambda code: self._ended(master, code))

    async def close(self, *, job_over: bool) -> None:
        """Let the master go, and wait a moment for its end. One that nobody else can need is killed
        then; another may have nodes yet and lives on for them."""
        await self.close_within(OVER_LIMIT if job_over else LEAVE_LIMIT)

    async def close_within(self, limit: float) -> None:
        """The same, with so many seconds for its end."""
        import asyncio

        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._master is not None:
            self._ping.cancel()
            self._patience.cancel()
            self._master.end_lifeline()
            if not self._answer:
                self.kill()  # it does not even serve yet
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), limit)
        alone = self._config.spec.max_nodes == 1
        if alone:
            self.kill()
        if self._master is not None:
            self._let_go(self._master)
        if self._master is not None and not alone:
            if self._record is not None:
                self._record.release()  # it removes the folder itself: it has seen our end
        elif (removed := self._forget()) is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(removed.wait(), RECORD_LIMIT)

    def _forget(self) -> asyncio.Event | None:
        """Remove the record, in a thread; the event is set when that is done."""
        import asyncio

        record, self._record = self._record, None
        if record is None:
            return None
        removed, loop = asyncio.Event(), self._loop

        def work() -> None:
            record.remove()
            with contextlib.suppress(RuntimeError):  # the loop did not wait for it
                loop.call_soon_threadsafe(removed.set)

        try:
            start_thread(work, "record")
        except NoThread:  # the next run sweeps it
            return None
        return removed

    def kill(self) -> None:
        """End the master that runs here, whatever state it is in."""
        if self._master is not None:
            sandbox.kill(self._master.process.pid)

    def _answered(self, master: MasterProcess) -> None:
        """It serves, or cannot; later: it has answered a ping."""
        if not (said := self._read(master, "ready_fd")):
            return
        if self._answer:
            self._ask_later(master)
            return
        try:
            answer = json.loads(said)
        except ValueError:
            return  # it died before it served; its end is told apart
        self._answer = answer if isinstance(answer, dict) else {}
        port = self._answer.get("port")
        if isinstance(port, int):
            self._served = True
            self._fate = ""
            everywhere = self._bind.host in ("::", "0.0.0.0")
            host = "127.0.0.1" if everywhere else self._bind.host
            self._bind = Endpoint(self._bind.host, port)
            self._ask_later(master)
            self._owner.master_serves(Endpoint(host, port))

    def _read(self, master: MasterProcess, name: str) -> bytes:
        """What has come from one of its pipes; nothing more is expected after the end of it."""
        fd = getattr(master, name)
        if fd < 0:
            return b""
        try:
            said = os.read(fd, RELAY_BYTES)
        except BlockingIOError:
            return b""
        if not said:
            self._loop.remove_reader(fd)
        return said

    # ------------------------------------------------------------ one that stands still

    def _ask_later(self, master: MasterProcess) -> None:
        """It has answered. One that we have let go of may live on for others."""
        self._patience.cancel()
        if not self._closing:
            self._ping.after(PING_EVERY, self._ask, master)

    def _ask(self, master: MasterProcess) -> None:
        """See whether its loop runs."""
        with contextlib.suppress(OSError):  # it is about to end, which is told apart
            os.write(master.lifeline_fd, b"\n")
        used = cpu_ticks(master.process.pid)
        self._patience.wait(ANSWER_LIMIT, self._silent, master, used)

    def _silent(self, master: MasterProcess, used: int | None) -> None:
        """`used`: its processor time when it was asked; None: it was given more time since."""
        pid = master.process.pid
        if used is not None and cpu_ticks(pid) != used and not is_stopped(pid):
            self._patience.wait(BUSY_LIMIT - ANSWER_LIMIT, self._silent, master, None)
        else:
            self._give_up(master, ANSWER_LIMIT if used is not None else BUSY_LIMIT)

    def _not_ready(self, master: MasterProcess) -> None:
        """A slow disk may keep it from serving for long; SIGSTOP must not."""
        if is_stopped(master.process.pid):
            self._give_up(master, ANSWER_LIMIT)
        else:
            self._patience.wait(ANSWER_LIMIT, self._not_ready, master)

    def _give_up(self, master: MasterProcess, limit: float) -> None:
        how = how_silent(master.process.pid)
        logger.warning("no answer of the job master for %g s: %s, and is killed", limit, how)
        self._fate = self._fate or f"gave no answer for {limit:g} s ({how}), and was killed"
        self.kill()

    def _relay(self, master: MasterProcess) -> None:
        # By way of us, so that a master which outlives us does not hold the user's pipe open.
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
        self._let_go(master)
        self._master = None
        self._node.reaper.spared.discard(master.process.pid)  # the early one may be reaped before
        self._gone.set()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        self._fate = self._fate or how
        if self._closing or code == 0:
            return  # the job is over, or we are
        if EXIT_NOT_LEADING in (code, self._answer.get("exit_code")):
            self._forget()
            self._owner.master_taken(
                str(self._answer.get("error", "the job master here leads no more"))
            )
            return
        if self._answer.get("exit_code") == EXIT_PORT_TAKEN:
            self._port_taken()
            return
        if "error" in self._answer:
            self._cannot_serve(str(self._answer["error"]))
            return
        if not self._served and self._deaths >= MAX_STILLBORN:
            self._node.fatal(f"the job master cannot be started: it {how} each time")
            return
        logger.warning("the job master %s; a new one is started, and the ranks go on", how)
        self._again()

    def _cannot_serve(self, sentence: str) -> None:
        """Something is in its way. At the job's start that ends this node. Later ranks run: it may
        pass, and they go on for `master_lost_timeout`."""
        if not self._served:
            self._node.fatal(sentence)
            return
        self._told.tell(f"no job master can be started here: {sentence}; it is tried again")
        self._again()

    def _port_taken(self) -> None:
        if self._config.rendezvous.kind not in NAMED_KINDS and self._served:
            # On loopback only we know the port: any other does as well.
            self._bind = Endpoint(self._bind.host, 0)
            self._again()
        elif self._served and (self._deaths < MAX_TAKEN or self._alone_hosts):
            self._again()  # the kernel may not have given it back yet
        else:
            self._forget()
            self._owner.master_taken(str(self._answer.get("error", "its port is taken")))

    @property
    def _alone_hosts(self) -> bool:
        """Whether no other agent can start a master in the place of ours."""
        where = self._config.rendezvous
        return where.kind == "elastic" and where.is_host is True

    def _again(self) -> None:
        if self._loop.time() - self._since > HEALTHY_AFTER:
            self._deaths = 0
        wait = RESTARTS[min(self._deaths, len(RESTARTS) - 1)]
        self._deaths += 1
        self._timer = self._loop.call_later(wait, self.start)

    def _let_go(self, master: MasterProcess) -> None:
        for fd in (master.ready_fd, master.output_fd):
            if fd >= 0:
                self._loop.remove_reader(fd)
        master.close()
