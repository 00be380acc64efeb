"""The demo: two agents train a real model. A rank is killed, and later a mistake makes a rank wait
forever; the job continues both times.

Both agents run on this machine, as they would on two machines. All figures of recovery and accuracy
are measured in this run; the exit code is 1 if a check fails.

    python examples/demo.py [--epochs N] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

HERE = Path(__file__).parent
NODES = 2
RANKS_PER_NODE = 2
LAST_RANK = NODES * RANKS_PER_NODE - 1
WANTED_ACCURACY = 0.95
HANG_LIMIT = 15
"""--hang-limit: seconds after which ranks that wait are restarted. Without it, a certain hang is
ended after 30 s."""

LIMIT = 180.0
"""Seconds after which the demo counts as failed."""

COLOURS = ("cyan", "magenta")

Lines = queue.Queue[tuple[int, str | None]]
"""Lines of all agents, each with the agent's number; None: that agent has exited."""


class Broken(Exception):
    """A check failed; the message is a sentence for the user."""


@dataclass
class Observed:
    """What the job's output has shown so far. Times are of the monotonic clock, durations in
    seconds."""

    ranks: dict[tuple[int, int], int] = field(default_factory=dict)  # (life, rank) -> pid
    resumed_at: int = -1
    killed_at: float = 0.0
    killed_in_epoch: int = 0
    recovery: float = 0.0
    hung_at: float = 0.0
    found_after: float = 0.0
    hang: str = ""
    hang_recovery: float = 0.0
    page: str = ""
    goodput: str = ""
    epochs: list[int] = field(default_factory=list)
    accuracy: float = 0.0


class Agent:
    """One elasticrun process, whose output a thread puts into the common queue, line by line."""

    def __init__(self, number: int, command: list[str], lines: Lines) -> None:
        self.number = number
        self.log: list[str] = []
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._reader.start()

    def _read(self, lines: Lines) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            lines.put((self.number, line.rstrip("\n")))
        self.process.wait()
        lines.put((self.number, None))

    def end(self) -> None:
        """Kill the agent if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def facts(line: str) -> tuple[str, dict[str, str]]:
    """Split a line such as `epoch number=3 of=9` into its first word and its values by name."""
    word, _, rest = line.strip().partition(" ")
    return word, dict(re.findall(r"(\w+)=(\S+)", rest))


def free_port() -> int:
    """A TCP port that is free on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(folder: Path, epochs: int, lines: Lines) -> list[Agent]:
    """Start both agents, each with the command that a user would type on each of two hosts."""
    command = [
        *(sys.executable, "-m", "elasticrun"),
        *(f"--nnodes={NODES}", f"--nproc-per-node={RANKS_PER_NODE}", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=demo"),
        "--preload=torch._dynamo",  # otherwise each start imports it with DDP: one second
        f"--hang-limit={HANG_LIMIT}",
        *(f"--log-dir={folder / 'logs'}", str(HERE / "digits.py")),
        *(f"--folder={folder}", f"--epochs={epochs}", f"--mistake={hang_epoch(epochs)}"),
    ]
    return [Agent(number, command, lines) for number in range(NODES)]


def hang_epoch(epochs: int) -> int:
    """The epoch after which rank 0 calls a collective that no other rank calls."""
    return 2 * epochs // 3


class Display:
    """Reads the job's output, displays what it shows, and kills a rank on the way."""

    def __init__(self, console: Console, epochs: int) -> None:
        self.console = console
        self.epochs = epochs
        self.observed = Observed()
        self.began = time.monotonic()
        self.progress = Progress(
            TextColumn("  training"),
            BarColumn(36),
            TextColumn("epoch {task.completed:.0f} of {task.total:.0f}   {task.fields[loss]}"),
            console=console,
        )
        self.task: TaskID = self.progress.add_task("training", total=epochs, loss="")

    def print_event(self, text: str) -> None:
        """Print a line with the time since the start."""
        passed = time.monotonic() - self.began
        self.progress.console.print(f"[dim]{passed:6.2f} s[/dim]  {text}", highlight=False)

    def handle_line(self, node: int, line: str) -> None:
        """Process one line of an agent's output. Kills a rank once a third of the epochs is
        done."""
        now = time.monotonic()
        word, values = facts(line)
        observed = self.observed
        if word == "start" and "pid" in values:
            rank, life = int(values["rank"]), int(values["life"])
            observed.ranks[life, rank] = int(values["pid"])
            epoch = int(values["epoch"])
            origin = f"from the checkpoint of epoch {epoch}" if epoch else "from nothing"
            if life and rank == 0:
                observed.resumed_at = epoch
            colour = COLOURS[node % len(COLOURS)]
            self.print_event(f"[{colour}]node {node}[/{colour}]  rank {rank} starts {origin}")
        elif word == "step" and values.get("life") == "1":
            observed.recovery = now - observed.killed_at
            self.print_event(
                f"[bold green]training goes on, {observed.recovery:.2f} s after the kill[/]"
            )
        elif word == "step" and values.get("life") == "2":
            observed.hang_recovery = now - observed.hung_at
            self.print_event(
                f"[bold green]training goes on, {observed.hang_recovery:.1f} s after it stood "
                "still[/]"
            )
        elif word == "epoch" and "number" in values:
            number = int(values["number"])
            observed.epochs.append(number)
            self.progress.update(self.task, completed=number, loss=f"loss {values['loss']}")
            due = number >= self.epochs // 3 and (0, LAST_RANK) in observed.ranks
            if due and not observed.killed_at:
                self.kill(number)
            if number == hang_epoch(self.epochs) and not observed.hung_at:
                observed.hung_at = now
                self.print_event(
                    "[bold red]rank 0 calls a barrier[/] that no other rank will come to"
                )
                self.print_event(
                    "[dim]waiting for elasticrun to find that out (about 10 s) and to restart the "
                    f"ranks ({HANG_LIMIT} s after the last movement)[/]"
                )
        elif word == "done" and "accuracy" in values:
            observed.accuracy = float(values["accuracy"])
        elif line.startswith("elasticrun"):
            self.handle_launcher_line(line)

    def handle_launcher_line(self, line: str) -> None:
        """Process a line of elasticrun itself. Both agents may print it; the first counts."""
        observed = self.observed
        _, _, text = line.partition(": ")
        if text.startswith("the job's page: ") and not observed.page:
            observed.page = text.partition(": ")[2]
            self.print_event(f"the job's page is at {observed.page}")
        elif text.startswith("hang (certain): ") and not observed.hang:
            observed.found_after = time.monotonic() - observed.hung_at
            observed.hang = text.partition(": ")[2].partition(";")[0]
            self.print_event(
                f"[bold yellow]found after {observed.found_after:.1f} s[/]: {observed.hang}"
            )
        elif text.startswith(("goodput ", "uptime ")):
            observed.goodput = text

    def kill(self, epoch: int) -> None:
        """Kill the last rank, which is not on rank 0's node, where the checkpoints are written."""
        self.observed.killed_in_epoch = epoch + 1
        self.print_event(
            f"[bold red]kill -9 rank {LAST_RANK}[/], in the middle of epoch {epoch + 1}"
        )
        self.observed.killed_at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):  # it has exited already; `check` reports that
            os.kill(self.observed.ranks[0, LAST_RANK], signal.SIGKILL)


def check(observed: Observed, agents: list[Agent], epochs: int) -> None:
    """Wait for the agents to exit, and raise Broken for the first check that fails."""
    codes = [agent.process.wait() for agent in agents]
    lives = {life for life, _ in observed.ranks}
    checks = [
        (observed.killed_at > 0, "no rank was killed: training never got that far"),
        (codes == [0] * NODES, f"the agents ended with {codes}, not with 0"),
        (observed.hung_at > 0, "no rank hung: training never got that far"),
        (lives == {0, 1, 2}, f"there were {len(lives)} lives, not three"),
        (observed.recovery > 0, "training did not go on after the kill"),
        ("barrier" in observed.hang, "the hang was not explained"),
        (observed.hang_recovery > 0, "training did not go on after the hang"),
        (observed.goodput != "", "nobody said where the time went"),
        (observed.resumed_at > 0, "the last life did not start from a checkpoint"),
        (observed.epochs[-1:] == [epochs], "the last epoch was not reached"),
        (
            observed.accuracy >= WANTED_ACCURACY,
            f"accuracy {observed.accuracy:.1%} is below {WANTED_ACCURACY:.0%}",
        ),
    ]
    for good, sentence in checks:
        if not good:
            raise Broken(sentence)


def result(observed: Observed, epochs: int, seconds: float) -> Panel:
    """The panel with the figures of this run."""
    table = Table.grid(padding=(0, 3))
    rows = (
        ("test accuracy", f"[bold]{observed.accuracy:.1%}[/] of 360 images never trained on"),
        ("recovery", f"[bold]{observed.recovery:.2f} s[/] from the kill to the next training step"),
        ("work lost", f"a part of epoch {observed.killed_in_epoch}; went on at its beginning"),
        ("hang", f"found after [bold]{observed.found_after:.1f} s[/]; 4 ranks started again"),
        ("restarts", "2 of 3, on both nodes together"),
        ("time", observed.goodput),
        ("page", f"{observed.page} while it ran"),
        ("in all", f"{seconds:.1f} s for {epochs} epochs, with three starts"),
    )
    for name, value in rows:
        table.add_row(f"[dim]{name}[/]", value)
    return Panel.fit(table, title="all checks passed", border_style="green", padding=(1, 2))


NEXT = """
What to type next:

  [bold]elasticrun --nproc-per-node=2 --max-restarts=3 train.py[/]   your own script, unchanged
  [bold]elasticrun --nnodes=1:10 train.py[/]                         machines that come and go
  [bold]elasticrun submit --name tr -- train.py[/]                   goes on without this terminal
  [bold]elasticrun list[/], [bold]status[/], [bold]logs JOB[/]                      your jobs

docs/snapshots.md has the five lines that keep your script's state in memory."""


def run(console: Console, folder: Path, epochs: int) -> None:
    """Start the agents, follow their output, and check the result. Raises Broken."""
    lines: Lines = queue.Queue()
    show = Display(console, epochs)
    agents = start(folder, epochs, lines)
    try:
        with show.progress:
            show.print_event(
                "[dim]waiting for both agents to import torch and to meet (5 to 20 s)[/]"
            )
            running = len(agents)
            while running:
                rest = LIMIT - (time.monotonic() - show.began)
                try:
                    node, line = lines.get(timeout=max(0.01, rest))
                except queue.Empty:
                    raise Broken(f"the job did not end within {LIMIT:g} s") from None
                if line is None:
                    running -= 1
                else:
                    show.handle_line(node, line)
        check(show.observed, agents, epochs)
        console.print(result(show.observed, epochs, time.monotonic() - show.began))
        console.print(NEXT, highlight=False)
    except Broken:
        for agent in agents:
            console.print(f"[dim]--- what agent {agent.number} printed last ---[/]")
            console.print("".join(agent.log[-40:]), markup=False, highlight=False)
        raise
    finally:
        for agent in agents:
            agent.end()


def main() -> int:
    """Run the demo in a temporary folder, or that of --keep. Returns 0 if every check passed."""
    parser = argparse.ArgumentParser(description="Two agents, a real model, two faults.")
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--keep", type=Path, help="a folder for checkpoints and logs, kept")
    arguments = parser.parse_args()
    console = Console()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="elasticrun-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    console.print(
        f"\n[bold]elasticrun[/]: {NODES} agents with {RANKS_PER_NODE} ranks each train on "
        "scikit-learn's digits; one rank is killed on the way, and one makes the others wait\n"
    )
    try:
        run(console, folder, arguments.epochs)
    except Broken as broken:
        console.print(f"[bold red]the demo failed:[/] {broken}")
        return 1
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
