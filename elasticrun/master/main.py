"""The job master as a process: from its configuration to its exit code.

There are two ways to start it. An agent starts `python -m elasticrun.master --config-fd N` in a
session of its own; such a hosted master ignores the signals that a terminal or a scheduler sends to
every process of a job, and ends as described at `Lifetime`. A user starts `elasticrun master`
(`main(config)`); that one also ends on SIGTERM or SIGINT.

The agent writes the MasterConfig to the pipe N as a JSON object, in which `spec` is an object or
null. The master answers on `ready_fd` with one line: {"port": 29400, "status_port": 43117}, or
{"error": "...", "exit_code": 79}. After that it answers each byte on `lifeline_fd` with one on
`ready_fd`, which shows the agent that the master's loop runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from elasticrun.config import (
    EXIT_FAILED,
    EXIT_NOT_LEADING,
    EXIT_OK,
    EXIT_PORT_TAKEN,
    EXIT_USAGE,
    HEARTBEAT_TIMEOUT,
    JOIN_TIMEOUT,
    LAST_CALL_TIMEOUT,
    MASTER_LOST_TIMEOUT,
    REATTACH_GRACE,
    MasterConfig,
)
from elasticrun.core.events import JobOver, Note, Tick
from elasticrun.core.job.job import Job
from elasticrun.core.persisted import Facts
from elasticrun.core.rounds.failures import Ending, code_of
from elasticrun.core.sight.picture import Picture
from elasticrun.host import log, user_folder
from elasticrun.host.runs.opening import RunRefused
from elasticrun.host.system import title
from elasticrun.host.system.processes import ProcessId, set_name
from elasticrun.host.system.sandbox import (
    NoThread,
    launcher_problem,
    raise_file_limit,
    start_thread,
)
from elasticrun.master.joining import Joining
from elasticrun.master.loop import Listeners, Loop, RecordStuck, StateMachineFault
from elasticrun.master.outward.outward import Outward
from elasticrun.master.page.http import StatusPage
from elasticrun.master.page.readers import Readers, reachable
from elasticrun.master.records import Records
from elasticrun.master.server import MAX_CALLS, METHODS, Servicer
from elasticrun.master.store import StoreRefused
from elasticrun.master.trace.writer import MasterStart
from elasticrun.wire import auth
from elasticrun.wire.auth import TlsError, operator_token, reader_token
from elasticrun.wire.messages import MAX_NODES, End, JobSpec
from elasticrun.wire.rpc.channel import ListenError, listen, make_server, server_options
from elasticrun.wire.types import loads, mint_nonce

MAX_CONFIG_BYTES: Final = 1024 * 1024
"""Maximum bytes read from the pipe; a configuration has a few hundred."""

OWNER_EXITED: Final = 0.5
"""Seconds without an attached agent after which the master ends, if its owner has exited and no
other node may need it. Short, because the owner's stream breaks at the same moment."""

LAST_WORDS: Final = 5.0
"""Maximum seconds for reading what an owner that has exited sent last: its stream ends after
that."""

STOP_GRACE: Final = 0.5
"""Seconds for streams to close when the server stops; the agents already have the outcome."""

SUCCEEDED_LINGER: Final = 30.0
"""Seconds that nodes have to connect and get the outcome of a job that had already succeeded."""

LISTING_LIMIT: Final = 2.0
"""Seconds that a hung folder may delay the master's exit."""

GC_THRESHOLDS: Final = (20_000, 50, 100)
"""Thresholds of the garbage collector. Each session is hundreds of long-lived objects. With
Python's defaults (700, 10, 10) the collector traversed them constantly while a thousand nodes
joined. That took a quarter of the CPU time and freed nothing, because reference counts free our
objects."""

logger = logging.getLogger("elasticrun")


def main(config: MasterConfig, *, hosted: bool = False) -> int:
    """Serve one job until it is over; returns the exit code. `hosted`: started by an agent."""
    lines = log.set_up(log.NOTICE if hosted else logging.INFO)
    log.set_prefix("elasticrun master")
    # asyncio, grpc and uvicorn log what strangers send, which is of no use to the user
    logging.getLogger().handlers[:] = [logging.NullHandler()]
    raise_file_limit()  # every agent is a socket, and the usual soft limit is 1024
    _name_process(config.spec.job_id if hosted and config.spec else "")
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    if why := launcher_problem():
        return _failed(config, why, EXIT_FAILED)
    try:
        return asyncio.run(Master(config, hosted=hosted).run())
    except ListenError as wrong:
        return _failed(config, str(wrong), EXIT_PORT_TAKEN if wrong.taken else EXIT_FAILED)
    except TlsError as wrong:
        return _failed(config, str(wrong), EXIT_USAGE)
    except RunRefused as wrong:
        return _failed(config, str(wrong), EXIT_FAILED)
    except StoreRefused as wrong:
        return _failed(config, str(wrong), wrong.exit_code)
    except NoThread as wrong:
        return _failed(config, str(wrong), EXIT_FAILED)
    except (StateMachineFault, RecordStuck) as fault:
        logger.error("the master exits: %s", fault)
        return EXIT_FAILED
    finally:
        lines.flush(1.0)


def _failed(config: MasterConfig, reason: str, code: int) -> int:
    """Report a failed start, to the agent (which shows it to the user) or on stderr; returns
    `code`."""
    if config.ready_fd >= 0:
        _write_line(config.ready_fd, {"error": reason, "exit_code": code})
    else:
        print(f"elasticrun master: {reason}", file=sys.stderr)
    return code


def _write_line(fd: int, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the reader has exited; the lifeline handles that
        os.write(fd, json.dumps(answer).encode() + b"\n")


async def _attempt(what: str, step: Callable[[], object]) -> None:
    """Run one shutdown step. A failure is logged, so that the next step runs."""
    try:
        if isinstance(done := step(), Awaitable):
            await done
    except Exception:
        logger.exception("%s failed", what)


def _name_process(job_id: str) -> None:
    """Set the process name for `ps -o comm` and `top`; the kernel keeps 15 bytes. `job_id`: also
    set the process title; "": keep the command line, which the user typed."""
    set_name(b"elasticrun-mast")
    if job_id:
        with contextlib.suppress(OSError, AttributeError):
            title.set_title(os.fsencode(title.MASTER.format(job_id)))


class Lifetime:
    """Decides when the master ends: owns the one timer that may end it, and the future `done`. The
    master ends for one of four reasons:

    over       the job has ended and every agent has disconnected, or `linger` seconds after the
               job's end; always the latter if an agent's stream broke, because it may reconnect
    alone      no agent for `lost` seconds (a master started by hand waits forever for its first)
    lifeline   EOF: ends soon after no agent is attached any more, without `outlive` LAST_WORDS
               seconds later at most
    signal     SIGTERM or SIGINT to a master that was started by hand
    """

    def __init__(self, config: MasterConfig, *, hosted: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        """The exit code, and the reason for the log."""
        self.servicer: Servicer | None = None
        """The gRPC service, once it exists."""
        self.outward = Outward(config, hosted=hosted)
        """Gets the job's outcome."""
        self._linger, self._outlive = config.linger, config.outlive
        spec = config.spec
        self._max_nodes = spec.max_nodes if spec and spec.max_nodes > 1 else MAX_NODES
        self._lost = spec.master_lost_timeout if spec else MASTER_LOST_TIMEOUT
        self._attached = 0
        self._outcome: JobOver | None = None
        self._began_over = False
        self._hosted = hosted
        self._owner_exited = False
        self._timer: asyncio.TimerHandle | None = None
        if hosted:
            self._on_alone()

    def on_count(self, attached: int) -> None:
        """Handle a change of the number of attached agents."""
        self._attached = attached
        if self._outcome is not None:
            dialling = self.servicer is not None and self.servicer.may_reconnect()
            all_attached = self.servicer is not None and len(self.servicer.nodes) >= self._max_nodes
            all_heard = not dialling and (all_attached or not self._began_over)
            if not attached and (all_heard or self._ends_with_owner):
                self._end(self._code(self._outcome), self._outcome.reason)
        elif not attached:
            self._on_alone()
        elif not self._ends_with_owner:
            self._arm(None)

    def on_over(self, outcome: JobOver, found: Picture) -> None:
        """Handle the job's outcome, which was sent to the attached agents; `found`: its last
        picture."""
        if self._outcome is None and not self._began_over:
            self.outward.over(outcome, found)
            self._start_linger(outcome)

    def _start_linger(self, outcome: JobOver) -> None:
        self._outcome = outcome
        self._arm(self._linger, self._code(outcome), outcome.reason)
        self.on_count(self._attached)

    def on_already_over(self, outcome: JobOver, late: float = 0.0) -> None:
        """Handle that the job had already ended when this master started.

        This master cannot know which agents already have the outcome, so it serves them for the
        whole of `linger`, or `late` seconds if that is longer. A master started by hand serves them
        until a user ends it."""
        self._began_over = True
        self.outward.close_files()
        self._linger = max(self._linger, late)
        if self._hosted:
            self._start_linger(outcome)

    def is_orphan(self, lifeline_fd: int) -> bool:
        """Whether the agent that started this master has exited. Checks the lifeline again, because
        its EOF may not have been handled yet."""
        if self._owner_exited or lifeline_fd < 0:
            return self._owner_exited
        poller = select.poll()
        poller.register(lifeline_fd, 0)
        return bool(poller.poll(0))  # POLLHUP: the other end is closed, even with unread data

    def _code(self, outcome: JobOver) -> int:
        """The master's exit code at the job's end: 0 if hosted, else that of the job."""
        return EXIT_OK if self._hosted else outcome.exit_code

    def on_owner_exit(self) -> None:
        """Handle EOF on the lifeline: the agent that started this master has exited."""
        self._owner_exited = True
        if self._attached and self._ends_with_owner:
            self._arm(LAST_WORDS, EXIT_OK, "the agent that started this master has ended")
        else:
            self.on_count(self._attached)

    @property
    def _ends_with_owner(self) -> bool:
        """Whether this master has to end because its owner has exited."""
        return self._owner_exited and not self._outlive

    def on_signal(self, signum: int, name: str) -> None:
        """Handle a signal to a master that was started by hand: end."""
        self._end(128 + signum, f"received {name}")

    def _on_alone(self) -> None:
        if self._outcome is not None or self._began_over:
            return
        if self._owner_exited:
            # If other nodes were attached, they may have lost their streams only briefly.
            several = self._outlive and self.servicer is not None and len(self.servicer.nodes) > 1
            wait = REATTACH_GRACE if several else OWNER_EXITED
            self._arm(
                wait,
                EXIT_OK,
                "the agent that started this master has exited, and no other is connected",
            )
        else:
            code = code_of(Ending.TOO_FEW)
            self._arm(self._lost, code, f"no agent for {self._lost:g} s")

    def _arm(self, after: float | None, code: int = 0, reason: str = "") -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if after is not None:
            self._timer = self._loop.call_later(after, self._end, code, reason)

    def _end(self, code: int, reason: str) -> None:
        self._arm(None)
        if not self.done.done():
            self.done.set_result((code, reason))


def _placeholder_spec(job_id: str) -> JobSpec:
    """A spec for a finished job whose spec no agent has sent; its values have no effect."""
    return JobSpec(
        job_id=job_id, min_nodes=1, max_nodes=1, node_unit=1, max_restarts=0, restart_backoff=0.0,
        restart_window=0.0, join_timeout=JOIN_TIMEOUT, last_call_timeout=LAST_CALL_TIMEOUT,
        heartbeat_timeout=HEARTBEAT_TIMEOUT, grow="auto", grow_cooldown=0.0, restart_grace=0.0,
        master_lost_timeout=MASTER_LOST_TIMEOUT,
    )  # fmt: skip


class Master:
    """Builds and shuts down all parts of one job's master."""

    def __init__(self, config: MasterConfig, *, hosted: bool) -> None:
        self._config = config
        self._hosted = hosted
        self._mint: Callable[[], str] = mint_nonce
        # The term only has to increase from one master of a job to the next, even without a record.
        # Wall-clock time does that, and a state machine that adopts a round uses a higher term if
        # the agents report one.
        self._term = time.time_ns() // 10**6

    async def run(self) -> int:
        """Serve until the master ends; returns the exit code. Raises ListenError if the port cannot
        be opened, TlsError, RunRefused or StoreRefused if a file, the run folder or the record
        cannot be used, StateMachineFault on repeated bugs, RecordStuck."""
        config = self._config
        lifetime = Lifetime(config, hosted=self._hosted)
        self._watch(lifetime)
        # The port is bound first: the process that holds it is the master and owns the record.
        silence = config.spec.heartbeat_timeout if config.spec else HEARTBEAT_TIMEOUT

        def served(context: Any, serve: Callable[[Servicer, Any], Awaitable[None]]) -> Any:
            return serve(servicer, context)  # `servicer` is set before the server starts

        handlers = (partial(served, serve=method) for method in METHODS)
        server = make_server(*handlers, max_calls=MAX_CALLS, options=server_options(silence))
        pem = (
            auth.read_pem(config.identity.tls, serving=True)
            if config.identity.tls is not None
            else None
        )
        port = listen(server, config.host, config.port, pem)
        records = Records(config, hosted=self._hosted)
        job = await self._restore(records, port, lifetime)
        # without a job token, only this user can operate the job, and only on this host
        operator = operator_token(config.identity.token or secrets.token_hex(32))
        readers = Readers(operator, guarded=bool(config.identity.token))
        loop = self._build_loop(job, records, lifetime, port, readers)
        servicer = lifetime.servicer = Servicer(
            loop,
            config.identity.job_id,
            token=config.identity.token,
            operator=operator,
            term=self._term,
            joining=Joining(config.identity.job_id, config.identity.token, config.launch.to_join),
            on_count=lifetime.on_count,
        )
        page = StatusPage(loop, readers)
        status_port = self._open_page(page)
        await server.start()
        if config.ready_fd >= 0:
            _write_line(config.ready_fd, {"port": port, "status_port": status_port})
        listing = Listing(config, port, loop, operator, lifetime.outward)
        lifetime.outward.start()
        logger.info("serving job %r on %s:%d", config.identity.job_id, config.host, port)
        grace = STOP_GRACE
        try:
            code = await self._serve(loop, records, lifetime)
            if code == EXIT_NOT_LEADING:
                grace = 0.0
            else:
                await asyncio.to_thread(lifetime.outward.close)
            return code
        finally:
            await _attempt("sending events", lambda: asyncio.to_thread(lifetime.outward.close))
            await _attempt("removing the listing", listing.remove)
            await _attempt("closing the status page", page.close)
            await _attempt("stopping the server", lambda: server.stop(grace))
            await _attempt("closing the record", records.close)
            if self._hosted and lifetime.is_orphan(config.lifeline_fd):
                await _attempt("removing the record", records.remove)

    def _build_loop(
        self, job: Job, records: Records, lifetime: Lifetime, port: int, readers: Readers
    ) -> Loop:
        """Build the loop, with its listeners and the values that only the configuration has."""
        config, outward = self._config, lifetime.outward
        listeners = Listeners(
            on_noted=outward.noted,
            on_metrics=outward.metrics,
            on_stepped=outward.stepped,
            on_formed=partial(outward.formed, f"{reachable(config.host)}:{port}"),
            on_filed=outward.filed,
            on_judged=outward.judged,
            on_slow=outward.slow,
            on_over=lifetime.on_over,
        )
        store, tracer = records.store, records.trace
        loop = Loop(
            job,
            job_id=config.identity.job_id,
            store=store,
            tracer=tracer,
            listeners=listeners,
            readers=readers,
        )
        loop.name, loop.sources = outward.job_name, config.launch.sources
        return loop

    async def _serve(self, loop: Loop, records: Records, lifetime: Lifetime) -> int:
        """Run until the lifetime, the state machine or the leadership ends; returns the exit
        code."""
        turning = asyncio.ensure_future(loop.run())
        ends: set[asyncio.Future[Any]] = {turning, lifetime.done}
        if records.store is not None:
            ends.add(records.store.lost)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if records.store is not None and records.store.lost.done():
                loop.stop_sending()
                reason = records.store.lost.result()
                logger.warning("the master ends: %s", reason)
                return EXIT_NOT_LEADING
            if turning.done():
                turning.result()  # raises
            code, reason = lifetime.done.result()
            logger.info("the master ends: %s", reason)
            return code
        except StateMachineFault:
            await records.crashed()
            raise
        finally:
            turning.cancel()

    async def _restore(self, records: Records, port: int, lifetime: Lifetime) -> Job:
        """Build the state machine from the previous master's facts, if any. Opens the record, the
        run folder and the trace; sets `_term`."""
        facts = await records.open(port)
        if records.store is not None and records.store.term:
            self._term = records.store.term
        if facts is not None:
            facts = records.with_hint(facts)
            self._term = max(self._term, facts.term + 1)
            try:
                # A trial run: facts that fail here are discarded.
                self._build_job(facts).step(Tick(), time.monotonic())
            except Exception as fault:
                logger.error("a bug: %s while reading the record", fault, exc_info=fault)
                await records.discard(f"this master cannot load it ({fault!r})")
                facts = None
        replaces = self._config.replaces
        if done := await lifetime.outward.open(is_successor=facts is not None or bool(replaces)):
            facts = self._succeeded_facts(done)
        elif replaces:
            lifetime.outward.noted(Note(f"the previous job master {replaces}", "warning"))
        job = self._build_job(facts)
        trace = records.begin_trace(
            MasterStart(self._config.identity.job_id, self._term, self._config.spec, facts)
        )
        if trace is not None:
            self._mint = trace.mint
        if facts is not None and facts.outcome is not None:
            logger.warning("job %r: %s", self._config.identity.job_id, facts.outcome.reason)
            outcome = JobOver(facts.outcome.exit_code, facts.outcome.reason)
            lifetime.on_already_over(outcome, SUCCEEDED_LINGER if done else 0.0)
        return job

    def _succeeded_facts(self, sentence: str) -> Facts:
        """Facts for a job that had already succeeded in its run folder, so that every node that
        joins gets the outcome."""
        spec = self._config.spec or _placeholder_spec(self._config.identity.job_id)
        over = End(EXIT_OK, sentence, ())
        return Facts(spec, self._term, 0, outcome=over)

    def _build_job(self, facts: Facts | None) -> Job:
        return Job(self._config.spec, self._term, lambda: self._mint(), facts)

    def _open_page(self, page: StatusPage) -> int:
        """Open the page; returns its port. If that fails, logs it and returns 0: the job runs
        without a page."""
        host, port = self._config.status_host, self._config.launch.status_port
        try:
            return page.listen(host, port)
        except OSError as wrong:
            logger.warning("no status page on %s:%d: %s", host, port, wrong.strerror or wrong)
            return 0

    def _watch(self, lifetime: Lifetime) -> None:
        """Handle signals (unless hosted) and the lifeline, which may end this process."""
        loop = asyncio.get_running_loop()
        if not self._hosted:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, lifetime.on_signal, int(number), number.name)
        fd, answers = self._config.lifeline_fd, self._config.ready_fd
        if fd >= 0:
            if answers >= 0:
                os.set_blocking(answers, False)
            loop.add_reader(fd, _read_lifeline, loop, fd, answers, lifetime)


def _read_lifeline(
    loop: asyncio.AbstractEventLoop, fd: int, answers: int, lifetime: Lifetime
) -> None:
    """Answer the owner's pings on the lifeline, or handle its EOF."""
    try:
        pings = os.read(fd, 4096)
    except BlockingIOError:
        return
    except OSError:
        pings = b""
    if not pings:
        loop.remove_reader(fd)
        lifetime.on_owner_exit()
    elif answers >= 0:
        with contextlib.suppress(OSError):  # the owner does not read, or has exited
            os.write(answers, pings)


class Listing:
    """This master's file in the user's folder, by which commands on this host find the job. A
    thread writes, renews and removes it, because the file system may hang."""

    def __init__(
        self, config: MasterConfig, port: int, loop: Loop, operator: str, outward: Outward
    ) -> None:
        """`operator`: the operator's token; `outward`: has the job's name and run folder."""
        self._entry = user_folder.Published(
            job_id=config.identity.job_id,
            host=reachable(config.host),
            port=port,
            status_url=loop.readers.link().partition("?")[0],
            process=ProcessId.own(),
            reader=reader_token(config.identity.token),
            operator=operator,
            tls=config.identity.tls is not None,
            began=time.time(),
            run=outward.run_folder,
            name=outward.job_name,
        )
        self._figures = loop.figures
        self._path: Path | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        with contextlib.suppress(NoThread):  # not listed
            self._thread = start_thread(self._keep, "listing")

    def remove(self) -> None:
        """Remove the file. Blocks, LISTING_LIMIT seconds at most; readers detect a stale file."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=LISTING_LIMIT)

    def _keep(self) -> None:
        with contextlib.suppress(OSError):
            folder = user_folder.user_folder(os.environ)
            self._adopt_start_time(folder)
            user_folder.published(folder)  # also removes files of killed masters
            self._path = user_folder.publish(folder, self._entry)
        while not self._over.wait(user_folder.RENEW_INTERVAL):
            if self._path is not None:
                with contextlib.suppress(OSError):
                    user_folder.renew(self._path, self._entry)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _adopt_start_time(self, folder: Path) -> None:
        """If an earlier master of this job was killed on this host, adopt the start time in the
        file that it left."""
        before = user_folder.began_before(folder, self._entry.job_id, self._entry.port)
        if 0 < before < self._entry.began:
            self._figures.began -= self._entry.began - before
            self._entry = replace(self._entry, began=before)


# ---------------------------------------------------------------- python -m elasticrun.master


def config_from_json(text: str) -> MasterConfig:
    """Decode the configuration that an agent writes to the pipe. Raises ValueError, with a
    sentence, if it is invalid."""
    try:
        return loads(text, MasterConfig)
    except ValueError as wrong:
        raise ValueError(f"this is not a master's configuration: {wrong}") from None


def hosted_main(argv: list[str]) -> int:
    """The entry point of a master that an agent starts; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m elasticrun.master",
        description="Started by an agent; use `elasticrun master` by hand.",
    )
    parser.add_argument("--config-fd", type=int, required=True, help="pipe with the configuration")
    fd = parser.parse_args(argv).config_fd
    try:
        with open(fd, "rb") as pipe:
            config = config_from_json(pipe.read(MAX_CONFIG_BYTES).decode())
    except (OSError, ValueError) as wrong:
        print(f"elasticrun master: {wrong}", file=sys.stderr)
        return EXIT_USAGE
    return main(config, hosted=True)
