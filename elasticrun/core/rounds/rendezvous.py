"""When a round of nodes forms or reopens, with whom, and why not yet.

Phases. A job is GATHERING until a round forms and RUNNING until it reopens:

    GATHERING --- formed(nodes) ---> RUNNING --- reopen(reason) ---> GATHERING ...

*The first round* forms at once when `max` nodes have joined. Otherwise last call begins when `min`
have. It ends when no node has joined for max(LAST_CALL_QUIET, 2 x the largest gap between joins so
far) - nodes that start together do not wait for nodes that do not exist, nodes that start ten
seconds apart are waited for - but no single silence lasts longer than `last_call_timeout`, and the
whole no longer than LAST_CALL_CAP_FACTOR times that, whoever joins. A node has come when its stream
stands; one that has not joined yet (it imports torch) is waited for.

*A later round* needs no last call: the nodes that are expected are known. It forms as soon as every
living member of the last round is back, with whoever else is ready. Last call is for those who are
not expected; so a live survivor that is still stopping holds the round open until the time it has
named and SURVIVOR_SLACK more: left out, it would come back and cost another restart. Only then do
the others go on without it.

*While RUNNING*, a member that dies or leaves before its ranks are done reopens the round at once. A
newcomer waits at the door while training goes on; when it is let in is the affair of `door`. Nodes
that `max` or `node_unit` leave over are spares; they replace the lost.

Storms. The round that follows a loss forms at once, with all who are left. In a job of STORM_NODES
and more, when that round is broken by the loss of another node within STORM_WINDOW, the two may be
one event (a switch, a rack), and the next round waits for the event's end, as `burst` judges it
from the pace of the losses so far. So an event costs two rounds, however it is spread, and one that
was over within seconds costs seconds. Nodes that return meanwhile are in that round. A successor of
the master knows nothing of a storm; the first loss that it sees is answered at once.

The fence. A round whose ranks may still run somewhere must not be followed by another that writes
the same checkpoints. Collectives need every rank, so it is enough that *one* member of the round
has reported that its ranks are gone, or has come back as a newer life. Where no member can be
heard, the next round waits until every agent of the last one has stopped its ranks by itself: after
the last word of the last of them, `heartbeat_timeout` for it to notice (two beats in a large job,
which beats slowly), `master_lost_timeout` in which it goes on, `restart_grace` for its ranks to
end, and FENCE_SLACK.

A successor with a record takes the round of the record as RUNNING, or as ended, with its members:
none begins beside it, whoever finds the new master first. A member that was never told its place is
told it now; one that comes back as a newer life has passed the fence; who is not heard for
REATTACH_GRACE has gone. A round that agents report wins over an older one in the record (a disk may
have lost its last writes); what neither the record nor any agent tells, nobody can know.

A successor without a record *adopts* the highest round that agents report, as RUNNING, and waits
REATTACH_GRACE for the nodes of it that have not been heard. Where these hold half of its ranks or
more, they may be in a later round of which only they know: unless `max` nodes are here all the
same, it forms none until they have had the time to stop by themselves, as for the fence. It learns
that there was a master before it from any agent that has obeyed one, be it a spare: from then on it
forms nothing until the grace is over or a round was reported. What remains: a successor without a
record that only new agents have found cannot know; it may begin a round, which it ends when the
first old agent attaches.

Invariants: a node is in `ready` only while no rank of an earlier round lives on it and its stream
stands. A round is formed of ready nodes only. Every WAIT has a reason, and a time at which it ends
unless something happens before; only a running round that lacks nothing waits without end.

What the caller owes: `decide` after every event that is not a beat and at the time it named; to
choose at most `Decision.nodes` of `ready` and tell `formed`; to tell every loss of contact, leave,
death and rebirth; not to tell `join` for a node whose ranks may live. Sentences for agents that
count nodes change seldom in a large job (Count), so that a thousand joins are not a million
messages; the numbers are in `detail`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from elasticrun.config import STORM_NODES
from elasticrun.core.nodes.membership import beat_interval
from elasticrun.core.rounds.crew import Phase, Stage
from elasticrun.core.rounds.takeover import Succession
from elasticrun.core.words import names, some
from elasticrun.wire.messages import JobSpec

COUNT_ALL = 64
"""Nodes of a job in which each is told of every one that joins."""

COUNT_SOON = 2.0
"""Seconds that a count stands at least in a larger job, the first time; then twice as long each
time."""

COUNT_LATE = 60.0
"""And at most; agents say what they wait for once a minute."""

FENCE_SLACK = 5.0
"""Seconds of doubt about how soon an agent notices that its master has gone."""


class Verb(StrEnum):
    """What `decide` asks for."""

    WAIT = "wait"
    FORM = "form"
    REOPEN = "reopen"
    SUCCEED = "succeed"
    GIVE_UP = "give-up"


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done now, and why; for WAIT, until when it stands at the latest."""

    verb: Verb
    reason: str
    until: float | None = None
    wake: float | None = None  # WAIT: to be asked again by then for another reason
    nodes: int = 0  # FORM: how many at most


class Count:
    """How many nodes are here, as sentences say it. A sentence that changes with every join is n
    messages to each of n nodes: in a large job the count stands for some seconds, whoever joins,
    and what a node is told goes by how long it waits and not by how many nodes there are."""

    def __init__(self) -> None:
        self.told = 0
        self._told_at: float | None = None
        self._pause = COUNT_SOON

    def begin(self) -> None:
        """The sentence is a new one."""
        self._told_at = None

    def look(self, here: int, needed: int, now: float) -> float | None:
        """`here` nodes of `needed` are here. When to look again, if the count is to be renewed."""
        if self._told_at is None:
            self._pause = COUNT_SOON
        elif here == self.told:
            return None
        elif needed > COUNT_ALL and self.told > 0:  # nobody who is here is told that nobody is
            due = self._told_at + self._pause
            if now < due:
                return due
            self._pause = min(2.0 * self._pause, COUNT_LATE)
        self.told, self._told_at = here, now
        return None


class Rendezvous(Succession):
    """The rounds of one job; see the module's head. The books are kept by `Crew`, those of a round
    that another master formed by `Succession`."""

    def __init__(self, spec: JobSpec, now: float) -> None:
        super().__init__(spec, now)
        self._count = Count()

    def decide(self, now: float) -> Decision:
        """What is to be done at `now`."""
        self._note_losses(now)
        for node in self._barred.due(now):
            self._door.appeared(node, now)
            self.join(node, now, not_before=now)
        decision = self._success(now)
        if self._unseen_ranks and now >= self._unseen_until(now):
            self._lost.append(self.loss)
            self._given_up_ranks, self._unseen_ranks = self._unseen_ranks, 0
            self._recount = True
        settled = now >= self._grace_until  # not while a new master waits for those who dial again
        if decision is None and self._recount and self._lost and self._impatient and settled:
            self._recount = False
            if self._within_reach() < self._spec.min_nodes:
                return Decision(Verb.GIVE_UP, self.loss)
        if decision is None:
            running = self.phase is Phase.RUNNING
            decision = self._running(now) if running else self._gathering(now)
        wakes = [decision.wake, self._barred.next(), None if settled else self._grace_until]
        wake = min((when for when in wakes if when is not None), default=None)
        if decision.verb is Verb.WAIT and wake is not None:
            return replace(decision, wake=wake)
        return decision

    @property
    def left_out(self) -> tuple[str, ...]:
        """Nodes that wait at the door until their time is over."""
        return tuple(self._barred)

    def excluded(self, node: str, now: float, reason: str) -> None:
        """It is told to go, and will not come back for long."""
        self._shortage = f"node {node} is excluded: {reason}"
        self.leaving(node, now, f"it is excluded: {reason}")

    def _note_losses(self, now: float) -> None:
        for node in self._struck:
            self._storm.seen(node, now)
        self._struck.clear()

    def _within_reach(self) -> int:
        """Nodes that could be in the next round; O(n), asked only when one was lost for good."""
        there = {node for node in self.stages if self.is_member(node)} - set(self._leaving)
        return len(there.union(self.ready, self._announced, self._barred, self._kept))

    def _success(self, now: float) -> Decision | None:
        if not self._completed or len(self._completed) + len(self._vanished) < len(self.stages):
            return None
        if not self._unseen_ranks and not self._vanished:
            return Decision(Verb.SUCCEED, "every rank ended with 0")
        if now < self._grace_until:
            return None
        return Decision(
            Verb.SUCCEED, "every rank that was heard of ended with 0; the others' result is unknown"
        )

    def _running(self, now: float) -> Decision:
        if self._lost or self._broken:
            return Decision(Verb.REOPEN, self.loss or self._broken)
        if self.is_incomplete(now):
            return Decision(
                Verb.WAIT,
                "the master is new and waits for the nodes of the round that runs",
                self._unseen_until(now),
            )
        return self._at_the_door(now)

    def _at_the_door(self, now: float) -> Decision:
        """Newcomers and a running round."""
        if not self.ready:
            return Decision(Verb.WAIT, "")
        if self._completed:
            return Decision(Verb.WAIT, "at the door: the job is finishing")
        size = len(self.stages)
        possible = self._usable(size + len(self.ready))
        if possible <= size:
            why = (
                f"the round is full, with {some(self._largest, 'node')}"
                if size >= self._largest
                else f"nodes are taken {self._spec.node_unit} at a time"
            )
            return Decision(Verb.WAIT, f"spare: {why}; takes the place of a node that is lost")
        entry = self._door.entry(size, possible, self._largest, bool(self._announced))
        if now >= entry.due:
            if self._unheard:  # their fate is decided first, and soon: membership has a deadline
                return Decision(
                    Verb.WAIT, "at the door: a node of the round cannot be heard just now"
                )
            new = tuple(self.ready)[: possible - size]
            return Decision(Verb.REOPEN, f"node{'s' * (len(new) > 1)} {names(new)} joined")
        return Decision(Verb.WAIT, entry.reason, entry.due)

    def _gathering(self, now: float) -> Decision:
        for node in self._awaited.pop_due(now):  # its time is over; it comes back as a newcomer
            if self.is_member(node) and self.stages[node] in (Stage.STARTING, Stage.RUNNING):
                self._lose(node, "does not answer")
                self._note_losses(now)
        if self.is_incomplete(now):
            return Decision(
                Verb.WAIT,
                "the master is new and waits for the other nodes of the last round",
                self._grace_until,
            )
        if self._successor_until is not None and not self.stages and now < self._successor_until:
            return Decision(
                Verb.WAIT,
                "the master is new and waits for the nodes of a round that may run",
                self._successor_until,
            )
        if len(self._awaited):
            return Decision(
                Verb.WAIT,
                "waiting for the other nodes of the last round to stop their ranks and join",
                self._awaited.next(),
            )
        if self.stages and not self._fenced:
            silence = self._silence()
            if now < self._last_word + silence:
                return Decision(
                    Verb.WAIT,
                    "no node of the last round can be heard, so its ranks may still run; the next "
                    f"round waits until they have stopped by themselves ({silence:g} s)",
                    self._last_word + silence,
                )
        if self._usable(len(self.ready)) < self._spec.min_nodes:
            self._call_in_the_barred(now)
        usable = self._usable(len(self.ready))
        if usable < self._spec.min_nodes:
            return self._starve(now)
        self._starved_since = None
        if now < self._stopped_by() and self._others_may_train():
            return Decision(
                Verb.WAIT,
                "the master is new and half of the last round's ranks or more were not heard: they "
                "may be in a later one; the next round waits until they have stopped by themselves",
                self._stopped_by(),
            )
        storm = self._storm.holds() if len(self.stages) >= STORM_NODES else None
        if storm is not None and now < storm:
            return Decision(
                Verb.WAIT,
                "nodes are lost one after another: the next round waits until no more are lost",
                storm,
            )
        if usable >= self._largest or self.stages:
            return Decision(Verb.FORM, "", nodes=usable)
        self._call.begin(now)
        ends = self._call.ends(announced=bool(self._announced))
        if now >= ends:
            return Decision(Verb.FORM, "", nodes=usable)
        return Decision(Verb.WAIT, f"last call: up to {self._spec.max_nodes} nodes may join", ends)

    def _silence(self) -> float:
        """Seconds after its last word in which a node that hears no master has stopped."""
        spec = self._spec
        notice = max(spec.heartbeat_timeout, 2.0 * beat_interval(len(self.stages)))
        return notice + spec.master_lost_timeout + spec.restart_grace + FENCE_SLACK

    def _unseen_until(self, now: float) -> float:
        """Until when the nodes of an adopted round that have not been heard are waited for. One
        that runs, runs on."""
        late = now >= self._grace_until and self.phase is Phase.RUNNING
        return self._stopped_by() if late and self._others_may_train() else self._grace_until

    def _others_may_train(self) -> bool:
        """Whether nodes that this master has never heard may be enough for a round of their own: no
        more than half of the ranks of an adopted one are accounted for, nor are as many nodes here
        as the job may have. O(n), where few are here."""
        if not self.is_minority:
            return False
        here = {node for node in self.stages if self.is_member(node)}
        return self._usable(len(here.union(self.ready))) < self._largest

    def _stopped_by(self) -> float:
        """When nodes that this master has never heard have stopped their ranks."""
        return self._taken_over_at + self._silence()

    def _call_in_the_barred(self, now: float) -> None:
        """Nodes are left out only while the job can go on without them."""
        if self._usable(len(self.ready) + len(self._barred)) >= self._spec.min_nodes:
            for node in tuple(self._barred):
                self._barred.lift(node)
                self.join(node, now, not_before=now)

    def _starve(self, now: float) -> Decision:
        self._call.cancel()
        if self._starved_since is None:
            self._starved_since = now
            self._count.begin()
        until = max(self._starved_since + self._spec.join_timeout, self._grace_until)
        needed = self._needed()
        why = self.loss or self._shortage or next(iter(self._kept.values()), "")
        if now >= until:
            limit = f"{self._spec.join_timeout:g} s, the join_timeout"
            reason = f"only {len(self.ready)} of {some(needed, 'node')} for {limit}"
            reason += f" ({why})" if why else ""
            return Decision(Verb.GIVE_UP, reason)
        wake = self._count.look(len(self.ready), needed, now)
        reason = f"waiting for nodes: {self._count.told} of {some(needed, 'node')}"
        reason += f" ({why})" if why else ""
        return Decision(Verb.WAIT, reason, until, wake)

    def _usable(self, nodes: int) -> int:
        """How many of so many nodes can be in a round."""
        return min(nodes // self._spec.node_unit * self._spec.node_unit, self._largest)

    def _needed(self) -> int:
        unit = self._spec.node_unit
        return -(-self._spec.min_nodes // unit) * unit
