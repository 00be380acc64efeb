"""Which nodes are ALIVE, SUSPECT, DEAD or LEFT, derived from streams, beats and incarnations.

There are three sources of evidence, because a slow event loop or a broken stream is not yet a
death, and declaring a living node dead costs all others a restart. *Process*: the stream; the
transport's pings break it when the process has exited or stopped. *Loop*: the beats; a node that is
connected but sends nothing is sluggish, and dead only after SLUGGISH_DEAD. *World*: ranks of the
same round that fail on another node. A broken stream makes a node SUSPECT. It becomes DEAD after
SUSPECT_CONFIRM if the world agrees (REDIAL_GRACE if pings broke the stream: its network may
return), at once if a newer incarnation of it attaches, and otherwise after `heartbeat_timeout` of
silence, which includes the silence that made pings break the stream. If the job's only node falls
silent (stopped by Ctrl-Z, or by a debugger), it has until SLUGGISH_DEAD or until another node
attaches, because declaring it dead would help nobody (decision 026).

Silence proves nothing while the master was not listening: `overslept` moves every deadline. Nodes
die one by one, or a few at a time. If more than half of a round's nodes are silent at once (in a
round of three or more), the fault is more likely on the master's side; the verdict waits for
MASS_SILENCE_HOLD, and applies if they are still silent then.

A node's name is its node id; an incarnation is one run of its agent. A superseded incarnation is
refused permanently. An incarnation that was wrongly declared dead may return: it is treated as a
new node, and anything it still runs is fenced by the name of its round. A living agent keeps its
node name: another agent with that name is refused.

Every report costs O(1). The caller must call `due` whenever `next_deadline` has passed.
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
"""Maximum number of beats per second that one master receives; with more nodes, each beats less
often. More beats would make the master fall behind and decide late."""


def beat_interval(streams: int) -> float:
    """Interval in seconds of the beats of each of `streams` agents. Even in the largest job, a
    living agent sends two beats before it counts as dead for being sluggish."""
    return min(max(BEAT_INTERVAL, streams / BEATS_PER_SECOND), SLUGGISH_DEAD / 3.0)


MASS_SILENCE_MIN_NODES = 3
"""In a smaller round, mass silence means nothing: of two nodes, one is half."""


class MassSilence:
    """Holds verdicts back while most nodes are silent; times are monotonic seconds."""

    def __init__(self) -> None:
        self.until: float | None = None
        """Until when verdicts are on hold; None: they are not."""
        self._silent: set[str] = set()  # nodes that are silent meanwhile

    def holds_until(self, silent: Collection[str], size: int, now: float) -> float | None:
        """Add these silent nodes of a round of `size` nodes. Return until when no node is declared
        dead; None if verdicts apply."""
        self._silent.update(silent)
        if size < MASS_SILENCE_MIN_NODES or 2 * len(self._silent) <= size:
            self._over()
            return None
        if self.until is None:
            self.until = now + MASS_SILENCE_HOLD
        return self.until if now < self.until else None

    def overslept(self, by: float) -> None:
        """The master was not listening for `by` seconds: a hold lasts that much longer."""
        if self.until is not None:
            self.until += by

    def remove(self, node: str) -> None:
        """The node is reachable again, or has left. If no node is silent any more, the hold ends.
        O(1)."""
        if self.until is not None:
            self._silent.discard(node)
            if not self._silent:
                self._over()

    def reason(self) -> CutOff | None:
        """Why silent nodes are not declared dead; None if verdicts are not on hold."""
        return None if self.until is None else CutOff(MASS_SILENCE_HOLD)

    def _over(self) -> None:
        self.until = None
        self._silent.clear()


SLUGGISH_BEATS = 5.0
"""A node is shown as sluggish after this many missed beats."""

MAX_SILENT_NODES = 1000
"""Maximum number of nodes whose deaths by silence are recorded: the newest."""

MAX_SUPERSEDED = 100_000
"""Maximum number of superseded incarnations remembered; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a stream that attaches as a node."""

    refusal: Reason | None = None  # None: admitted
    newer: bool = False  # an earlier incarnation of this node was known
    superseded: bool = False  # the earlier incarnation was not declared dead yet; it is now
    silent_since: float = 0.0  # when the stream of the superseded one broke
    returned: bool = False  # this incarnation had been declared dead
    old_session: int | None = None  # a stream that this one replaces
    forgotten: str = ""  # a departed node that was dropped to make room


@dataclass(frozen=True, slots=True)
class Death:
    """A node that was declared dead, and why."""

    node: str
    how: LostContact
    session: int | None  # its stream, if still open: close it
    since: float = 0.0  # when its stream broke, or when it was last heard


class Membership:
    """The state of every node that the job has seen."""

    def __init__(self, nodes: Nodes, *, heartbeat_timeout: float) -> None:
        """`heartbeat_timeout`: seconds from a broken stream to death, without corroboration."""
        self._nodes = nodes
        self._timeout = heartbeat_timeout
        self.sessions: dict[int, Node] = {}
        """The nodes by open stream, in the order of attaching."""
        self._superseded: dict[str, None] = {}
        self.suspects: dict[str, None] = {}
        """Nodes whose stream is broken and that have neither reattached nor been declared dead."""
        self.present: dict[str, None] = {}
        """Nodes that are alive or suspect."""
        self.moved: set[str] = set()
        """Nodes that attached, lost contact or left since the ledger last read this."""
        self._deadlines: Deadlines[str] = Deadlines()
        self.mass_silence = MassSilence()
        self._past: dict[str, Deaths] = {}  # from the record: nodes that have not attached yet

    # ------------------------------------------------------------ questions

    def beat_interval(self) -> float:
        """Interval of the agents' beats, in seconds."""
        return beat_interval(len(self.sessions))

    def why_sluggish(self, node: Node, now: float) -> str:
        """A clause that says that a connected node misses its beats; "" if it does not."""
        silent = now - node.last_heard
        if node.session is None or silent < SLUGGISH_BEATS * self.beat_interval():
            return ""
        return (
            f"sluggish: it is connected, but its agent has sent nothing for {silent:.0f} s "
            f"(given up after {SLUGGISH_DEAD:g} s)"
        )

    def next_deadline(self) -> float | None:
        """When `due` must be called; None if nothing is armed."""
        return self._deadlines.next()

    # ------------------------------------------------------------ events

    def attach(self, session: int, hello: Hello, now: float) -> Admission:
        """A stream attaches as this incarnation of this node. Return whether it is admitted."""
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
        """Add an unknown incarnation of a node."""
        node = Node(hello.node, hello.incarnation, hello, session, now, silences)
        self._nodes[node.id] = node
        self._connected(node, session, now)

    def _reattach(self, old: Node, session: int, hello: Hello, now: float) -> Admission:
        returned, replaced = old.health is Health.DEAD, old.session
        if replaced is not None:
            self.sessions.pop(replaced, None)
        old.session, old.last_heard, old.known_hello, old.sent_reason = session, now, hello, ""
        old.health, old.reason, old.corroborated = Health.ALIVE, None, False
        self._connected(old, session, now)
        return Admission(returned=returned, old_session=replaced)

    def _connected(self, node: Node, session: int, now: float) -> None:
        self.sessions[session] = node
        self.moved.add(node.id)
        self.present[node.id] = None
        self.suspects.pop(node.id, None)
        self.mass_silence.remove(node.id)
        self._deadlines.arm(node.id, now + SLUGGISH_DEAD)
        if len(self.present) == 2:  # a node that fell silent is no longer the only one
            for first in map(self._nodes.__getitem__, self.suspects):
                if first.known_hello is not None:
                    until = first.broke_at + self._patience(first)
                    self._deadlines.arm(first.id, max(now, until))

    def on_message(self, session: int, now: float) -> str | None:
        """A message arrived on `session`. Return the session's node; None if it has none."""
        node = self.sessions.get(session)
        if node is None:
            return None
        node.last_heard = now
        if node.health is Health.ALIVE:
            self._deadlines.arm(node.id, now + SLUGGISH_DEAD)
        if self.mass_silence.until is not None:
            self.mass_silence.remove(node.id)
        return node.id

    def detached(self, event: Detached, now: float, *, corroborated: bool) -> str | None:
        """The stream ended. Return its node if this was the node's current stream. `corroborated`:
        ranks of its round have failed on another node."""
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
        """Seconds from the break of the node's stream until it is declared dead."""
        confirm = min(REDIAL_GRACE, self._timeout)
        if node.corroborated:
            closed = node.quiet < STOPPED_AFTER  # its kernel closed it: no ping was missed
            return min(SUSPECT_CONFIRM, confirm) if closed else confirm
        if len(self.present) == 1 and node.quiet >= STOPPED_AFTER:
            return max(confirm, max(self._timeout, SLUGGISH_DEAD) - node.quiet)
        return max(confirm, self._timeout - node.silent)

    def corroborate(self, reporter: str, concerned: Callable[[str], bool], now: float) -> None:
        """Ranks failed on `reporter`. That corroborates the suspects of which `concerned` is
        true."""
        for node in map(self._nodes.__getitem__, self.suspects):
            if node.id != reporter and not node.corroborated and concerned(node.id):
                node.corroborated = True
                self._deadlines.arm(node.id, max(now, node.broke_at + self._patience(node)))

    def left(self, node: str, reason: Reason) -> None:
        """The node announces that it leaves. Its stream may stay open while its ranks exit."""
        self._nodes[node].health, self._nodes[node].reason = Health.LEFT, reason
        self._deadlines.disarm(node)
        self._no_longer_present(node)

    def _no_longer_present(self, node: str) -> None:
        self.suspects.pop(node, None)
        self.present.pop(node, None)
        self.moved.add(node)
        self.mass_silence.remove(node)

    def overslept(self, by: float, beat: float) -> None:
        """The master was not listening for `by` seconds: deadlines move by that and one more
        beat."""
        self._deadlines.shift(by + beat)
        self.mass_silence.overslept(by + beat)

    def due(self, now: float, concerned: Callable[[str], bool], size: int) -> list[Death]:
        """Declare dead and return the nodes whose deadline has passed. While most members of the
        round are silent (`MassSilence`), that applies only to corroborated nodes. `concerned` tests
        for members, `size` is their number."""
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
        return [self._declare_dead(nodes[node], now) for node in due]

    def _declare_dead(self, node: Node, now: float) -> Death:
        how = node.reason
        if not isinstance(how, LostContact):  # its stream is open
            how = LostContact("mute", now - node.last_heard)
        elif node.corroborated and node.known_hello is not None:
            how = LostContact(how.how, missed=True)
        elif node.known_hello is not None:
            how = LostContact(how.how, now - node.broke_at + node.silent)
        since = node.broke_at if node.health is Health.SUSPECT else node.last_heard
        if not node.corroborated and node.known_hello is not None:
            node.silences.count(now)
        node.health, node.reason = Health.DEAD, how
        session, node.session = node.session, None
        if session is not None:
            self.sessions.pop(session, None)
        self._no_longer_present(node.id)
        return Death(node.id, how, session, since)

    # ------------------------------------------------------------ the record of another master

    def recall(self, node: str, incarnation: str, now: float) -> Node:
        """Add a member of the record's round, as DEAD: the previous master had lost it."""
        known = Node(node, incarnation, None, None, now, self._recalled(node), Health.DEAD)
        known.reason = LostContact("gone_before")
        self._nodes[node] = known
        return known

    def redial_time(self, nodes: int) -> float:
        """Seconds within which `nodes` living agents have redialled a new master: the heartbeat
        timeout (they try once a second), or the time that it takes to process so many if that is
        longer, at most REATTACH_GRACE."""
        return min(REATTACH_GRACE, max(self._timeout, nodes / BEATS_PER_SECOND))

    def expect(self, node: str, incarnation: str, now: float, *, redial: float) -> None:
        """Add a member of the record's round as suspect. It has REATTACH_GRACE to attach, or only
        `redial` seconds if ranks of another node fail."""
        known = self.recall(node, incarnation, now)
        known.health = Health.SUSPECT
        known.reason = LostContact("unheard")
        known.broke_at = now + max(0.0, redial - SUSPECT_CONFIRM)
        self.present[node] = None
        self.suspects[node] = None
        self.moved.add(node)
        self._deadlines.arm(node, now + REATTACH_GRACE)

    def restore(self, facts: MembershipFacts, at: float) -> None:
        """Restore which nodes fell silent under another master."""
        self._past = {one.node: Deaths.from_fact(one, at) for one in facts.left_out}

    def facts(self, now: float) -> MembershipFacts:
        """The newest MAX_SILENT_NODES nodes whose silences still matter, the newest last."""
        found = [
            *self._past.items(),
            *((one.id, one.silences) for one in self._nodes.values()),
        ]
        found = [one for one in found if one[1].times and one[1].still_count(now)]
        found.sort(key=lambda one: one[1].times[-1])
        newest = found[-MAX_SILENT_NODES:]
        return MembershipFacts(tuple(silences.fact(node, now) for node, silences in newest))

    def _recalled(self, node: str) -> Deaths:
        return self._past.pop(node, None) or Deaths()

    # ------------------------------------------------------------ bounds

    def _supersede(self, incarnation: str) -> None:
        self._superseded[incarnation] = None
        if len(self._superseded) > MAX_SUPERSEDED:
            self._superseded.pop(next(iter(self._superseded)))

    def _forget_one(self) -> str:
        """Make room by dropping a departed node; return its name, "" if there is none."""
        for node in self._nodes.values():
            if node.health in (Health.DEAD, Health.LEFT) and node.session is None:
                self._supersede(node.incarnation)
                self._nodes.forget(node.id)
                return node.id
        return ""
