"""What a master takes over from the one before: a round that it did not form.

With a record it knows the members of that round and *restores* it: they are members from the first
moment, unheard until they attach. Without one it *adopts* the highest round that agents report, and
its members one by one as they attach; how many are missing it learns from the world size. Either
way the round is taken as it was, and for REATTACH_GRACE those who have not been heard are waited
for: agents dial again within a second, so who is silent for longer has gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elasticrun.config import GROW_YOUNG, REATTACH_GRACE
from elasticrun.core.rounds.crew import SURVIVOR_SLACK, Crew, Phase, Stage
from elasticrun.wire.messages import JobSpec


@dataclass(frozen=True, slots=True)
class Standing:
    """How the last round stands, as far as it must outlive the master. Seconds, no clock."""

    running: bool  # it has not been ended
    lost: str  # which member was lost first, in a sentence; empty if none
    gone: tuple[str, ...]  # members whose agents have gone
    done: tuple[str, ...]  # of these, the ones whose ranks had all ended with 0
    waiting: tuple[str, ...]  # once it is over: nodes without a place in it that are ready
    fenced: bool  # it can complete no further collective
    age: float
    silent: float  # since the last word of the members that have gone
    starved: float  # how long the job has been below its smallest size; 0.0: it is not


class Succession(Crew):
    """`Crew`, and the round of another master."""

    def __init__(self, spec: JobSpec, now: float) -> None:
        super().__init__(spec, now)
        self._unseen: dict[str, None] = {}  # members of a restored round, not heard yet
        self._vanished: dict[str, None] = {}  # of these, the ones that were given up
        self._taken_over_at = now
        self._elsewhere: dict[str, int] = {}  # nodes heard that know of no round to adopt: ranks
        self._begun = False  # a restored round was told to one of its members only now

    # ------------------------------------------------------------ with a record

    def standing(self, now: float) -> Standing:
        """For the record."""
        since = self._starved_since
        running = self.phase is Phase.RUNNING
        return Standing(
            running=running,
            lost=self._lost[0] if self._lost else "",
            gone=tuple(self._away),
            done=tuple(node for node in self._away if node in self._completed),
            waiting=() if running else tuple(n for n in self.ready if not self.is_member(n)),
            fenced=self._fenced,
            age=now - self.formed_at,
            silent=now - self._last_word,
            starved=0.0 if since is None or running else now - since,
        )

    def restore(
        self, members: Mapping[str, int], ranks: int, was: Standing, now: float, *, redial: float
    ) -> None:
        """The round of the record. `members`: node -> how many of its `ranks` are there. `redial`:
        seconds in which a living agent has dialled again."""
        self._begin(dict.fromkeys(members, Stage.STARTING), now - was.age)
        self._grace_until = now + REATTACH_GRACE
        self._away = dict.fromkeys(was.gone)
        self._completed = dict.fromkeys(was.done)
        self._unseen = {node: None for node in members if node not in self._away}
        self._unheard = dict(self._unseen)
        self._unseen_ranks = max(0, ranks - sum(members.values()))  # of one that was adopted
        self._adopted_ranks = ranks
        self._taken_over_at = now
        self._fenced = was.fenced
        # who was not gone may have been heard until the last master's last moment
        self._last_word = now if self._unseen or self._unseen_ranks else now - was.silent
        if was.lost:
            self._lost.append(was.lost)
            self._recount = True
        if not was.running:
            self.phase = Phase.GATHERING
            for node in self._unseen:
                self._awaited.arm(node, self._grace_until)
            for node in was.waiting:  # no reason to form without them, who dial again just now
                self._awaited.arm(node, now + redial)

    def restore_wait(self, starved: float, now: float) -> None:
        """The job had been below its smallest size for so long. Its nodes have the grace to come
        back, whatever is left of `join_timeout`."""
        self._grace_until = max(self._grace_until, now + REATTACH_GRACE)
        self._starved_since = now - starved if starved else None

    def is_unseen(self, node: str) -> bool:
        """Whether this member of a restored round has not been heard yet."""
        return node in self._unseen

    def seen(self, node: str, now: float) -> bool:
        """A stream of this node stands; whether it was the last of a restored round's members."""
        if node not in self._unseen:
            return False
        del self._unseen[node]
        if node in self._awaited:
            self._awaited.arm(node, now + self._spec.restart_grace + SURVIVOR_SLACK)
        return not self._unseen

    def is_incomplete(self, now: float) -> bool:
        """Whether nodes of a round of another master may still dial."""
        return self._unseen_ranks > 0 or (len(self._unseen) > 0 and now < self._grace_until)

    def begins_now(self, now: float) -> None:
        """A member of the restored round is told its place only now: no step was done yet."""
        if self.phase is Phase.RUNNING and not self._begun:
            self._begun = True
            self._formed_at = now
            self._door.formed(now, announced=bool(self._announced))

    # ------------------------------------------------------------ without one

    def adopt(self, world_size: int, now: float) -> None:
        """A round that another master formed runs; this one learns of it from its nodes."""
        self._begin({}, now - GROW_YOUNG)  # its age is unknown: not young
        # But for the door it is: a record is lost with its host only, whose node is then about to
        # come back, and the round may have been formed because it went.
        self._door.formed(now, announced=bool(self._announced))
        self._unseen_ranks = self._adopted_ranks = world_size
        self._taken_over_at = now
        self._grace_until = now + REATTACH_GRACE

    def succeed_another(self, now: float) -> None:
        """Another master served this job before: there may be a round that nobody reported yet."""
        if not self.stages and self._successor_until is None:
            self._successor_until = now + REATTACH_GRACE

    @property
    def is_blind(self) -> bool:
        """Whether there may be a round of another master that nobody has reported."""
        return self._successor_until is not None and not self.stages

    @property
    def is_adopting(self) -> bool:
        """Whether further nodes of an adopted round are taken as its members."""
        return self._unseen_ranks > 0

    @property
    def is_minority(self) -> bool:
        """Whether no more than half of an adopted round's ranks are accounted for."""
        unseen = self._unseen_ranks or self._given_up_ranks
        return unseen > 0 and 2 * (unseen - sum(self._elsewhere.values())) >= self._adopted_ranks

    def passed_by(self, node: str, ranks: int) -> None:
        """A node that was there before this master and has no place in the adopted round as far as
        it knows: so many ranks are in no later one."""
        if node not in self.stages:
            self._elsewhere[node] = ranks

    def adopt_member(self, node: str, ranks: int, now: float) -> None:
        """A node of the adopted round has been heard, with so many ranks."""
        self._elsewhere.pop(node, None)
        if node not in self.stages:
            self.stages[node] = Stage.STARTING
            self._unseen_ranks = max(0, self._unseen_ranks - ranks)
            if now >= self._grace_until:  # a cut has healed: the others dial just now as well
                self._grace_until = now + REATTACH_GRACE
            if self.phase is Phase.GATHERING:
                self._awaited.arm(node, now + self._spec.restart_grace + SURVIVOR_SLACK)
        self._announced.pop(node, None)
        self.ready.pop(node, None)

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the last round is accounted for."""
        return not self._unseen_ranks

    # ------------------------------------------------------------ the books

    def formed(self, nodes: Iterable[str], now: float) -> None:
        """As `Crew.formed`."""
        super().formed(nodes, now)
        self._elsewhere.clear()

    def gone(self, node: str, reason: str, *, last_word: float, reborn: bool = False) -> None:
        """As `Crew.gone`."""
        if node in self._unseen:
            del self._unseen[node]
            if not reborn:
                self._vanished[node] = None
        super().gone(node, reason, last_word=last_word, reborn=reborn)

    def reopen(self, now: float) -> tuple[str, ...]:
        """As `Crew.reopen`; who has not been heard yet has the grace to dial again."""
        told = super().reopen(now)
        for node in self._unseen:
            due = self._awaited.when(node)
            if due is not None and due < self._grace_until:
                self._awaited.arm(node, self._grace_until)
        return told

    def overslept(self, by: float) -> None:
        """As `Crew.overslept`: the grace too is a time of listening."""
        super().overslept(by)
        self._grace_until += by
        if self._successor_until is not None:
            self._successor_until += by

    def _begin(self, members: dict[str, Stage], now: float) -> None:
        super()._begin(members, now)
        self._unseen = {}
        self._vanished = {}
        self._begun = False
