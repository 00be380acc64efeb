"""Training as counters: ranks that compute, load, save and reduce in nested groups, by a seed, on
two nodes that say what real agents say. Nothing of it knows how the master judges."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from elasticrun.core import events as fx
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName
from tests.core import by_hand

QUIET = 5.0
"""Seconds without movement after which a node says so."""

BEAT = 2.0
"""Seconds between two signs of life of an agent."""

NODES = ("a", "b")
EACH = 4
RANKS = range(len(NODES) * EACH)
GROUPS = (
    m.GroupSeen("0", "world", ""),
    *(m.GroupSeen(f"tp{one}", "tp", f"{2 * one},{2 * one + 1}") for one in range(4)),
    m.GroupSeen("dp0", "dp", "0-6:2"),
    m.GroupSeen("dp1", "dp", "1-7:2"),
    m.GroupSeen("uploads", "uploads", ""),
)
WORLD, UPLOADS = 0, 7
CALL = "all_reduce [1000] float32"
FOR_EVER = float("inf")

COMPUTES = m.RankSeen(0, 1, m.Being.RUNS, True, True, 0.9, 0.0, place="train.py:20 step")
LOADS = replace(COMPUTES, being=m.Being.SLEEPS, cpu=0.0, place="train.py:41 load")
SAVES = replace(COMPUTES, being=m.Being.DISK, cpu=0.1, io=2e8, place="train.py:88 save")
WAITS = replace(
    COMPUTES,
    being=m.Being.SLEEPS,
    cpu=0.0,
    place="train.py:30 reduce",
    library="torch.distributed.distributed_c10d",
)


def groups_of(rank: int) -> tuple[int, int]:
    """Its tp and its dp group."""
    return 1 + rank // 2, 5 + rank % 2


def members_of(group: int) -> list[int]:
    return [rank for rank in RANKS if group in (WORLD, UPLOADS, *groups_of(rank))]


@dataclass(slots=True)
class _Rank:
    number: int
    entered: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    does: m.RankSeen = COMPUTES
    step: int = 0
    program: list[tuple[str, float]] = field(default_factory=list)


class Training:
    """`plan(rank, step)` gives what a rank does in a step, in order: ("compute" | "load" | "save",
    seconds; for ever: it is `stuck`), or ("tp" | "dp" | "world", 0.0) for a collective. `silent`:
    the part of questions that a rank does not answer in time, as on a host with too much to do."""

    def __init__(
        self,
        plan: Callable[[int, int], list[tuple[str, float]]],
        stuck: m.RankSeen = COMPUTES,
        silent: float = 0.0,
        spec: m.JobSpec = by_hand.SPEC,
    ) -> None:
        self.master = by_hand.Master(spec)
        self.stuck = stuck
        self._silent = silent
        self._draw = random.Random(0)
        self.plan = plan
        self.now = 0.0
        self.moved = dict.fromkeys(NODES, 0.0)
        self.quiet: set[str] = set()
        self.notes: list[tuple[float, str]] = []
        self.judged: list[fx.Judged] = []
        self.over_at: float | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._seen = dict.fromkeys((1, 2), 0)
        self.round = self._begin()
        self.ranks = [_Rank(number) for number in RANKS]
        for one in self.ranks:
            self._go_on(one)
        self._beat()

    def _begin(self) -> RoundName:
        for session, node in enumerate(NODES, 1):
            hello = by_hand.hello(node, local_world_size=EACH)
            self.master.feed(fx.Attached(session, hello))
            self.master.hear(session, m.Join(Endpoint(f"10.0.0.{session}", 4000)))
        (start,) = [o for o in self.master.told[1] if isinstance(o, m.Start)]
        for session in (1, 2):
            self.master.hear(session, m.Running(start.round, tuple(range(10, 10 + EACH))))
        return start.round

    # ------------------------------------------------------------ time

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._numbers), what))

    def run(self, until: float) -> Training:
        """Until then, or until the round is ended."""
        while self.over_at is None:
            due = self.master.job.next_deadline()
            first = self._heap[0][0] if self._heap else FOR_EVER
            when = min(first, FOR_EVER if due is None else max(due, self.now))
            if when > until:
                break
            self.now = when
            if first <= when:
                heapq.heappop(self._heap)[2]()
            else:
                self._tell(None)
        return self

    def _tell(self, event: tuple[int, m.Report] | None) -> None:
        """Feed the master, and carry out what it orders."""
        self.master.now = self.now
        fed = fx.Tick() if event is None else fx.Heard(*event)
        for effect in self.master.feed(fed):
            if isinstance(effect, fx.Note):
                self.notes.append((self.now, effect.text))
            elif isinstance(effect, fx.Judged):
                self.judged.append(effect)
        for session in (1, 2):
            orders = self.master.told[session]
            fresh, self._seen[session] = orders[self._seen[session] :], len(orders)
            for order in fresh:
                if isinstance(order, m.Stop):
                    self.over_at = self.now
                elif isinstance(order, m.Inspect):
                    self.at(self.now + 0.05, lambda s=session, o=order: self._answer(s, o))

    def _beat(self) -> None:
        for session in (1, 2):
            self._tell((session, m.Beat(1)))
        self.at(self.now + BEAT, self._beat)

    # ------------------------------------------------------------ ranks

    def _go_on(self, one: _Rank) -> None:
        """Begin with what comes next."""
        if not one.program:
            one.step += 1
            one.program = list(self.plan(one.number, one.step))
        what, seconds = one.program.pop(0)
        if what == "upload":  # by a thread of its own
            self.at(self.now + seconds, lambda: self._enter(one, UPLOADS, CALL, None))
            self._go_on(one)
            return
        kinds = {"compute": COMPUTES, "load": LOADS, "save": SAVES}
        if what in kinds:
            one.does = kinds[what] if seconds < FOR_EVER else self.stuck
            if seconds < FOR_EVER:
                self.at(self.now + seconds, lambda: self._go_on(one))
            return
        kind, _, call = what.partition(" ")
        group = WORLD if kind == "world" else groups_of(one.number)[kind == "dp"]
        one.does = WAITS
        self._enter(one, group, call or CALL, self._go_on)

    def _enter(
        self, one: _Rank, group: int, call: str, then: Callable[[_Rank], None] | None
    ) -> None:
        """Call a collective; once all are in it goes on with `then`."""
        one.calls[group] = call
        one.entered[group] = number = one.entered.get(group, 0) + 1
        self._move(one)
        members = [self.ranks[rank] for rank in members_of(group)]
        calls = {other.calls.get(group) for other in members}
        if all(other.entered.get(group, 0) >= number for other in members) and len(calls) == 1:
            for other in members:
                other.done[group] = number
                self._move(other)
                if then is not None:
                    self.at(self.now + 0.001, lambda o=other: then(o))

    def _move(self, one: _Rank) -> None:
        """A counter of it has moved."""
        session = 1 + one.number // EACH
        node = NODES[session - 1]
        self.moved[node] = now = self.now
        if node in self.quiet:
            self.quiet.discard(node)
            self._tell((session, m.Quiet(self.round, 0.0)))

        def still() -> None:
            if self.moved[node] == now and node not in self.quiet:
                self.quiet.add(node)
                mine = [one for one in self.ranks if NODES[one.number // EACH] == node]
                waiting = sum(one.entered != one.done for one in mine)
                self._tell((session, m.Quiet(self.round, QUIET, 1.0, True, waiting)))

        self.at(now + QUIET, still)

    def _answer(self, session: int, order: m.Inspect) -> None:
        node = NODES[session - 1]
        seen = tuple(self.see(self.ranks[rank]) for rank in RANKS if rank // EACH == session - 1)
        self._tell((session, m.Inspected(order.round, order.number, 0, GROUPS, seen)))
        if order.stacks:
            groups = (m.StackGroup("k", f"{seen[0].rank}", 1, "", "train.py:41 load"),)
            folder = f"logs/{node}" if order.dump else ""
            told = m.Stacks(order.round, order.number, groups, folder=folder)
            self._tell((session, told))

    def see(self, one: _Rank) -> m.RankSeen:
        at = []
        for group, entered in one.entered.items():
            done = one.done.get(group, 0)
            call = one.calls[group] if entered > done else ""
            at.append(m.Position(group, entered, done, call=call))
        seen = replace(one.does, rank=one.number, at=tuple(at) if one.does.answers else ())
        late = seen.answers and self._draw.random() < self._silent
        return replace(seen, answers=False, holds=True, at=()) if late else seen


def healthy(seed: int) -> Callable[[int, int], list[tuple[str, float]]]:
    """Steps of some length with tp, dp; now and then a checkpoint or an evaluation by rank 0, a
    slow loader, a compile, an upload by threads of their own that ends with a collective of theirs,
    each as long as they are in life."""
    draw = random.Random(seed)
    base = draw.choice([0.3, 2.0, 9.0, 25.0])
    every_save, every_eval, every_load = (draw.randrange(10, 60) for _ in range(3))
    compile_, save, evaluate = (draw.uniform(10.0, 900.0) for _ in range(3))
    load = draw.uniform(1.0, 45.0)
    every_upload = draw.randrange(5, 40)

    def plan(rank: int, step: int) -> list[tuple[str, float]]:
        noise = random.Random(f"{seed} {rank} {step}")
        seconds = base * noise.uniform(0.7, 1.3)
        todo = [("compute", seconds / 2), ("tp", 0.0), ("compute", seconds / 2), ("dp", 0.0)]
        if step == 1:
            todo.insert(0, ("compute", compile_ * noise.uniform(0.9, 1.1)))
        if step % every_load == 0 and rank == step % len(RANKS):
            todo.insert(0, ("load", load))
        if step % every_upload == 0:
            todo.insert(0, ("upload", noise.uniform(0.1, 60.0)))
        if step % every_save == 0:
            todo += [("save", save if rank == 0 else 0.01), ("world", 0.0)]
        if step % every_eval == 0:
            todo += [("compute", evaluate if rank == 0 else 0.01), ("world", 0.0)]
        return todo

    return plan
