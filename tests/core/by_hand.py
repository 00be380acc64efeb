"""The two state machines by hand: events in, effects out, a clock that tests set."""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from elasticrun.core import events as fx
from elasticrun.core.job.job import Job
from elasticrun.core.persisted import Facts
from elasticrun.core.reasons import Completed, code
from elasticrun.core.worker.group import WorkerGroup
from elasticrun.core.worker.states import State
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName, dumps, loads
from tests.master import people
from tests.simulator.script import DEFAULT_SPEC

DONE = m.End(0, "every rank exited with 0", (), code=code(Completed()))

SPEC = replace(DEFAULT_SPEC, min_nodes=2, max_nodes=2, max_restarts=3, restart_backoff=0.0)


def hello(node: str, **changes: object) -> m.Hello:
    own = {"incarnation": f"life-{node}", "host": f"host-{node}", "address": "10.0.0.1"}
    return people.hello(node, **{**own, "spec": SPEC, **changes})


class Master:
    """A job with the orders it gave, by session."""

    def __init__(
        self, spec: m.JobSpec | None = SPEC, *, facts: Facts | None = None, now: float = 0.0
    ) -> None:
        nonces = iter(f"nonce{number}" for number in range(10**6))
        self.job = Job(spec, 1, lambda: next(nonces), facts)
        self.now = now
        self.effects: list[fx.JobEffect] = []
        self.facts = facts
        """The newest record."""
        self.told: dict[int, list[m.Order]] = defaultdict(list)
        """All orders, by session."""

    def feed(self, event: fx.JobEvent) -> list[fx.JobEffect]:
        self.effects = self.job.step(event, self.now)
        for effect in self.effects:
            if isinstance(effect, fx.Record):
                self.facts = loads(dumps(effect.facts), Facts)  # as a record has them
            elif isinstance(effect, fx.Send):
                for session in effect.sessions:
                    self.told[session].append(effect.order)
        return self.effects

    def hear(self, session: int, *reports: m.Report) -> None:
        for report in reports:
            self.feed(fx.Heard(session, report))

    def both(self, *reports: m.Report) -> None:
        for session in (1, 2):
            self.hear(session, *reports)

    def orders(self, session: int) -> list[m.Order]:
        tells = [effect for effect in self.effects if isinstance(effect, fx.Send)]
        return [tell.order for tell in tells if session in tell.sessions]

    def running(self) -> RoundName:
        """Two nodes, a on session 1 and b on session 2, in a round."""
        for session, node in ((1, "a"), (2, "b")):
            self.feed(fx.Attached(session, hello(node)))
            self.hear(session, m.Join(Endpoint(f"10.0.0.{session}", 4000)))
        (start,) = self.orders(2)
        self.hear(1, m.Running(start.round, (11, 12)))
        self.hear(2, m.Running(start.round, (21, 22)))
        return start.round

    def come_back(self, session: int, name: RoundName) -> None:
        store = Endpoint(f"10.0.0.{session}", 4001)
        self.hear(session, m.Stopping(name, 30.0), m.Stopped(name), m.Join(store))

    def both_back(self, name: RoundName) -> None:
        for session in (1, 2):
            self.come_back(session, name)


def failure(rank: int) -> m.Failure:
    return m.Failure("h", rank, 0, 1, 1, 0, m.FailureKind.SCRIPT, "boom", "", "")


# ---------------------------------------------------------------- the agent's

STORE, NEXT = Endpoint("here", 4001), Endpoint("here", 4002)
ROUND = RoundName(1, 1, "aa")
START = m.Start(
    info=m.RoundInfo(ROUND, world_size=2),
    group_rank=0,
    group_world_size=1,
    first_rank=0,
    role_first_rank=0,
    role_world_size=2,
    store=STORE,
    host_store=True,
)
WELCOME = m.Welcome(1, "x", "job", 1, 1.0, 600.0, "")


STOPPED = [fx.RanksGone(), fx.Say(m.Stopped(ROUND))]
FINISHED = [fx.RanksGone(done=True), fx.Say(m.Finished(ROUND))]


def own(rank: int, code: int = 1, kind: str = "script") -> m.Failure:
    """A failure of a rank of this agent."""
    return m.Failure("here", rank, rank, 50 + rank, code, 1, m.FailureKind(kind), "boom", "", "")


PERSIST = m.Persist(
    attempt="a1",
    round=ROUND,
    step=7,
    world_size=2,
    ranks=(0, 1),
    shared=(0,),
    writers=2,
    coordinates=True,
    coordinator=None,
    reason="breakpoint",
    limit=30.0,
)


class Agent:
    """A group of two ranks and its clock."""

    def __init__(self, **settings: float | None) -> None:
        values: dict[str, float | None] = {"restart_grace": 10.0, "shutdown_timeout": 20.0}
        self.group = WorkerGroup(nproc=2, **(values | settings))  # type: ignore[arg-type]
        self.now = 0.0

    def feed(self, event: fx.AgentEvent) -> list[fx.AgentEffect]:
        effects = self.group.step(event, self.now)
        return [effect for effect in effects if not isinstance(effect, fx.Note)]

    def order(self, order: m.Order) -> list[fx.AgentEffect]:
        return self.feed(fx.Ordered(order))

    def exit(
        self, rank: int, code: int = -15, *, failure: m.Failure | None = None
    ) -> list[fx.AgentEffect]:
        return self.feed(fx.RankExited(rank, code, failure))

    def reaped(self, code: int = -15, *, stuck: tuple[int, ...] = ()) -> list[fx.AgentEffect]:
        """Both ranks have ended with this code, and what they left has been swept."""
        self.exit(0, code)
        self.exit(1, code)
        return self.feed(fx.RanksSwept(stuck))

    def wait(self) -> list[fx.AgentEffect]:
        deadline = self.group.next_deadline()
        assert deadline is not None
        self.now = deadline
        return self.feed(fx.Tick())

    @property
    def alive(self) -> bool:
        return self.state is not State.OVER

    @property
    def state(self) -> State:
        return self.group.status().state

    def joined(self) -> Agent:
        assert self.group.next_deadline() == 0.0
        assert self.feed(fx.Tick()) == [fx.PrepareStore()]
        self.feed(fx.LinkBack())
        self.order(WELCOME)
        assert self.feed(fx.StoreReady(STORE)) == [fx.Say(m.Join(STORE))]
        return self

    def started(self) -> Agent:
        self.joined()
        assert self.order(START) == [fx.SpawnRanks(START, 0), fx.PrepareStore()]
        return self

    def running(self) -> Agent:
        self.started()
        assert self.feed(fx.RankSpawned(0, 50)) == []
        assert self.feed(fx.RankSpawned(1, 51)) == [fx.Say(m.Running(ROUND, (50, 51)))]
        return self


def ended(effects: list[fx.AgentEffect]) -> fx.Exit:
    """How the agent ends, which is the last thing it is told."""
    outcome = effects[-1]
    assert isinstance(outcome, fx.Exit)
    return outcome
