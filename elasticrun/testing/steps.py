"""The step log of a job under test: ranks write it, tests read it.

A rank reports a completed step with one line of JSON, in a single `write` to the file that
$ELASTICRUN_STEP_LOG names (opened for appending, so that lines of several ranks never mix):

    {"rank": 0, "step": 17, "world_size": 4, "world": "10.0.0.1:43117/0", "pid": 471, "time": 81.2,
     "node": 1, "group_rank": 0, "restarts": 0}

`step(17)` does that and needs only the standard library. A script that must run where elasticrun is
not installed writes the line itself, and may omit the second row. If the variable is not set,
`step` does nothing, so the call may stay in the script. `time` is CLOCK_MONOTONIC in seconds, one
clock for all processes of a machine. `world` identifies a world of the job by its store's address
and the number of restarts. `node` is $ELASTICRUN_STEP_NODE.

A world is the set of ranks that trained together, with its time span and nodes: what ranks did, not
what the launcher reports.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

STEP_LOG: Final = "ELASTICRUN_STEP_LOG"
"""Environment variable with the path of the step log; not set outside a test."""

STEP_NODE: Final = "ELASTICRUN_STEP_NODE"
"""Environment variable with the number of a rank's node in the test."""

MAX_LINE: Final = 4096
"""Maximum bytes of a line; a longer line is an error."""

MAX_SHOWN: Final = 10
"""Maximum number of steps that a sentence names."""


def step(number: int) -> None:
    """Report that this rank has just completed step `number`. Does nothing outside a test."""
    path = os.environ.get(STEP_LOG)
    if not path:
        return
    where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    record = {
        "rank": int(os.environ.get("RANK", "0")),
        "step": number,
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "world": f"{where}/{restarts}",
        "pid": os.getpid(),
        "time": time.clock_gettime(time.CLOCK_MONOTONIC),
        "node": int(os.environ.get(STEP_NODE, "-1")),
        "group_rank": int(os.environ.get("GROUP_RANK", "-1")),
        "restarts": restarts,
    }
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(fd, json.dumps(record).encode() + b"\n")
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Step:
    """One step that one rank completed.

    `world`: the world's name, as the rank wrote it. `round`: the world's number, from 1 in the
    order of their first lines; it is not the number of the rendezvous round, because a round that
    completed no step is not counted. `time`: CLOCK_MONOTONIC, seconds. `node`: the node's number in
    the test. `restarts`: restarts charged to the job when this world began. The last three are -1
    if a script that writes its own lines omits them."""

    rank: int
    step: int
    world_size: int
    round: int
    world: str
    pid: int
    time: float
    node: int = -1
    group_rank: int = -1
    restarts: int = -1


class StepLog:
    """Reads the step log of a job while it grows. `steps`: all steps read so far."""

    def __init__(self, path: str) -> None:
        """Creates the file, which must not exist yet."""
        self.path = path
        self.steps: list[Step] = []
        self._rounds: dict[tuple[str, int], int] = {}
        self._newest: dict[str, tuple[int, int, set[int]]] = {}  # number, size, ranks seen
        self._rest = b""
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close)

    def read(self) -> list[Step]:
        """Read what was written since the last call. Returns only these steps, in order of arrival.
        Raises ValueError for a line that is not a step."""
        if self._file.closed:
            return []
        data = self._rest + (self._file.read() or b"")
        *lines, self._rest = data.split(b"\n")
        fresh = [self._parse(line) for line in lines if line.strip()]
        self.steps += fresh
        return fresh

    def _parse(self, line: bytes) -> Step:
        try:
            if len(line) > MAX_LINE:
                raise ValueError("a long line")
            fields = json.loads(line)
            return self._numbered(
                Step(
                    rank=int(fields["rank"]),
                    step=int(fields["step"]),
                    world_size=int(fields["world_size"]),
                    round=0,
                    world=str(fields["world"]),
                    pid=int(fields["pid"]),
                    time=float(fields["time"]),
                    node=int(fields.get("node", -1)),
                    group_rank=int(fields.get("group_rank", -1)),
                    restarts=int(fields.get("restarts", -1)),
                )
            )
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"the step log {self.path} has a line that is not a step: {line[:200]!r}"
            ) from None

    def _numbered(self, record: Step) -> Step:
        """The step with the number of its world. Two worlds may have the same name, because ports
        are reused; but a process belongs to one world, and a rank of a world is one process."""
        process = (record.world, record.pid)
        if process not in self._rounds:
            number, size, ranks = self._newest.get(record.world, (0, 0, set()))
            if size != record.world_size or record.rank in ranks:
                number, size, ranks = len(set(self._rounds.values())) + 1, record.world_size, set()
                self._newest[record.world] = number, size, ranks
            ranks.add(record.rank)
            self._rounds[process] = number
        return dataclasses.replace(record, round=self._rounds[process])

    def close(self) -> None:
        """Close the file; it remains on disk."""
        self._file.close()


def overlap(steps: Iterable[Step], held: Collection[int] | None = None) -> str:
    """A sentence about the first two worlds of a job that overlapped in time, or "".

    After the first step of a world, no earlier world may complete a step. The ranks' own times are
    compared, not the order of arrival. A step counts as completed when the first of its ranks
    reports it, because by then the other ranks have taken part in its collective; a rank that is
    stopped at that moment reports it whenever it continues. `held`: pids of all processes that were
    stopped; then a late line of any other rank counts as an overlap. None: unknown."""
    done: dict[tuple[tuple[str, int], int], Step] = {}
    prompt: list[Step] = []
    for record in steps:
        if held is not None and record.pid not in held:
            prompt.append(record)
        before = done.setdefault((_steps_world(record), record.step), record)
        if record.time < before.time:
            done[_steps_world(record), record.step] = record
    seen: set[tuple[str, int]] = set()
    newest: Step | None = None
    for record in sorted([*done.values(), *prompt], key=lambda s: s.time):
        if newest is None or _steps_world(record) not in seen:
            seen.add(_steps_world(record))
            newest = record
        elif _steps_world(record) != _steps_world(newest):
            late = record.time - newest.time
            return (
                f"rank {record.rank} of {record.world_size} completed step {record.step} of the "
                f"world at {record.world} {late:.3f} s after rank {newest.rank} of "
                f"{newest.world_size} had begun the world at {newest.world}"
            )
    return ""


def _steps_world(record: Step) -> tuple[str, int]:
    """What identifies a step's world; its name does not, because a later world may have the same
    name."""
    return record.world, record.round


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that trained together, as far as they have reported steps."""

    round: int
    """The world's number; see `elasticrun.testing.Step`."""
    world_size: int
    restarts: int
    """Restarts charged to the job when it began; -1 if the script does not say."""
    began: float
    """When its first step was completed: CLOCK_MONOTONIC, seconds."""
    ended: float
    """When its last step so far was completed."""
    nodes: Mapping[int, int]
    """Numbers of the nodes by group rank; empty if the script does not say."""
    pids: Mapping[int, int]
    """Pids by rank."""
    first: int
    """The lowest step that one of its ranks has completed: where it started or resumed."""
    last: int
    """The highest step that one of its ranks has completed."""
    whole: frozenset[int]
    """The steps that all of its ranks have completed."""

    def has_done(self, step: int | None) -> bool:
        """Whether all its ranks have completed step `step` or a later one; None: any step."""
        return bool(self.whole) and (step is None or max(self.whole) >= step)


def worlds(steps: Iterable[Step]) -> list[World]:
    """All worlds in which at least one rank has completed a step, ordered by the time of their
    first step."""
    by_round: dict[int, list[Step]] = {}
    for record in steps:
        by_round.setdefault(record.round, []).append(record)
    return sorted(map(_world, by_round.values()), key=lambda world: world.began)


def _world(steps: Sequence[Step]) -> World:
    size = steps[0].world_size
    who: dict[int, set[int]] = {}
    for record in steps:
        who.setdefault(record.step, set()).add(record.rank)
    return World(
        round=steps[0].round,
        world_size=size,
        restarts=steps[0].restarts,
        began=min(record.time for record in steps),
        ended=max(record.time for record in steps),
        nodes={r.group_rank: r.node for r in steps if r.group_rank >= 0 and r.node >= 0},
        pids={record.rank: record.pid for record in steps},
        first=min(who),
        last=max(who),
        whole=frozenset(step for step, ranks in who.items() if len(ranks) == size),
    )


def gap(found: Sequence[World]) -> str:
    """A sentence about the steps that were not completed by all ranks of any world, or "". The very
    last step does not count, because it may have been interrupted.

    A script that resumes from its last checkpoint may repeat a step, but skips none."""
    if not found:
        return ""
    done = frozenset().union(*(world.whole for world in found))
    steps = range(min(world.first for world in found), max(world.last for world in found))
    if missing := [step for step in steps if step not in done]:
        more = " ..." if len(missing) > MAX_SHOWN else ""
        named = ", ".join(map(str, missing[:MAX_SHOWN]))
        return f"no whole world completed step {named}{more}; {describe_worlds(found)}"
    return ""


def describe_worlds(found: Sequence[World]) -> str:
    """A short description of the worlds, for the message of a failed test."""
    if not found:
        return "no rank has completed a step"
    start = found[0].began
    return "; ".join(
        f"a world of {world.world_size} from {world.began - start:.2f} s to "
        f"{world.ended - start:.2f} s, steps {world.first} to {world.last}"
        for world in found
    )


def earliest(
    steps: Sequence[Step], step: int, world_size: int | None, since: float | None
) -> Step | None:
    """The earliest report of step `step` or a later one, in the newest world, or with `since` in
    any world that began after it; None if there is none."""
    began: dict[int, float] = {}
    for record in steps:
        began[record.round] = min(record.time, began.get(record.round, record.time))
    newest = max(began, default=0)
    fitting = [
        record
        for record in steps
        if (record.round == newest if since is None else began[record.round] > since)
        and record.step >= step
        and world_size in (None, record.world_size)
    ]
    return min(fitting, key=lambda record: record.time, default=None)


def candidates(found: Sequence[World], round: int | None, since: float | None) -> Sequence[World]:
    """The world with this number; else those that began after `since`; else the newest."""
    if round is not None:
        return [world for world in found if world.round == round]
    return found[-1:] if since is None else [world for world in found if world.began > since]
