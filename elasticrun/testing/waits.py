"""The worlds of a job under test: which ranks trained together, from when to when, and on which
nodes. All of it is read from the step log, that is, from what ranks did, not from what the launcher
believes.

What a test sees of a job and waits for: its steps and worlds, its status, its words, its end.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, overload

from elasticrun.testing import processes
from elasticrun.testing.fleet import Fleet, JobError, Where, mistake
from elasticrun.testing.steps import Deadline, Step, overlap
from elasticrun.wire.messages import JobStatus

MOST_SHOWN: Final = 10
"""Numbers of steps that a sentence names."""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that trained together, as far as they have said so."""

    round: int
    """Its number, as in the steps of its ranks; see `elasticrun.testing.Step`."""
    world_size: int
    restarts: int
    """Restarts that the job had been charged when it began; -1 where the script does not say."""
    began: float
    """When its first step was completed: CLOCK_MONOTONIC, seconds."""
    ended: float
    """When the last one was, so far."""
    nodes: Mapping[int, int]
    """Number of the node by group rank; empty where the script does not say."""
    pids: Mapping[int, int]
    """Process by rank."""
    first: int
    """The lowest step that a rank of it has completed: where it took up the work."""
    last: int
    """The highest."""
    whole: frozenset[int]
    """The steps that every one of its ranks has completed."""


def worlds(steps: Iterable[Step]) -> list[World]:
    """Every world in which at least one rank has completed a step, in the order of their first."""
    lives: dict[int, list[Step]] = {}
    for record in steps:
        lives.setdefault(record.round, []).append(record)
    return sorted(map(_world, lives.values()), key=lambda world: world.began)


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
    """The steps that no whole world has completed though a later one was: a sentence, or "".

    A script that goes on from its last checkpoint may do a step twice, but leaves none out; the
    last step of all may have been interrupted."""
    if not found:
        return ""
    done = frozenset().union(*(world.whole for world in found))
    steps = range(min(world.first for world in found), max(world.last for world in found))
    if missing := [step for step in steps if step not in done]:
        more = " ..." if len(missing) > MOST_SHOWN else ""
        named = ", ".join(map(str, missing[:MOST_SHOWN]))
        return f"no whole world completed step {named}{more}; {story(found)}"
    return ""


def story(found: Sequence[World]) -> str:
    """The worlds in a few words, for a test that fails."""
    if not found:
        return "no rank has completed a step"
    start = found[0].began
    return "; ".join(
        f"a world of {world.world_size} from {world.began - start:.2f} s to "
        f"{world.ended - start:.2f} s, steps {world.first} to {world.last}"
        for world in found
    )


ASK_AGAIN: Final = 1.0
"""The status is asked for when an agent or a master has said something, and at the latest after so
many seconds, since not every change has a line."""

ASK_SPACING: Final = 0.05
"""Seconds between two looks at what grows all the time, however much ranks print."""

__tracebackhide__ = mistake  # pytest shows the line of the test


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """How a job ended, by node."""

    exit_codes: tuple[int | None, ...]
    """Of the agents, as subprocess has them."""
    outcomes: tuple[str, ...]
    """The same in words; a node that the test had killed is told from one that failed."""
    ok: bool
    """Every node that the test had not killed ended with 0."""


class Watched(Fleet):
    """A job, to those who look on. `since`, where a method has it: CLOCK_MONOTONIC, seconds, as all
    that does something to a job returns it. `timeout`: the job's own where none is given."""

    # ------------------------------------------------------------ worlds

    def one_world(self) -> None:
        """Assert that no two worlds of this job have completed steps at a time."""
        if wrong := overlap(self.steps()):
            raise JobError(f"two worlds at a time: {wrong}")

    def no_gap(self) -> None:
        """Assert that every step, from the first to the one before the last, was completed by all
        ranks of one world: the script took up its work where it had been saved."""
        if wrong := gap(self.worlds()):
            raise JobError(f"steps are missing: {wrong}")

    def worlds(self) -> list[World]:
        """The worlds that have completed a step so far, in the order of their first."""
        return worlds(self.steps())

    def wait_for_world(
        self,
        world_size: int | None = None,
        *,
        step: int | None = None,
        round: int | None = None,
        since: float | None = None,
        timeout: float | None = None,
    ) -> World:
        """Wait for a world, every rank of which has completed a step (`step`: that or a later one).
        JobError when there is none within `timeout` seconds, or when every agent has ended.

        `world_size`: its ranks. `round`: that world (`World.round`) and no other. `since`: the
        first such world of those that began after this moment. Without both: the newest world.
        """
        deadline = self._deadline(timeout)
        while True:
            over = self._over()
            found = self.worlds()
            for world in _candidates(found, round, since):
                if world_size in (None, world.world_size) and _has_done(world, step):
                    return world
            if over or deadline.over():
                size = "" if world_size is None else f" of {world_size} ranks"
                what = "a step" if step is None else f"step {step}"
                raise self._failed(
                    f"a world{size} all of which completed {what}", over, deadline, story(found)
                )
            self._stepped.wait(deadline.left())
            time.sleep(min(ASK_SPACING, deadline.left()))

    # ------------------------------------------------------------ words, steps, status

    def wait_for_output(
        self, number: Where, text: str | re.Pattern[str], *, timeout: float | None = None
    ) -> str:
        """Wait until a node's agent or ranks have printed `text` (a pattern is searched for); all
        that they have printed then. JobError when they have not within `timeout` seconds, or when
        the agent has ended."""
        node = self._named(number)
        deadline = self._deadline(timeout)
        while True:
            over = node.exit_code is not None
            said = node.output()
            if text in said if isinstance(text, str) else text.search(said):
                return said
            if over or deadline.over():
                words = text if isinstance(text, str) else text.pattern
                tail = f"its last words:\n{node.tail()}"
                raise self._failed(f"{node.name} to print {words!r}", over, deadline, tail)
            self._said.wait(deadline.left())

    @overload
    def wait_for(
        self, *, step: int, world_size: int | None = ..., since: float | None = ...,
        timeout: float | None = ...,
    ) -> Step: ...  # fmt: skip

    @overload
    def wait_for(
        self, condition: Callable[[JobStatus], object] | None = ..., *,
        world_size: int | None = ..., round: int | None = ..., phase: str | None = ...,
        reason: str | None = ..., timeout: float | None = ...,
    ) -> JobStatus: ...  # fmt: skip

    def wait_for(
        self,
        condition: Callable[[JobStatus], object] | None = None,
        *,
        step: int | None = None,
        world_size: int | None = None,
        round: int | None = None,
        phase: str | None = None,
        reason: str | None = None,
        since: float | None = None,
        timeout: float | None = None,
    ) -> Step | JobStatus:
        """Wait until the job is as described; JobError when it is not within `timeout` seconds, or
        when every agent has ended.

        With `step`: until a rank of the newest world has completed that step or a later one, in a
        world of `world_size` ranks where that is given, in a world that began `since` some moment
        where that is given; returns the first such step. Else: until the master's status shows
        this world size (running), this round or a later one, this phase, this text in the reason of
        the job or of a node, and satisfies `condition`; returns that status.
        """
        if step is not None:
            if condition or round or phase or reason:
                raise ValueError("wait for a step or for a state of the job: not for both at once")
            return self._wait_step(step, world_size, since, timeout)
        if since is not None:
            raise ValueError("since= needs step=: a status has no time")

        def fits(status: JobStatus) -> bool:
            return (
                (world_size is None or (status.world_size, status.phase) == (world_size, "running"))
                and (round is None or (status.round is not None and status.round.number >= round))
                and (phase is None or status.phase == phase)
                and (reason is None or any(reason in text for text in _reasons(status)))
                and (condition is None or bool(condition(status)))
            )

        wanted = {"world_size": world_size, "round": round, "phase": phase, "reason": reason}
        words = [f"{name}={value!r}" for name, value in wanted.items() if value is not None]
        return self._wait_status(fits, ", ".join(words) or "the condition", timeout)

    def _wait_step(
        self, step: int, world_size: int | None, since: float | None, timeout: float | None
    ) -> Step:
        deadline = self._deadline(timeout)
        while True:
            over = self._over()
            if found := _first(self.steps(), step, world_size, since):
                return found
            if over or deadline.over():
                size = "" if world_size is None else f" of a world of {world_size}"
                last = self._log.steps[-1] if self._log.steps else "none"
                raise self._failed(f"step {step}{size}", over, deadline, f"the last step: {last}")
            self._stepped.wait(deadline.left())

    def _wait_status(
        self, fits: Callable[[JobStatus], bool], what: str, timeout: float | None
    ) -> JobStatus:
        deadline = self._deadline(timeout)
        last: JobStatus | str = "never asked"
        while True:
            over = self._over()
            try:
                last = self.status()
                if fits(last):
                    return last
            except JobError as error:
                last = str(error)
            if over or deadline.over():
                raise self._failed(what, over, deadline, f"the last status: {last}")
            self._said.wait(min(ASK_AGAIN, deadline.left()))
            time.sleep(ASK_SPACING)

    def result(self, timeout: float | None = None) -> Result:
        """Wait until every agent has ended. JobError when one has not within `timeout` seconds."""
        deadline = self._deadline(timeout)
        while not self._over():
            if deadline.over():
                running = [n.name for n in self.nodes if n.exit_code is None]
                raise self._failed(f"the end of {', '.join(running)}", False, deadline, "")
            self._stepped.wait(deadline.left())
        if self.master_node is not None and not self.master_node.killed:
            processes.await_end([self.master_node.pid], deadline.left())
        return Result(
            exit_codes=tuple(node.exit_code for node in self.nodes),
            outcomes=tuple(node.outcome() for node in self.nodes),
            ok=all(node.killed or node.exit_code == 0 for node in self.nodes),
        )

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.timeout if timeout is None else timeout)

    def _failed(self, what: str, over: bool, deadline: Deadline, seen: str) -> JobError:
        ends = ", ".join(f"{node.name} {node.outcome()}" for node in self.nodes)
        when = f"it did not come within {deadline.seconds:g} s"
        if over:
            when = "every agent ended" if self._over() else "it ended"
        return JobError(f"waited for {what}, but {when} ({ends}); {seen}")


def _first(
    steps: Sequence[Step], step: int, world_size: int | None, since: float | None
) -> Step | None:
    """The earliest step that fits, of the newest world or of those that began `since`."""
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


def _candidates(found: Sequence[World], round: int | None, since: float | None) -> Sequence[World]:
    if round is not None:
        return [world for world in found if world.round == round]
    return found[-1:] if since is None else [world for world in found if world.began > since]


def _has_done(world: World, step: int | None) -> bool:
    return bool(world.whole) and (step is None or max(world.whole) >= step)


def _reasons(status: JobStatus) -> list[str]:
    return [status.reason, status.outcome, *(node.reason for node in status.nodes)]
