"""Inputs (events) and outputs (effects) of the two state machines.

The processes feed events in the order in which they occurred, and carry out the effects of one step
before the next. An effect never raises into the state machine: its result, even a failure, arrives
as a later event.
"""

from __future__ import annotations

from msgspec import Struct

from elasticrun.core.persisted import Facts
from elasticrun.core.reasons import Reason
from elasticrun.core.sight.picture import IncidentRow, VerdictRow
from elasticrun.wire.messages import (
    Failure,
    Hello,
    Order,
    Probe,
    Probed,
    ReasonCode,
    Reply,
    Report,
    Request,
    Start,
)
from elasticrun.wire.types import Endpoint

# ---------------------------------------------------------------- both


class Tick(Struct, frozen=True):
    """A deadline from `next_deadline()` may be due."""


class Note(Struct, frozen=True):
    """One line for the operator's log; emitted once per change."""

    text: str
    level: str = "info"  # info, warning, error
    on_nodes: bool = False  # nodes of the round print it too
    why: Reason | None = None  # reason of an agent's note that names an unreachable peer
    number: int = 0  # numbers the notes of a master's core from 1; 0: not numbered


# ---------------------------------------------------------------- the master's: Job


class Attached(Struct, frozen=True):
    """A stream was opened, and its Hello names our protocol and job. `session` numbers streams."""

    session: int
    hello: Hello


class Heard(Struct, frozen=True):
    """A report on an attached session."""

    session: int
    report: Report


class Detached(Struct, frozen=True):
    """The stream ended. `clean`: the agent closed it; otherwise it broke (reset, or pings
    unanswered).

    `silent`: seconds without traffic on it beyond the beat interval, while other streams had
    traffic. A stream whose pings went unanswered was silent; a stream that was reset was not.
    `quiet`: seconds since the last traffic on it, regardless of other streams.
    """

    session: int
    clean: bool
    silent: float = 0.0
    quiet: float = 0.0


class Overslept(Struct, frozen=True):
    """The loop woke `by` seconds after its deadline: silence during that time proves nothing."""

    by: float


class Requested(Struct, frozen=True):
    """A request of a reader or an operator. `number` is unique. Each request gets exactly one
    reply, in the same step or a later one."""

    number: int
    request: Request


JobEvent = Attached | Heard | Detached | Overslept | Requested | Tick


class Send(Struct, frozen=True):
    """Send one order to each of these sessions."""

    sessions: tuple[int, ...]
    order: Order


class Hangup(Struct, frozen=True):
    """Close this session after everything queued for it has been sent."""

    session: int


class JobOver(Struct, frozen=True):
    """The outcome is known; the master exits once every agent has received it or is
    disconnected."""

    exit_code: int
    reason: str
    saved: int = -1  # the newest step in storage; -1: none
    code: ReasonCode | None = None


class Record(Struct, frozen=True):
    """Make these facts durable. Every later effect, of this step and of later steps, waits for
    that, so no agent receives an order that the next master would not know of. Events are still
    processed meanwhile (decision 012)."""

    facts: Facts


class Replied(Struct, frozen=True):
    """The reply to the Requested with this number."""

    number: int
    reply: Reply


class Filed(Struct, frozen=True):
    """Store this incident; it replaces an older version with the same number."""

    incident: IncidentRow


class Judged(Struct, frozen=True):
    """Publish a verdict on what blocks the job. `over`: it no longer applies."""

    verdict: VerdictRow
    over: bool


class FoundSlow(Struct, frozen=True):
    """Publish that a node is slow but stays in the job."""

    node: str
    sentence: str


JobEffect = Send | Hangup | Note | JobOver | Record | Replied | Filed | Judged | FoundSlow


# ---------------------------------------------------------------- the agent's: WorkerGroup


class Ordered(Struct, frozen=True):
    """An order from the master. The runtime's link handles Echo, so it never arrives here."""

    order: Order


class StoreReady(Struct, frozen=True):
    """A fresh store host is listening; the next Join may offer it."""

    store: Endpoint


class StoreLost(Struct, frozen=True):
    """The store host at this port exited on its own."""

    store: Endpoint


class RankSpawned(Struct, frozen=True):
    """A rank of the current round is running."""

    local_rank: int
    pid: int


class RankArmed(Struct, frozen=True):
    """A rank can be recalled from now on (`training.recoverable`); `armed` False: no longer."""

    local_rank: int
    armed: bool


class RankRaised(Struct, frozen=True):
    """An exception has left the recoverable function of a rank. The rank waits for RecallRanks or
    LetRankFail."""

    local_rank: int
    failure: Failure


class RankLeft(Struct, frozen=True):
    """A recalled rank has left its round: its process groups are destroyed. Its process waits for
    the next round."""

    local_rank: int


class RankExited(Struct, frozen=True):
    """A rank was reaped. `failure`: built by the runtime (error file, signal), None if code is
    0."""

    local_rank: int
    code: int
    failure: Failure | None


class RanksSwept(Struct, frozen=True):
    """All descendants of the stopped ranks are dead, except `stuck`: pids that do not die after
    SIGKILL."""

    stuck: tuple[int, ...]


class SpawnerLost(Struct, frozen=True):
    """The spawner died; the agent has killed and reaped its ranks. The runtime starts a new one
    without an effect; StoreReady says when it is usable. `time_us`: wall clock, microseconds, for
    the failures of the ranks that died with it."""

    reason: str
    time_us: int = 0


class Signalled(Struct, frozen=True):
    """The agent received a signal. `death`: one of --signals-to-handle; otherwise it is only
    forwarded. `step`: the newest step of a rank with a Checkpointer; -1: no rank here can save its
    state. `margin`: number of steps within which a message from the master reaches every rank.
    `held`: the newest step with a snapshot on this node, whole or not; -1: none. `fresh`: no rank
    that runs here has created a Checkpointer yet, so `held` contains everything they have."""

    signum: int
    name: str
    death: bool
    step: int = -1
    margin: int = 2
    held: int = -1
    fresh: bool = False


class LinkLost(Struct, frozen=True):
    """The master has just become unreachable; the runtime keeps redialling."""

    reason: str


class LinkBack(Struct, frozen=True):
    """The stream to the master is up (again). The group sends its present state to the master, in
    Say effects. The runtime has already sent Hello, with `start`."""


class ProbeEnded(Struct, frozen=True):
    """The result of a RunProbe, even if its processes could not be started or had to be killed. All
    its processes have been reaped. Arrives exactly once for each RunProbe, but never after
    CallOffProbe."""

    result: Probed


AgentEvent = (
    Ordered
    | StoreReady
    | StoreLost
    | RankSpawned
    | RankArmed
    | RankRaised
    | RankLeft
    | RankExited
    | RanksSwept
    | SpawnerLost
    | Signalled
    | LinkLost
    | LinkBack
    | ProbeEnded
    | Tick
)


class SpawnRanks(Struct, frozen=True):
    """Start all local ranks of this round; the runtime supplies environment, logs and keys.

    The runtime first releases the resources of the old ranks. `attempt` names the log folder.
    `kept`: local ranks whose process waits for this round; their process is not started again.
    """

    start: Start
    attempt: int
    kept: tuple[int, ...] = ()


class RecallRanks(Struct, frozen=True):
    """Make these ranks leave their round without ending their process; each answers with RankLeft,
    unless it exits first."""

    local_ranks: tuple[int, ...]


class LetRankFail(Struct, frozen=True):
    """Let a rank that has raised an exception fail with it; RankExited follows."""

    local_rank: int


class SignalRanks(Struct, frozen=True):
    """Send a signal to the process group of each of these local ranks."""

    local_ranks: tuple[int, ...]
    signum: int


class SweepRanks(Struct, frozen=True):
    """All ranks of this round have exited: end their remaining descendants, with SIGKILL after
    `grace` seconds; answer with RanksSwept."""

    grace: float


class PrepareStore(Struct, frozen=True):
    """Start a fresh store host (answer: StoreReady); at most one is unused at any time."""


class ReleaseStore(Struct, frozen=True):
    """No process needs the store of this round any more: stop its host (its port stays bound)."""

    store: Endpoint


class RunProbe(Struct, frozen=True):
    """Probe this machine as ordered; answer with ProbeEnded. The runtime enforces the time
    limit."""

    order: Probe


class CallOffProbe(Struct, frozen=True):
    """Kill the processes of the running probe; no ProbeEnded follows."""


class Obey(Struct, frozen=True):
    """Carry out an order about snapshots that also changed the state of the group."""

    order: Order


class RanksStopping(Struct, frozen=True):
    """Tell the parts of the agent: the ranks are being stopped, or the first of them has failed."""


class RanksGone(Struct, frozen=True):
    """Tell the parts of the agent: no rank of this round is left."""

    done: bool = False  # all exited with 0, and the round may continue on other nodes


class Say(Struct, frozen=True):
    """Send this report to the master, if connected."""

    report: Report


class Exit(Struct, frozen=True):
    """The agent is done. The runtime prints the summary of `failures` (root cause first), kills
    leftover processes and exits with `code`."""

    code: int
    reason: str
    failures: tuple[Failure, ...]
    signum: int  # the death signal that caused it, 0 for none
    saved: int = -1  # the newest step in storage, as far as this node knows; -1: none
    why: Reason | None = None  # the reason that `reason` renders; None: no more is known


AgentEffect = (
    SpawnRanks
    | RecallRanks
    | LetRankFail
    | SignalRanks
    | SweepRanks
    | PrepareStore
    | ReleaseStore
    | RunProbe
    | CallOffProbe
    | Obey
    | RanksStopping
    | RanksGone
    | Say
    | Note
    | Exit
)
