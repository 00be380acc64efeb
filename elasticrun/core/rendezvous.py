"""When a round of nodes forms or reopens, with whom, and why not yet.

Phases. A job is GATHERING until a round forms and RUNNING until it reopens:

    GATHERING --- formed(nodes) ---> RUNNING --- reopen(reason) ---> GATHERING ...

*The first round* forms at once when `max` nodes have joined. Otherwise last call begins when `min`
have. It ends when no node has joined for max(LAST_CALL_QUIET, 2 x the largest gap between joins so
far) - nodes that start together do not wait for nodes that do not exist, nodes that start ten
seconds apart are waited for - but no single silence lasts longer than `last_call_timeout`, and the
whole no longer than LAST_CALL_CAP_FACTOR times that, whoever joins. A node whose stream stands but
that has not joined yet (it imports torch) counts as a join to come.

*A later round* needs no last call: the nodes that are expected are known. It forms as soon as every
living member of the last round is back, with whoever else is ready. Last call is for those who are
not expected; so a live survivor that is still stopping holds the round open until the time it has
named and SURVIVOR_SLACK more, and only then goes on without (COORDINATION 6).

*While RUNNING*, a member that dies or leaves before its ranks are done reopens the round at once. A
newcomer waits at the door while training goes on: last call is spent before workers are stopped,
not after. A round younger than GROW_YOUNG lets newcomers in when no more come, because little work
is lost; an older one when `grow_cooldown` is over since it began (`grow == "now"`: any round at
once). Nodes that `max` or `node_unit` leave over are spares; they replace the lost.

The fence. A round whose ranks may still run somewhere must not be followed by another that writes
the same checkpoints. Collectives need every rank, so it is enough that *one* member of the round
has reported that its ranks are gone, or has come back as a newer life (COORDINATION 1). Where no
member can be heard, the next round waits until every agent of the last one has stopped its ranks by
itself: after the last word of the last of them, `heartbeat_timeout` for it to notice,
`master_lost_timeout` in which it goes on, `restart_grace` for its ranks to end, and FENCE_SLACK.

Adoption. A master without a record of its own adopts the highest round that agents report, as
RUNNING, and waits REATTACH_GRACE for the nodes of it that have not been heard. It learns that there
was a master before it from any agent that has obeyed one, be it a spare: from then on it forms
nothing until the grace is over or a round was reported. (A successor that only new agents have
found so far cannot know; it may begin a round that it ends when the first old agent attaches. Only
a record that outlives the master could prevent that.)

Invariants: a node is in `ready` only while no rank of an earlier round lives on it and its stream
stands. A round is formed of ready nodes only. Every WAIT has a reason, and a time at which it ends
unless something happens before; only a running round that lacks nothing waits without end.

What the caller owes: `decide` after every event that is not a beat and at the time it named; to
choose at most `Decision.nodes` of `ready` and tell `formed`; to tell every loss of contact, leave,
death and rebirth; not to tell `join` for a node whose ranks may live. Sentences for agents do not
count nodes, so that a thousand joins are not a million messages; the numbers are in `detail`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticrun.config import EXIT_BELOW_MIN, EXIT_FAILED, GROW_YOUNG
from elasticrun.core.crew import Crew, Phase, Stage

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
    nodes: int = 0  # FORM: how many at most
    exit_code: int = 0  # GIVE_UP


class Rendezvous(Crew):
    """The rounds of one job; see the module's head. The books are kept by `Crew`."""

    def decide(self, now: float) -> Decision:
        """What is to be done at `now`."""
        for node in self._barred.pop_due(now):
            self.join(node, now, not_before=now)
        decision = self._success(now)
        if self._unseen_ranks and now >= self._grace_until:
            self._lost.append(self.loss)
            self._unseen_ranks = 0
            self._recount = True
        if decision is None and self._recount and self._lost and self._impatient:
            self._recount = False
            if self._within_reach() < self._spec.min_nodes:
                return Decision(Verb.GIVE_UP, self.loss, exit_code=EXIT_FAILED)
        if decision is None:
            running = self.phase is Phase.RUNNING
            decision = self._running(now) if running else self._gathering(now)
        barred = self._barred.next()
        if decision.verb is Verb.WAIT and barred is not None:
            until = barred if decision.until is None else min(barred, decision.until)
            return Decision(Verb.WAIT, decision.reason, until)
        return decision

    def _within_reach(self) -> int:
        """Nodes that could be in the next round; O(n), asked only when one was lost for good."""
        there = {node for node in self.stages if self.is_member(node)} - set(self._leaving)
        return len(there.union(self.ready, self._announced, self._barred))

    def _success(self, now: float) -> Decision | None:
        if not self.stages or len(self._completed) < len(self.stages):
            return None
        if not self._unseen_ranks:
            return Decision(Verb.SUCCEED, "every rank ended with 0")
        if now < self._grace_until:
            return None
        return Decision(
            Verb.SUCCEED, "every rank that was heard of ended with 0; the others' result is unknown"
        )

    def _running(self, now: float) -> Decision:
        if self._lost or self._broken:
            return Decision(Verb.REOPEN, self.loss or self._broken)
        if self._unseen_ranks:
            return Decision(
                Verb.WAIT,
                "the master is new and waits for the nodes of the round that runs",
                self._grace_until,
            )
        return self._door(now)

    def _door(self, now: float) -> Decision:
        """Newcomers and a running round."""
        if not self.ready:
            return Decision(Verb.WAIT, "")
        if self._completed:
            return Decision(Verb.WAIT, "at the door: the job is finishing")
        size = len(self.stages)
        possible = self._usable(size + len(self.ready))
        if possible <= size:
            why = (
                f"the round has all {self._spec.max_nodes} nodes"
                if size >= self._largest
                else f"nodes are taken {self._spec.node_unit} at a time"
            )
            return Decision(Verb.WAIT, f"spare: {why}; takes the place of a node that is lost")
        assert self._formed_at is not None
        opened = self._formed_at if self._door_opened is None else self._door_opened
        self._door_call.begin(opened)
        due = now
        if possible < self._largest:
            due = self._door_call.ends(announced=bool(self._announced))
        reason = "at the door: let in when no more nodes come"
        if self._spec.grow != "now" and opened - self._formed_at >= GROW_YOUNG:
            due = max(due, self._formed_at + self._spec.grow_cooldown)
            reason = (
                f"at the door: let in {self._spec.grow_cooldown:g} s after the round began "
                "(--grow=now: at once), or when a node is lost"
            )
        if now >= due:
            if self._unheard:  # their fate is decided first, and soon: membership has a deadline
                return Decision(
                    Verb.WAIT, "at the door: a node of the round cannot be heard just now"
                )
            return Decision(Verb.REOPEN, "new nodes join")
        return Decision(Verb.WAIT, reason, due)

    def _gathering(self, now: float) -> Decision:
        for node in self._awaited.pop_due(now):  # its time is over; it comes back as a newcomer
            if self.is_member(node) and self.stages[node] in (Stage.STARTING, Stage.RUNNING):
                self._lost.append(f"node {node} does not answer")
        if self._unseen_ranks:
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
            spec = self._spec
            silence = spec.heartbeat_timeout + spec.master_lost_timeout + spec.restart_grace
            silence += FENCE_SLACK
            if now < self._last_word + silence:
                return Decision(
                    Verb.WAIT,
                    "no node of the last round can be heard, so its ranks may still run; the next "
                    f"round waits until they have stopped by themselves ({silence:g} s)",
                    self._last_word + silence,
                )
        usable = self._usable(len(self.ready))
        if usable < self._spec.min_nodes:
            return self._starve(now)
        self._starved_since = None
        if usable >= self._largest or self.stages:
            return Decision(Verb.FORM, "", nodes=usable)
        self._call.begin(now)
        ends = self._call.ends(announced=bool(self._announced))
        if now >= ends:
            return Decision(Verb.FORM, "", nodes=usable)
        return Decision(Verb.WAIT, f"last call: up to {self._spec.max_nodes} nodes may join", ends)

    def _starve(self, now: float) -> Decision:
        self._call.cancel()
        if self._starved_since is None:
            self._starved_since = now
        until = self._starved_since + self._spec.join_timeout
        needed = self._needed()
        if now >= until:
            reason = f"fewer than {needed} nodes for {self._spec.join_timeout:g} s"
            reason += f" ({self.loss})" if self.loss else ""
            return Decision(Verb.GIVE_UP, reason, exit_code=EXIT_BELOW_MIN)
        reason = f"waiting for nodes: {needed} must join"
        reason += f", because {self.loss}" if self.loss else ""
        return Decision(Verb.WAIT, reason, until)

    def _usable(self, nodes: int) -> int:
        """How many of so many nodes can be in a round."""
        return min(nodes // self._spec.node_unit * self._spec.node_unit, self._largest)

    def _needed(self) -> int:
        unit = self._spec.node_unit
        return -(-self._spec.min_nodes // unit) * unit
