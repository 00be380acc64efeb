"""Ranks are killed at random moments, while their standbys rehearse, wait or do not exist yet: the
life that ends well has the losses, weights and generators of an undisturbed one."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.fidelity.runner import Case, Ran, Runs
from tests.fidelity.test_training import skip_without
from tests.further import further

pytestmark = [pytest.mark.slow, further("test_training::test_a_standby_trains_as_torchrun_does")]

SCRIPTS = ("ddp", "fsdp2", "compiled", "trainer", "light")
RESTARTS = 10


def ranks(job: psutil.Process, traced: set[int]) -> dict[int, list[psutil.Process]]:
    """The processes of ranks, by life; those of standbys, which have a tracer, go to `traced`."""
    found: dict[int, list[psutil.Process]] = {}
    for process in job.children(recursive=True):
        with suppress(psutil.Error, OSError):
            environ = process.environ()
            status = Path(f"/proc/{process.pid}/status").read_text()
            if "TracerPid:\t0\n" not in status:
                traced.add(process.pid)
            elif "RANK" in environ:
                life = int(environ["TORCHELASTIC_RESTART_COUNT"])
                found.setdefault(life, []).append(process)
    return found


def disturb(job: psutil.Process, chance: random.Random, longest: float) -> int:
    """Kill a rank in each life, until one ends before that; `longest`: how long it lives at most.
    Returns how many of them were standbys."""
    traced: set[int] = set()
    killed: set[int] = set()
    for life in range(RESTARTS):
        while not (there := ranks(job, traced).get(life, [])):
            if not job.is_running() or job.status() == psutil.STATUS_ZOMBIE:
                return len(killed & traced)
            time.sleep(0.05)  # the moment is what is tested
        time.sleep(chance.uniform(0.0, longest))  # the moment is what is tested
        ranks(job, traced)
        with suppress(psutil.NoSuchProcess):
            victim = chance.choice(there)
            killed.add(victim.pid)
            victim.kill()
    return len(killed & traced)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("script", SCRIPTS)
def test_random_restarts(runs: Runs, script: str, seed: int) -> None:
    skip_without(script)
    env = {"FIDELITY_LATE": "1", "FIDELITY_BRIEF_LIVES": "", "FIDELITY_LAST_LIFE": "0"}
    case = Case(("train.py", script), env=env)
    began = time.monotonic()
    whole = runs.ran(case, "fork")["fork"]
    longest = 0.7 * (time.monotonic() - began)
    chance = random.Random(f"{script} {seed}")
    standbys: list[int] = []
    disturbed = runs.disturbed(
        case, RESTARTS, lambda job: standbys.append(disturb(job, chance, longest))
    )
    assert disturbed.code == 0, disturbed.console
    assert result(disturbed) == result(whole)
    count = f"{last_life(disturbed)} restarts, {standbys[0]} standbys among those killed"
    print(f"{script}, seed {seed}: bitwise the same after {count}")


def last_life(ran: Ran) -> int:
    return max(life for life, _ in ran.records)


def result(ran: Ran) -> list[object]:
    """What was computed in the last life, by rank."""
    parts, last = ("losses", "weights", "generators"), last_life(ran)
    return [[ran.records[last, rank][part] for part in parts] for rank in range(2)]
