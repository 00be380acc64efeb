"""What a node's agent keeps of the work of its ranks."""

from __future__ import annotations

from typing import Any

import pytest

from elasticrun.agent.work.local import LocalWork
from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.types import Endpoint, RoundName

ROUND = RoundName(1, 1, "x")
START = m.Start(m.RoundInfo(ROUND, 4), 1, 2, 2, 2, 4, Endpoint("a", 1), host_store=False)


class Link:
    def __init__(self) -> None:
        self.sent: list[m.Report] = []

    def send(self, report: m.Report) -> None:
        self.sent.append(report)


class Peer:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.why = ""

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def break_off(self, why: str) -> None:
        self.why = why

    def close(self) -> None:
        self.why = "closed"


def work(*leases: int, total: int = 100) -> s.RankWork:
    share = s.RankShare("train", total, 10, 1, -1, 0, leases, 0, (), wants=True)
    return s.RankWork(restored=True, since=0, marked=(), shares=(share,), record=0)


@pytest.fixture
def local() -> LocalWork:
    made = LocalWork(Link())  # type: ignore[arg-type]
    made.round_began(START)
    return made


def test_a_grant_is_part_of_what_is_reported_again(local: LocalWork) -> None:
    """The rank may not have read it when its agent reports to another master."""
    link: Any = local._link
    peer = Peer()
    local.on_message(peer, s.WorkHere(1, 3))
    local.on_message(peer, work(0, 10))
    (first,) = link.sent
    assert (first.rank, first.shares[0].leases) == (3, (0, 10))
    order = m.WorkGrant(ROUND, 3, "train", 0, (0, 10, 40, 50), 0, record=7)
    local.grant(order)
    assert peer.sent == [s.RankLeases("train", 0, (0, 10, 40, 50), 0, over=False, record=7)]
    local.lost(peer)
    local.attached()
    assert link.sent[-1].shares[0].leases == (0, 10, 40, 50)
    assert not link.sent[-1].shares[0].wants
    local.round_began(START)
    local.attached()
    assert len(link.sent) == 2, "in another round nothing of that is left"


def test_what_rank_0_has_restored_comes_first(local: LocalWork) -> None:
    link: Any = local._link
    peer = Peer()
    local.on_message(peer, s.WorkHere(0, 2))
    local.on_message(peer, work())
    local.restored(s.Restored(5, "storage", used="[]"))
    link.sent.clear()
    local.attached()
    assert link.sent[0] == m.WorkBase(ROUND, "storage", 5, "[]")
    assert isinstance(link.sent[1], m.WorkState)


def test_strangers_and_invalid_reports_are_cut_off(local: LocalWork) -> None:
    link: Any = local._link
    stranger, second, liar = Peer(), Peer(), Peer()
    local.on_message(stranger, s.WorkHere(1, 0))
    assert stranger.why == "it is no rank of this round"
    local.on_message(Peer(), s.WorkHere(1, 3))
    local.on_message(second, s.WorkHere(1, 3))
    assert second.why == "another process of this rank has taken work in this round"
    local.on_message(liar, s.WorkHere(0, 2))
    local.on_message(liar, work(total=0))
    assert "total is 0" in liar.why
    assert not link.sent


def test_a_refusal_reaches_the_rank_and_another_round_does_not(local: LocalWork) -> None:
    peer = Peer()
    local.on_message(peer, s.WorkHere(0, 2))
    local.on_message(peer, work())
    local.grant(m.WorkGrant(RoundName(1, 2, "y"), 2, "train", 0, (0, 10), 0))
    assert not peer.sent
    local.grant(m.WorkGrant(ROUND, 2, "train", 0, (), 0, refused="no more"))
    assert peer.sent == [s.RankRefused("no more")]
