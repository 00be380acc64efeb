"""Replication: which nodes copy which snapshots, so that every part of a step is in the memory of
two nodes.

A step is *paired* when it is whole and would remain so after the loss of any one node. If ranks
want replicas, the next node in the order of group ranks copies what only one node holds of the
newest whole step. What two nodes hold anyway (DDP, HSDP) is not copied, so such a job pays nothing;
that is known once all nodes have reported what they hold of the step. The watermark waits until a
step is paired, because otherwise ranks would overwrite the last step that remains whole after the
loss of a node. One step is paired at a time, the newest.

The wait is bounded: when a node cannot copy its share, or the time limit is over, this step is
given up and counts without replicas; the next step is tried again. The reason is logged once, until
copying works again. With fewer than two nodes no copies are possible, and a step counts without
them.

Nothing begins until every node of the round has reported what it holds. After a restart the
restored step is paired too: until the new round has a whole step, there is no other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elasticrun.core.snapshots.ledger import Ledger
from elasticrun.core.snapshots.types import Key, Outbox
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

PATIENCE = 1.0
"""Seconds for which a whole step is not copied because other ranks may soon have it themselves."""


@dataclass(slots=True)
class Copying:
    """`node` copies from `source`."""

    node: str
    source: str
    ranks: dict[int, int]  # content -> a rank of the source that has it


@dataclass(slots=True)
class Pairing:
    """A step that is being paired, and the copies that it needs."""

    key: Key
    world_size: int
    deadline: float
    copies: list[Copying]
    unsent: list[Copying]
    lone: int = 0  # contents on only one node, when last checked


class Replicas:
    """Orders the copies of one step at a time."""

    def __init__(self, limit: float, outbox: Outbox) -> None:
        """`limit`: seconds that one step may take."""
        self._limit = limit
        self._outbox = outbox
        self._seats: Mapping[str, int] = {}
        self._wanting: dict[str, None] = {}  # nodes whose ranks want replicas
        self._pairing: Pairing | None = None
        self._due: tuple[Key, float] | None = None  # the step to pair next, and since when
        self._given_up: dict[RoundName, int] = {}  # steps up to these count without replicas
        self._is_failing = self._has_worked = False

    # ------------------------------------------------------------ nodes and rounds

    def begin_round(self, seats: Mapping[str, int]) -> None:
        """A round was formed, adopted or read from the record. `seats`: group ranks by node; it may
        still grow."""
        self._seats = seats
        self._pairing = None
        self._due = None
        self._given_up.clear()

    def on_holdings(self, node: str, report: m.Holdings) -> None:
        """Note whether the ranks of a connected node want replicas."""
        if report.replicas:
            self._wanting[node] = None
        else:
            self._wanting.pop(node, None)

    def failed(self, node: str, report: m.NotReplicated) -> None:
        """A node could not copy its share: give the step up."""
        pairing, key = self._pairing, (report.round, report.step)
        if pairing and pairing.key == key and any(one.node == node for one in pairing.copies):
            self._give_up(pairing, f"{report.reason} (node {node})")

    def attached(self, node: str) -> None:
        """A node has attached: it may have missed what it must copy."""
        pairing = self._pairing
        if pairing is not None:
            again = (one for one in pairing.copies if one.node == node)
            pairing.unsent += [one for one in again if one not in pairing.unsent]

    def nodes_leave(self, nodes: Collection[str]) -> None:
        """These nodes leave: if one of them takes part in a copy, pairing starts again."""
        pairing = self._pairing
        copies = pairing.copies if pairing is not None else []
        if any(one.node in nodes or one.source in nodes for one in copies):
            self._pairing = None

    # ------------------------------------------------------------ which steps count

    def counts(self, ledger: Ledger, step: int) -> bool:
        """Whether this whole step makes older ones unnecessary."""
        if not self._applies() or step <= self._given_up.get(ledger.name, -1):
            return True
        return ledger.is_paired(step)

    def proceed(
        self,
        ledgers: list[Ledger],
        living: Mapping[str, m.Holdings],
        leaving: Collection[str],
        now: float,
    ) -> None:
        """End copies that are done or late, and start those that are due. `ledgers`: of the current
        round, and of the previous one; `living`: the last report of each connected node; `leaving`:
        nodes that are leaving."""
        if not self._applies():
            self._pairing = None
            return
        for ledger in ledgers:
            self._check_pairing(ledger, now)
        for ledger in ledgers:
            step = _newest_whole(ledger)
            if step >= 0:
                if self._is_due(ledger, step, living, now):
                    self._due = None
                    able = {node for node in self._seats if node not in leaving}
                    self._start_pairing(ledger, step, able, now)
                break  # older rounds are no longer needed
        else:
            self._due = None
        if self._pairing is not None:
            self._send_orders(self._pairing, living)

    def next_deadline(self) -> float | None:
        """When `proceed` is due at the latest."""
        if not self._applies():
            return None
        if self._pairing is not None:
            return self._pairing.deadline
        return self._due[1] + PATIENCE if self._due is not None else None

    def overslept(self, by: float) -> None:
        """The master did not listen for `by` seconds: the pairing gets that much longer."""
        if self._pairing is not None:
            self._pairing.deadline += by

    def is_on_two(self, ledger: Ledger, step: int) -> bool:
        """Whether ranks want replicas of this step, and it has them."""
        return self._applies() and ledger.is_paired(step)

    # ------------------------------------------------------------ one step

    def _applies(self) -> bool:
        return bool(self._wanting) and len(self._seats) >= 2

    def _check_pairing(self, ledger: Ledger, now: float) -> None:
        """End the pairing of a step of this round that is done, late, or must start again."""
        pairing = self._pairing
        if pairing is None or pairing.key[0] != ledger.name:
            return
        step = pairing.key[1]
        if ledger.is_paired(step):
            self._pairing = None
            if self._is_failing or not self._has_worked:
                self._is_failing, self._has_worked = False, True
                self._outbox.log(f"every part of step {step} is in the memory of two nodes")
        elif now >= pairing.deadline:
            self._give_up(pairing, f"it took longer than {self._limit:g} s")
        else:
            lone, pairing.lone = pairing.lone, ledger.count_single_copies(step)
            if pairing.lone > lone or (not ledger.is_whole(step) and _newest_whole(ledger) > step):
                self._pairing = None  # a node has lost something of it: start again

    def _is_due(self, ledger: Ledger, step: int, living: Collection[str], now: float) -> bool:
        """Whether to start pairing this step now: it needs copies, and what they are is known."""
        key = (ledger.name, step)
        if self._pairing is not None and self._pairing.key[0] != ledger.name:
            self._pairing = None  # a step of an older round
        if self._pairing is not None or self.counts(ledger, step):
            self._due = None
            return False
        if any(node not in living for node in self._seats):  # the node returns, or the round ends
            self._due = None
            return False
        if ledger.upto is not None:
            return True
        if self._due is None or self._due[0] != key:
            self._due = (key, now)
        return ledger.is_full(step) or now >= self._due[1] + PATIENCE

    def _start_pairing(self, ledger: Ledger, step: int, able: Collection[str], now: float) -> None:
        """Start pairing this step with these nodes; give it up if no node can make a copy."""
        ring = sorted(self._seats, key=lambda node: self._seats[node])
        key, end = (ledger.name, step), now + self._limit
        pairing = Pairing(key, ledger.world_size, end, [], [], ledger.count_single_copies(step))
        for source, contents in ledger.snaps[step].sole_copies().items():
            node = _next_in_ring(ring, source, able)
            if node is None:
                self._give_up(pairing, f"no node other than {source} can copy its snapshots")
                return
            pairing.copies.append(Copying(node, source, contents))
        pairing.unsent = list(pairing.copies)
        self._pairing = pairing

    def _send_orders(self, pairing: Pairing, living: Mapping[str, m.Holdings]) -> None:
        """Send the orders to nodes that can begin and do not have them yet."""
        unsent, pairing.unsent = pairing.unsent, []
        for one in unsent:
            report = living.get(one.source)
            if one.node not in living or report is None or report.saver is None:
                pairing.unsent.append(one)
                continue
            rows = sorted((rank, content) for content, rank in one.ranks.items())
            ranks, contents = zip(*rows, strict=True)
            order = m.Replicate(*pairing.key, pairing.world_size, ranks, contents, report.saver)
            self._outbox.send(order, one.node)

    def _give_up(self, pairing: Pairing, reason: str) -> None:
        name, step = pairing.key
        self._given_up[name] = step
        self._pairing = None
        if not self._is_failing:
            self._is_failing = True
            what = f"step {step} is not in the memory of two nodes: {reason}"
            self._outbox.log(f"{what}; retrying with the next one", "warning")


def _next_in_ring(ring: list[str], source: str, able: Collection[str]) -> str | None:
    """The node after `source` in the ring that is able to copy; None if there is none."""
    at = ring.index(source) + 1 if source in ring else 0
    return next((n for n in ring[at:] + ring[:at] if n in able and n != source), None)


def _newest_whole(ledger: Ledger) -> int:
    """The newest whole step of a round; -1: there is none."""
    return next((step for step in ledger.steps() if ledger.is_whole(step)), -1)
