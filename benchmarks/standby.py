"""From the death of a rank to the first step of all: torchrun, and three ways to start ranks.

    NANOGPT=FOLDER python benchmarks/standby.py [--samples N] [--only WORD] [--json FILE]

Each script trains with two ranks; one of them is killed, once the standbys are ready where there
are any. Standbys have the priority of ranks here (`--standby=0`): how long they take is not
measured. nanoGPT needs a clone of it, see scripts/nanogpt.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import time
from pathlib import Path

from report import begin, write
from rows import NO_BACKOFF, last
from stage import ELASTICRUN, SCRIPTS as FOLDER, TORCHRUN, job

LOUD = {"LOGLEVEL": "DEBUG"}
START_LIMIT, READY_LIMIT = 300.0, 600.0
"""Seconds for ranks to complete their first step, and for standbys to be ready."""

SCRIPTS = (
    ("DDP with nn.Transformer", "torch", ("ddp_transformer.py",)),
    ("DDP, torch._dynamo first", "torch", ("dynamo_first.py", f"{FOLDER}/ddp_transformer.py")),
    ("HF Trainer", "transformers", ("hf_trainer.py",)),
    ("Lightning", "lightning", ("lightning_fit.py",)),
    ("nanoGPT", "numpy", ("nanogpt.py",)),
    ("nanoGPT, torch._dynamo first", "numpy", ("dynamo_first.py", f"{FOLDER}/nanogpt.py")),
)
WAYS = {
    "torchrun": (TORCHRUN, ()),
    "exec": (ELASTICRUN, ("--launch=exec",)),
    "fork": (ELASTICRUN, ()),
    "standby": (ELASTICRUN, ("--standby=0",)),
}


def restart(way: str, script: str, *arguments: str) -> list[float]:
    """Seconds from the death to the first step of both ranks of the next life."""
    launcher, flags = WAYS[way]
    own = NO_BACKOFF if launcher == ELASTICRUN else ()
    with job(launcher) as run:
        words = ("--nproc-per-node=2", "--max-restarts=1", *own, *flags)
        run.start(*words, script=script, arguments=(*arguments, "100000"), more=LOUD)
        run.until(lambda: len(run.of("allreduce", 0)) == 2, START_LIMIT)
        until = time.monotonic() + READY_LIMIT
        console = run.folder / "console-0"
        while way == "standby" and console.read_bytes().count(b": ready (") < 2:
            if time.monotonic() > until:
                return []
            time.sleep(0.2)
        os.kill(run.of("allreduce", 0)[-1].pid, signal.SIGKILL)
        died = time.monotonic()
        run.until(lambda: len(run.of("allreduce", 1)) == 2, START_LIMIT)
        return [last(run.of("allreduce", 1)) - died]


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", default="", help="scripts whose name contains this word")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    about = begin()
    found: dict[str, dict[str, list[float]]] = {}
    print(f"| script | {' | '.join(WAYS)} |\n|---|{'--:|' * len(WAYS)}")
    for name, package, words in SCRIPTS:
        if options.only.lower() not in name.lower() or importlib.util.find_spec(package) is None:
            continue
        if name.startswith("nanoGPT") and "NANOGPT" not in os.environ:
            continue
        samples: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.samples):
            for way in WAYS:
                samples[way] += restart(way, *words)
        found[name] = samples
        cells = [f"{statistics.median(s):.2f} s" if s else "-" for s in samples.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    write("standby", about, found, options.json)


if __name__ == "__main__":
    main()
