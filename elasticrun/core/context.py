"""What the parts of a job's master share: what the job is, who is there, the round, the way out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from elasticrun.core import events as fx
from elasticrun.core.nodes.admission import Exclusions, FlapHistory
from elasticrun.core.nodes.membership import Membership
from elasticrun.core.nodes.node import Nodes
from elasticrun.core.persisted import Cause, LongWait
from elasticrun.core.rounds.budget import Restarts
from elasticrun.core.rounds.rendezvous import Rendezvous
from elasticrun.core.rounds.round import Round
from elasticrun.wire import messages as m


class JobContext:
    """One job. Machines that decide about it are asked by every part; orders and notes go out in
    the order in which they are given here."""

    def __init__(self, spec: m.JobSpec, term: int, mint: Callable[[], str], now: float) -> None:
        """`mint` gives a nonce for every round, probe and attempt to write a checkpoint."""
        self.spec = spec
        self.term = term
        self.mint = mint
        self.now = now  # monotonic seconds, of the event that is being taken in
        self.away = 0.0  # seconds in which the master did not listen
        self.nodes = Nodes()
        self.membership = Membership(self.nodes, heartbeat_timeout=spec.heartbeat_timeout)
        self.flaps = FlapHistory()
        self.exclusions = Exclusions()
        self.rdzv = Rendezvous(spec, now)
        self.restarts = Restarts(spec)
        self.number = 0  # of the last round
        self.incidents = 0  # the number of the last one
        self.stood: defaultdict[Cause, float] = defaultdict(float)
        """Seconds without training, by cause of the incidents that are over."""
        self.hung = 0.0  # seconds of hangs that stand in incidents
        self.newest = -1  # step that ranks of a round that is over had come to; -1: not known
        self.round: Round | None = None  # the last one that was formed or adopted
        self.dumps = 0  # as in the facts
        self.backs: deque[float] = deque(maxlen=200)
        """Seconds from ranks that run again until they train, of the last restarts."""
        self.waits: tuple[LongWait, ...] = ()  # as in the facts
        self.scaled = False  # an operator has changed the number of nodes
        self.outcome: m.End | None = None
        self.out: list[fx.JobEffect] = []
        self._notes = 0

    def scale(self, low: int, high: int) -> None:
        """So many nodes are needed, and taken at most, from now on."""
        self.spec = replace(self.spec, min_nodes=low, max_nodes=high)
        self.scaled = True
        self.rdzv.scale(self.spec)

    def note(self, text: str, level: str = "info", *, told: bool = False) -> None:
        """A line for the operator. `told`: nodes print it, too."""
        self._notes += 1
        self.out.append(fx.Note(text, level, told, number=self._notes))

    def tell(self, session: int, order: m.Order) -> None:
        """An order to one stream."""
        self.out.append(fx.Tell((session,), order))

    def broadcast(self, nodes: Iterable[str], order: m.Order) -> None:
        """An order to those of these nodes that can be reached."""
        found = (self.nodes[node].session for node in nodes if node in self.nodes)
        sessions = tuple(session for session in found if session is not None)
        if sessions:
            self.out.append(fx.Tell(sessions, order))

    def hang_up(self, session: int) -> None:
        """Close a stream, once what was told to it has been sent."""
        self.out.append(fx.Hangup(session))
