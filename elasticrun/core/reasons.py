"""Typed reasons: every decision, stop, exit, loss, exclusion and failure carries one.

`text` renders a reason for terminals, status, pages, incidents, Kubernetes Events and logs. No code
parses the result: decisions depend on the type of a reason. Evidence, such as the network check's
verdict or how a rank died, is free text written where it was measured; no code parses it.

On the wire and in the job's record a reason is its text plus a `ReasonCode` (the name of its type,
and its fields as JSON). A reader that does not know the type uses `Said(text)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, structs

from elasticrun.core.words import names, plural
from elasticrun.wire.messages import MAX_CODE, ReasonCode


def _kind(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).strip("_")


class _Typed(Struct, frozen=True, tag_field="kind", tag=_kind):
    """Base of all reasons; the tag names the type on the wire."""


class Said(_Typed, frozen=True):
    """Free text: from a person, a script or another release, or a reason whose type is unknown."""

    text: str


# ---------------------------------------------------------------- how a node is lost


class LostContact(_Typed, frozen=True):
    """How the master lost contact with an agent, and how long the agent was silent if that was too
    long.

    `mute`: the agent is connected but sends nothing. `unheard`: nothing has arrived since the
    master restarted. `gone_before`: the node had left before that.
    """

    how: Literal["closed", "broken", "mute", "unheard", "gone_before"]
    silent: float = -1.0  # seconds; -1.0: silence is not the reason
    missed: bool = False  # ranks of other nodes lost it


class Dead(_Typed, frozen=True):
    how: LostContact


class Suspect(_Typed, frozen=True):
    """Its connection is lost; the node may still be alive."""


class Silent(_Typed, frozen=True):
    """It was ordered to stop its ranks and does not answer."""


class Replaced(_Typed, frozen=True):
    """A newer agent with the same node name took its place."""


class Leaves(_Typed, frozen=True):
    """The agent leaves on its own. `signal`: the signal it received; 0: none."""

    words: str
    signal: int = 0


class Excluded(_Typed, frozen=True):
    """Excluded by the network check, by step times, by its own agent, because replicas differ, or
    by a person."""

    by: str  # failed, slow, unhealthy, differs, asked
    verdict: str


class HasLeft(_Typed, frozen=True):
    why: Leaves | Excluded


class FirstToFail(_Typed, frozen=True):
    """Ranks of this node failed first in `rounds` consecutive rounds; 1 is enough if the node was
    in backoff recently. `moved`: the node had different rank numbers in some of the rounds."""

    rounds: int
    moved: bool
    first: RankFailed | None


class BackedOff(_Typed, frozen=True):
    """The node is in backoff; the others continue without it."""

    why: FirstToFail


Fate = Dead | Suspect | Silent | Replaced | HasLeft | BackedOff | Leaves | Excluded


class NodeLost(_Typed, frozen=True):
    node: str
    how: Fate


class NodesUnheard(_Typed, frozen=True):
    """Nodes of an adopted round have not reported."""


class NodeExcluded(_Typed, frozen=True):
    node: str
    how: Excluded


class Banned(_Typed, frozen=True):
    """Sent to an excluded node. `node` and `host` are set when it tries to attach again."""

    how: Excluded
    seconds: float
    node: str = ""
    host: str = ""


class Superseded(_Typed, frozen=True):
    """An agent is refused: a newer agent has its place."""

    node: str


class NodeTaken(_Typed, frozen=True):
    """An agent is refused: another agent holds its node name."""

    node: str
    host: str
    leaving: bool


class MasterFull(_Typed, frozen=True):
    most: int


# ---------------------------------------------------------------- why a round ended


class Joined(_Typed, frozen=True):
    nodes: tuple[str, ...]


class Scaled(_Typed, frozen=True):
    """The round has more nodes than the job was scaled to."""

    nodes: int


class RanksStopped(_Typed, frozen=True):
    """A node's agent stopped its ranks without an order."""

    node: str
    over: bool  # they have already exited


class ByOperator(_Typed, frozen=True):
    """An operator's request. `done`: stopped, restarted, asked, included again, scaled to ..."""

    done: str
    who: str
    why: str


class GivenUp(_Typed, frozen=True):
    """The master has given up on this node. `later`: the job continues in another round."""

    later: bool


class OtherRound(_Typed, frozen=True):
    """A round other than the local one is newer, or has begun (`begun`)."""

    name: str
    begun: bool


class SnapshotUnusable(_Typed, frozen=True):
    step: int


class ReplicasDiffer(_Typed, frozen=True):
    """The snapshots of ranks with the same state differ. `sides`: ranks that are equal, as `0-2`.
    `right`: the first side is a majority. `places`: where some of the ranks that differ run (all
    ranks without a majority). `agreed`: the newest step at which all were equal; -1: unknown."""

    step: int
    sides: tuple[str, ...]
    right: bool
    places: tuple[str, ...]
    tensor: str  # the first that differs; "": unknown
    agreed: int


class LossNotFinite(_Typed, frozen=True):
    """Ranks have reported a loss that is NaN or infinite. `ranks`: those with the first such step,
    as `0-2`."""

    step: int
    ranks: str
    value: str


class WorkUnknown(_Typed, frozen=True):
    """It is not known what was used before this round of the work that is handed out."""


class RankFailed(_Typed, frozen=True):
    """A rank failed. `what`: how; for a hang, the whole verdict."""

    rank: int
    node: str  # "" where there is only one
    what: str
    hung: bool = False


class FailedElsewhere(_Typed, frozen=True):
    """The rank lost a peer under the previous master, and only that master may know why."""

    first: RankFailed


# ---------------------------------------------------------------- why the next round waits


class MasterIsNew(_Typed, frozen=True):
    """The master has restarted and waits for:

    `runs`: nodes of the running round.
    `last`: the other nodes of the last round.
    `may_run`: nodes of a round that may still run.
    `half`: agents to stop their ranks; half of all ranks or more may be in a later round.
    """

    whom: Literal["runs", "last", "may_run", "half"]


class Pending(_Typed, frozen=True, tag="at_door"):
    """New nodes wait to join while a round runs."""

    until: Literal["finishing", "unheard", "no_more", "start", "returns", "probed", "cooldown"]
    cooldown: float = 0.0


class Spare(_Typed, frozen=True):
    """The round has no place for this node. `full`: the size of a full round; 0: the round is not
    full, but nodes join `unit` at a time. `silence`: after this many seconds of silence this node
    replaces the only node of the round."""

    full: int
    unit: int
    silence: float = 0.0


class Spares(_Typed, frozen=True):
    """Why these nodes are spares; a `Spare` reason for the operator."""

    nodes: tuple[str, ...]
    why: Spare


class Survivors(_Typed, frozen=True):
    """Nodes of the last round have not yet stopped their ranks and joined."""

    alone: bool


class Fence(_Typed, frozen=True):
    """No node of the last round reports, so its ranks may still run."""

    seconds: float


class Storm(_Typed, frozen=True):
    """Nodes are lost one after another."""


class MoreMayJoin(_Typed, frozen=True):
    most: int


class NodesNeeded(_Typed, frozen=True):
    here: int
    needed: int
    why: Reason | None


class PeerLost(_Typed, frozen=True):
    """All failures look like a lost peer, and no report explains it yet."""

    alone: bool


class RestartDelayed(_Typed, frozen=True):
    seconds: float


class Checking(_Typed, frozen=True):
    """The network check runs; `words` describes its stage."""

    words: str


class LastSave(_Typed, frozen=True):
    """The job ends once its last snapshot is written. `busy`: what is in progress; "": ranks are
    being stopped."""

    busy: str = ""


class CutOff(_Typed, frozen=True):
    """Most nodes fell silent at once, so the master may be cut off: it declares no node dead for
    `seconds`."""

    seconds: float


class NoAgentYet(_Typed, frozen=True):
    """No agent has attached to this master."""


# ---------------------------------------------------------------- why the job ends


class Completed(_Typed, frozen=True):
    """Every rank exited with 0. `heard_of_all`: every rank has reported."""

    heard_of_all: bool = True


class TooFewNodes(_Typed, frozen=True):
    here: int
    needed: int
    limit: float
    why: Reason | None


class SaidFinal(_Typed, frozen=True):
    """The script says that a restart cannot help."""

    first: RankFailed


class NoRestartsLeft(_Typed, frozen=True):
    """The restart budget is spent. `pattern`: what the last failures have in common; "":
    nothing."""

    first: RankFailed
    most: int
    window: float
    pattern: str


class AllLeft(_Typed, frozen=True):
    """Every node has left before the ranks were done. `signal`: one that a node has received; 0:
    none."""

    signal: int = 0


class Unfit(_Typed, frozen=True):
    """The nodes together failed a check that the job requires."""

    verdict: str


class Saved(_Typed, frozen=True):
    """Why the job ended, and the step that is in storage."""

    why: Reason
    step: int


class NotSaved(_Typed, frozen=True):
    """The ranks are done, but the last checkpoint is not in storage."""

    why: Reason
    owed: str


class Then(_Typed, frozen=True):
    """A reason and its consequence."""

    first: Reason
    then: Reason


# ---------------------------------------------------------------- an agent's own


class StoreComing(_Typed, frozen=True):
    """This node joins once its store is ready."""


class BeingProbed(_Typed, frozen=True):
    partners: str  # in words; "": probed alone


class FailedHere(_Typed, frozen=True):
    """A rank of this node failed."""


class RanksDone(_Typed, frozen=True):
    waits: bool  # for the other nodes


class Departs(_Typed, frozen=True):
    """This node leaves once its ranks have saved a step."""

    signal: str


class HoldsCheckpoint(_Typed, frozen=True):
    """This node stays until its part of the checkpoint is saved."""


class OlderMaster(_Typed, frozen=True):
    term: int
    own: int


class NoMaster(_Typed, frozen=True):
    """No master can be reached at the moment."""

    why: str


class NoMasterFor(_Typed, frozen=True):
    """No master could be reached for `seconds`. `done`: the ranks of this node had finished."""

    seconds: float
    done: bool = False


class MasterUnmet(_Typed, frozen=True):
    """No master was ever reached. `why`: how the first attempt failed, while this node is still
    dialling."""

    dial: str
    seconds: float
    why: str = ""


class StoresEnd(_Typed, frozen=True):
    """The store hosts of this node keep exiting."""


class SpawnLate(_Typed, frozen=True):
    seconds: float


class Stuck(_Typed, frozen=True):
    """Processes that survive SIGKILL. `seconds`: since ranks were killed; 0.0: other processes."""

    left: str
    seconds: float = 0.0


# ---------------------------------------------------------------- one sentence for each

Reason = (
    Said
    | LostContact
    | Fate
    | NodeLost
    | NodesUnheard
    | NodeExcluded
    | Banned
    | Superseded
    | NodeTaken
    | MasterFull
    | FirstToFail
    | Joined
    | Scaled
    | RanksStopped
    | ByOperator
    | GivenUp
    | OtherRound
    | SnapshotUnusable
    | ReplicasDiffer
    | LossNotFinite
    | WorkUnknown
    | RankFailed
    | FailedElsewhere
    | MasterIsNew
    | Pending
    | Spare
    | Spares
    | Survivors
    | Fence
    | Storm
    | MoreMayJoin
    | NodesNeeded
    | PeerLost
    | RestartDelayed
    | Checking
    | LastSave
    | CutOff
    | NoAgentYet
    | Completed
    | TooFewNodes
    | SaidFinal
    | NoRestartsLeft
    | AllLeft
    | Unfit
    | Saved
    | NotSaved
    | Then
    | StoreComing
    | BeingProbed
    | FailedHere
    | RanksDone
    | Departs
    | HoldsCheckpoint
    | OlderMaster
    | NoMaster
    | NoMasterFor
    | MasterUnmet
    | StoresEnd
    | SpawnLate
    | Stuck
)


def text(reason: Reason | None) -> str:
    """Render a reason as a sentence or a clause; "" for None."""
    return "" if reason is None else _TEXTS[type(reason)](reason)


_QUOTING: Final = (
    Said, Leaves, Excluded, HasLeft, BackedOff, FirstToFail, Unfit, Checking, LastSave, Banned,
    BeingProbed, NoMaster, MasterUnmet, Stuck,
)  # fmt: skip
"""Types whose text is mostly quoted: `text_without_evidence` omits them entirely."""


def text_without_evidence(reason: Reason | None) -> str:
    """Like `text`, without evidence and without words of a rank, a person or an agent."""
    match reason:
        case RankFailed(hung=True):
            return "ranks are hanging"
        case RankFailed():
            return f"rank {reason.rank}{f' on node {reason.node}' if reason.node else ''}"
        case SaidFinal() | NoRestartsLeft() | FailedElsewhere():
            return text_without_evidence(reason.first)
        case ByOperator():
            return text(structs.replace(reason, why=""))
        case TooFewNodes():
            return text(structs.replace(reason, why=None))
        case ReplicasDiffer():
            return f"replicas differ at step {reason.step}"
        case LossNotFinite():
            return f"the loss is not finite since step {reason.step}"
        case Saved():
            return f"{text_without_evidence(reason.why)}; step {reason.step} is saved"
        case NotSaved():
            return text_without_evidence(reason.why)
        case NodeLost(node=node, how=HasLeft()):
            return f"node {node} left"
        case NodeLost(node=node, how=BackedOff()):
            return f"node {node} is in backoff"
        case NodeLost(node=node, how=Leaves() | Excluded()):
            return f"node {node} is gone"
        case Then():
            return text_without_evidence(reason.first)
        case NodeExcluded():
            return f"node {reason.node} is excluded"
        case NodesNeeded():
            return text(structs.replace(reason, why=None))
        case _ if isinstance(reason, _QUOTING):
            return ""
    return text(reason)


def what_it_awaits(reason: NodesNeeded | MoreMayJoin) -> str:
    """What the rendezvous waits for, as a clause after `waiting for nodes:` or `rendezvous X:`."""
    if isinstance(reason, NodesNeeded):
        return f"{reason.here} of {plural(reason.needed, 'node')}{_because(reason.why)}"
    return text(reason)


Unreachable = Literal["", "master", "node"]


def unreachable_side(reason: Reason | None) -> Unreachable:
    """Which side was unreachable, if that is the cause; else ""."""
    match reason:
        case NoMaster() | NoMasterFor() | MasterUnmet():
            return "master"
        case LostContact(how="closed" | "broken" | "unheard", silent=silent) if silent >= 0.0:
            return "node"
        case NodeLost(how=inner) | Dead(how=inner):
            return unreachable_side(inner)
        case NodesNeeded(why=why) | TooFewNodes(why=why) | Saved(why=why) | NotSaved(why=why):
            return unreachable_side(why)
        case Then(first=first, then=then):
            return unreachable_side(first) or unreachable_side(then)
    return ""


def failure_in(reason: Reason | None) -> RankFailed | None:
    """The rank failure that this reason is about, or None."""
    match reason:
        case RankFailed():
            return reason
        case SaidFinal() | NoRestartsLeft() | FailedElsewhere():
            return reason.first
        case Saved() | NotSaved():
            return failure_in(reason.why)
    return None


def exclusion_in(reason: Reason | None) -> Banned | None:
    """The exclusion that ends a node, or None."""
    match reason:
        case Banned():
            return reason
        case Then():
            return exclusion_in(reason.first)
    return None


def is_by_operator(reason: Reason | None) -> bool:
    """Whether an operator ended the job."""
    while isinstance(reason, Saved | NotSaved):
        reason = reason.why
    return isinstance(reason, ByOperator)


def _lost_contact(it: LostContact) -> str:
    if it.how == "mute":
        return f"its agent sent nothing for {it.silent:.0f} s"
    what = _CONTACT[it.how]
    if it.missed:
        return f"{what} and ranks of other nodes lost it"
    return what if it.silent < 0 else f"{what} and it sent nothing for {it.silent:.1f} s"


_CONTACT: Final = {
    "closed": "its connection was closed",
    "broken": "its connection broke",
    "unheard": "it has not reported since the master returned",
    "gone_before": "it had left before the master returned",
}

_NEW_MASTER: Final = {
    "runs": "the master is new and waits for the nodes of the running round",
    "last": "the master is new and waits for the other nodes of the last round",
    "may_run": "the master is new and waits for the nodes of a round that may still run",
    "half": (
        "the master is new and at least half of the last round's ranks have not reported: they may "
        "be in a later one; the next round waits until their agents have stopped them"
    ),
}

_PENDING_UNTIL: Final = {
    "finishing": "the job is finishing",
    "unheard": "a node of the round is unreachable right now",
    "no_more": "joins once no more nodes are arriving",
    "start": "the job is starting; joins once no more nodes are arriving",
    "probed": "this node is probed before it may join",
    "returns": "nodes are arriving one after another; joins once no more arrive",
}


def _pending(it: Pending) -> str:
    if it.until == "cooldown":
        return (
            f"pending: joins {it.cooldown:g} s after the round began (--grow=now: at once), "
            "or when a node is lost"
        )
    return f"pending: {_PENDING_UNTIL[it.until]}"


def _no_place(it: Spare) -> str:
    taken = f"nodes join {it.unit} at a time"
    why = f"the round is full, with {plural(it.full, 'node')}" if it.full else taken
    if it.silence:
        return f"{why}; replaces it when it leaves, or {it.silence:g} s after it is lost"
    return f"{why}; replaces a lost node"


def _spares(it: Spares) -> str:
    are = "nodes {} are spares" if len(it.nodes) > 1 else "node {} is a spare"
    return f"{are.format(names(it.nodes))}: {_no_place(it.why)}"


def _first_to_fail(it: FirstToFail) -> str:
    if it.rounds == 1:
        return f"its ranks fail again: {text(it.first)}"
    alone = "its ranks changed in between" if it.moved else "no rank of another node did"
    row = plural(it.rounds, "round")
    return f"its ranks were the first to fail in {row} in a row, and {alone}: {text(it.first)}"


def how_to_include(node: str) -> str:
    """The clause that says how an operator admits an excluded node before its time."""
    return f"`elasticrun include {node or 'NODE'}` admits it sooner"


def _banned(it: Banned) -> str:
    verdict = it.how.verdict
    if not it.node:
        return f"this node is excluded for {it.seconds:g} s: {verdict}; {how_to_include(it.node)}"
    where = f"node {it.node} on {it.host or 'its host'}"
    return f"{where} is excluded for {it.seconds:.0f} s more: {verdict}; {how_to_include(it.node)}"


def _ranks_stopped(it: RanksStopped) -> str:
    if it.over:
        return f"the ranks of node {it.node} have been stopped"
    return f"node {it.node} is stopping its ranks"


def _rank_failed(it: RankFailed) -> str:
    where = f" on node {it.node}" if it.node else ""
    return it.what if it.hung else f"rank {it.rank}{where}: {it.what}"


def _survivors(it: Survivors) -> str:
    whom, whose = ("node", "its") if it.alone else ("other nodes", "their")
    return f"waiting for the {whom} of the last round to stop {whose} ranks and join"


def _replicas_differ(it: ReplicasDiffer) -> str:
    sides = [f"rank{'' if one.isdecimal() else 's'} {one}" for one in it.sides]
    where = f" ({'; '.join(it.places)})" if it.places else ""
    first = f", first in {it.tensor}" if it.tensor else ""
    before = f"; all were equal at step {it.agreed}" if it.agreed >= 0 else ""
    if it.right:
        differs = "differs" if len(sides) == 2 and it.sides[1].isdecimal() else "differ"
        who = " and ".join(sides[1:])
        return f"{who}{where} {differs} from {sides[0]} at step {it.step}{first}{before}"
    known = "no majority shows which is right"
    return f"{' and '.join(sides)}{where} differ at step {it.step}{first}: {known}{before}"


def _because(why: Reason | None) -> str:
    return f" ({text(why)})" if why is not None else ""


def _too_few(it: TooFewNodes) -> str:
    limit = f"{it.limit:g} s, the join_timeout"
    return f"only {it.here} of {plural(it.needed, 'node')} for {limit}{_because(it.why)}"


def no_restarts_left(most: int, window: float) -> str:
    """The clause that says that the restart budget is spent."""
    if not most:
        return "no restarts left (--max-restarts is 0)"
    within = f" within {window:g} s" if window else ""
    return f"no restarts left ({most} of {most} used{within})"


def budget_clause(it: NoRestartsLeft) -> str:
    """The reason without the failure."""
    pattern = f"; {it.pattern}" if it.pattern else ""
    return f"{no_restarts_left(it.most, it.window)}{pattern}"


def _peer_lost(it: PeerLost) -> str:
    news = "a report about it" if it.alone else "confirmation that its node is lost"
    return f"ranks have lost a peer: waiting for {news}"


def _by_operator(it: ByOperator) -> str:
    return f"{it.done} by {it.who or 'an operator'}{f': {it.why}' if it.why else ''}"


def _no_master_for(it: NoMasterFor) -> str:
    done = "; the ranks of this node are done, the others' result is unknown" if it.done else ""
    return f"no master answered for {it.seconds:g} s{done}"


def _master_unmet(it: MasterUnmet) -> str:
    if it.why:
        dials = f"this node keeps connecting for {it.seconds:g} s"
        return f"no job master answers at {it.dial} yet ({it.why}); {dials}"
    return f"no job master answered at {it.dial} for {it.seconds:g} s"


def _stuck(it: Stuck) -> str:
    if it.seconds:
        return f"still running {it.seconds:g} s after SIGKILL: {it.left}"
    return f"processes that do not exit after SIGKILL remain here: {it.left}"


_TEXTS: Final[Mapping[type, Callable[[Any], str]]] = {
    Said: lambda it: it.text,
    LostContact: _lost_contact,
    Dead: lambda it: f"is dead: {text(it.how)}",
    Suspect: lambda it: "is suspect",
    Silent: lambda it: "does not answer",
    Replaced: lambda it: "was replaced by a newer agent",
    Leaves: lambda it: it.words,
    Excluded: lambda it: f"it is excluded: {it.verdict}",
    HasLeft: lambda it: f"left: {text(it.why)}",
    FirstToFail: _first_to_fail,
    BackedOff: lambda it: f"is in backoff: {text(it.why)}",
    NodeLost: lambda it: f"node {it.node} {text(it.how)}",
    NodesUnheard: lambda it: "nodes of the adopted round have not reported",
    NodeExcluded: lambda it: f"node {it.node} is excluded: {it.how.verdict}",
    Banned: _banned,
    Superseded: lambda it: f"a newer agent has replaced this one as node {it.node}",
    NodeTaken: lambda it: (
        f"node {it.node} belongs to another agent, on {it.host}, which is "
        f"{'leaving' if it.leaving else 'alive'}"
    ),
    MasterFull: lambda it: f"the master serves {it.most} nodes, which is its limit",
    Joined: lambda it: f"node{'s' * (len(it.nodes) > 1)} {names(it.nodes)} joined",
    Scaled: lambda it: f"the job is scaled to {plural(it.nodes, 'node')}",
    RanksStopped: _ranks_stopped,
    ByOperator: _by_operator,
    GivenUp: lambda it: (
        "the job has continued without this node"
        if it.later
        else "this node had been declared dead"
    ),
    OtherRound: lambda it: f"round {it.name} {'has begun' if it.begun else 'is newer'}",
    WorkUnknown: lambda it: (
        "no record says what was used before this round of the work that is handed out"
    ),
    ReplicasDiffer: _replicas_differ,
    LossNotFinite: lambda it: (
        f"the loss is {it.value} since step {it.step}, first on "
        f"rank{'' if it.ranks.isdecimal() else 's'} {it.ranks}"
    ),
    SnapshotUnusable: lambda it: f"the snapshot of step {it.step} cannot be used",
    RankFailed: _rank_failed,
    FailedElsewhere: lambda it: f"{text(it.first)} while another master served",
    MasterIsNew: lambda it: _NEW_MASTER[it.whom],
    Pending: _pending,
    Spare: lambda it: f"spare: {_no_place(it)}",
    Spares: _spares,
    Survivors: _survivors,
    Fence: lambda it: (
        "no node of the last round is reachable, so its ranks may still run; the next "
        f"round waits until they have stopped by themselves ({it.seconds:g} s)"
    ),
    Storm: lambda it: (
        "nodes are lost one after another: the next round waits until no more are lost"
    ),
    MoreMayJoin: lambda it: f"last call: up to {it.most} nodes may join",
    NodesNeeded: lambda it: f"waiting for nodes: {what_it_awaits(it)}",
    PeerLost: _peer_lost,
    RestartDelayed: lambda it: (
        f"ranks fail soon after they start: the next restart waits {it.seconds:g} s"
    ),
    Checking: lambda it: it.words,
    LastSave: lambda it: (
        f"{it.busy or 'ranks are stopped, so that their last snapshot can be saved'} before the "
        "job ends"
    ),
    CutOff: lambda it: (
        "more than half of the nodes fell silent together, so the master itself may be cut "
        f"off; no node is declared dead for {it.seconds:g} s"
    ),
    NoAgentYet: lambda it: "no agent has attached yet",
    Completed: lambda it: (
        "every rank exited with 0"
        if it.heard_of_all
        else "every rank that reported exited with 0; the others' result is unknown"
    ),
    TooFewNodes: _too_few,
    SaidFinal: lambda it: f"{text(it.first)}: the script reports that a retry cannot help",
    NoRestartsLeft: lambda it: f"{text(it.first)}; {budget_clause(it)}",
    AllLeft: lambda it: "all nodes were ordered to leave",
    Unfit: lambda it: it.verdict,
    Saved: lambda it: f"{text(it.why)}; step {it.step} is saved",
    NotSaved: lambda it: f"{text(it.why)}, but {it.owed}",
    Then: lambda it: f"{text(it.first)}; {text(it.then)}",
    StoreComing: lambda it: "the store for the next round is being prepared",
    BeingProbed: lambda it: (
        f"this machine is being probed{f' with {it.partners}' if it.partners else ''}"
    ),
    FailedHere: lambda it: "a rank failed here; the others are being stopped",
    RanksDone: lambda it: (
        f"all ranks of this node are done{'; waiting for the other nodes' if it.waits else ''}"
    ),
    Departs: lambda it: f"received {it.signal}: this node leaves when its ranks have saved a step",
    HoldsCheckpoint: lambda it: "this node stays until its part of a checkpoint is saved",
    OlderMaster: lambda it: f"the responding master has term {it.term}, older than {it.own}",
    NoMaster: lambda it: f"no master answers: {it.why}",
    NoMasterFor: _no_master_for,
    MasterUnmet: _master_unmet,
    StoresEnd: lambda it: "the store host keeps exiting",
    SpawnLate: lambda it: (
        f"the fork server was asked for the ranks {it.seconds:g} s ago and has not started all of "
        "them"
    ),
    Stuck: _stuck,
}


# ---------------------------------------------------------------- on wires and in records


def code(reason: Reason | None) -> ReasonCode | None:
    """The `ReasonCode` sent beside the text; None for `Said`, or if the fields exceed MAX_CODE."""
    if reason is None or isinstance(reason, Said):
        return None
    fields = msgspec.to_builtins(reason)
    kind = fields.pop("kind")
    packed = msgspec.json.encode(fields)
    return ReasonCode(kind, packed.decode()) if len(packed) <= MAX_CODE else None


def text_and_code(reason: Reason | None) -> tuple[str, ReasonCode | None]:
    """The text and the `ReasonCode` of a reason."""
    return text(reason), code(reason)


def recorded(**reasons: Reason | None) -> dict[str, Any]:
    """Fields of a record: each text as NAME, and its `ReasonCode` as NAME_code."""
    fields: dict[str, Any] = {name: text(reason) for name, reason in reasons.items()}
    return fields | {f"{name}_code": code(reason) for name, reason in reasons.items()}


def read(said: str, code: ReasonCode | None) -> Reason | None:
    """Decode a reason from its text and code: `Said(text)` if the code is missing or unknown, None
    if there is no text either."""
    if code is not None:
        try:
            fields = msgspec.json.decode(code.fields)
            found: Reason = msgspec.convert({**fields, "kind": code.kind}, Reason)
        except (msgspec.MsgspecError, TypeError):
            return Said(said) if said else None
        return found
    return Said(said) if said else None
