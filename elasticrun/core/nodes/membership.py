"""How often the agents of a job say that they live.

When so many nodes fall silent together that it is the master that has been cut off.

Nodes die one by one, or a few at a time. Where more than half of a round's nodes (of three at
least) are silent at once, the one that hears nothing is the likelier to be at fault: the verdict
waits for MASS_SILENCE_HOLD, and is given then if they are silent still.

Which nodes are there: ALIVE, SUSPECT, DEAD, LEFT, from streams, beats and incarnations.

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

Silence proves nothing where the listener did not listen: `overslept` moves every deadline, and when
more than half of a round's nodes fall silent together the verdict waits (`mass_silence`).

A node's name is its node id; an incarnation is one life of its agent. A superseded incarnation is
refused for ever. One that was only taken for dead may come back: it is treated as a newcomer, and
whatever it still runs is fenced by the name of its round. A name that is held by a living agent is
not taken from it: the newcomer is refused.

Every report costs O(1). The caller owes `due` a look whenever `next_deadline` has come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

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
from elasticrun.core.nodes.admission import Silences
from elasticrun.core.nodes.node import Admission, Death, Health, Member

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
        self._until: float | None = None
        self._silent: set[str] = set()  # who is silent while verdicts are held back

    def holds_until(self, silent: Collection[str], size: int, now: float) -> float | None:
        """Until when nobody is given up, now that these of the round's `size` nodes are silent too;
        None: the verdict may be given."""
        self._silent.update(silent)
        if size < SMALLEST or 2 * len(self._silent) <= size:
            self._over()
            return None
        if self._until is None:
            self._until = now + MASS_SILENCE_HOLD
        return self._until if now < self._until else None

    def overslept(self, by: float) -> None:
        """The master did not listen for so many seconds: they do not count."""
        if self._until is not None:
            self._until += by

    def settled(self, node: str) -> None:
        """It is heard again, or has gone. Of the last of them: the next mass silence is another
        one. O(1)."""
        if self._until is not None:
            self._silent.discard(node)
            if not self._silent:
                self._over()

    def reason(self) -> str:
        """Why no verdict is given although nodes are silent; empty if none is held back."""
        if self._until is None:
            return ""
        return (
            "more than half of the nodes fell silent together, so it is the master that may be cut "
            f"off; nobody is given up for {MASS_SILENCE_HOLD:g} s"
        )

    def _over(self) -> None:
        self._until = None
        self._silent.clear()


SLUGGISH_BEATS = 5.0
"""A node that has missed so many beats is shown as sluggish."""

MAX_SUPERSEDED = 100_000
"""Superseded incarnations remembered; the oldest are forgotten first."""


class Membership:
    """All nodes that the job has seen."""

    def __init__(self, *, heartbeat_timeout: float) -> None:
        """`heartbeat_timeout`: seconds from a broken stream to death, without corroboration."""
        self._timeout = heartbeat_timeout
        self._members: dict[str, Member] = {}
        self._sessions: dict[int, Member] = {}
        self._superseded: dict[str, None] = {}
        self._suspects: dict[str, None] = {}
        self._present: dict[str, None] = {}  # alive or suspect
        self._deadlines: Deadlines[str] = Deadlines()
        self._mass_silence = MassSilence()
        self._past: dict[str, Silences] = {}  # from the record: nodes that have not attached yet

    # ------------------------------------------------------------ questions

    def node_of(self, session: int) -> str | None:
        """The node whose present stream this is."""
        member = self._sessions.get(session)
        return None if member is None else member.node

    def session_of(self, node: str) -> int | None:
        """The stream of `node`, None if none stands."""
        member = self._members.get(node)
        return None if member is None else member.session

    def member(self, node: str) -> Member:
        """What is known of a node that has attached once."""
        return self._members[node]

    def sessions(self) -> tuple[int, ...]:
        """Every stream that stands, in the order of attaching."""
        return tuple(self._sessions)

    def nodes(self) -> Iterable[Member]:
        """Every node seen, in the order of first sight."""
        return self._members.values()

    def suspects(self) -> Iterable[str]:
        """Nodes whose stream is broken and whose fate is open."""
        return self._suspects

    def is_suspect(self, node: str) -> bool:
        """Whether its stream is broken and its fate is open."""
        return node in self._suspects

    def connected(self) -> int:
        """How many streams stand."""
        return len(self._sessions)

    def present(self) -> int:
        """How many nodes are alive or suspect."""
        return len(self._present)

    def beat_interval(self) -> float:
        """How often agents are to say that they live, in seconds."""
        return beat_interval(len(self._sessions))

    def hold_reason(self) -> str:
        """Why no verdict is given although nodes are silent; empty if none is held back."""
        return self._mass_silence.reason()

    def barred_until(self, node: str, now: float) -> float:
        """Until when a node that keeps falling silent waits at the door; `now` if it need not."""
        member = self._members[node]
        return max(now, member.silences.barred_until)

    def sluggish(self, member: Member, now: float) -> str:
        """That a node whose stream stands misses its beats, in words; empty if it does not."""
        silent = now - member.last_heard
        if member.session is None or silent < SLUGGISH_BEATS * self.beat_interval():
            return ""
        return (
            f"sluggish: its connection stands, but its agent has said nothing for {silent:.0f} s "
            f"(given up after {SLUGGISH_DEAD:g} s)"
        )

    def next_deadline(self) -> float | None:
        """When `due` must be asked."""
        return self._deadlines.next()

    # ------------------------------------------------------------ events

    def attach(
        self, *, node: str, host: str, incarnation: str, session: int, now: float
    ) -> Admission:
        """A stream says that it is this incarnation of this node."""
        if incarnation in self._superseded:
            return Admission(f"a newer agent has taken the place of this one as node {node}")
        old = self._members.get(node)
        if old is None:
            forgotten = ""
            if len(self._members) >= MAX_SESSIONS:
                forgotten = self._forget_one()
                if not forgotten:
                    return Admission(f"the master serves {MAX_SESSIONS} nodes and takes no more")
            fresh = Member(node, host, incarnation, session, now, silences=self._recalled(node))
            self._enter(fresh, now)
            return Admission(forgotten=forgotten)
        if old.incarnation == incarnation:
            return self._reattach(old, session, now)
        if old.session is not None:
            return Admission(
                f"node {node} is held by another agent, on {old.host}, which is "
                + ("leaving" if old.health is Health.LEFT else "alive")
            )
        self._supersede(old.incarnation)
        fresh = Member(node, host, incarnation, session, now, silences=old.silences)
        self._enter(fresh, now)
        if old.health in (Health.DEAD, Health.LEFT):
            return Admission(newer=True)
        return Admission(newer=True, superseded=True, silent_since=old.broke_at)

    def _reattach(self, old: Member, session: int, now: float) -> Admission:
        returned = old.health is Health.DEAD
        replaced = old.session
        if replaced is not None:
            self._sessions.pop(replaced, None)
        old.session, old.last_heard = session, now
        old.health, old.reason, old.corroborated, old.unseen = Health.ALIVE, "", False, False
        self._enter(old, now)
        return Admission(returned=returned, old_session=replaced)

    def _enter(self, member: Member, now: float) -> None:
        self._members[member.node] = member
        if member.session is not None:
            self._sessions[member.session] = member
        self._present[member.node] = None
        self._suspects.pop(member.node, None)
        self._mass_silence.settled(member.node)
        self._deadlines.arm(member.node, now + SLUGGISH_DEAD)
        if len(self._present) == 2:  # one that fell silent is no longer the only node
            for first in map(self._members.__getitem__, self._suspects):
                if not first.unseen:
                    until = first.broke_at + self._patience(first)
                    self._deadlines.arm(first.node, max(now, until))

    def heard(self, session: int, now: float) -> str | None:
        """Something came in on `session`; the node it speaks for, None if it speaks for none."""
        member = self._sessions.get(session)
        if member is None:
            return None
        member.last_heard = now
        if member.health is Health.ALIVE:
            self._deadlines.arm(member.node, now + SLUGGISH_DEAD)
        self._mass_silence.settled(member.node)
        return member.node

    def detached(
        self,
        session: int,
        now: float,
        *,
        corroborated: bool,
        clean: bool,
        silent: float = 0.0,
        quiet: float = 0.0,
    ) -> str | None:
        """The stream is gone; the node it was the stream of, if it was a node's present one.
        `corroborated`: ranks of its round have failed on another node. `silent`: for how long
        nothing had come, while the master heard others. `quiet`: for how long nothing had come,
        whatever else was heard."""
        member = self._sessions.pop(session, None)
        if member is None:
            return None
        member.session = None
        if member.health is Health.ALIVE:
            member.health = Health.SUSPECT
            member.reason = "its connection was closed" if clean else "its connection broke"
            member.broke_at, member.silent, member.quiet = now, silent, quiet
            member.corroborated = corroborated
            self._suspects[member.node] = None
            self._deadlines.arm(member.node, now + self._patience(member))
        return member.node

    def _patience(self, member: Member) -> float:
        confirm = min(REDIAL_GRACE, self._timeout)
        if member.corroborated:
            closed = member.quiet < STOPPED_AFTER  # by its kernel: no ping was missed
            return min(SUSPECT_CONFIRM, confirm) if closed else confirm
        if len(self._present) == 1 and member.quiet >= STOPPED_AFTER:
            return max(confirm, max(self._timeout, SLUGGISH_DEAD) - member.quiet)
        return max(confirm, self._timeout - member.silent)

    def corroborate(self, reporter: str, concerned: Callable[[str], bool], now: float) -> None:
        """Ranks failed on `reporter`: suspects for whom `concerned` holds have a second witness."""
        for node in self._suspects:
            member = self._members[node]
            if node != reporter and not member.corroborated and concerned(node):
                member.corroborated = True
                self._deadlines.arm(node, max(now, member.broke_at + self._patience(member)))

    def left(self, node: str, reason: str) -> None:
        """The node says that it goes. Its stream may still stand while its ranks end."""
        member = self._members[node]
        member.health, member.reason = Health.LEFT, reason
        self._suspects.pop(node, None)
        self._present.pop(node, None)
        self._deadlines.disarm(node)
        self._mass_silence.settled(node)

    def park(self, node: str, reason: str) -> None:
        """It has left, and its agent stays for as long as its stream stands."""
        self.left(node, reason)
        self._members[node].health = Health.PARKED

    def parked(self, but: str = "") -> int:
        """How many nodes are parked, not counting `but`."""
        health = (one.health for node, one in self._members.items() if node != but)
        return sum(one is Health.PARKED for one in health)

    def overslept(self, by: float, beat: float) -> None:
        """The listener was away for `by` seconds: no silence counts before one beat more."""
        self._deadlines.shift(by + beat)
        self._mass_silence.overslept(by + beat)

    def due(self, now: float, concerned: Callable[[str], bool], size: int) -> list[Death]:
        """The nodes whose time is up. `concerned` tells the members of the round, `size` how many
        there are; the rule of mass silence is about them."""
        due = self._deadlines.pop_due(now)
        if not due:
            return []
        silent = [node for node in due if not self._members[node].corroborated]
        if silent:
            waiting = [n for n in self._suspects if not self._members[n].corroborated]
            together = {node for node in (*silent, *waiting) if concerned(node)}
            until = self._mass_silence.holds_until(together, size, now)
            if until is not None:
                for node in silent:
                    self._deadlines.arm(node, until)
                due = [node for node in due if self._members[node].corroborated]
        return [self._die(node, now) for node in due]

    def _die(self, node: str, now: float) -> Death:
        member = self._members[node]
        if member.unseen:
            reason = member.reason
        elif member.corroborated:
            reason = f"{member.reason} and ranks of other nodes lost it"
        elif member.health is Health.SUSPECT:
            silent = now - member.broke_at + member.silent
            reason = f"{member.reason} and nothing was heard for {silent:.1f} s"
        else:
            reason = f"its agent said nothing for {now - member.last_heard:.0f} s"
        since = member.broke_at if member.health is Health.SUSPECT else member.last_heard
        if not member.corroborated and not member.unseen:
            member.silences.count(now)
        member.health, member.reason = Health.DEAD, reason
        session, member.session = member.session, None
        if session is not None:
            self._sessions.pop(session, None)
        self._suspects.pop(node, None)
        self._present.pop(node, None)
        self._mass_silence.settled(node)
        return Death(node, reason, session, since)

    # ------------------------------------------------------------ the record of another master

    def recall(self, node: str, incarnation: str, now: float) -> Member:
        """A member of the record's round that had been given up."""
        member = self._members[node] = Member(
            node,
            "",
            incarnation,
            None,
            now,
            Health.DEAD,
            "it had gone before the master came back",
            silences=self._recalled(node),
            unseen=True,
        )
        return member

    def redial(self, nodes: int) -> float:
        """Seconds in which living agents, so many, have dialled a master that came back: they try
        once a second; the silence limit, or the time that it takes to hear so many."""
        return min(REATTACH_GRACE, max(self._timeout, nodes / BEATS_PER_SECOND))

    def expect(self, node: str, incarnation: str, now: float, *, redial: float) -> None:
        """A member of the record's round. It is suspect until it attaches, for REATTACH_GRACE; for
        `redial` only where another node's ranks lose it."""
        member = self.recall(node, incarnation, now)
        member.health = Health.SUSPECT
        member.reason = "it was not heard since the master came back"
        member.broke_at = now + max(0.0, redial - SUSPECT_CONFIRM)
        self._present[node] = None
        self._suspects[node] = None
        self._deadlines.arm(node, now + REATTACH_GRACE)

    def remember(self, past: Mapping[str, Silences]) -> None:
        """Nodes that fell silent under another master."""
        self._past = dict(past)

    def pasts(self, now: float) -> list[tuple[str, Silences]]:
        """The nodes whose silences still matter, the newest last."""
        found = [*self._past.items(), *((m.node, m.silences) for m in self._members.values())]
        found = [one for one in found if one[1].matter(now)]
        return sorted(found, key=lambda one: one[1].times[-1])

    def _recalled(self, node: str) -> Silences:
        return self._past.pop(node, None) or Silences()

    # ------------------------------------------------------------ bounds

    def _supersede(self, incarnation: str) -> None:
        self._superseded[incarnation] = None
        if len(self._superseded) > MAX_SUPERSEDED:
            self._superseded.pop(next(iter(self._superseded)))

    def _forget_one(self) -> str:
        """Make room by forgetting a node that has gone; its name, empty if none has."""
        for node, member in self._members.items():
            if member.health in (Health.DEAD, Health.LEFT) and member.session is None:
                self._supersede(member.incarnation)
                del self._members[node]
                return node
        return ""
