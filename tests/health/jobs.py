"""Jobs whose nodes are not all well: faults planted by $ELASTICRUN_FAULT, and what came of them.

Nodes are numbered in the order of their starts and are called node0, node1, ... What a check did is
read from exit codes, from the master's page, from what the agents say, and from which nodes' ranks
ever did a step.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from elasticrun.testing.job import ElasticJob
from elasticrun.testing.steps import World
from elasticrun.wire.messages import ExcludedNode
from tests.counting import times
from tests.harness import (
    COMMANDS,
    ELASTICRUN,
    LIMIT,
    SCRIPTS,
    await_exit,
    await_true,
    shm_entries,
    shm_since,
)

COUNTS = "counts.py"
PACES = "paces.py"

CHECK = "--network-check"
EXCLUDED = 75

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Of every probe and rank: agents share the cores here, and threads that wait for each other in a
loop, as OpenMP's do, would make a matmul ten times as long, now of this node and now of that."""


class Health:
    """The job of one test; see the module's head."""

    def __init__(self, elastic_job: Any, folder: Path) -> None:
        self.job: ElasticJob | None = None
        self._start = elastic_job
        self._folder = folder
        self._shm = shm_entries()

    def start(
        self, nnodes: str, *options: str, fault: str = "", script: str = COUNTS, **more: Any
    ) -> ElasticJob:
        """Start the job, the larger number of nodes together if not said otherwise; `fault` is told
        to all of them, `more` as for `elastic_job`. Its times are those of `times` where no option
        gives others."""
        env = {**ONE_THREAD, **more.pop("env", {})}
        env |= {"ELASTICRUN_FAULT": fault} if fault else {}
        words = {"nodes": int(nnodes.rpartition(":")[2]), "together": True, **more}
        words |= {"nnodes": nnodes, "options": (times(), *options), "env": env}
        job: ElasticJob = self._start(str(SCRIPTS / script), self._folder, **words)
        self.job = job
        return job

    # ------------------------------------------------------------ what is seen

    def said(self, *numbers: int) -> str:
        """What these nodes have said so far; all of them where none is named."""
        assert self.job is not None
        chosen = numbers or range(len(self.job.nodes))
        return "\n".join(self.job.output(number) for number in chosen)

    def told(self, pattern: str) -> str:
        """Wait until somebody has said this (the line may be on its way when what it tells of is
        seen already); all that was said."""
        await_true(lambda: re.search(pattern, self.said()), f"word of {pattern}")
        return self.said()

    def exit_of(self, number: int) -> int | None:
        """Wait for the end of a node's agent; its exit code."""
        assert self.job is not None
        node = self.job.nodes[number]
        assert not await_exit([node.pid], LIMIT), f"{node.name} still runs:\n{node.tail()}"
        return node.exit_code

    def excluded(self, number: int) -> str:
        """Wait until this node's agent has ended because it was excluded; what it said, in a line
        of its own on stderr."""
        code = self.exit_of(number)
        assert code == EXCLUDED, f"exit code {code}:\n{self.said(number)}"
        found = re.findall(r".*\bexcluded\b.*", self.said(number))
        assert found, self.said(number)
        return str(found[-1])

    def listed(self) -> ExcludedNode:
        """The one node on the list of excluded nodes."""
        assert self.job is not None
        (found,) = self.job.status().excluded
        return found

    def shown(self) -> str:
        """What `elasticrun status` prints of this job, as soon as its master answers: it gives one
        that stands still no more than five seconds."""
        assert self.job is not None
        endpoint = next(w for w in self.job.nodes[0].command if w.startswith("--rdzv-endpoint="))
        printed: list[str] = []

        def answered() -> bool:
            done = subprocess.run(
                [*COMMANDS[ELASTICRUN], "status", endpoint.partition("=")[2]],
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            printed[:] = [done.stdout]
            return done.returncode == 0

        await_true(answered, "answer to `elasticrun status`")
        return printed[0]

    def measured(self) -> str:
        """What the last probes of each node have measured; for the message of a failure."""
        assert self.job is not None
        return "\n".join(f"{one.node}: {one.health}" for one in self.job.status().nodes)

    def trained(self) -> set[int]:
        """The nodes whose ranks have done a step so far."""
        assert self.job is not None
        return {step.node for step in self.job.steps()}

    def world_of(self, *numbers: int, since: float | None = None) -> World:
        """Wait for a world of these nodes, one rank each."""
        assert self.job is not None
        world = self.job.wait_for_world(len(numbers), since=since)
        assert set(world.nodes.values()) == set(numbers), world
        return world

    def goes_on(self, world: World, steps: int = 5) -> None:
        """Wait until this very world has done so many more steps than now."""
        assert self.job is not None
        last = next(w.last for w in self.job.worlds() if w.round == world.round)
        self.job.wait_for_world(round=world.round, step=last + steps)

    # ------------------------------------------------------------ the end

    def finish(self, *codes: int) -> None:
        """Let the script end; the exit codes of all nodes, in the order of their starts. What they
        trained until then is whole: one world at a time, no step missing."""
        assert self.job is not None
        self._stop()
        result = self.job.result()
        assert result.exit_codes == codes, f"{result.exit_codes}\n{self.said()}"
        self.job.one_world()
        self.job.no_gap()

    def _stop(self) -> None:
        (self._folder / "stop").touch()

    def close(self) -> None:
        """End the job before the fixture does, so that what it left can be seen."""
        if self.job is not None:
            complaint = self.job.close()
            assert not complaint, complaint
            left = shm_since(self._shm)
            assert not left, f"left in /dev/shm: {left}"
