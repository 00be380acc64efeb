"""Starts the jobs and commands that the parts measure, and waits for what they report."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.gpu.results import PART
from benchmarks.stage import ELASTICRUN, TORCHRUN, Fact, Job, TookTooLong, job
from elasticrun.agent import warm
from elasticrun.wire.env import WARM_SERVER

RANKS: Final = Path(__file__).parent / "ranks.py"
PROBES: Final = Path(__file__).parent / "probes.py"
NO_BACKOFF: Final = "--restart-backoff=0"
POLL: Final = 0.1
"""Seconds between two reads of a console."""

__all__ = ["ELASTICRUN", "TORCHRUN", "Fact", "Job", "TookTooLong"]


class Answer(NamedTuple):
    """What a command has printed; `code` is None if it was killed at its limit."""

    code: int | None
    said: str
    seconds: float

    @property
    def last_line(self) -> str:
        return (self.said.strip().splitlines() or ["-"])[-1]


def ask(command: Sequence[str], limit: float, env: Mapping[str, str] | None = None) -> Answer:
    """Run a command until it exits or `limit` seconds are over."""
    began = time.monotonic()
    child = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    code: int | None = None
    try:
        said = child.communicate(timeout=limit)[0]
        code = child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        said = child.communicate()[0]
    return Answer(code, said, time.monotonic() - began)


def elasticrun(*words: str, limit: float = 30.0) -> Answer:
    """Run a verb of elasticrun."""
    return ask([sys.executable, "-m", "elasticrun", *words], limit)


def probe(*words: str, limit: float, env: Mapping[str, str] | None = None) -> Answer:
    """Run a probe in its own process (probes.py)."""
    return ask([sys.executable, str(PROBES), *words], limit, env)


class Running:
    """A job of ranks.py."""

    def __init__(self, run: Job, name: str) -> None:
        self.run, self.name = run, name

    def reach(
        self, event: str, count: int = 1, *, limit: float = 60.0, life: int | None = None
    ) -> list[Fact]:
        """Wait for `count` reports of an event. Raises TookTooLong if they do not come."""
        self.run.until(lambda: len(self.run.of(event, life)) >= count, limit)
        found = self.run.of(event, life)
        if len(found) < count:
            codes = [agent.poll() for agent in self.run.agents]
            text = f"the job ended with {codes}, with {len(found)} of {count} reports of {event}"
            raise TookTooLong(f"{text}\n{self.run.console()}")
        return found

    def end(self, limit: float = 60.0) -> int:
        """Wait for the launcher's exit. Returns its code; raises TookTooLong."""
        agent = self.run.agents[0]
        self.run.until(lambda: agent.poll() is not None, limit)
        return agent.wait()

    def console(self) -> str:
        """What the launcher and its ranks have printed."""
        return (self.run.folder / "console-0").read_text(errors="replace")

    def own_lines(self) -> str:
        """The launcher's own lines."""
        lines = self.console().splitlines()
        return "\n".join(line for line in lines if line.startswith(("elasticrun", "torchrun")))


@contextlib.contextmanager
def ranks(
    mode: str,
    *arguments: object,
    launcher: str = ELASTICRUN,
    count: int = 1,
    flags: Sequence[str] = (),
    is_warm: bool = False,
    more: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """A job of `count` ranks of ranks.py in this mode. Its processes end with the block. `is_warm`:
    it starts from a warm process, which is started before and not measured."""
    with job(launcher) as run, contextlib.ExitStack() as stack:
        # short, because it is part of socket names; the folder's name makes it unique
        name = f"{PART}-{run.folder.name.rpartition('-')[2]}".lower().replace("_", "-")
        environ = {**(more or {})}
        if is_warm:
            environ |= stack.enter_context(_warm_process(run))
        flags = (*flags, f"--name={name}") if launcher == ELASTICRUN else flags
        run.start(
            *("--standalone", f"--nproc-per-node={count}"), *flags,
            script=str(RANKS), arguments=(mode, *map(str, arguments)), more=environ,
        )  # fmt: skip
        yield Running(run, name)


@contextlib.contextmanager
def _warm_process(run: Job) -> Iterator[dict[str, str]]:
    place = run.folder / "warm.sock"
    said, pid = warm.start(place, 600.0, run.environment())
    if not said.startswith("ok"):
        raise TookTooLong(f"no warm process: {said}")
    try:
        yield {WARM_SERVER: str(place)}
    finally:
        os.kill(pid, signal.SIGKILL)


def await_true(condition: Callable[[], bool], limit: float, every: float = POLL) -> bool:
    """Whether the condition became true within `limit` seconds; it is tested every few ms."""
    end = time.monotonic() + limit
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(every)
    return found


def temporary(prefix: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=prefix))
