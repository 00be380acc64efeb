"""The facts of a job that outlive its master: what is decided, never how it came about.

A job says `Record(facts)` before the orders that the facts permit; whoever starts the next master
hands the newest `Facts` to its `Job`, which takes them for true and is never told old events again
(decision 012). Facts are bounded: a round, the order of first joins, the budget, who is left out
and the outcome; some hundred bytes a node.

Each part of the core has one struct here and reads and writes it alone, by `facts` and `restore`
(`core/parts.py`). Times are ages or remainders in seconds, because the next master has another
clock; `restore` is given the moment of the record on the new clock, so that the time for which the
facts lay in the record counts.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from elasticrun.wire.messages import End, ExcludedNode, JobSpec, ReasonCode, Restore
from elasticrun.wire.types import NOTHING, Endpoint, RoundName, Skip


class Seat(Struct, frozen=True):
    """A member's place in the round, enough to tell it its `Start` again.

    Of an adopted round the roles are not known: `role_world_size` is 0."""

    node: str
    incarnation: str
    group_rank: int
    first_rank: int
    ranks: int  # on this node
    role_first_rank: int
    role_world_size: int


class RoundFacts(Struct, frozen=True):
    """The last round that was formed or adopted."""

    name: RoundName
    world_size: int
    restart_count: int
    store: Endpoint
    store_node: str
    seats: tuple[Seat, ...]
    adopted: bool = False  # its nodes told of it; what they do not know is missing
    over: str = ""  # why its members were told to stop, empty while it runs
    over_code: ReasonCode | None = None  # the reason that this is the text of
    restore: Restore | None = None  # the snapshot that it was to go on from
    skip: Skip = NOTHING  # as in Start


class RendezvousFacts(Struct, frozen=True):
    """How the last round stands, and what the job waits for."""

    age: float = 0.0  # of the round
    lost: str = ""  # which member was lost first, in a sentence
    lost_code: ReasonCode | None = None  # the reason that this is the text of
    gone: tuple[str, ...] = ()  # members whose agents have gone
    done: tuple[str, ...] = ()  # of these, the ones whose ranks had all ended with 0
    waiting: tuple[str, ...] = ()  # once it is over: nodes that wait to be in the next one
    fenced: bool = False  # it can complete no further collective
    silent: float = 0.0  # since the last word of the members that have gone
    starved: float = 0.0  # how long the job has waited below its smallest size; 0.0: it does not
    blind: bool = False  # no round, but another master served before, without leaving a record


class LeftOut(Struct, frozen=True):
    """A node that has fallen silent lately, or whose stays were brief: the ages of these deaths,
    how often it was sent to the door for them, and how long it waits there yet."""

    node: str
    silences: tuple[float, ...]
    bars: int
    remaining: float


class MembershipFacts(Struct, frozen=True):
    """Which nodes have fallen silent."""

    left_out: tuple[LeftOut, ...] = ()


class FlapFacts(Struct, frozen=True):
    """Which nodes never stay."""

    fickle: tuple[LeftOut, ...] = ()


class ExclusionFacts(Struct, frozen=True):
    """Which nodes are refused."""

    excluded: tuple[ExcludedNode, ...] = ()
    slow_ages: tuple[float, ...] = ()  # since nodes were excluded as slow, within the hour


class Blamed(Struct, frozen=True):
    """A node whose ranks were the first to fail: in how many rounds in a row until now, how often
    it was left out for that and for which rank (-1: none), and the seconds until it is let in
    (negative: since then)."""

    node: str
    rounds: int
    times: int
    rank: int
    remaining: float


class RestartFacts(Struct, frozen=True):
    """What failures have cost, and who was to blame."""

    count: int = 0  # restarts charged since the job began
    charges: tuple[float, ...] = ()  # the ages of those that count
    short_lives: int = 0
    blamed: tuple[Blamed, ...] = ()
    excuse: str = ""  # why what fails in the last round from here on costs nothing
    excuse_code: ReasonCode | None = None  # the reason that this is the text of


class Rejected(Struct, frozen=True):
    """A snapshot, and how many rounds that trained on from it failed by themselves within a few
    steps."""

    round: RoundName
    step: int
    times: int


class SnapshotFacts(Struct, frozen=True):
    """What ranks can go on from, and what they should not."""

    written: Restore | None = None  # the newest checkpoint that was committed
    rejected: tuple[Rejected, ...] = ()
    rewound_from: int = -1  # training was taken back from this step since the newest checkpoint
    restore_step: int = -1  # that a person wants, until a checkpoint of what came of it


class LongWait(Struct, frozen=True):
    """Ranks have waited so long for one at this place in the user's source, and it came."""

    place: str
    seconds: float


class LedgerLine(Struct, frozen=True):
    """Slot-microseconds of one category and cause, and the slots that were in it just then."""

    category: str
    cause: str
    micros: int
    slots: int


Cause = str
"""What ended a round, in the words of incidents."""


class LedgerEnd(Struct, frozen=True):
    """Rounds that ended for one cause: how many, the node where it was always the same one, and the
    steps that were done again."""

    cause: str
    count: int
    node: str
    steps: int


class LedgerNode(Struct, frozen=True):
    """What is booked of a node's sums in this round: slot-microseconds, and the saves of a rank."""

    node: str
    saves: int
    saved: int
    restored: int


class LedgerFacts(Struct, frozen=True):
    """Where the time of every slot went."""

    lines: tuple[LedgerLine, ...] = ()
    ends: tuple[LedgerEnd, ...] = ()
    wall: int = 0  # microseconds in which any slot was held
    cause: str = ""  # of the end of the last round that was over
    newest: int = -1  # step that was told
    done: int = 0  # steps that were kept
    trained: int = 0  # microseconds in which they were done
    saves: int = 0  # that a rank made, in all
    nodes: tuple[LedgerNode, ...] = ()
    stood: tuple[tuple[Cause, float], ...] = ()  # seconds without training, by cause of incidents
    hung: float = 0.0  # seconds of hangs in these


class Facts(Struct, frozen=True):
    """All of it: what the parts share (`core/context.py`), and an entry for each part. The next
    master believes this and asks the agents for the rest."""

    spec: JobSpec
    term: int
    number: int  # of the last round
    scaled: bool = False  # the numbers of nodes in the spec are an operator's
    outcome: End | None = None
    incidents: int = 0  # the number of the last one
    dumps: int = 0  # the number of the last folder of stacks
    waits: tuple[LongWait, ...] = ()  # at each place the longest that ended well
    age: float = 0.0  # seconds for which this has lain in the record
    order: tuple[str, ...] = ()  # node ids in the order of first join
    round: RoundFacts | None = None
    rendezvous: RendezvousFacts = RendezvousFacts()
    membership: MembershipFacts = MembershipFacts()
    flaps: FlapFacts = FlapFacts()
    exclusions: ExclusionFacts = ExclusionFacts()
    restarts: RestartFacts = RestartFacts()
    snapshots: SnapshotFacts = SnapshotFacts()
    ledger: LedgerFacts = LedgerFacts()


def aged(facts: Facts, seconds: float) -> Facts:
    """The same facts, after they have lain in the record for so long. Without this every crash of
    a master would start an exclusion or a window of the restart budget anew, and a master that
    crashes often enough would never let anything end."""
    return replace(facts, age=facts.age + seconds) if seconds > 0.0 else facts
