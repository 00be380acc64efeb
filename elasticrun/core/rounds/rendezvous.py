"""Rendezvous: when a round forms or reopens, with which nodes, and why not yet.

A job is GATHERING until a round forms and RUNNING until it reopens:

    GATHERING --- formed(nodes) ---> RUNNING --- reopen(reason) ---> GATHERING ...

*The first round* forms at once when `max` nodes have joined. Otherwise last call begins when `min`
have joined. It ends when no node has arrived for max(LAST_CALL_QUIET, 2 x the largest gap between
arrivals so far): nodes that start together do not wait for nodes that do not exist, and nodes that
start ten seconds apart are waited for. A wait without an arrival lasts at most `last_call_timeout`,
and last call as a whole at most LAST_CALL_CAP_FACTOR times that. A node has arrived once it is
connected, even if it has not joined yet (it imports torch).

*A later round* needs no last call, because the expected nodes are known. It forms as soon as every
living member of the last round has rejoined, together with all other ready nodes. It waits for a
survivor that is still stopping its ranks, because its later return would cost another restart: for
the stopping time that the survivor reported, plus SURVIVOR_SLACK.

*While RUNNING*, a member that is lost or leaves before its ranks are done reopens the round at
once. A new node is pending while training continues; `JoinWindow` decides when it joins. Nodes
beyond `max` or a multiple of `node_unit` are spares; they replace lost nodes. When an operator asks
for fewer nodes than the round has, it ends at once; excess nodes become spares (decision 034).

Storms. The round that follows a loss forms at once, with all remaining nodes. If another loss
breaks a round of STORM_NODES or more within STORM_WINDOW, the two may be one event, and the next
round waits until no node was lost for STORM_QUIET. Nodes that return meanwhile join it. A new
master does not know of a storm; it answers the first loss at once.

The fence. While ranks of a round may still be running somewhere, no other round that writes the
same checkpoints may follow. Collectives need every rank, so it is enough that *one* member of that
round has reported that its ranks have exited, or has returned as a newer incarnation. If no member
is reachable, the next round waits until every agent of the last one has stopped its ranks on its
own. The wait starts at the last message of any member. It is the sum of
 - `heartbeat_timeout`, to notice the loss (two beats in a large job, whose beats are slow),
 - `master_lost_timeout`, during which the agent continues,
 - `restart_grace` for its ranks to exit, and FENCE_SLACK.

Invariants: a node is in `ready` only if it is connected and no rank of an earlier round is alive on
it. A round is formed of ready nodes only. Every WAIT of a gathering job has a reason, and ends at a
set time if nothing happens earlier. The WAIT of a complete running round may have neither.

The caller must call `decide` after every event except a beat, and at the time it returned; pass at
most `Decision.nodes` of `ready` to `formed`; report every loss of contact, leave, death and new
incarnation; and not call `join` for a node whose ranks may be alive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from elasticrun.config import GROW_YOUNG, STORM_NODES, STORM_QUIET
from elasticrun.core.deadlines import Deadlines, earliest
from elasticrun.core.nodes.admission import Backoffs
from elasticrun.core.nodes.membership import beat_interval
from elasticrun.core.persisted import RendezvousFacts, Seat
from elasticrun.core.reasons import (
    BackedOff,
    Completed,
    Excluded,
    Fate,
    Fence,
    HasLeft,
    Joined,
    Leaves,
    MasterIsNew,
    MoreMayJoin,
    NodeExcluded,
    NodeLost,
    NodesNeeded,
    NodesUnheard,
    Pending,
    RanksStopped,
    Reason,
    Scaled,
    Silent,
    Spare,
    Storm,
    Survivors,
    TooFewNodes,
    recorded,
    text,
)
from elasticrun.core.rounds.join_window import Debounce, JoinWindow, LastCall
from elasticrun.core.rounds.round import Round, Stage, no_round
from elasticrun.core.rounds.takeover import Takeover
from elasticrun.core.words import ShownCount
from elasticrun.wire.messages import JobSpec

SURVIVOR_SLACK = 2.0
"""Seconds by which the wait for a survivor exceeds the stopping time that it reported."""

SLOW_START = 10.0
"""After this many seconds, the status shows that a node's ranks have not all started."""

REJOIN_WAIT = 30.0
"""Seconds that a survivor without ranks may take to offer a store again: a new fork server must
import torch again, which takes up to 20 s from a cluster's file system."""

FENCE_SLACK = 5.0
"""Safety margin in seconds for how soon an agent notices that its master is lost."""


class Phase(StrEnum):
    """Whether a round runs."""

    GATHERING = "gathering"
    RUNNING = "running"


class Verb(StrEnum):
    """What to do, as `decide` returns it."""

    WAIT = "wait"
    FORM = "form"
    REOPEN = "reopen"
    SUCCEED = "succeed"
    GIVE_UP = "give-up"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why. `until`: when a WAIT ends at the latest."""

    verb: Verb
    reason: Reason | None
    until: float | None = None
    wake: float | None = None  # WAIT: when to call `decide` again for another reason
    nodes: int = 0  # FORM: maximum number of nodes


class Rendezvous:
    """Decides when the rounds of one job form and end."""

    def __init__(self, spec: JobSpec, now: float) -> None:
        self._set_size(spec)
        self._scaled = False  # an operator has changed the number of nodes
        self._stop_time = spec.restart_grace + SURVIVOR_SLACK
        self.phase = Phase.GATHERING
        self.ready: dict[str, None] = {}
        """Nodes that could start now, in the order of their joins."""
        self.last = no_round()
        self.takeover = Takeover(now)
        self._announced: dict[str, None] = {}  # attached, not joined
        self.backing_off = Backoffs()
        """Nodes in backoff: they are pending until it ends."""
        self._kept_out: dict[str, Reason] = {}  # until the network check passes them, and why
        self._last_exclusion: NodeExcluded | None = None  # the latest since the last round formed
        self._awaited: Deadlines[str] = Deadlines()  # survivors, and until when to wait for them
        self._call = LastCall(spec.last_call_timeout)
        self._window = JoinWindow(spec)
        self._storm = Debounce(STORM_QUIET)
        self._new_losses: list[str] = []  # nodes just lost, not yet processed by `decide`
        self._recount = False  # check again whether there are enough nodes
        self.formed_at = 0.0
        """When the last round formed; 0.0 if there was none."""
        self._short_since: float | None = now  # since when too few nodes have been ready
        self._count = ShownCount()

    def _set_size(self, spec: JobSpec) -> None:
        self._spec = spec
        self._largest = spec.max_nodes // spec.node_unit * spec.node_unit
        fixed = spec.min_nodes == spec.max_nodes and spec.max_restarts == 0
        self._gives_up_at_loss = fixed and not spec.nodes_return

    def scale(self, spec: JobSpec) -> None:
        """An operator has changed the number of nodes. A running round with more nodes ends, and
        the age of the round no longer delays pending nodes."""
        self._set_size(spec)
        self._scaled = True
        self._window.scaled()

    # ------------------------------------------------------------ questions

    @property
    def loss(self) -> Reason | None:
        """The first loss since the round formed, NodesUnheard while ranks are missing, or None."""
        if self.last.lost:
            return self.last.lost[0]
        unseen = self.takeover.unseen_ranks
        return NodesUnheard() if unseen else None

    def is_held_back(self, node: str) -> bool:
        """Whether the node must wait even if the round has a place for it."""
        return node in self.backing_off or node in self._kept_out

    @property
    def succeeded(self) -> bool:
        """Whether every rank of the last round exited with 0."""
        last = self.last
        return 0 < len(last.stages) <= len(last.completed) and self.is_whole

    @property
    def awaits_survivors(self) -> bool:
        """Whether members of the last round have yet to stop or to rejoin."""
        return len(self._awaited) > 0

    def is_incomplete(self, now: float) -> bool:
        """Whether nodes of another master's round may still reconnect."""
        unseen = bool(self.last.unseen) and now < self.takeover.grace_until
        return self.takeover.unseen_ranks > 0 or unseen

    def activity(self, node: str) -> str:
        """The value of `NodeStatus.activity`."""
        if node in self.ready:
            return "joining" if self.phase is Phase.GATHERING else "at-the-door"
        if self.last.is_member(node):
            stage = self.last.stages[node]
            return "joining" if stage is Stage.STOPPED else stage.value
        if self.is_held_back(node):
            return "at-the-door"
        return "joining" if node in self._announced else "stopping"

    def reason_of(self, node: str, now: float) -> str:
        """Why this node waits, if that is specific to it; else ""."""
        if node in self._kept_out:
            return text(self._kept_out[node])
        if node in self.backing_off:
            return self.backing_off.sentence(node, now)
        if node in self._announced:
            return "it has not joined yet: its store is being prepared"
        if self.last.is_member(node):
            age = now - self.formed_at
            if self.last.stages[node] is Stage.STARTING and age >= SLOW_START:
                return f"its ranks have not all been started yet, {age:.0f} s after its round began"
        elif node not in self.ready:
            return "it has not yet reported that its ranks of an earlier round have exited"
        return ""

    def detail(self) -> str:
        """The numbers behind the reason, for the status page."""
        ready, low, high = len(self.ready), self._spec.min_nodes, self._spec.max_nodes
        text = f"{ready} ready, {low} needed, {high} at most"
        if self.phase is Phase.GATHERING and self.awaits_survivors:
            text += f"; waiting for {', '.join(sorted(self._awaited)[:5])}"
            text += f" and {len(self._awaited) - 5} more" if len(self._awaited) > 5 else ""
        return text

    def is_enough_without(self, node: str) -> bool:
        """Whether a round could form without this node; O(n)."""
        others = self.last.staying().union(self.ready) - {node, *self._kept_out}
        unit = self._spec.node_unit
        return len(others) // unit * unit >= self._spec.min_nodes

    # ------------------------------------------------------------ nodes join and leave

    def announce(self, node: str, now: float) -> None:
        """The node is connected; it is expected to join."""
        if node not in self.ready and not self.last.is_member(node):
            if not self.last.stages and node not in self._announced:
                self._call.arrival(now)
            self._announced[node] = None
            self._window.appeared(node, now)

    def join(self, node: str, now: float, *, not_before: float, why: str = "") -> None:
        """No rank is alive on this node and it offers a store. `not_before`: when its backoff ends
        (a past time: it has none). `why`: the reason for the backoff as a clause."""
        if self.last.is_member(node) and self.last.stages[node] is not Stage.STOPPED:
            return  # it sent this before it received the Start of the current round
        announced = node in self._announced
        self._announced.pop(node, None)
        self._awaited.disarm(node)
        if not_before > now and not self.last.is_member(node):
            # it may have to miss the next round
            self.backing_off.put(node, not_before, why)
        elif node not in self.ready and node not in self._kept_out:
            self.ready[node] = None
            if not self.last.stages:
                self._call.ready(now) if announced else self._call.arrival(now)
            if self.phase is Phase.RUNNING:
                self._window.joined(node, now)

    def overslept(self, by: float) -> None:
        """The master did not listen for `by` seconds: survivors get that much longer to answer."""
        self._awaited.shift(by)
        self.takeover.overslept(by)

    def lost_contact(self, node: str, now: float, patience: float) -> None:
        """The node's stream broke. It may reconnect within `patience` seconds and join again."""
        if node in self._announced or node in self.ready:
            self._window.left(node)
        self._drop_pending(node)
        if self.last.is_concerned(node):
            self.last.disconnected.add(node)
        if node in self.last.away:
            self._awaited.disarm(node)
        if node in self.ready:
            del self.ready[node]
            if self.phase is Phase.GATHERING and self.last.is_member(node):
                self._awaited.arm(node, now + patience)

    def reconnected(self, node: str, now: float) -> bool:
        """The node is connected again. Return whether it was the last member of a restored round
        that had not reconnected."""
        self.last.disconnected.discard(node)
        unseen = self.last.unseen
        if node not in unseen:
            return False
        del unseen[node]
        if node in self._awaited:
            self._awaited.arm(node, now + self._stop_time)
        return not unseen

    def leaving(self, node: str, now: float, why: Leaves | Excluded) -> None:
        """The node announces that it leaves; its ranks may be alive until it reports `Stopped`."""
        over = (Stage.STOPPED, Stage.FINISHED)
        if not self.last.is_member(node) or self.last.stages[node] in over:
            self.node_gone(node, HasLeft(why), last_heard=now)
        elif node not in self.last.leaving:
            self.last.leaving.add(node)
            self._note_loss(node, HasLeft(why))
            self._awaited.arm(node, now + self._stop_time)

    def excluded(self, node: str, now: float, how: Excluded) -> None:
        """The node is ordered to leave, and is refused for a long time."""
        self._last_exclusion = NodeExcluded(node, how)
        self.leaving(node, now, how)

    def node_gone(self, node: str, how: Fate, *, last_heard: float, replaced: bool = False) -> None:
        """The node is dead, or leaves with no rank alive. `last_heard`: when it last sent anything.
        `replaced`: a newer incarnation has attached, so the ranks of this one are dead."""
        last = self.last
        if node in last.unseen:
            del last.unseen[node]
            self.takeover.vanished += not replaced
        self._drop_pending(node)
        self._awaited.disarm(node)
        self.ready.pop(node, None)
        last.disconnected.discard(node)
        if last.is_member(node):
            if node not in last.completed and node not in last.leaving:
                self._note_loss(node, how)
            last.away[node] = None
            over = last.stages[node] in (Stage.STOPPED, Stage.FINISHED)
            last.fenced = last.fenced or replaced or over
            last.last_heard = max(last.last_heard, last_heard)

    def _drop_pending(self, node: str) -> None:
        self._announced.pop(node, None)
        self._kept_out.pop(node, None)
        if node in self.backing_off:
            self.backing_off.lift(node)
        self._recount = True

    def _note_loss(self, node: str, how: Fate) -> None:
        self.last.lost.append(NodeLost(node, how))
        self._new_losses.append(node)
        self._recount = True

    def back_off(self, node: str, until: float, how: BackedOff) -> None:
        """Put this member in backoff until `until`. It does not count towards a storm."""
        self.last.away[node] = None
        self._awaited.disarm(node)
        self.last.lost.append(NodeLost(node, how))
        if node in self.ready:  # otherwise its backoff starts when it joins
            del self.ready[node]
            self.backing_off.put(node, until, text(how.why))

    def keep_out(self, node: str, why: Reason) -> None:
        """Keep this node out of rounds until the network check has passed it."""
        self._kept_out[node] = why
        self._awaited.disarm(node)
        self._announced.pop(node, None)
        self.ready.pop(node, None)

    def admit(self, node: str) -> bool:
        """The node may join again. Return whether it was kept out."""
        return self._kept_out.pop(node, None) is not None

    def returned(self, node: str, now: float, *, within: float) -> None:
        """A node without a place is connected and will join. If it was a member and the job is
        gathering, the next round waits up to `within` seconds for it: two restarts cost more."""
        self.announce(node, now)
        if self.phase is Phase.GATHERING and node in self.last.away:
            self._awaited.arm(node, now + within)

    # ------------------------------------------------------------ a round's ranks stop

    def stopping(self, node: str, remaining: float, now: float) -> None:
        """This member is stopping its ranks; they will have exited within `remaining` seconds."""
        last = self.last
        if not self.last.is_member(node) or last.stages[node] is Stage.STOPPED:
            return
        last.stages[node] = Stage.STOPPING
        if self.phase is Phase.GATHERING or node in last.leaving:
            self._awaited.arm(node, now + remaining + SURVIVOR_SLACK)
        else:
            last.broken = last.broken or RanksStopped(node, over=False)

    def stopped(self, node: str, now: float) -> None:
        """No process of this node's ranks is left."""
        last = self.last
        last.fenced = last.fenced or node in last.stages
        if not self.last.is_member(node):
            if node in self._awaited:
                self._awaited.arm(node, now + REJOIN_WAIT)
            return
        last.stages[node] = Stage.STOPPED
        if node in last.leaving:
            self._awaited.disarm(node)
            last.away[node] = None
        elif self.phase is Phase.RUNNING:
            last.broken = last.broken or RanksStopped(node, over=True)
        elif node not in self.ready:
            self._awaited.arm(node, now + REJOIN_WAIT)

    # ------------------------------------------------------------ rounds

    def formed(self, round_: Round, now: float) -> None:
        """Begin this new round, formed of ready nodes."""
        for node in round_.members:
            del self.ready[node]
        first = self.takeover.is_first
        self._start_round(round_, now)
        self.takeover.elsewhere.clear()
        if first:
            self._window.job_began()

    def _start_round(self, round_: Round, now: float) -> None:
        self.phase = Phase.RUNNING
        self.last, round_.last_heard = round_, now
        self.takeover.round_began()
        self._awaited.clear()
        self._last_exclusion = None
        self._recount = False
        self._storm.answered(now)
        self._young_since(now)

    def _young_since(self, now: float) -> None:
        self.formed_at = now
        self._window.formed(now, announced=bool(self._announced))

    def reopen(self, now: float) -> tuple[str, ...]:
        """End the running round; return the members that must be ordered to stop their ranks.
        Members not heard from since this master started have the grace period to redial."""
        self.phase = Phase.GATHERING
        self._short_since = None
        to_stop = []
        for node, stage in self.last.stages.items():
            if node in self.last.away or node in self.last.leaving:
                continue
            if stage is not Stage.STOPPED:
                self._awaited.arm(node, now + self._stop_time)
                to_stop.append(node)
            elif node not in self.ready:
                self._awaited.arm(node, now + REJOIN_WAIT)
        grace = self.takeover.grace_until
        for node in self.last.unseen:
            due = self._awaited.when(node)
            if due is not None and due < grace:
                self._awaited.arm(node, grace)
        return tuple(to_stop)

    # ------------------------------------------------------------ a round of another master

    def facts(self, now: float) -> RendezvousFacts:
        """The state of the last round, for the record."""
        last, running, since = self.last, self.phase is Phase.RUNNING, self._short_since
        why = {} if last.why_stopped is None else {"over": last.why_stopped}
        why |= {"lost": last.lost[0]} if last.lost else {}
        return RendezvousFacts(
            round=last.info if last.store is not None else None,
            store=last.store,
            store_node=last.store_node,
            seats=tuple(last.members.values()),
            adopted=last.is_adopted,
            age=now - self.formed_at,
            **(recorded(**why) if why else {}),
            gone=tuple(last.away),
            done=tuple(node for node in last.away if node in last.completed),
            waiting=() if running else tuple(n for n in self.ready if not last.is_member(n)),
            fenced=last.fenced,
            silent=now - last.last_heard,
            starved=0.0 if since is None or running else now - since,
            blind=self.takeover.expected_until is not None,
        )

    def restore(self, facts: RendezvousFacts, now: float) -> None:
        """Restore the record. The time without a master does not count as a wait for nodes."""
        self.takeover.grant(now)
        self._short_since = now - facts.starved if facts.starved else None
        if facts.blind:
            self.takeover.expect_round(now)

    def restore_round(
        self, round_: Round, facts: RendezvousFacts, at: float, now: float, redial: float
    ) -> None:
        """Restore the last round as it was `at` the time of the record; its members have the grace
        period to reconnect. `redial`: seconds within which a living agent has redialled."""
        self._start_round(round_, at - facts.age)
        round_.expect(facts, at)
        missing = round_.unreported()
        self.takeover.round_taken(round_.info.world_size, missing, now)
        if self.last.unseen or missing:  # the last master may have heard from them until its end
            self.last.last_heard = now
        self._recount = bool(self.last.lost)
        if facts.over:
            self.phase = Phase.GATHERING
            for node in self.last.unseen:
                self._awaited.arm(node, self.takeover.grace_until)
            for node in facts.waiting:  # they are redialling: form no round without them
                self._awaited.arm(node, now + redial)

    def begins_now(self, now: float) -> None:
        """A member of a restored running round gets its place only now, so no step has run yet."""
        if not self.takeover.is_begun:
            self.takeover.is_begun = True
            self._young_since(now)

    def adopt(self, round_: Round, now: float) -> None:
        """Adopt a running round that another master formed and that its nodes report."""
        self._start_round(round_, now - GROW_YOUNG)  # its age is unknown: not young
        # It counts as young for pending nodes: a record is lost only together with its host, whose
        # node is about to return, and the loss of that node may be why the round was formed.
        self._window.formed(now, announced=bool(self._announced))
        self.takeover.round_taken(round_.info.world_size, round_.info.world_size, now)

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the last round is accounted for. Until then, further nodes of an
        adopted round are accepted as its members."""
        return not self.takeover.unseen_ranks

    def adopt_member(self, seat: Seat, now: float) -> None:
        """A node of the adopted round has reported its place."""
        self.takeover.elsewhere.pop(node := seat.node, None)
        if self.last.add_seat(seat):
            self.takeover.ranks_heard(seat.ranks, now)
            if self.phase is Phase.GATHERING:
                self._awaited.arm(node, now + self._stop_time)
        self._announced.pop(node, None)
        self.ready.pop(node, None)

    # ------------------------------------------------------------ decisions

    def decide(self, now: float) -> Decision:
        """Record due losses, end due backoffs, and return what to do at `now`."""
        takeover, last = self.takeover, self.last
        if self._new_losses:
            self._count_losses(now)
        if self.backing_off:
            for node in self.backing_off.due(now):
                self._window.appeared(node, now)
                self.join(node, now, not_before=now)
        decision = self._success(now) if last.completed else None
        if takeover.unseen_ranks and now >= self._unseen_until(now):
            last.lost.append(NodesUnheard())
            takeover.given_up_ranks, takeover.unseen_ranks = takeover.unseen_ranks, 0
            self._recount = True
        settled = now >= takeover.grace_until  # the grace period for redialling is over
        if decision is None and self._recount and last.lost and self._gives_up_at_loss and settled:
            self._recount = False
            here = last.staying().union(
                self.ready, self._announced, self.backing_off, self._kept_out
            )
            if len(here) < self._spec.min_nodes:
                return Decision(Verb.GIVE_UP, self.loss)
        if decision is None:
            running = self.phase is Phase.RUNNING
            decision = self._running(now) if running else self._gathering(now)
        if decision.verb is not Verb.WAIT or (settled and not self.backing_off):
            return decision
        grace = None if settled else takeover.grace_until
        return replace(decision, wake=earliest(decision.wake, self.backing_off.next(), grace))

    def _count_losses(self, now: float) -> None:
        for node in self._new_losses:
            self._storm.record(node, now)
        self._new_losses.clear()

    def _success(self, now: float) -> Decision | None:
        completed, vanished = self.last.completed, self.takeover.vanished
        if len(completed) + vanished < len(self.last.stages):
            return None
        if self.is_whole and not vanished:
            return Decision(Verb.SUCCEED, Completed())
        if now < self.takeover.grace_until:
            return None
        return Decision(Verb.SUCCEED, Completed(heard_of_all=False))

    def _running(self, now: float) -> Decision:
        if self.last.lost or self.last.broken:
            return Decision(Verb.REOPEN, self.loss or self.last.broken)
        if self.is_incomplete(now):
            return Decision(Verb.WAIT, MasterIsNew("runs"), self._unseen_until(now))
        last = self.last
        shrinks = self._scaled and len(last.stages) > self._largest
        if shrinks and not last.completed and not last.disconnected:
            return Decision(Verb.REOPEN, Scaled(self._largest))
        return self._decide_pending(now) if self.ready else Decision(Verb.WAIT, None)

    def _decide_pending(self, now: float) -> Decision:
        """Decide about pending nodes while a round runs."""
        if self.last.completed:
            return Decision(Verb.WAIT, Pending("finishing"))
        size = len(self.last.stages)
        possible = self._usable(size + len(self.ready))
        if possible <= size:
            full = self._largest if size >= self._largest else 0
            # with a single node, no other node can confirm that its ranks have exited
            silence = self._fence_seconds() if size == 1 else 0.0
            return Decision(Verb.WAIT, Spare(full, self._spec.node_unit, silence))
        due, why = self._window.admission(size, possible, self._largest, bool(self._announced))
        if now < due:
            return Decision(Verb.WAIT, why, due)
        if self.last.disconnected:  # back or declared dead soon: membership has a deadline for them
            return Decision(Verb.WAIT, Pending("unheard"))
        new = tuple(self.ready)[: possible - size]
        return Decision(Verb.REOPEN, Joined(new))

    def _gathering(self, now: float) -> Decision:
        takeover, last = self.takeover, self.last
        for node in self._awaited.pop_due(now):  # overdue: if it returns, it counts as new
            if last.is_member(node) and last.stages[node] in (Stage.STARTING, Stage.RUNNING):
                self._note_loss(node, Silent())
                self._count_losses(now)
        if self.is_incomplete(now):
            return Decision(Verb.WAIT, MasterIsNew("last"), takeover.grace_until)
        expected = takeover.expected_until
        if expected is not None and now < expected:
            return Decision(Verb.WAIT, MasterIsNew("may_run"), expected)
        if (until := self._awaited.next()) is not None:
            return Decision(Verb.WAIT, Survivors(alone=len(last.stages) == 1), until)
        fence = 0.0 if last.fenced or not last.stages else last.last_heard + self._fence_seconds()
        if now < fence:
            return Decision(Verb.WAIT, Fence(self._fence_seconds()), fence)
        if self.backing_off:
            self._end_backoffs_if_needed(now)
        usable = self._usable(len(self.ready))
        if usable < self._spec.min_nodes:
            return self._wait_for_nodes(now)
        self._short_since = None
        if self._others_may_train() and now < self._stopped_by():
            return Decision(Verb.WAIT, MasterIsNew("half"), self._stopped_by())
        storm = self._storm.holds_until() if len(last.stages) >= STORM_NODES else None
        if storm is not None and now < storm:
            return Decision(Verb.WAIT, Storm(), storm)
        if usable >= self._largest or last.stages:
            return Decision(Verb.FORM, None, nodes=usable)
        self._call.start(now)
        ends = self._call.ends(announced=bool(self._announced))
        if now >= ends:
            return Decision(Verb.FORM, None, nodes=usable)
        return Decision(Verb.WAIT, MoreMayJoin(self._spec.max_nodes), ends)

    def _fence_seconds(self) -> float:
        """Seconds after its last message until a node without a master has stopped its ranks."""
        spec = self._spec
        notice = max(spec.heartbeat_timeout, 2.0 * beat_interval(len(self.last.stages)))
        return notice + spec.master_lost_timeout + spec.restart_grace + FENCE_SLACK

    def _unseen_until(self, now: float) -> float:
        """Until when to wait for the nodes of an adopted round that have not reported. A running
        round keeps running meanwhile."""
        grace = self.takeover.grace_until
        late = now >= grace and self.phase is Phase.RUNNING
        return self._stopped_by() if late and self._others_may_train() else grace

    def _others_may_train(self) -> bool:
        """Whether nodes that this master has never heard from may suffice for a round of their own:
        at most half of the ranks of an adopted round are accounted for, and fewer nodes than the
        job's maximum are present. O(n), if few are present."""
        unseen = self.takeover.unseen_ranks or self.takeover.given_up_ranks
        heard_of = sum(self.takeover.elsewhere.values())
        if not unseen or 2 * (unseen - heard_of) < self.takeover.ranks:
            return False
        present = self.last.stages.keys() - self.last.away.keys()
        return self._usable(len(present.union(self.ready))) < self._largest

    def _stopped_by(self) -> float:
        """When nodes that this master has never heard from have stopped their ranks."""
        return self.takeover.taken_at + self._fence_seconds()

    def _end_backoffs_if_needed(self, now: float) -> None:
        """End all backoffs if the job cannot continue without these nodes."""
        low, ready = self._spec.min_nodes, len(self.ready)
        if self._usable(ready) < low <= self._usable(ready + len(self.backing_off)):
            for node in tuple(self.backing_off):
                self.backing_off.lift(node)
                self.join(node, now, not_before=now)

    def _wait_for_nodes(self, now: float) -> Decision:
        self._call.cancel()
        if self._short_since is None:
            self._short_since = now
            self._count.restart()
        until = max(self._short_since + self._spec.join_timeout, self.takeover.grace_until)
        unit = self._spec.node_unit
        needed = -(-self._spec.min_nodes // unit) * unit
        why = self.loss or self._last_exclusion or next(iter(self._kept_out.values()), None)
        if now >= until:
            limit = self._spec.join_timeout
            return Decision(Verb.GIVE_UP, TooFewNodes(len(self.ready), needed, limit, why))
        wake = self._count.update(len(self.ready), needed, now)
        reason = NodesNeeded(self._count.shown, needed, why)
        return Decision(Verb.WAIT, reason, until, wake)

    def _usable(self, nodes: int) -> int:
        """How many of `nodes` nodes can be in a round."""
        return min(nodes // self._spec.node_unit * self._spec.node_unit, self._largest)
