"""The health of nodes: what the network check and the stragglers' watch ask for is carried out.

Whom to probe with whom and whom that convicts is decided in `netcheck`, who is slow while training
in `stragglers`, who is refused until when in `exclusion`. Here their answers become orders:

* Where a round could form and some of its nodes must be probed, the check comes first. Nodes that
  join meanwhile are taken in, and probed by the check that follows.
* A newcomer is probed by itself at the door of a running round, and joins when it has passed: a bad
  node never stops a round. Its links are tried when the next round is gathered.
* A node of which nobody can tell whether it is at fault is kept out until another node comes, or
  goes; where one node is enough for a round, one of those whose own probes passed may form it.
* A convicted node is excluded: recorded first, then told. A slow one only where the user said so,
  the others are enough, and not too many were excluded for that lately.

While the master does not listen no answer is late: `netcheck` has a clock that stands still then.
"""

from __future__ import annotations

from collections.abc import Iterator

from elasticrun.core.health.groups import Group, Standing, Verdict
from elasticrun.core.health.netcheck import NetCheck
from elasticrun.core.health.speed import Slowness, Stragglers
from elasticrun.core.job.saving import Saving
from elasticrun.core.nodes.admission import FAILED, SLOW
from elasticrun.core.rounds.failures import Ending, code_of
from elasticrun.core.rounds.rendezvous import Decision, Phase, Verb
from elasticrun.core.rounds.round import lay_out, store_host
from elasticrun.core.words import some
from elasticrun.wire import messages as m

MAX_TURNS = 64
"""Passes and verdicts that may follow from one answer; more would be a check that does not end."""

DOUBTED = "the network check could not tell whether this node is well; it is tried with another one"
AT_THE_DOOR = "at the door: this node is probed before it may be let in"

Sentence = tuple[str, str, str]
"""A node that is to be excluded: its id, the kind, and the reason."""


class Checking(Saving):
    """See the module's head."""

    # ------------------------------------------------------------ before a round

    def _hold_for_check(self, now: float) -> Decision | None:
        """A round could form: what it waits for if nodes must be probed before, else None."""
        check = self._netcheck
        if check is None:
            return None
        if not check.busy:
            self._doubt_the_cause()
            ready = self._in_order()
            if not check.wants(ready):
                return None
            ranks = {node: self._roster[node].hello.local_world_size for node in ready}
            self._is_checking = True
            for node in ready:
                if check.standing(node) is not Standing.GOOD:
                    self._suspicions.pop(node, None)
            self._order(check.begin(ready, self._check_time(now), ranks=ranks))
        return Decision(Verb.WAIT, check.reason(), self._check_due())

    def _in_order(self) -> list[str]:
        """The ready nodes in the order of placement, so that neighbours are probed together."""
        ready = [self._roster.candidate(node) for node in self._rdzv.ready]
        return [one.node for one in lay_out(ready, self._round.seats if self._round else {}).places]

    def _doubt_the_cause(self) -> None:
        """The node whose rank was the first to fail in the last round is probed again, once."""
        cause = self._settlement.cause()
        if self._round is None or self._round.name == self._examined or self._rdzv.loss:
            return
        self._examined = self._round.name
        if cause is not None:
            self._doubt(cause.node)

    def _doubt(self, node: str) -> None:
        """Something has happened there: it must be probed before it is in a round again."""
        if self._netcheck is not None:
            self._netcheck.forget(node)

    def _keep_out_the_doubted(self) -> bool:
        """No probe would tell more, and some of those that are ready have not passed: they are in
        no round. Whether there are any."""
        check = self._netcheck
        if check is None or not self.spec.checks.network:
            return False
        ready = self._in_order()
        doubted = [node for node in ready if check.standing(node) is not Standing.GOOD]
        if len(doubted) == len(ready) and max(self.spec.min_nodes, self.spec.node_unit) == 1:
            alone = [node for node in ready if check.standing(node) is Standing.ALONE]
            doubted = [node for node in doubted if node not in alone[:1]]
        for node in ready:
            if check.standing(node) is Standing.GOOD:
                self._unresolved.pop(node, None)
        for node in doubted:
            self._rdzv.keep_out(node, self._unresolved.setdefault(node, DOUBTED))
            self._tell_why_kept_out(node)
        return bool(doubted)

    def _call_in_the_doubted(self, now: float) -> None:
        """Another node has come or gone: those that nobody could tell of may be tried again."""
        if self._rdzv.phase is Phase.GATHERING:
            for node in tuple(self._unresolved):
                if self._rdzv.admit(node):
                    self._rdzv.join(node, now, not_before=now)

    def _tell_why_kept_out(self, node: str) -> None:
        """Why this one waits, whatever the others wait for; once per sentence."""
        entry, session = self._roster[node], self._membership.session_of(node)
        why = self._rdzv.reason_of(node, self._now)
        if session is not None and entry.told != why:
            entry.told = why
            self._tell(session, m.Wait(why))

    # ------------------------------------------------------------ at the door of a round

    def _is_probed_at_door(self, node: str, now: float) -> bool:
        """A node has joined. Whether it must be probed by itself before the rendezvous may know,
        because a round runs that it would stop."""
        check, rdzv = self._netcheck, self._rdzv
        if check is None or not self.spec.checks.network or rdzv.phase is not Phase.RUNNING:
            return False
        if rdzv.last.is_member(node):
            return False
        if node in self._unresolved:
            rdzv.keep_out(node, self._unresolved[node])
        elif check.standing(node) is Standing.UNKNOWN:
            rdzv.keep_out(node, AT_THE_DOOR)
            if node not in self._at_door:
                self._at_door[node] = None
                self._order((check.at_door(node, self._check_time(now)),))
        else:
            return False
        self._tell_why_kept_out(node)
        return True

    def _probe_the_left_out(self, now: float) -> None:
        """A round has formed without the nodes that are left out for a while: they are probed
        meanwhile, so that none stops this round when its time is over and fails then."""
        check = self._netcheck
        if check is None or not self.spec.checks.network:
            return
        for node in self._rdzv.barred:
            if check.standing(node) is Standing.UNKNOWN and node not in self._at_door:
                self._at_door[node] = None
                self._order((check.at_door(node, self._check_time(now)),))

    def _passed_at_door(self, now: float) -> None:
        """Those that have been probed by themselves and have not failed may join."""
        check, answered = self._netcheck, self._answered_at_door
        self._answered_at_door = []
        for node in answered:
            if check is not None and check.standing(node) is not Standing.UNKNOWN:
                self._at_door.pop(node, None)
                if self._rdzv.admit(node):
                    self._joined(node, now)

    def _joined(self, node: str, now: float) -> None:
        """No rank lives on this node, and it has been probed as far as it must be."""
        until, why = max(
            (self._membership.barred_until(node, now), "it fell silent too often"),
            (self._settlement.blame.barred_until(node, now), "its ranks kept failing"),
            (self._stays.barred_until(node, now), "its agent died soon after each start"),
        )
        self._rdzv.join(node, now, not_before=until, why=why)
        self._call_in_the_doubted(now)

    # ------------------------------------------------------------ a check goes on

    def _probed(self, node: str, answer: m.Probed, now: float) -> None:
        """A node's answer."""
        if self._netcheck is not None:
            self._netcheck.answered(node, answer, self._check_time(now))
            self._stirred = True
            if node in self._at_door:
                self._answered_at_door.append(node)

    def _pursue(self, now: float) -> None:
        """If anything has happened to the check: order the probes of its next pass, act on what was
        found, and say what it came to."""
        check, due = self._netcheck, self._check_due()
        late = due is not None and now >= due
        if check is None or not (self._stirred or late):
            return
        time = self._check_time(now)
        if late:  # whatever is lost by adding and taking away
            time = max(time, check.next_deadline() or time)
        for _ in range(MAX_TURNS):
            self._stirred = False
            groups = check.proceed(time)
            self._order(groups)
            self._judge(check.verdicts(), now)
            if not groups and not self._stirred:
                break
        else:
            raise RuntimeError("the network check does not come to rest")
        self._passed_at_door(now)
        if self._is_checking and not check.busy:
            self._is_checking = False
            self._tell_summary(check)

    def _tell_summary(self, check: NetCheck) -> None:
        # at the level of warnings: who asks by a flag is to see the answer
        for line in check.perf.lines[:-1] if not self._is_perf_told else ():
            self._is_perf_told = True  # the last and largest is in the summary
            self._note(line, "warning")
        self._note(check.news(), "warning")

    def _order(self, groups: tuple[Group, ...]) -> None:
        for group in groups:
            for node, probe in self._probes(group):
                self._probe_orders[node] = probe
                session = self._membership.session_of(node)
                if session is not None:  # else it is told when it attaches
                    self._tell(session, probe)

    def _probe_again(self, session: int, node: str) -> None:
        """An agent has attached: if its answer is awaited it may not know."""
        group = self._netcheck.group_of(node) if self._netcheck is not None else None
        order = self._probe_orders.get(node)
        if group is not None and order is not None and order.check == group.check:
            self._tell(session, order)

    def _probes(self, group: Group) -> Iterator[tuple[str, m.Probe]]:
        """Each node's place in a group that is probed together; O(nodes) for all of them."""
        places = [self._roster.candidate(node) for node in group.nodes]
        world_size = sum(one.local_world_size for one in places)
        store = store_host(places).store
        first_rank = 0
        for at, one in enumerate(places):
            yield (
                one.node,
                m.Probe(
                    check=group.check,
                    perf=group.perf,
                    partners=_partners(group.nodes, at),
                    group_rank=at,
                    group_world_size=len(places),
                    first_rank=first_rank,
                    world_size=world_size,
                    store=store,
                    limit=self.spec.checks.probe_limit,
                ),
            )
            first_rank += one.local_world_size

    def _unprobed(self, node: str, reason: str, now: float) -> None:
        """The node has gone, or its present life has."""
        for book in (self._at_door, self._unresolved, self._suspicions, self._probe_orders):
            book.pop(node, None)
        if self._stragglers is not None:
            self._stragglers.gone(node)
        if self._netcheck is not None:
            self._netcheck.lost(node, reason, self._check_time(now))
            self._stirred = True
            self._call_in_the_doubted(now)

    # ------------------------------------------------------------ verdicts

    def _judge(self, verdicts: tuple[Verdict, ...], now: float) -> None:
        failed: list[Sentence] = []
        told: set[str] = set()
        for verdict in verdicts:
            if verdict.kind == "failed":
                failed.append((verdict.node, FAILED, verdict.reason))
            elif verdict.kind == "unresolved":
                if verdict.reason not in told:  # of a pair it is the same
                    told.add(verdict.reason)
                    self._note(verdict.reason, "warning")
                self._unresolved[verdict.node] = verdict.reason
        if failed:
            self._exclude(failed, now)
        for verdict in verdicts:
            if verdict.kind == "slow":
                self._found_slow(verdict.node, verdict.reason, now)

    def _found_slow(self, node: str, reason: str, now: float) -> None:
        """A node is slow, as `reason` says: it stays, unless the user wants it out and the job can
        spare it."""
        why_not = ""
        if not self.spec.checks.exclude_stragglers:
            why_not = "it stays (--exclude-straggler would leave it out)"
        elif not self._rdzv.is_enough_without(node):
            why_not = "it stays: the job has no node to spare"
        elif not self._exclusions.may_be_slow(now):
            why_not = "it stays: enough nodes were excluded for being slow within the hour"
        if not why_not:
            self._exclude([(node, SLOW, reason)], now)
            return
        known = node in self._suspicions  # told of before; it may have become sparable, or not
        self._suspicions[node] = reason
        if not known:
            self._note(f"{reason}; {why_not}", "warning")

    def _exclude(self, sentences: list[Sentence], now: float) -> None:
        """These nodes are told to go, and are refused for a while: recorded first, then told."""
        seconds = self.spec.checks.exclude_for
        for node, kind, reason in sentences:
            host = self._roster[node].hello.host
            self._exclusions.add(node, host, kind=kind, reason=reason, seconds=seconds, now=now)
            self._note(f"node {node} is excluded for {seconds:g} s: {reason}", "warning")
        self._are_going(node for node, _, _ in sentences)
        told = [(node, self._membership.session_of(node), why) for node, _, why in sentences]
        for node, _, reason in sentences:
            self._membership.left(node, f"it is excluded: {reason}")
            self._stays.over(node)
            self._rdzv.excluded(node, now, reason)
            self._unprobed(node, "it is excluded", now)
            self._doubt(node)
        self._record()
        for node, session, reason in told:
            if session is not None:
                sentence = f"this node is excluded for {seconds:g} s: {reason}"
                if self._may_park(node):
                    self._park(session, node, sentence, seconds)
                else:
                    self._tell(session, m.Refused(sentence, code_of(Ending.EXCLUDED)))

    # ------------------------------------------------------------ quarantine by occupation

    def _may_park(self, node: str) -> bool:
        """Whether an excluded node is to stay, so that nobody is given its machine."""
        most = self.spec.checks.quarantine
        free = self._membership.parked(but=node) < most
        if most and not free:
            parked = f"{some(most, 'node')} {'is' if most == 1 else 'are'} parked already"
            self._note(f"node {node} is not parked: {parked} (--quarantine)", "warning")
        return free

    def _park(self, session: int, node: str, sentence: str, seconds: float) -> None:
        """It stays without ranks, for so many seconds at most. It has its place for as long as its
        stream stands; when it dials again it is parked again, if there is room."""
        self._membership.park(node, f"parked: {sentence}")
        self._note(f"node {node} stays parked until the job ends, for {seconds:.0f} s at most")
        self._tell(session, m.Park(sentence, seconds))

    def _perf_failure(self) -> str:
        """Why the job must not start; empty if it may."""
        return self._netcheck.perf.failure if self._netcheck is not None else ""

    # ------------------------------------------------------------ while training

    def _stepped(self, node: str, report: m.Steps, now: float) -> None:
        """How training goes on a member of the running round."""
        round_ = self._round
        if round_ is None or self._rdzv.phase is not Phase.RUNNING:
            return
        if self._stragglers is None:
            self._stragglers = Stragglers(self.spec.checks)
        if self._watched != round_.name:
            self._watched = round_.name
            self._suspicions.clear()
            self._stragglers.new_round(tuple(round_.members))
        slow = self._stragglers.heard(node, report, now)
        if slow is not None:
            self._suspect(slow, now)

    def _suspect(self, slow: Slowness, now: float) -> None:
        """It is probed again before the next round, if it is there then."""
        if slow.node not in self._suspicions:
            self._doubt(slow.node)
        self._found_slow(slow.node, f"{slow.node} is slow in training: {slow.evidence}", now)


def _partners(nodes: tuple[str, ...], at: int) -> str:
    """The others of a group, in words that do not grow with it."""
    if len(nodes) > 3:
        return some(len(nodes) - 1, "other node")
    return " and ".join(nodes[:at] + nodes[at + 1 :])
