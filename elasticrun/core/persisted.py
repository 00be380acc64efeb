"""The facts of a job that outlive its master: decisions, not the events that led to them.

A job emits `Record(facts)` before the orders that depend on them. The next master passes the newest
`Facts` to its `Job`, which trusts them; old events are never replayed (decision 012). Facts are
bounded to some hundred bytes per node: a round, the order of first joins, the budget, nodes in
backoff and the outcome.

Each component has one struct here. Only the component reads and writes it, with `facts` and
`restore` (`core/parts.py`). Times are ages or remaining seconds, because the next master has
another clock. `restore` gets the time of the record on the new clock, so the time that the facts
spent in the record counts.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from elasticrun.wire.messages import End, ExcludedNode, JobSpec, ReasonCode, Restore, RoundInfo
from elasticrun.wire.types import Endpoint, RoundName


class Seat(Struct, frozen=True):
    """A member's place in the round: enough to send its `Start` again."""

    node: str
    incarnation: str
    group_rank: int
    first_rank: int
    ranks: int  # on this node
    role_first_rank: int
    role_world_size: int


class RendezvousFacts(Struct, frozen=True):
    """The last round that was formed or adopted, its state, and what the job waits for."""

    round: RoundInfo | None = None  # None: no round yet
    store: Endpoint | None = None
    store_node: str = ""
    seats: tuple[Seat, ...] = ()
    adopted: bool = False  # rebuilt from its nodes' reports; what they do not know is missing
    over: str = ""  # why its members were stopped; empty while it runs
    over_code: ReasonCode | None = None  # the typed reason of that text
    age: float = 0.0  # of the round
    lost: str = ""  # which member was lost first, as a sentence
    lost_code: ReasonCode | None = None  # the typed reason of that text
    gone: tuple[str, ...] = ()  # members whose agents have exited
    done: tuple[str, ...] = ()  # those of `gone` whose ranks had all exited with 0
    waiting: tuple[str, ...] = ()  # after the round ended: nodes waiting to join the next one
    fenced: bool = False  # it can complete no further collective
    silent: float = 0.0  # seconds since the last message of the members in `gone`
    starved: float = 0.0  # seconds with fewer nodes than the minimum; 0.0: there are enough
    blind: bool = False  # no round, but an earlier master served without leaving a record


class DeathRecord(Struct, frozen=True):
    """A node that repeatedly fell silent, or repeatedly died soon after it joined: the ages of
    these deaths, how often it was put in backoff for them, and the seconds of backoff that
    remain."""

    node: str
    silences: tuple[float, ...]
    bars: int
    remaining: float


class MembershipFacts(Struct, frozen=True):
    """Which nodes have fallen silent."""

    left_out: tuple[DeathRecord, ...] = ()


class FlapFacts(Struct, frozen=True):
    """Which nodes keep dying soon after they join a round."""

    fickle: tuple[DeathRecord, ...] = ()


class ExclusionFacts(Struct, frozen=True):
    """Which nodes are refused."""

    excluded: tuple[ExcludedNode, ...] = ()
    slow_ages: tuple[float, ...] = ()  # since nodes were excluded as slow, within the last hour


class Blamed(Struct, frozen=True):
    """A node whose ranks failed first: in how many consecutive rounds until now, how often it was
    in backoff for that, for which rank (-1: none), and the remaining seconds of that backoff
    (negative: seconds since it ended)."""

    node: str
    rounds: int
    times: int
    rank: int
    remaining: float


class RestartFacts(Struct, frozen=True):
    """What failures have cost, and which nodes caused them."""

    count: int = 0  # restarts charged since the job began
    charges: tuple[float, ...] = ()  # ages of the charges within --restart-window; () without one
    short_lives: int = 0  # consecutive rounds that failed soon after they began
    blamed: tuple[Blamed, ...] = ()
    excuse: str = ""  # why further failures in the last round cost nothing
    excuse_code: ReasonCode | None = None  # the typed reason of that text


class Rejected(Struct, frozen=True):
    """A snapshot, and how many rounds that resumed from it failed by themselves within a few
    steps."""

    round: RoundName
    step: int
    times: int


class KnownUse(Struct, frozen=True):
    """What was used by a snapshot of the work that is handed out (`core/work/spans.py`)."""

    round: RoundName
    step: int
    used: str


class WorkFacts(Struct, frozen=True):
    """The work that is handed out."""

    is_used: bool = False  # a rank has taken work
    round: RoundName | None = None  # of which `source` and `used` are known
    source: str = ""
    used: str = ""  # in this round, whatever step is restored
    kept: str = ""  # when the last round ended, without a Checkpointer
    known: tuple[KnownUse, ...] = ()
    number: int = 0  # of this record


class AgreementFacts(Struct, frozen=True):
    """What is known of replicas. `has_agreed`: all were equal once. `left_out`: keys of the tensors
    that differ by design. `is_off`: they differ too much to be compared. `accused`: nodes whose
    ranks differed before. `returns`: rounds that ended for that reason."""

    has_agreed: bool = False
    left_out: tuple[int, ...] = ()
    is_off: bool = False
    accused: tuple[str, ...] = ()
    returns: int = 0


class SnapshotFacts(Struct, frozen=True):
    """What ranks can resume from, and what they should avoid."""

    written: Restore | None = None  # the newest committed checkpoint
    rejected: tuple[Rejected, ...] = ()
    rewound_from: int = -1  # the step from which training was rewound since the newest checkpoint
    restore_step: int = -1  # requested by a person; reset by the first checkpoint written after it
    work: WorkFacts = WorkFacts()
    agreement: AgreementFacts = AgreementFacts()


class LongWait(Struct, frozen=True):
    """The longest wait for a rank at this place in the user's source that ended well."""

    place: str
    seconds: float


class LedgerLine(Struct, frozen=True):
    """Slot-microseconds of one category and cause, and the number of slots in it at the time."""

    category: str
    cause: str
    micros: int
    slots: int


IncidentCause = str
"""What ended a round, as incidents name it."""


class LedgerEnd(Struct, frozen=True):
    """Rounds that ended for one cause: how many, the node if it was always the same one, and the
    steps that had to be repeated."""

    cause: str
    count: int
    node: str
    steps: int


class LedgerNode(Struct, frozen=True):
    """What is already booked of a node's sums in this round: slot-microseconds, and the saves of a
    rank."""

    node: str
    saves: int
    saved: int
    restored: int


class LedgerFacts(Struct, frozen=True):
    """How the time of every slot was spent."""

    lines: tuple[LedgerLine, ...] = ()
    ends: tuple[LedgerEnd, ...] = ()
    wall: int = 0  # microseconds in which any slot was held
    cause: str = ""  # why the last ended round ended
    newest: int = -1  # newest reported step
    done: int = 0  # steps that were kept
    trained: int = 0  # microseconds spent on them
    saves: int = 0  # number of saves, summed over all slots
    nodes: tuple[LedgerNode, ...] = ()
    stood: tuple[tuple[IncidentCause, float], ...] = ()  # seconds without training, by cause
    hung: float = 0.0  # seconds of hangs in these


class Facts(Struct, frozen=True):
    """All facts: what the components share (`core/context.py`), and one entry per component. The
    next master trusts them and learns the rest from the agents."""

    spec: JobSpec
    term: int
    number: int  # of the last round
    scaled: bool = False  # an operator set the numbers of nodes in the spec
    outcome: End | None = None
    incidents: int = 0  # the number of the last one
    dumps: int = 0  # the number of the last folder of stacks
    waits: tuple[LongWait, ...] = ()  # for each place the longest one that ended well
    age: float = 0.0  # seconds since they were recorded
    order: tuple[str, ...] = ()  # node ids in the order of first join
    rendezvous: RendezvousFacts = RendezvousFacts()
    membership: MembershipFacts = MembershipFacts()
    flaps: FlapFacts = FlapFacts()
    exclusions: ExclusionFacts = ExclusionFacts()
    restarts: RestartFacts = RestartFacts()
    snapshots: SnapshotFacts = SnapshotFacts()
    ledger: LedgerFacts = LedgerFacts()


def aged(facts: Facts, seconds: float) -> Facts:
    """The same facts, `seconds` older. Without this, every crash of a master would restart an
    exclusion or the window of the restart budget; if it crashed often enough, they would never
    expire."""
    return replace(facts, age=facts.age + seconds) if seconds > 0.0 else facts
