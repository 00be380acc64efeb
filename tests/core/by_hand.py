"""The master's brain by hand: events in, effects out, a clock that tests set."""

from __future__ import annotations

from msgspec.structs import replace

from elasticrun.core import events as fx
from elasticrun.core.job.job import Job
from elasticrun.core.persisted import Facts
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName
from tests.simulator.script import DEFAULT_SPEC

SPEC = replace(DEFAULT_SPEC, min_nodes=2, max_nodes=2, max_restarts=3, restart_backoff=0.0)


def hello(node: str, **changes: object) -> m.Hello:
    one = m.Hello(
        protocol=m.PROTOCOL_VERSION,
        version="x",
        node=node,
        incarnation=f"life-{node}",
        host=f"host-{node}",
        address="10.0.0.1",
        pid=7,
        node_rank=-1,
        local_world_size=2,
        role="default",
        spec=SPEC,
        attached=None,
    )
    return replace(one, **changes)  # type: ignore[arg-type]


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

    def feed(self, event: fx.JobEvent) -> list[fx.JobEffect]:
        self.effects = self.job.step(event, self.now)
        for effect in self.effects:
            if isinstance(effect, fx.Record):
                self.facts = effect.facts
        return self.effects

    def hear(self, session: int, *reports: m.Report) -> None:
        for report in reports:
            self.feed(fx.Heard(session, report))

    def orders(self, session: int) -> list[m.Order]:
        tells = [effect for effect in self.effects if isinstance(effect, fx.Tell)]
        return [tell.order for tell in tells if session in tell.sessions]

    def running(self) -> RoundName:
        """Two nodes, a on session 1 and b on session 2, in a round."""
        for session, node in ((1, "a"), (2, "b")):
            self.feed(fx.Attached(session, hello(node)))
            self.hear(session, m.Join(Endpoint(f"10.0.0.{session}", 4000)))
        (start,) = self.orders(2)
        assert isinstance(start, m.Start)
        self.hear(1, m.Running(start.round, (11, 12)))
        self.hear(2, m.Running(start.round, (21, 22)))
        return start.round

    def come_back(self, session: int, name: RoundName) -> None:
        store = Endpoint(f"10.0.0.{session}", 4001)
        self.hear(session, m.Stopping(name, 30.0), m.Stopped(name), m.Join(store))


def failure(rank: int) -> m.Failure:
    return m.Failure("h", rank, 0, 1, 1, 0, m.FailureKind.SCRIPT, "boom", "", "")
