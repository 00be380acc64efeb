"""The data of `top`, `events`, `incidents`, `stacks` and the page: one record, as JSON.

Times are seconds before the picture was made, so a reader's clock is never compared with the
master's; durations are seconds. Texts come from scripts and hosts: the code that displays them must
escape them.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from elasticrun.wire.messages import JobStatus


class RankRow(Struct, frozen=True):
    """One rank as of the last sample, which is `Picture.looked` seconds old."""

    rank: int
    node: str
    state: str  # stepping, waiting, odd, busy, idle, starting, stopped, ended, silent
    waits_for: str = ""  # ranks: "2", "0-41,43-63"
    place: str = ""  # "train.py:88 load_shard"
    call: str = ""  # the collective it is in: "all_reduce #8231 [1000] float32 of dp"
    step: int = -1
    step_seconds: float = 0.0
    quiet: float = 0.0  # seconds since a counter or a step of it moved
    cpu: float = 0.0  # cores
    io: float = 0.0  # bytes per second
    rss: int = 0  # MiB
    gpu: int = -1  # percent; -1: unknown
    gpu_mib: int = 0


class StackRow(Struct, frozen=True):
    """Ranks whose threads have the same frames. The rarest group comes first."""

    ranks: str
    count: int
    thread: str
    text: str  # one line per frame, innermost first


class VerdictRow(Struct, frozen=True):
    """What keeps the job from making progress, as of the last sample."""

    klass: str  # certain, strong, weak, still
    kind: str  # mismatch, deadlock, ended, stopped, idle, held, disk, fabric, busy, still, said
    sentence: str
    since: float  # seconds since anything moved
    ranks: str  # the culprits; "" if none is known
    node: str  # the node at fault; "" for the script
    then: str  # a clause: what will be done about it, and in how many seconds; "": nothing
    folder: str = ""  # where stacks and counters were written, on each node
    says: str = ""  # the long operation that a rank has declared: then it is not a hang
    place: str = ""  # where the odd rank is, `train.py:41 load_shard`; "" if unknown
    said: tuple[str | int, ...] = ()  # `sentence` in pieces; a number: seconds, still increasing


class LedgerRow(Struct, frozen=True):
    """Slot-seconds of one category and cause."""

    category: str
    cause: str  # "" for none
    seconds: float


class Goodput(Struct, frozen=True):
    """Where the time of all slots went. `rows` add up to `slot_seconds`."""

    name: str  # "goodput" if steps are reported, else "uptime"
    share: float  # 0 to 1
    ettr: float  # 0 to 1; -1.0: unknown
    slot_seconds: float
    rows: tuple[LedgerRow, ...]
    line: str  # one line, as in status and at the job's end
    ends: tuple[tuple[str, int], ...] = ()  # ended rounds, by cause
    advice: str = ""  # what would have saved most; "": nothing known
    cost: float = 0.0  # of all slots' time, at --slot-price; 0.0: no price is set

    @property
    def summary(self) -> str:
        """The line, and the advice after it."""
        return f"{self.line}; {self.advice}" if self.advice else self.line


def without_words(rows: Iterable[LedgerRow]) -> tuple[LedgerRow, ...]:
    """The rows, with the operations that scripts declare replaced by "said"."""
    sums: dict[tuple[str, str], float] = {}
    for row in rows:
        key = (row.category, "said" if row.category == "wait" and row.cause else row.cause)
        sums[key] = sums.get(key, 0.0) + row.seconds
    return tuple(LedgerRow(*key, seconds) for key, seconds in sums.items())


class PhaseRow(Struct, frozen=True):
    """One phase of the recovery from an incident."""

    name: str  # detect, left, stop, gather, spawn, restore, warm
    seconds: float


CAUSES = (
    "node_lost",
    "node_slow",
    "rank_failed",
    "hang",
    "preempted",
    "scaled",
    "operator",
    "master",
    "script",
    "corruption",
)
"""Causes of incidents."""


class IncidentRow(Struct, frozen=True):
    """One thing that stopped training, and what it cost."""

    number: int
    cause: str  # one of CAUSES
    sentence: str  # what failed first
    followed: str  # what followed from it; "": nothing
    decision: str  # what was done, and why
    age: float  # seconds since it began
    round: int
    node: str = ""
    rank: int = -1
    over: bool = False  # training continues, or the job has ended
    excluded: tuple[str, ...] = ()
    phases: tuple[PhaseRow, ...] = ()
    steps_lost: int = 0
    slot_seconds: float = 0.0
    cost: float = 0.0  # of `slot_seconds`, at --slot-price; 0.0: no price is set
    hang: str = ""  # the hang when it began, unless it is the cause itself
    verdict: VerdictRow | None = None  # on that hang, or on the one that is the cause
    last_lines: str = ""
    stacks: tuple[StackRow, ...] = ()
    exitcode: int = 0  # of the rank that failed first; negative: the signal that ended it
    step: int = -1  # the newest reported before it; -1: none
    kind: str = ""  # of the failure of that rank (wire.messages.FailureKind); "": none failed
    ended: bool = False  # the job ended with it, with a code other than 0
    restarted: float = -1.0  # seconds until all ranks ran again; -1.0: not yet, or never
    first_step: float = -1.0  # seconds until the first step or collective; -1.0: unknown
    ended_before: str = ""  # ranks that had exited with 0 when that rank lost its connection
    found: str = ""  # what was found in that round before: replicas differ, a loss that is NaN


class PaceRow(Struct, frozen=True):
    """The training pace of a node that reports its steps, as of its last report."""

    node: str
    seconds: float  # of a step
    own: float  # of these, the time without waiting for others; 0.0: unknown
    slow: bool  # whether it is found slow


class EventRow(Struct, frozen=True):
    """A line of what happened. `number` counts from 1 for the job's master: a reader that has seen
    one asks for no older ones."""

    number: int
    age: float
    node: str
    text: str
    level: str  # info, warning, error


class SettingRow(Struct, frozen=True):
    """A setting of the job, for people."""

    name: str
    value: str
    source: str = ""  # a flag, a variable, or what was detected; "" if it is the default


class CurveRow(Struct, frozen=True):
    """A metric, or the seconds of a step (`step`): a mean for each stretch of time, if any."""

    name: str
    values: tuple[float | None, ...]


class TrainingRow(Struct, frozen=True):
    """How the training went, in stretches of `width` seconds, the oldest first."""

    ages: tuple[float, ...]  # of the beginning of each stretch
    width: float
    steps: tuple[int, ...]  # the newest in each; -1: none
    curves: tuple[CurveRow, ...]
    total: int = -1  # the last step, as the script has told; -1: unknown
    left: float = -1.0  # seconds until then at the current pace; -1.0: unknown


class Picture(Struct, frozen=True):
    """The whole picture of a job."""

    status: JobStatus
    looked: float = -1.0  # age of `ranks`; -1.0: never sampled
    verdict: VerdictRow | None = None
    ranks: tuple[RankRow, ...] = ()
    stacks: tuple[StackRow, ...] = ()
    stacks_missing: str = ""
    said: tuple[StackRow, ...] = ()  # the last lines that ranks have written, the newest last
    goodput: Goodput | None = None
    incidents: tuple[IncidentRow, ...] = ()  # the newest last
    events: tuple[EventRow, ...] = ()  # the newest last
    slow: tuple[str, ...] = ()  # why nodes are found slow, with figures
    paces: tuple[PaceRow, ...] = ()
    settings: tuple[SettingRow, ...] = ()
    training: TrainingRow | None = None
