"""`elasticrun demo`: two agents on this machine train a small model; a rank is killed, a node is
killed, a node is added, and a mistake in the script makes the ranks hang.

Every figure is measured in this run, except those of torchrun, which docs/figures.md has.
The exit code is 1 if the job does not recover. All files are in a temporary folder, which is
removed unless the demo fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rich.console import Console

from elasticrun.cli.flags import PROG, Parser
from elasticrun.cli.settings import NotHere, UsageError
from elasticrun.config import EXIT_FAILED, EXIT_OK
from elasticrun.core.words import plural
from elasticrun.testing.demo import ACCURACY, FINISH, MISTAKE
from elasticrun.testing.job import ElasticJob, JobError, start
from elasticrun.testing.processes import new_folder
from elasticrun.testing.steps import Step

SCRIPT: Final = "elasticrun.testing.demo.train"

HANG_LIMIT: Final = 11
"""--hang-limit: seconds after which hanging ranks are restarted. By default a certain hang ends
after 30 s; it is reported after 10 s."""

OPTIONS: Final = (
    "--preload=torch._dynamo,torch.distributed.checkpoint",
    f"--hang-limit={HANG_LIMIT}",
)
"""The modules that the script needs besides torch are imported once on each node, not in each start
of a rank."""

STEPS: Final = 40
"""Steps that are trained before the first fault and after each recovery."""

LIMIT: Final = 180.0
"""Maximum seconds for each wait: enough for a busy machine."""

FAILURE: Final = "failure.txt"
"""The file with the reason and the agents' last lines, if the demo fails."""

DEMO: Final = "demo"
"""The last word of the name of the demo's folder."""

LEARNED: Final = 0.9
"""Accuracy that shows that the training was not lost; guessing gives a third."""

TORCHRUN: Final = {
    "rank": "torchrun takes 1.47 s and repeats all steps since the last checkpoint on disk",
    "node": "torchrun takes 42.4 s and repeats all steps since the last checkpoint on disk",
    "join": "torchrun takes 6.2 s and repeats all steps since the last checkpoint on disk",
    "hang": "torchrun prints nothing; torch itself ends the job after 30 min (gloo)",
}
"""What torchrun does. The figures are those of README.md and docs/figures.md, which
tests/e2e/test_demo.py compares."""

NEXT: Final = f"""
What to type next, for your own script:

  {PROG} --nproc-per-node=2 --max-restarts=3 train.py   2 ranks here, restarted up to 3 times
  {PROG} --nnodes=1:10 train.py                         machines that come and go
  {PROG} submit --name tr -- train.py                   a job that outlives this terminal
  {PROG} --dry-run train.py                             what would run, without running it

To resume from memory as above, the script needs a Checkpointer: five lines, in docs/snapshots.md.
"""


class Show:
    """The demo's job and its output. Times are CLOCK_MONOTONIC, in seconds."""

    def __init__(self, console: Console, job: ElasticJob, folder: Path, began: float) -> None:
        self.console = console
        self.job = job
        self.folder = folder
        self.began = began
        self._shown: dict[int, int] = {}

    def say(self, text: str, style: str = "", at: float | None = None) -> None:
        """Print a line with the seconds from the start until `at`; None: now."""
        passed = (time.monotonic() if at is None else at) - self.began
        self.console.print(f"{passed:5.1f} s  {text}", style=style, markup=False, soft_wrap=True)

    def add(self, text: str, style: str) -> None:
        """Print a line without a time, indented."""
        self.console.print(f"{'':11}{text}", style=style, markup=False, soft_wrap=True)

    def torchrun(self, fault: str) -> None:
        """Print what torchrun does in this case."""
        self.add(TORCHRUN[fault], "yellow")

    def print_launcher_lines(self) -> None:
        """Print what the agents have printed since the last call; a line of several agents once."""
        seen = set()
        for number in range(len(self.job.nodes)):
            lines = self.job.output(number).splitlines()
            for line in lines[self._shown.get(number, 0) :]:
                _, _, text = line.partition(": ")
                if line.startswith(PROG) and text not in seen:
                    seen.add(text)
                    self.add(line, "cyan")
            self._shown[number] = len(lines)

    def train_on(self, since: float | None, world_size: int, steps: int) -> Step:
        """Wait until `world_size` ranks have started after `since` and trained this many steps.
        Returns their first step."""
        first = self.job.wait_for(step=0, world_size=world_size, since=since)
        self.job.wait_for(step=first.step + steps, world_size=world_size, since=since)
        return first

    def recovered(self, since: float, world_size: int, what: str) -> None:
        """Wait until training continues after the event of `since`, and print how."""
        first = self.train_on(since, world_size, STEPS)
        steps = self.job.steps()
        before = max((each.step for each in steps if each.time < first.time), default=0)
        self.job.wait_for(lambda status: status.step >= first.step)  # the master knows it
        self.print_launcher_lines()
        lost = max(0, before - first.step + 1)
        again = f"{plural(lost, 'step')} repeated" if lost else "no step lost"
        self.say(
            f"training continues {first.time - since:.2f} s after {what}, at step {first.step} "
            f"of the snapshot in memory; {again}",
            "bold green",
            at=first.time,
        )

    # ------------------------------------------------------------ the faults

    def kill_rank(self) -> None:
        self.say("kill -9 of rank 1", "bold red")
        self.recovered(self.job.kill_rank(1), 2, "the kill")
        self.torchrun("rank")

    def kill_node(self) -> None:
        self.say("kill -9 of all processes of node1", "bold red")
        self.recovered(self.job.kill_node(1), 1, "the kill")
        self.torchrun("node")

    def add_node(self) -> None:
        self.say("a new node runs the same command", "bold red")
        since = time.clock_gettime(time.CLOCK_MONOTONIC)
        self.job.add_node()
        self.recovered(since, 2, "its command")
        self.torchrun("join")

    def hang(self) -> None:
        self.say("a mistake: rank 0 calls a barrier that no other rank calls", "bold red")
        since = time.clock_gettime(time.CLOCK_MONOTONIC)
        (self.folder / MISTAKE).touch()
        limit = f"ended after {HANG_LIMIT} s; later on a busy machine"
        self.add(f"(it is reported after about 10 s, and {limit})", "dim")
        before = self.job.status().restart_count
        self.job.wait_for(lambda now: now.hang == "certain" or now.restart_count > before)
        found = time.clock_gettime(time.CLOCK_MONOTONIC) - since
        self.say(f"the hang is found after {found:.1f} s", "bold green")
        self.recovered(since, 2, "the mistake")
        self.torchrun("hang")

    def finish(self) -> float:
        """End the training. Returns the model's accuracy. Raises JobError if a node failed."""
        (self.folder / FINISH).touch()
        result = self.job.result()
        self.print_launcher_lines()
        if not result.ok:
            raise JobError(f"the nodes ended like this: {', '.join(result.outcomes)}")
        accuracy = float((self.folder / ACCURACY).read_text())
        if accuracy < LEARNED:
            raise JobError(f"the accuracy is {accuracy:.1%}, less than {LEARNED:.0%}")
        return accuracy


def main(words: Sequence[str]) -> int:
    """Run the demo. Returns the exit code; raises UsageError if it cannot run here."""
    made = Parser(
        prog=f"{PROG} demo",
        description="Train a small model on two agents of this machine, with a killed rank, a "
        "killed node, a new node and a hang. Takes about 30 s on two idle cores; needs no GPU and "
        "no network, and leaves no file and no process behind.",
    )
    made.parse_args(words)
    if find_spec("torch") is None:
        raise NotHere("the demo needs torch: pip install torch")
    with contextlib.ExitStack() as cleanup:
        _end_on_signals(cleanup)
        try:
            folder = _make_folder(cleanup)
            return _run(Console(highlight=False), folder)
        except _Failed as failed:
            raise UsageError(str(failed), EXIT_FAILED) from None
        except OSError as wrong:
            raise UsageError(f"the demo cannot run here: {wrong}", EXIT_FAILED) from None


class _Failed(Exception):
    """The job did not do what the demo shows; the message is a sentence."""


def _end_on_signals(cleanup: contextlib.ExitStack) -> None:
    """Let the first signal that ends this process raise an exception, so that it cleans up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        print("\nelasticrun: the demo stops, and removes what it has started", file=sys.stderr)
        raise SystemExit(128 + number)

    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            cleanup.callback(signal.signal, number, signal.signal(number, end))


def _make_folder(cleanup: contextlib.ExitStack) -> Path:
    """A temporary folder for files, which becomes the working folder. Raises OSError."""
    folder = new_folder(tempfile.gettempdir(), DEMO)
    cleanup.callback(_remove, folder)
    cleanup.callback(os.chdir, os.getcwd())
    os.chdir(folder)
    return folder


def _remove(folder: Path) -> None:
    """Remove the folder, unless it shows why the demo failed."""
    if not (folder / FAILURE).exists():
        shutil.rmtree(folder, ignore_errors=True)


def _run(console: Console, folder: Path) -> int:
    """Start the job, inject the faults, end it. Raises _Failed, OSError."""
    began = time.monotonic()
    jobs: list[ElasticJob] = []
    console.print(
        "two agents on this machine, each a node with one rank, run this command in "
        f"{folder}, which is removed at the end:",
        f"  {PROG} --nnodes=1:2 --max-restarts=3 {' '.join(OPTIONS)} train.py",
        "both import torch first, which takes some seconds",
        sep="\n",
        end="\n\n",
        soft_wrap=True,
    )
    try:
        (folder / "job").mkdir()
        job = start(
            SCRIPT,
            scratch=folder / "job",
            register=jobs.append,
            nnodes="1:2",
            nodes=2,
            max_restarts=3,
            options=(*OPTIONS, "-m"),
            env={"LOGLEVEL": "", "OMP_NUM_THREADS": 1},
            together=True,
            timeout=LIMIT,
        )
        show = Show(console, job, folder, began)
        first = show.train_on(None, 2, STEPS)
        show.print_launcher_lines()
        show.say("2 ranks train", "bold green", at=first.time)
        for fault in (show.kill_rank, show.kill_node, show.add_node, show.hang):
            fault()
        accuracy = show.finish()
        if left := job.close():
            raise JobError(left)
    except JobError as wrong:
        tails = [f"--- {node.name} ---\n{node.tail()}" for job in jobs for node in job.nodes]
        (folder / FAILURE).write_text("\n".join(map(str, [wrong, *tails])))
        why = textwrap.shorten(str(wrong), 240)
        raise _Failed(f"the demo failed: {why}; its files are in {folder}") from None
    finally:
        for job in jobs:
            job.close()
    show.say(f"done: the model is right for {accuracy:.1%} of new points", "bold green")
    console.print(NEXT, markup=False, soft_wrap=True)
    return EXIT_OK
