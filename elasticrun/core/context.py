"""What the components of a job's master share: spec, nodes, current round, outgoing effects."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from elasticrun.core import events as fx
from elasticrun.core.nodes.admission import Exclusions, FlapHistory
from elasticrun.core.nodes.membership import Membership
from elasticrun.core.nodes.node import Nodes
from elasticrun.core.persisted import IncidentCause, LongWait
from elasticrun.core.rounds.budget import Restarts
from elasticrun.core.rounds.rendezvous import Rendezvous
from elasticrun.core.rounds.round import Round
from elasticrun.wire import messages as m


class JobContext:
    """The shared state of one job. Components query the state machines here, and append their
    orders and notes to `out`, in order."""

    def __init__(self, spec: m.JobSpec, term: int, mint: Callable[[], str], now: float) -> None:
        """`mint` returns a nonce for every round, every probe and every attempt to write a
        checkpoint."""
        self.spec = spec
        self.term = term
        self.mint = mint
        self.now = now  # monotonic seconds, of the event being processed
        self.away = 0.0  # seconds in which the master was not listening
        self.nodes = Nodes()
        self.membership = Membership(self.nodes, heartbeat_timeout=spec.heartbeat_timeout)
        self.flaps = FlapHistory()
        self.exclusions = Exclusions()
        self.rdzv = Rendezvous(spec, now)
        self.restarts = Restarts(spec)
        self.number = 0  # of the last round
        self.incidents = 0  # the number of the last one
        self.downtime: defaultdict[IncidentCause, float] = defaultdict(float)
        """Seconds without training, by cause of the closed incidents."""
        self.hung = 0.0  # seconds of hangs within incidents
        self.newest = -1  # newest step in reports of the end of the current round; -1: none
        self.round: Round | None = None  # the last one that was formed or adopted
        self.dumps = 0  # the number of the last folder of stacks
        self.recoveries: deque[float] = deque(maxlen=200)
        """For the last restarts: seconds from when the ranks ran again to when they trained
        again."""
        self.waits: tuple[LongWait, ...] = ()  # the longest that ended well, for each place
        self.scaled = False  # an operator has changed the number of nodes
        self.outcome: m.End | None = None
        self.out: list[fx.JobEffect] = []
        self._notes = 0

    def scale(self, low: int, high: int) -> None:
        """Change the minimum and maximum number of nodes."""
        self.spec = replace(self.spec, min_nodes=low, max_nodes=high)
        self.scaled = True
        self.rdzv.scale(self.spec)

    def note(self, text: str, level: str = "info", *, on_nodes: bool = False) -> None:
        """Log a line for the operator. `on_nodes`: nodes print it too."""
        self._notes += 1
        self.out.append(fx.Note(text, level, on_nodes, number=self._notes))

    def send(self, session: int, order: m.Order) -> None:
        """Send an order on one stream."""
        self.out.append(fx.Send((session,), order))

    def broadcast(self, nodes: Iterable[str], order: m.Order) -> None:
        """Send an order to each of these nodes that is connected."""
        found = (self.nodes[node].session for node in nodes if node in self.nodes)
        sessions = tuple(session for session in found if session is not None)
        if sessions:
            self.out.append(fx.Send(sessions, order))

    def hang_up(self, session: int) -> None:
        """Close a stream after everything queued for it has been sent."""
        self.out.append(fx.Hangup(session))
