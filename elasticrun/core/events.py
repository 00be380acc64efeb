"""What goes into the two state machines (events) and what they may ask for (effects).

Their processes feed events in the order in which things happened and carry out the effects of one
step before the next. Effects never fail back into the machine: what came of them is a later event.
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
    """A deadline that `next_deadline()` named may be due."""


class Note(Struct, frozen=True):
    """One line for the operator's log; emitted once per change."""

    text: str
    level: str = "info"  # info, warning, error
    told: bool = False  # to the nodes of the round, each of which prints it
    why: Reason | None = None  # of an agent's own line, where that names somebody out of reach
    number: int = 0  # counts the notes of a master's core from 1; 0: no such note


# ---------------------------------------------------------------- the master's: Job


class Attached(Struct, frozen=True):
    """A stream was opened and its Hello is of our protocol and job. `session` numbers streams."""

    session: int
    hello: Hello


class Heard(Struct, frozen=True):
    """A report on an attached session."""

    session: int
    report: Report


class Detached(Struct, frozen=True):
    """The stream is gone. `clean`: the agent closed it; else it broke (reset, pings unanswered).
    `silent`: seconds for which nothing had come on it, more than a beat allows, while we heard
    others; a stream that is reset was not silent, one whose pings went unanswered was. `quiet`:
    seconds since anything came on it, whether we heard others or there were none."""

    session: int
    clean: bool
    silent: float = 0.0
    quiet: float = 0.0


class Overslept(Struct, frozen=True):
    """The loop woke `by` seconds after its deadline: silence during that time proves nothing."""

    by: float


class Requested(Struct, frozen=True):
    """A reader or an operator asks; `number` is new for each. Answered at once or later, once."""

    number: int
    request: Request


JobEvent = Attached | Heard | Detached | Overslept | Requested | Tick


class Tell(Struct, frozen=True):
    """Send one order to each of these sessions."""

    sessions: tuple[int, ...]
    order: Order


class Hangup(Struct, frozen=True):
    """Close this session after what was told to it has been sent."""

    session: int


class JobOver(Struct, frozen=True):
    """The outcome is known; the master ends when every agent has been told or is gone."""

    exit_code: int
    reason: str
    saved: int = -1  # the newest step in storage; -1: none
    code: ReasonCode | None = None


class Record(Struct, frozen=True):
    """Make these facts durable. Every effect after this one, of this step and of later ones, is
    carried out only when that is done, so that nobody is told what the next master would not know;
    events are taken in meanwhile (decision 012)."""

    facts: Facts


class Replied(Struct, frozen=True):
    """What came of the Requested of this number."""

    number: int
    reply: Reply


class Filed(Struct, frozen=True):
    """Keep this record of what stopped training, in place of an older one of its number."""

    incident: IncidentRow


class Judged(Struct, frozen=True):
    """What keeps the job from going on was found, or is no longer so."""

    verdict: VerdictRow
    over: bool


class FoundSlow(Struct, frozen=True):
    """A node is slow, and stays all the same."""

    node: str
    sentence: str


JobEffect = Tell | Hangup | Note | JobOver | Record | Replied | Filed | Judged | FoundSlow


# ---------------------------------------------------------------- the agent's: WorkerGroup


class Ordered(Struct, frozen=True):
    """An order from the master (Echo is handled by the runtime's link and never comes here)."""

    order: Order


class StoreReady(Struct, frozen=True):
    """A fresh store host listens; it may be offered in the next Join."""

    store: Endpoint


class StoreLost(Struct, frozen=True):
    """The store host at this port ended by itself."""

    store: Endpoint


class RankSpawned(Struct, frozen=True):
    """A rank of the current life runs."""

    local_rank: int
    pid: int


class RankExited(Struct, frozen=True):
    """A rank was reaped. `failure`: by the runtime (error file, signal), None if code is 0."""

    local_rank: int
    code: int
    failure: Failure | None


class RanksSwept(Struct, frozen=True):
    """Nothing below the stopped ranks lives, but for `stuck` pids the kernel will not let die."""

    stuck: tuple[int, ...]


class SpawnerLost(Struct, frozen=True):
    """The spawner died; its ranks have been killed and reaped by the agent. A new one is started
    by the runtime without being asked; a StoreReady tells when it is usable. `time_us`: wall clock,
    microseconds, for the failures of the ranks it took with it."""

    reason: str
    time_us: int = 0


class Signalled(Struct, frozen=True):
    """The agent received a signal. `death`: one of --signals-to-handle, else forward only. `step`:
    the newest that a rank with a Checkpointer is at; -1: no rank here can save its state. `margin`:
    steps in which word from the master comes to every rank. `held`: the newest of which there is a
    snapshot here, whole or not; -1: there is none. `fresh`: no rank that runs here has made a
    Checkpointer yet, so that they have lost nothing that `held` has not."""

    signum: int
    name: str
    death: bool
    step: int = -1
    margin: int = 2
    held: int = -1
    fresh: bool = False


class LinkLost(Struct, frozen=True):
    """The master cannot be reached since now; the runtime keeps dialling."""

    reason: str


class LinkBack(Struct, frozen=True):
    """A stream to the master stands (again); the group answers with what the master must know:
    Say(...) of its present state. The runtime has already sent Hello, with `attached()`."""


class ProbeEnded(Struct, frozen=True):
    """What came of a RunProbe, also where its processes could not be started or had to be killed.
    Every process of it has been reaped. Comes exactly once for each RunProbe, unless CallOffProbe
    came first: then never."""

    result: Probed


AgentEvent = (
    Ordered
    | StoreReady
    | StoreLost
    | RankSpawned
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
    """Start all local ranks of this round (environment, logs and keys are the runtime's).

    The runtime frees the old ranks' resources before; `attempt` names the log folder."""

    start: Start
    attempt: int


class SignalRanks(Struct, frozen=True):
    """Send a signal to the process group of each of these local ranks."""

    local_ranks: tuple[int, ...]
    signum: int


class SweepRanks(Struct, frozen=True):
    """All ranks of this round have exited: remove their descendants, answer with RanksSwept."""

    grace: float


class PrepareStore(Struct, frozen=True):
    """Make a fresh store host ready (answer: StoreReady); one at most is unused at any time."""


class ReleaseStore(Struct, frozen=True):
    """Nobody can need the store of this round any more: end its host (its port stays bound)."""

    store: Endpoint


class RunProbe(Struct, frozen=True):
    """Probe this machine as the order says; answer with ProbeEnded. Its limit is the runtime's."""

    order: Probe


class CallOffProbe(Struct, frozen=True):
    """Kill the processes of the probe that is under way; no ProbeEnded follows."""


class Obey(Struct, frozen=True):
    """Carry out an order about snapshots that has changed something here as well."""

    order: Order


class RanksStopping(Struct, frozen=True):
    """The ranks of this life are being stopped, or the first of them has failed."""


class RanksGone(Struct, frozen=True):
    """No rank of this life is left."""

    done: bool = False  # all have ended with 0, and the round may go on elsewhere


class Say(Struct, frozen=True):
    """Send this report to the master, when there is one."""

    report: Report


class Exit(Struct, frozen=True):
    """The agent is done. The runtime prints the summary of `failures` (root cause first), sweeps
    and ends the process with `code`."""

    code: int
    reason: str
    failures: tuple[Failure, ...]
    signum: int  # the death signal that caused it, 0 for none
    saved: int = -1  # the newest step in storage, as far as this node knows; -1: none
    why: Reason | None = None  # what `reason` is the text of; None: no more is known


AgentEffect = (
    SpawnRanks
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
