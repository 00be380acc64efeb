"""Jobs on this host: agents in their own sessions, which outlive the terminal.

A job of one node is standalone. Several nodes each have an agent on this host; they meet on
loopback and split the host's GPUs, which is for testing what happens when nodes join and leave. An
agent is identified by pid and start time, so that a reused pid is never mistaken for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from elasticrun.core.words import names, plural
from elasticrun.host.runs.layout import CONSOLE, ENDED, LAST_WORD, LocalAgent, RunFolder, RunResult
from elasticrun.host.system.processes import ProcessId
from elasticrun.jobs.backend import (
    RequestFailed,
    Submission,
    make_token,
    submission,
    was_submitted,
    write_submission,
)
from elasticrun.jobs.rows import SUSPENDED, JobRow, row_of
from elasticrun.wire.env import GIT_PASSWORDS, GIT_USERNAMES, LAST_WORDS
from elasticrun.wire.messages import Reply, Request

SECRETS: Final = ("ELASTICRUN_TOKEN", *GIT_USERNAMES, *GIT_PASSWORDS)
"""Variables removed from the environment of a command that `execute` runs."""

LEAVE_LIMIT: Final = 600.0
"""Seconds that a job may take to save and exit, whatever its --departure-grace."""

START_LIMIT: Final = 2.0
"""Seconds for which `submit` watches for launchers that fail to start."""

START_POLL: Final = 0.05

END_LIMIT: Final = 60.0
"""Seconds that agents of a deleted job have to exit after SIGTERM and again after SIGKILL, and that
a master has to exit once its launchers have."""


class LocalJobs:
    """The backend of this host."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def submit(self, run: RunFolder, submission: Submission) -> str:
        """Start one agent per node, all at once; for `hosts`, the process that starts the agents
        there. Raises RequestFailed if they exit within START_LIMIT seconds without having
        begun."""
        count = 1 if submission.hosts else submission.scaled or submission.max_nodes
        port = _free_port() if submission.max_nodes > 1 and not submission.hosts else 0
        self._start_agents(run, replace(submission, port=port, agents=()), count)
        _await_start(run, submission.name)
        nodes = f", with {count} agents as its nodes" if count > 1 else ""
        where = names(submission.hosts) if submission.hosts else "this host"
        return f"job {submission.name} has started on {where}{nodes}"

    def resume(self, run: RunFolder) -> str:
        """Start the same command in the same folder, with the environment of the user who resumes
        the job. Raises RequestFailed if the job runs or has succeeded."""
        known = submission(run)
        if living_agents(run):
            raise RequestFailed(f"job {known.name} is running: there is nothing to resume")
        _await_master_exit(run)
        before = run.result()
        if before is not None and before.state == "succeeded":
            raise RequestFailed(f"job {known.name} has succeeded: submit it again to rerun it")
        try:
            write_submission(run, replace(known, **starter_fields()))
            run.prepare_restart()
        except OSError as wrong:
            raise RequestFailed(f"the run folder cannot be written: {wrong}") from None
        try:
            return self.submit(run, known)
        except RequestFailed:
            if before is not None:  # restore the previous result
                with contextlib.suppress(OSError):
                    run.write_result(before)
            raise

    def scale(self, run: RunFolder, request: Request, send: Callable[[Request], Reply]) -> str:
        """Change the master's maximum, and start the missing agents. For a job that has ended
        without success, only record the number for its resume."""
        known, job = submission(run), run.job()
        if known.gpus and request.number > known.max_nodes:
            raise RequestFailed(
                f"{plural(known.max_nodes, 'node')} share all GPUs of this host: none is "
                "free for another node"
            )
        if request.number > 1 and known.max_nodes == 1 and run.state() != "succeeded":
            raise RequestFailed(
                f"job {known.name} was submitted for exactly one node, so no other can join; "
                f"submit it with --nodes 1:{request.number} to make it elastic"
            )
        is_at_rest = not living_agents(run) and run.state() in ENDED and run.state() != "succeeded"
        if is_at_rest:
            answer = (
                f"job {known.name} is {_listed_state(run)}: it will use at most "
                f"{plural(request.number, 'node')} when it resumes"
            )
        else:
            answer = send(request).reason
        if job is not None:
            low = min(known.min_nodes, request.number)
            known = replace(known, scaled=request.number)
            with contextlib.suppress(OSError):  # a full disk; the master has the number
                run.write_job(replace(job, nodes=f"{low}:{request.number}"))
                write_submission(run, known)
        missing = request.number - len(living_agents(run))
        if known.port and missing > 0 and not is_at_rest:
            self._start_agents(run, known, missing)
            answer += f"; {plural(missing, 'agent')} more started here"
        return answer

    def suspend(self, run: RunFolder) -> str:
        """Send SIGTERM, and wait while the agents save a step and leave."""
        name = submission(run).name
        if not _signal(living_agents(run), signal.SIGTERM):
            if run.is_suspended():
                return f"job {name} is already suspended"
            _await_master_exit(run)
            raise RequestFailed(f"job {name} does not run: {run.state()}")
        if left := _await_end(living_agents(run), LEAVE_LIMIT):
            raise RequestFailed(f"job {name} is still leaving: {names([one.node for one in left])}")
        _await_master_exit(run)  # it writes the result, and may outlive the agents
        again = f"continue with `elasticrun resume {name}`"
        state = run.state()
        if state == "lost":  # it had not begun, or its hosts do not share the folder
            _record_end(
                run, "stopped", f"{SUSPENDED}; the saved step is unknown here", suspended=True
            )
            return f"the agents of job {name} have saved and exited; {again}"
        if state == "saved":
            step = result.saved if (result := run.result()) else -1
            at = f" at step {step}" if step >= 0 else ""
            _record_end(run, "saved", f"{SUSPENDED}{at}", suspended=True)
            return f"job {name} is suspended{at}; {again}"
        if state == "succeeded":
            return f"job {name} had succeeded before the suspend"
        _record_end(
            run, "stopped", f"{SUSPENDED}; no step was saved", suspended=True
        )  # not a failure
        return (
            f"job {name} is suspended, but no step was saved; {again}, from an earlier "
            "checkpoint, or from step 0 without a Checkpointer"
        )

    def stop(self, run: RunFolder) -> str:
        """Send SIGTERM to the agents of a job whose master does not answer. A suspended job is
        recorded as stopped."""
        if not _signal(living_agents(run), signal.SIGTERM):
            result = run.result()
            if result is None or not result.suspended:
                raise RequestFailed(f"job {_job_name(run)} does not run: {run.state()}")
            _record_end(run, "stopped", f"it was {result.reason}")
            return f"job {_job_name(run)} is stopped; it was {result.reason}"
        if run.state() == "submitted":
            _record_end(run, "stopped", "stopped before its start")
        return f"job {_job_name(run)} has no responding master: its agents were sent SIGTERM"

    def terminate(self, run: RunFolder) -> None:
        """Send SIGTERM, and SIGKILL after END_LIMIT seconds. The end that this causes is
        recorded as "stopped"."""
        here = living_agents(run)
        _signal(here, signal.SIGTERM)
        left = _await_end(here, END_LIMIT)
        _signal(left, signal.SIGKILL)
        if left := _await_end(left, END_LIMIT):
            raise RequestFailed(f"process {left[0].process.pid} cannot be ended")
        _await_master_exit(run)
        if here and run.state() in ("failed", "interrupted"):
            _record_end(run, "stopped", "ended by `elasticrun delete`")

    def execute(self, run: RunFolder, node: str, command: Sequence[str]) -> int:
        """Run it in the working directory and with the environment of the node's agent, of any
        agent if `node` is ""."""
        here = living_agents(run)
        import psutil

        one = _find_agent(here, node, _job_name(run))
        try:
            agent = psutil.Process(one.process.pid)
            environ = agent.environ()
            for name in SECRETS:  # an agent masks their values
                environ.pop(name, None)
            return subprocess.run(command, env=environ, cwd=agent.cwd(), check=False).returncode
        except psutil.Error as wrong:
            raise RequestFailed(f"{command[0]} cannot be run: {wrong}") from None
        except OSError as wrong:
            raise RequestFailed(f"{command[0]} cannot be run: {wrong.strerror}") from None

    def jobs(self, rows: Sequence[JobRow]) -> list[JobRow]:
        """The rows unchanged: the run folders already hold all that is known."""
        return list(rows)

    def _start_agents(self, run: RunFolder, known: Submission, count: int) -> None:
        """Start `count` more agents and record each. If one cannot start, signal all to exit and
        raise RequestFailed."""
        here = {one.node for one in living_agents(run)}
        free = [node for at in range(known.max_nodes + count) if (node := f"node{at}") not in here]
        started = [one for one in known.agents if one.node in here]
        try:
            for node in free[:count]:
                started.append(self._start_agent(run, known, node))
                write_submission(run, replace(known, agents=tuple(started)))
        except OSError as wrong:
            _signal(started, signal.SIGTERM)
            raise RequestFailed(f"the job cannot be started: {wrong}") from None

    def _start_agent(self, run: RunFolder, known: Submission, node: str) -> LocalAgent:
        words = [f"--run-dir={run.path}", *rendezvous_flags(known, node, known.port)]
        environ = {**self._environ, **known.env, LAST_WORDS: str(run.path / LAST_WORD)}
        given = any(word.startswith("--token-file=") for word in known.flags)
        if (known.port or known.hosts) and not given:
            words += [f"--token-file={make_token(run)}"]
        if known.port:
            at, nodes = int(node.removeprefix("node")), known.max_nodes
            if share := known.gpus[at % nodes :: nodes]:
                environ["CUDA_VISIBLE_DEVICES"] = ",".join(share)
        # -P: keeps the working directory off sys.path, as the elasticrun command does
        command = [sys.executable, "-P", "-m", "elasticrun", *words, *known.flags, *known.program]
        with open(run.path / CONSOLE, "ab") as console:
            process = subprocess.Popen(
                command,
                cwd=known.workdir,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        return LocalAgent(node, ProcessId.of(process.pid))


def rendezvous_flags(known: Submission, node: str, port: int) -> list[str]:
    """The flags that name the job, and by which the agent of a node finds the others."""
    words = [f"--name={known.name}", f"--rdzv-id={known.name}"]
    if known.hosts:
        return words
    if known.max_nodes == 1:
        return [*words, "--standalone"]
    most = known.scaled or known.max_nodes
    words += [f"--nnodes={min(known.min_nodes, most)}:{most}", f"--node-id={node}"]
    words += [f"--node-rank={node.removeprefix('node')}"]  # a preference only
    return [*words, "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]


# ---------------------------------------------------------------- the job's processes


def living_agents(run: RunFolder) -> list[LocalAgent]:
    """The running agents; for a job that was not submitted, its launching process. Raises
    RequestFailed if they run on another host or in another PID namespace."""
    job, own = run.job(), os.uname().nodename
    if was_submitted(run):
        known = submission(run)
        host, name = known.host, known.name
        agents = [one for one in run.agents() if one.node]
    elif job is not None and job.pid:
        host, name = job.host, job.name
        agents = [LocalAgent(job.host, job.process)]
    else:
        submission(run)  # raises RequestFailed with the reason
        return []
    alive = [one for one in agents if one.process.is_alive() is not False]
    found = [one for one in alive if one.process.is_local]
    if host != own and not found:
        raise RequestFailed(f"job {name} was started on {host}: run this there")
    if alive and not found:
        raise RequestFailed(
            f"job {name} was started in another container or PID namespace of {host}: run "
            "this there"
        )
    return found


def starter_fields() -> dict[str, Any]:
    """The fields of a submission that record this process as the one that starts its agents."""
    return {"agents": (LocalAgent("", ProcessId.own()),)}


def _record_end(run: RunFolder, state: str, reason: str, *, suspended: bool = False) -> None:
    """Record why the job ended; called by the process that ended it, because the master knows only
    of a signal. Ignores OSError."""
    result = run.result() or RunResult(job=_job_name(run), state=state, ended=time.time())
    with contextlib.suppress(OSError):
        run.write_result(replace(result, state=state, reason=reason, suspended=suspended))


@contextlib.contextmanager
def _process(one: LocalAgent) -> Iterator[int]:
    """A pidfd of exactly this process, not of a later process with its pid. Raises OSError."""
    fd = os.pidfd_open(one.process.pid)
    try:
        if not (one.process.is_local and one.process.is_alive()):
            raise ProcessLookupError(one.process.pid)
        yield fd
    finally:
        os.close(fd)


def _signal(agents: Iterable[LocalAgent], number: int) -> int:
    """Signal the agents. Returns how many were signaled."""
    count = 0
    for one in agents:
        with contextlib.suppress(OSError), _process(one) as fd:
            signal.pidfd_send_signal(fd, number)
            count += 1
    return count


def _await_end(agents: Sequence[LocalAgent], limit: float) -> list[LocalAgent]:
    """Wait for the agents to exit. Returns those that still run after `limit` seconds."""
    end = time.monotonic() + limit
    for one in agents:
        with contextlib.suppress(OSError), _process(one) as fd:
            select.select([fd], [], [], max(0.0, end - time.monotonic()))
    return [one for one in agents if one.process.is_alive()]


def _find_agent(agents: Sequence[LocalAgent], node: str, job: str) -> LocalAgent:
    if not agents:
        raise RequestFailed(f"job {job} does not run, so there is no node to run a command on")
    named = [one for one in agents if one.node == node] if node else agents
    if len(named) == 1 or (named and not node):
        return named[0]
    raise RequestFailed(
        f"job {job} has no node {node}: it has {names([one.node for one in agents])}"
    )


def _listed_state(run: RunFolder) -> str:
    """The job's state, as lists show it."""
    job = run.job()
    return row_of(run, job).state if job else run.state()


def _await_master_exit(run: RunFolder) -> None:
    """Wait until the job's master, which may outlive its launchers, releases the run folder: no
    other master may start earlier. Raises RequestFailed after END_LIMIT seconds."""
    end = time.monotonic() + END_LIMIT
    while run.is_locked():
        if time.monotonic() > end:
            raise RequestFailed(
                f"a master of job {_job_name(run)} still runs in {run.path}: stop it first"
            )
        time.sleep(START_POLL)


def _await_start(run: RunFolder, name: str) -> None:
    """Wait until the job has begun, for START_LIMIT seconds at most. Raises RequestFailed if its
    launchers exit first."""
    end = time.monotonic() + START_LIMIT
    with contextlib.suppress(KeyboardInterrupt):  # ends only the waiting: the job has started
        while run.state() == "submitted" and time.monotonic() < end:
            _await_end(run.live_agents(), START_POLL)
    if run.state() == "failed" and run.result() is None:
        job = run.job()
        why = run.last_words(job) if job is not None else run.last_line()
        raise RequestFailed(f"job {name} cannot start: {why}")


def _job_name(run: RunFolder) -> str:
    job = run.job()
    return job.name if job else run.path.name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
