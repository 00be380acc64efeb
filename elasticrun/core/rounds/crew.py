"""Who is ready, who is a member of the last round, and what has become of its ranks.

These are the books on which `rendezvous` decides: every method writes down one thing that was told.
`ready` holds a node only while no rank of an earlier round lives on it and its stream stands. A
member stays on the books when it goes, because its ranks may live on: see the fence in
`rendezvous`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from elasticrun.config import STORM_LONGEST, STORM_QUIET, STORM_WINDOW
from elasticrun.core.deadlines import Deadlines
from elasticrun.core.nodes.admission import Bars
from elasticrun.core.rounds.join_window import Burst, Door, LastCall
from elasticrun.wire.messages import JobSpec

SURVIVOR_SLACK = 2.0
"""A survivor is waited for this much longer than the stopping time it has named."""

SLOW_START = 10.0
"""Seconds after which a node whose ranks are still being started is shown with that."""

REJOIN_WAIT = 30.0
"""A survivor without ranks is waited for this long to offer a store again: a fork server that died
must import torch once more, which takes up to 20 s from a cluster's file system."""


class Phase(StrEnum):
    """What the job is doing about rounds."""

    GATHERING = "gathering"
    RUNNING = "running"


class Stage(StrEnum):
    """A member of the last round that was formed."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"


class Crew:
    """The books of one job's rounds, nodes by name. `rendezvous.Rendezvous` decides on them."""

    def __init__(self, spec: JobSpec, now: float) -> None:
        self._spec = spec
        self._largest = spec.max_nodes // spec.node_unit * spec.node_unit
        self._impatient = spec.min_nodes == spec.max_nodes and spec.max_restarts == 0
        self.phase = Phase.GATHERING
        self.ready: dict[str, None] = {}
        """Nodes that could start now, in the order of their joins."""
        self.stages: dict[str, Stage] = {}
        """Members of the last round formed, those that have gone too."""
        self._away: dict[str, None] = {}  # members whose agents have gone
        self._leaving: dict[str, None] = {}  # members that go as soon as their ranks have ended
        self._completed: dict[str, None] = {}  # members all of whose ranks ended with 0
        self._announced: dict[str, None] = {}  # attached, not joined
        self._barred = Bars()
        self._kept: dict[str, str] = {}  # kept out until the network check passes them, and why
        self._shortage = ""  # which node was excluded since the last round was formed
        self._awaited: Deadlines[str] = Deadlines()  # survivors, and until when
        self._call = LastCall(spec.last_call_timeout)
        self._door = Door(spec)
        self._storm = Burst(  # of losses; the news of one takes `heartbeat_timeout` at most
            window=STORM_WINDOW,
            least=min(spec.heartbeat_timeout, STORM_QUIET),
            most=STORM_QUIET,
            longest=STORM_LONGEST,
        )
        self._formed_at: float | None = None
        self._unheard: dict[str, None] = {}  # members whose stream is broken
        self._lost: list[str] = []  # sentences: members that went before their ranks were done
        self._struck: list[str] = []  # nodes just lost, until `decide` knows when
        self._broken = ""  # why the running round cannot go on
        self._recount = False
        self._fenced = True
        self._last_word = now
        self._starved_since: float | None = now
        self._unseen_ranks = 0  # of an adopted round
        self._given_up_ranks = 0  # that were not heard in time
        self._adopted_ranks = 0  # all of its ranks
        self._grace_until = now
        self._successor_until: float | None = None

    # ------------------------------------------------------------ questions

    @property
    def loss(self) -> str:
        """Which member was lost first since the round was formed, in a sentence; empty if none."""
        if self._lost:
            return self._lost[0]
        return "nodes of the adopted round have not been heard of" if self._unseen_ranks else ""

    @property
    def size(self) -> int:
        """Members of the last round."""
        return len(self.stages)

    def is_member(self, node: str) -> bool:
        """Whether the node has a place in the last round and its agent has not gone."""
        return node in self.stages and node not in self._away

    def is_concerned(self, node: str) -> bool:
        """Whether the work of the round needs this node still."""
        return self.is_member(node) and node not in self._completed

    def is_stopping(self, node: str) -> bool:
        """Whether the ranks of this member are being stopped, or were."""
        return self.stages.get(node) in (Stage.STOPPING, Stage.STOPPED)

    def is_barred(self, node: str) -> bool:
        """Whether it waits at the door whatever room there is."""
        return node in self._barred or node in self._kept

    @property
    def formed_at(self) -> float:
        """When the last round was formed; 0.0 if there was none."""
        return 0.0 if self._formed_at is None else self._formed_at

    @property
    def succeeded(self) -> bool:
        """Whether every rank of the last round ended with 0."""
        return 0 < len(self.stages) <= len(self._completed) and not self._unseen_ranks

    def activity(self, node: str) -> str:
        """The word of `NodeStatus.activity`."""
        if node in self.ready:
            return "joining" if self.phase is Phase.GATHERING else "at-the-door"
        if self.is_member(node):
            stage = self.stages[node]
            return "joining" if stage is Stage.STOPPED else stage.value
        if self.is_barred(node):
            return "at-the-door"
        return "joining" if node in self._announced else "stopping"

    def is_waiting_for_survivors(self) -> bool:
        """Whether members of the last round are still to stop or to come back."""
        return len(self._awaited) > 0

    def reason_of(self, node: str, now: float) -> str:
        """Why this one node waits, where that is an affair of its own; else empty."""
        if node in self._kept:
            return self._kept[node]
        if node in self._barred:
            return self._barred.sentence(node, now)
        if node in self._announced:
            return "it has not joined yet: its store is being made ready"
        if self.is_member(node):
            age = now - self.formed_at
            if self.stages[node] is Stage.STARTING and age >= SLOW_START:
                return f"its ranks have not all been started yet, {age:.0f} s after its round began"
        elif node not in self.ready:
            return "it has not said yet that its ranks of an earlier round are gone"
        return ""

    def detail(self) -> str:
        """The numbers behind the reason, for the status page."""
        ready, low, high = len(self.ready), self._spec.min_nodes, self._spec.max_nodes
        text = f"{ready} ready, {low} needed, {high} at most"
        if self.phase is Phase.GATHERING and len(self._awaited):
            text += f"; waiting for {', '.join(sorted(self._awaited)[:5])}"
            text += f" and {len(self._awaited) - 5} more" if len(self._awaited) > 5 else ""
        return text

    # ------------------------------------------------------------ nodes come and go

    def announce(self, node: str, now: float) -> None:
        """A stream of this node stands; it is expected to join."""
        if node not in self.ready and not self.is_member(node):
            if not self.stages and node not in self._announced:
                self._call.arrival(now)
            self._announced[node] = None
            self._door.appeared(node, now)

    def join(self, node: str, now: float, *, not_before: float, why: str = "") -> None:
        """No rank lives on this node and it offers a store. `not_before`: when it is let in, for a
        node that keeps falling silent or whose ranks keep failing, as `why` says in a clause."""
        if self.is_member(node) and self.stages[node] is not Stage.STOPPED:
            return  # it said so before it read the Start of the present round
        announced = node in self._announced
        self._announced.pop(node, None)
        if not_before > now and not self.is_member(node):
            self._barred.put(node, not_before, why)
            self._awaited.disarm(node)  # it has come back, and will not be in the next round
            return
        self._awaited.disarm(node)
        if node not in self.ready and node not in self._kept:
            self.ready[node] = None
            if not self.stages:
                self._call.ready(now) if announced else self._call.arrival(now)
            if self.phase is Phase.RUNNING:
                self._door.joined(node, now)

    def overslept(self, by: float) -> None:
        """The master did not listen for `by` seconds: the answers of survivors are not late."""
        self._awaited.shift(by)

    def lost_contact(self, node: str, now: float, patience: float) -> None:
        """Its stream broke; it may come back within `patience` seconds, and joins again then."""
        if node in self._announced or node in self.ready:
            self._door.went(node)
        self._announced.pop(node, None)
        self._kept.pop(node, None)
        self._barred.lift(node)
        self._recount = True
        if self.is_concerned(node):
            self._unheard[node] = None
        if node in self._away:
            self._awaited.disarm(node)
        if node in self.ready:
            del self.ready[node]
            if self.phase is Phase.GATHERING and self.is_member(node):
                self._awaited.arm(node, now + patience)

    def back(self, node: str) -> None:
        """A stream of this node stands again."""
        self._unheard.pop(node, None)

    def leaving(self, node: str, now: float, reason: str) -> None:
        """The node says that it goes; its ranks may live until it says that they have ended."""
        if self.is_member(node) and self.stages[node] not in (Stage.STOPPED, Stage.FINISHED):
            if node not in self._leaving:
                self._leaving[node] = None
                self._lose(node, f"left: {reason}")
                self._awaited.arm(node, now + self._spec.restart_grace + SURVIVOR_SLACK)
        else:
            self.gone(node, f"left: {reason}", last_word=now)

    def gone(self, node: str, reason: str, *, last_word: float, reborn: bool = False) -> None:
        """The node is dead or has left, and its agent with it. `last_word`: when it was last
        heard. `reborn`: a newer life of it is there, so its ranks are not."""
        self._announced.pop(node, None)
        self._unheard.pop(node, None)
        self._kept.pop(node, None)
        self._barred.lift(node)
        self._awaited.disarm(node)
        self.ready.pop(node, None)
        self._recount = True
        if not self.is_member(node):
            return
        stage = self.stages[node]
        if node not in self._completed and node not in self._leaving:
            self._lose(node, reason)
        self._away[node] = None
        self._fenced = self._fenced or reborn or stage in (Stage.STOPPED, Stage.FINISHED)
        self._last_word = max(self._last_word, last_word)

    def _lose(self, node: str, reason: str) -> None:
        self._lost.append(f"node {node} {reason}")
        self._struck.append(node)
        self._recount = True

    def can_spare(self, node: str) -> bool:
        """Whether the next round could do without this member; O(n)."""
        if not self.is_member(node) or node in self._leaving:
            return False
        return self.is_enough_without(node)

    def is_enough_without(self, node: str) -> bool:
        """Whether a round could form if this node, member or not, were not there; O(n)."""
        others = {one for one in self.stages if self.is_member(one)} - set(self._leaving)
        others.update(self.ready)
        others -= {node, *self._kept}
        unit = self._spec.node_unit
        return len(others) // unit * unit >= self._spec.min_nodes

    def leave_out(self, node: str, until: float, why: str) -> None:
        """This member waits at the door until then. It is no loss that others would follow."""
        self._away[node] = None
        self._awaited.disarm(node)
        self._lost.append(f"node {node} is left out: {why}")
        if node in self.ready:  # else it is barred when it joins
            del self.ready[node]
            self._barred.put(node, until, why)

    def keep_out(self, node: str, why: str) -> None:
        """This node may not be in a round before the network check has passed it."""
        self._kept[node] = why
        self._awaited.disarm(node)
        self._announced.pop(node, None)
        self.ready.pop(node, None)

    def admit(self, node: str) -> bool:
        """It need not be kept out any more, and may join; whether it was."""
        return self._kept.pop(node, None) is not None

    def let_in(self, node: str, now: float) -> None:
        """A node that was left out need not wait any more."""
        if node in self._barred:
            self._barred.put(node, now, "acquitted")

    def reborn(self, node: str) -> None:
        """A newer life of a node that had gone is there: none of its ranks lives on."""
        if node in self._away:
            self._fenced = True

    def returned(self, node: str, now: float, *, within: float) -> None:
        """A member that had gone is there again and will join; if the next round is still being
        gathered it is waited for, `within` seconds, since two restarts cost more than a wait."""
        self.announce(node, now)
        if self.phase is Phase.GATHERING and node in self._away:
            self._awaited.arm(node, now + within)

    # ------------------------------------------------------------ what becomes of a round's ranks

    def running(self, node: str) -> None:
        """All ranks of this member have been started."""
        if self.is_member(node) and self.stages[node] is Stage.STARTING:
            self.stages[node] = Stage.RUNNING

    def finished(self, node: str) -> None:
        """All ranks of this member have ended with 0."""
        if self.is_member(node) and self.stages[node] in (Stage.STARTING, Stage.RUNNING):
            self.stages[node] = Stage.FINISHED
            self._completed[node] = None

    def stopping(self, node: str, remaining: float, now: float) -> None:
        """The ranks of this member are told to end and will be gone in `remaining` seconds."""
        if not self.is_member(node) or self.stages[node] is Stage.STOPPED:
            return
        self.stages[node] = Stage.STOPPING
        if self.phase is Phase.GATHERING or node in self._leaving:
            self._awaited.arm(node, now + remaining + SURVIVOR_SLACK)
        else:
            self._broken = self._broken or f"node {node} is stopping its ranks"

    def stopped(self, node: str, now: float) -> None:
        """No process of this member's ranks is left."""
        if node in self.stages:
            self._fenced = True
        if not self.is_member(node):
            if node in self._awaited:
                self._awaited.arm(node, now + REJOIN_WAIT)
            return
        self.stages[node] = Stage.STOPPED
        if node in self._leaving:
            self._awaited.disarm(node)
            self._away[node] = None
        elif self.phase is Phase.GATHERING:
            if node not in self.ready:
                self._awaited.arm(node, now + REJOIN_WAIT)
        else:
            self._broken = self._broken or f"the ranks of node {node} have been stopped"

    # ------------------------------------------------------------ rounds

    def formed(self, nodes: Iterable[str], now: float) -> None:
        """These ready nodes have been given places in a new round."""
        members = dict.fromkeys(nodes, Stage.STARTING)
        for node in members:
            del self.ready[node]
        first = self._formed_at is None
        self._begin(members, now)
        if first:
            self._door.job_began()

    def _begin(self, members: dict[str, Stage], now: float) -> None:
        self.phase = Phase.RUNNING
        self.stages = members
        self._away.clear()
        self._unheard.clear()
        self._leaving.clear()
        self._awaited.clear()
        self._lost.clear()
        self._completed.clear()
        self._broken = self._shortage = ""
        self._unseen_ranks = 0
        self._given_up_ranks = 0
        self._door.formed(now, announced=bool(self._announced))
        self._storm.answered(now)
        self._formed_at = now
        self._fenced = False
        self._last_word = now
        self._recount = False

    def reopen(self, now: float) -> tuple[str, ...]:
        """End the running round; the members that must be told to stop their ranks."""
        self.phase = Phase.GATHERING
        self._starved_since = None
        told = []
        for node, stage in self.stages.items():
            if node in self._away or node in self._leaving:
                continue
            if stage is Stage.STOPPED:
                if node not in self.ready:
                    self._awaited.arm(node, now + REJOIN_WAIT)
                continue
            self._awaited.arm(node, now + self._spec.restart_grace + SURVIVOR_SLACK)
            told.append(node)
        return tuple(told)
