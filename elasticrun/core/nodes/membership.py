"""Which nodes are there: ALIVE, SUSPECT, DEAD, LEFT, from streams, beats and incarnations.

Three witnesses speak of a node, because a slow loop or a broken stream is no death yet, and a node
that is wrongly taken for dead costs all the others a restart. *Process*: its stream; the
transport's pings break it when the process is gone or stopped. *Loop*: its beats; a node whose
stream stands but that says nothing is sluggish, and dead only after SLUGGISH_DEAD. *World*: ranks
of the same round that fail on another node. A broken stream makes a node SUSPECT; it is DEAD after
SUSPECT_CONFIRM if the world agrees (REDIAL_GRACE where pings broke it: its network may be back), at
once if a newer incarnation of it attaches, and otherwise when it has been silent for
`heartbeat_timeout`; that includes the silence for which pings broke the stream. The only node of
all, once fallen silent (stopped by Ctrl-Z, or by a debugger), has until SLUGGISH_DEAD or until
another node comes: giving it up would help nobody (decision 026).

Silence proves nothing where the listener did not listen: `overslept` moves every deadline. And
nodes die one by one, or a few at a time: where more than half of a round's nodes (of three at
least) are silent at once, the one that hears nothing is the likelier to be at fault; the verdict
waits for MASS_SILENCE_HOLD, and is given then if they are silent still.

A node's name is its node id; an incarnation is one life of its agent. A superseded incarnation is
refused for ever. One that was only taken for dead may come back: it is treated as a newcomer, and
whatever it still runs is fenced by the name of its round. A name that is held by a living agent is
not taken from it: the newcomer is refused.

Every report costs O(1). The caller owes `due` a look whenever `next_deadline` has come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from elasticrun.config import (
    BEAT_INTERVAL,
    MASS_SILENCE_HOLD,
    MAX_SESSIONS,
    REATTACH_GRACE,
    REDIAL_GRACE,
    SLUGGISH_DEAD,
    STOPPED_AFTER,
    SUSPECT_CONFIRM,
)
from elasticrun.core.deadlines import Deadlines
from elasticrun.core.events import Detached
from elasticrun.core.nodes.admission import Deaths
from elasticrun.core.nodes.node import Health, Node, Nodes
from elasticrun.core.persisted import MembershipFacts
from elasticrun.core.reasons import (
    CutOff,
    LostContact,
    MasterFull,
    NodeTaken,
    Reason,
    Superseded,
)
from elasticrun.wire.messages import Hello

BEATS_PER_SECOND = 500
"""Beats that one master hears per second at most; more nodes beat less often. With more to hear
it would fall behind, and judge late."""


def beat_interval(streams: int) -> float:
    """How often each of so many agents is to say that it lives, in seconds; however many there are,
    one that lives is heard twice before it is given up as sluggish."""
    return min(max(BEAT_INTERVAL, streams / BEATS_PER_SECOND), SLUGGISH_DEAD / 3.0)


SMALLEST = 3
"""Of fewer nodes in a round nothing can be told: with two, half of them is one."""


class MassSilence:
    """Whether verdicts are held back; times are monotonic seconds."""

    def __init__(self) -> None:
        self.until: float | None = None
        """Until when verdicts are held back; None: they are not."""
        self._silent: set[str] = set()  # who is silent meanwhile

    def holds_until(self, silent: Collection[str], size: int, now: float) -> float | None:
        """Until when nobody is given up, now that these of the round's `size` nodes are silent too;
        None: the verdict may be given."""
        self._silent.update(silent)
        if size < SMALLEST or 2 * len(self._silent) <= size:
            self._over()
            return None
        if self.until is None:
            self.until = now + MASS_SILENCE_HOLD
        return self.until if now < self.until else None

    def overslept(self, by: float) -> None:
        """The master did not listen for so many seconds: they do not count."""
        if self.until is not None:
            self.until += by

    def settled(self, node: str) -> None:
        """It is heard again, or has gone. Of the last of them: the next mass silence is another
        one. O(1)."""
        if self.until is not None:
            self._silent.discard(node)
            if not self._silent:
                self._over()

    def reason(self) -> CutOff | None:
        """Why no verdict is given although nodes are silent; None if none is held back."""
        return None if self.until is None else CutOff(MASS_SILENCE_HOLD)

    def _over(self) -> None:
        self.until = None
        self._silent.clear()


SLUGGISH_BEATS = 5.0
"""A node that has missed so many beats is shown as sluggish."""

MAX_LEFT_OUT = 1000
"""Nodes whose deaths by silence are recorded, the newest."""

MAX_SUPERSEDED = 100_000
"""Superseded incarnations remembered; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a stream that wants to be a node's."""

    refusal: Reason | None = None  # None: admitted
    newer: bool = False  # another life of this node was known
    superseded: bool = False  # an older life of the node had not been given up: it is over now
    silent_since: float = 0.0  # ... and when its stream broke
    returned: bool = False  # this very incarnation had been given up as dead
    old_session: int | None = None  # a stream that this one replaces
    forgotten: str = ""  # a node that had gone, forgotten to make room


@dataclass(frozen=True, slots=True)
class Death:
    """A node that was given up, and why."""

    node: str
    how: LostContact
    session: int | None  # a stream that stood nevertheless: close it
    since: float = 0.0  # when its stream broke, or when it was last heard


class Membership:
    """All nodes that the job has seen."""

    def __init__(self, nodes: Nodes, *, heartbeat_timeout: float) -> None:
        """`heartbeat_timeout`: seconds from a broken stream to death, without corroboration."""
        self._nodes = nodes
        self._timeout = heartbeat_timeout
        self.sessions: dict[int, Node] = {}
        """The nodes of the streams that stand, in the order of attaching."""
        self._superseded: dict[str, None] = {}
        self.suspects: dict[str, None] = {}
        """Nodes whose stream is broken and whose fate is open."""
        self.present: dict[str, None] = {}
        """Nodes that are alive or suspect."""
        self.moved: set[str] = set()
        """Nodes that came or went since the ledger looked."""
        self._deadlines: Deadlines[str] = Deadlines()
        self.mass_silence = MassSilence()
        self._past: dict[str, Deaths] = {}  # from the record: nodes that have not attached yet

    # ------------------------------------------------------------ questions

    def beat_interval(self) -> float:
        """How often agents are to say that they live, in seconds."""
        return beat_interval(len(self.sessions))

    def sluggish(self, node: Node, now: float) -> str:
        """That a node whose stream stands misses its beats, in words; empty if it does not."""
        silent = now - node.last_heard
        if node.session is None or silent < SLUGGISH_BEATS * self.beat_interval():
            return ""
        return (
            f"sluggish: its connection stands, but its agent has said nothing for {silent:.0f} s "
            f"(given up after {SLUGGISH_DEAD:g} s)"
        )

    def next_deadline(self) -> float | None:
        """When `due` must be asked."""
        return self._deadlines.next()

    # ------------------------------------------------------------ events

    def attach(self, session: int, hello: Hello, now: float) -> Admission:
        """A stream says that it is this incarnation of this node."""
        if hello.incarnation in self._superseded:
            return Admission(Superseded(hello.node))
        old = self._nodes.get(hello.node)
        if old is None:
            forgotten = self._forget_one() if len(self._nodes) >= MAX_SESSIONS else ""
            if len(self._nodes) >= MAX_SESSIONS:
                return Admission(MasterFull(MAX_SESSIONS))
            self._enter(session, hello, self._recalled(hello.node), now)
            return Admission(forgotten=forgotten)
        if old.incarnation == hello.incarnation:
            return self._reattach(old, session, hello, now)
        if old.session is not None:
            return Admission(NodeTaken(old.id, old.hello.host, old.health is Health.LEFT))
        self._supersede(old.incarnation)
        self._enter(session, hello, old.silences, now)
        if old.health in (Health.DEAD, Health.LEFT):
            return Admission(newer=True)
        return Admission(newer=True, superseded=True, silent_since=old.broke_at)

    def _enter(self, session: int, hello: Hello, silences: Deaths, now: float) -> None:
        """A life of a node that was not known."""
        node = Node(hello.node, hello.incarnation, hello, session, now, silences)
        self._nodes[node.id] = node
        self._stands(node, session, now)

    def _reattach(self, old: Node, session: int, hello: Hello, now: float) -> Admission:
        returned, replaced = old.health is Health.DEAD, old.session
        if replaced is not None:
            self.sessions.pop(replaced, None)
        old.session, old.last_heard, old.said, old.told = session, now, hello, ""
        old.health, old.reason, old.corroborated = Health.ALIVE, None, False
        self._stands(old, session, now)
        return Admission(returned=returned, old_session=replaced)

    def _stands(self, node: Node, session: int, now: float) -> None:
        self.sessions[session] = node
        self.moved.add(node.id)
        self.present[node.id] = None
        self.suspects.pop(node.id, None)
        self.mass_silence.settled(node.id)
        self._deadlines.arm(node.id, now + SLUGGISH_DEAD)
        if len(self.present) == 2:  # one that fell silent is no longer the only node
            for first in map(self._nodes.__getitem__, self.suspects):
                if first.said is not None:
                    until = first.broke_at + self._patience(first)
                    self._deadlines.arm(first.id, max(now, until))

    def heard(self, session: int, now: float) -> str | None:
        """Something came in on `session`; the node it speaks for, None if it speaks for none."""
        node = self.sessions.get(session)
        if node is None:
            return None
        node.last_heard = now
        if node.health is Health.ALIVE:
            self._deadlines.arm(node.id, now + SLUGGISH_DEAD)
        if self.mass_silence.until is not None:
            self.mass_silence.settled(node.id)
        return node.id

    def detached(self, event: Detached, now: float, *, corroborated: bool) -> str | None:
        """The stream is gone; the node it was the stream of, if it was a node's present one.
        `corroborated`: ranks of its round have failed on another node."""
        node = self.sessions.pop(event.session, None)
        if node is None:
            return None
        node.session = None
        self.moved.add(node.id)
        if node.health is Health.ALIVE:
            node.health = Health.SUSPECT
            node.reason = LostContact("closed" if event.clean else "broken")
            node.broke_at, node.silent, node.quiet = now, event.silent, event.quiet
            node.corroborated = corroborated
            self.suspects[node.id] = None
            self._deadlines.arm(node.id, now + self._patience(node))
        return node.id

    def _patience(self, node: Node) -> float:
        confirm = min(REDIAL_GRACE, self._timeout)
        if node.corroborated:
            closed = node.quiet < STOPPED_AFTER  # by its kernel: no ping was missed
            return min(SUSPECT_CONFIRM, confirm) if closed else confirm
        if len(self.present) == 1 and node.quiet >= STOPPED_AFTER:
            return max(confirm, max(self._timeout, SLUGGISH_DEAD) - node.quiet)
        return max(confirm, self._timeout - node.silent)

    def corroborate(self, reporter: str, concerned: Callable[[str], bool], now: float) -> None:
        """Ranks failed on `reporter`: suspects for whom `concerned` holds have a second witness."""
        for node in map(self._nodes.__getitem__, self.suspects):
            if node.id != reporter and not node.corroborated and concerned(node.id):
                node.corroborated = True
                self._deadlines.arm(node.id, max(now, node.broke_at + self._patience(node)))

    def left(self, node: str, reason: Reason) -> None:
        """The node says that it goes. Its stream may still stand while its ranks end."""
        self._nodes[node].health, self._nodes[node].reason = Health.LEFT, reason
        self._deadlines.disarm(node)
        self._has_gone(node)

    def _has_gone(self, node: str) -> None:
        self.suspects.pop(node, None)
        self.present.pop(node, None)
        self.moved.add(node)
        self.mass_silence.settled(node)

    def overslept(self, by: float, beat: float) -> None:
        """The listener was away for `by` seconds: no silence counts before one beat more."""
        self._deadlines.shift(by + beat)
        self.mass_silence.overslept(by + beat)

    def due(self, now: float, concerned: Callable[[str], bool], size: int) -> list[Death]:
        """The nodes whose time is up. `concerned` tells the members of the round, `size` how many
        there are; the rule of mass silence is about them."""
        due = self._deadlines.pop_due(now)
        if not due:
            return []
        nodes = self._nodes
        silent = [node for node in due if not nodes[node].corroborated]
        if silent:
            waiting = [node for node in self.suspects if not nodes[node].corroborated]
            together = {node for node in (*silent, *waiting) if concerned(node)}
            until = self.mass_silence.holds_until(together, size, now)
            if until is not None:
                for node in silent:
                    self._deadlines.arm(node, until)
                due = [node for node in due if nodes[node].corroborated]
        return [self._die(nodes[node], now) for node in due]

    def _die(self, node: Node, now: float) -> Death:
        how = node.reason
        if not isinstance(how, LostContact):  # its stream stands
            how = LostContact("mute", now - node.last_heard)
        elif node.corroborated and node.said is not None:
            how = LostContact(how.how, missed=True)
        elif node.said is not None:
            how = LostContact(how.how, now - node.broke_at + node.silent)
        since = node.broke_at if node.health is Health.SUSPECT else node.last_heard
        if not node.corroborated and node.said is not None:
            node.silences.count(now)
        node.health, node.reason = Health.DEAD, how
        session, node.session = node.session, None
        if session is not None:
            self.sessions.pop(session, None)
        self._has_gone(node.id)
        return Death(node.id, how, session, since)

    # ------------------------------------------------------------ the record of another master

    def recall(self, node: str, incarnation: str, now: float) -> Node:
        """A member of the record's round that had been given up."""
        known = Node(node, incarnation, None, None, now, self._recalled(node), Health.DEAD)
        known.reason = LostContact("gone_before")
        self._nodes[node] = known
        return known

    def redial(self, nodes: int) -> float:
        """Seconds in which living agents, so many, have dialled a master that came back: they try
        once a second; the silence limit, or the time that it takes to hear so many."""
        return min(REATTACH_GRACE, max(self._timeout, nodes / BEATS_PER_SECOND))

    def expect(self, node: str, incarnation: str, now: float, *, redial: float) -> None:
        """A member of the record's round. It is suspect until it attaches, for REATTACH_GRACE; for
        `redial` only where another node's ranks lose it."""
        known = self.recall(node, incarnation, now)
        known.health = Health.SUSPECT
        known.reason = LostContact("unheard")
        known.broke_at = now + max(0.0, redial - SUSPECT_CONFIRM)
        self.present[node] = None
        self.suspects[node] = None
        self.moved.add(node)
        self._deadlines.arm(node, now + REATTACH_GRACE)

    def restore(self, facts: MembershipFacts, at: float) -> None:
        """Nodes that fell silent under another master."""
        self._past = {one.node: Deaths.recalled(one, at) for one in facts.left_out}

    def facts(self, now: float) -> MembershipFacts:
        """The nodes whose silences still matter, the newest of them, the newest last."""
        found = [
            *self._past.items(),
            *((one.id, one.silences) for one in self._nodes.values()),
        ]
        found = [one for one in found if one[1].times and one[1].matter(now)]
        found.sort(key=lambda one: one[1].times[-1])
        newest = found[-MAX_LEFT_OUT:]
        return MembershipFacts(tuple(silences.fact(node, now) for node, silences in newest))

    def _recalled(self, node: str) -> Deaths:
        return self._past.pop(node, None) or Deaths()

    # ------------------------------------------------------------ bounds

    def _supersede(self, incarnation: str) -> None:
        self._superseded[incarnation] = None
        if len(self._superseded) > MAX_SUPERSEDED:
            self._superseded.pop(next(iter(self._superseded)))

    def _forget_one(self) -> str:
        """Make room by forgetting a node that has gone; its name, empty if none has."""
        for node in self._nodes.values():
            if node.health in (Health.DEAD, Health.LEFT) and node.session is None:
                self._supersede(node.incarnation)
                self._nodes.forget(node.id)
                return node.id
        return ""
