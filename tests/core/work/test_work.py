"""What is refused, what can never be settled, and what is recorded, by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elasticrun.core.persisted import WorkFacts
from elasticrun.core.snapshots.types import Outbox
from elasticrun.core.work.spans import Spans, decode_used, encode_used
from elasticrun.core.work.work import MAX_DATASETS, RECORD_AFTER, Work, WorkNews
from elasticrun.wire import messages as m
from elasticrun.wire.types import MAX_LEASES, RoundName

ROUND = RoundName(1, 1, "x")
INFO = m.RoundInfo(ROUND, 2)
SPEC = m.DatasetSpec("train", 100_000, 10, 1, -1)


class Rank:
    """One rank, as its reports show it."""

    def __init__(self, job: Job, number: int, *, restored: bool = True, since: int = 0) -> None:
        self.job, self.number = job, number
        share = m.DatasetShare(SPEC, 0, (), 0, (), wants=True)
        self.state = m.WorkState(ROUND, number, restored, since, (), (share,))

    @property
    def share(self) -> m.DatasetShare:
        return self.state.shares[0]

    def tell(self, **changes: object) -> m.WorkGrant | None:
        """Report, and receive the answer."""
        marks = changes.pop("marked", self.state.marked)
        share = replace(self.share, **changes)
        self.state = replace(self.state, marked=marks, shares=(share,))
        self.job.outbox.orders.clear()
        self.job.news = self.job.work.on_state("a", self.state, INFO, inherited=False)
        if any(order is None for _, order in self.job.outbox.orders):
            self.job.records.append(self.job.work.facts())
        orders = [one for _, one in self.job.outbox.orders if isinstance(one, m.WorkGrant)]
        for order in orders:
            known = self.share.dropped + sum(b - a for a, b in m.batched(self.share.leases))
            leases = self.share.leases + m.after(order, known)
            self.state = replace(self.state, shares=(replace(self.share, leases=leases),))
        return orders[-1] if orders else None

    def mark(self, step: int) -> None:
        self.tell(marked=(*self.state.marked, step), marks=(*self.share.marks, self.share.used))


class Job:
    def __init__(self, source: str = "nothing") -> None:
        self.outbox = Outbox()
        self.work = Work(self.outbox)
        self.records: list[object] = []
        self.news = WorkNews.NOTHING
        if source:
            self.work.on_base(m.WorkBase(ROUND, source, 0), INFO, inherited=False)


def used_by(job: Job, step: int) -> list[tuple[int, int]]:
    return list(decode_used(job.work.used_by((ROUND, step)))[SPEC.name][1])


def test_ranks_wait_until_it_is_known_what_they_have_restored() -> None:
    job = Job(source="")
    assert Rank(job, 1).tell() is None
    job.work.on_base(m.WorkBase(ROUND, "nothing", 0), INFO, inherited=False)
    ((_, record), (_, order)) = job.outbox.orders
    assert record is None, "where the round starts from is durable before the first grant"
    assert isinstance(order, m.WorkGrant)
    assert order.leases == (0, 10)


def test_a_grant_that_was_not_received_is_sent_again_and_no_other() -> None:
    job = Job()
    rank = Rank(job, 0)
    rank.tell()
    rank.tell(leases=())
    assert rank.share.leases == (0, 10)


def test_a_step_counts_once_every_rank_has_marked_it() -> None:
    job = Job()
    one, other = Rank(job, 0), Rank(job, 1)
    one.tell()
    other.tell()
    one.mark(5)
    assert job.news is WorkNews.NEWS
    assert not job.work.settle((ROUND, 5))
    assert job.work.can_settle((ROUND, 5))
    assert not job.work.knows((ROUND, 5))
    other.mark(6)
    assert job.work.can_settle((ROUND, 5)), "it may still come"
    one.mark(6)
    assert not job.work.can_settle((ROUND, 5)), "the other has passed it"
    assert job.work.settle((ROUND, 6))
    assert job.outbox.orders[-1] == ((), None), "it is recorded before anything else"
    assert job.work.knows((ROUND, 6))
    assert not job.work.settle((ROUND, 5)), "what is older can no longer be told apart"


def test_a_rank_that_has_nothing_left_holds_nobody_up() -> None:
    job = Job()
    busy, idle = Rank(job, 0), Rank(job, 1)
    busy.tell()
    idle.tell()
    idle.tell(used=10, wants=False)
    busy.mark(5)
    assert job.work.settle((ROUND, 5))


def test_what_is_used_for_certain_is_recorded_and_dropped() -> None:
    job = Job()
    rank = Rank(job, 0)
    rank.tell()
    longest = 0
    for number in range(1, 300):
        order = rank.tell(used=10 * number)
        assert order is not None
        while rank.share.leases and rank.share.dropped + 10 <= order.dropped:
            share = replace(
                rank.share, dropped=rank.share.dropped + 10, leases=rank.share.leases[2:]
            )
            rank.state = replace(rank.state, shares=(share,), record=order.record)
        longest = max(longest, len(rank.share.leases) // 2)
    assert longest <= 2 * RECORD_AFTER
    assert 2 < len(job.records) < 300 // (RECORD_AFTER // 2)


def test_too_many_shards_between_two_snapshots_are_refused() -> None:
    """An open mark keeps the list: it may be the step that is restored."""
    job = Job()
    rank = Rank(job, 0)
    Rank(job, 1).tell()
    rank.tell()
    rank.mark(5)
    for number in range(1, MAX_LEASES + 1):
        order = rank.tell(used=10 * number)
        if order and order.refused:
            break
    assert order is not None
    assert "use larger shards, or take snapshots more often" in order.refused


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"size": 5}, "is opened with total=100000, size=5, epochs=1, no shuffle, and was with"),
        ({"epochs": 2}, "epochs=2"),
        ({"shuffle": 3}, "shuffle=3"),
    ],
)
def test_all_ranks_open_a_dataset_alike(changes: dict[str, int], sentence: str) -> None:
    job = Job()
    Rank(job, 0).tell()
    order = Rank(job, 1).tell(spec=replace(SPEC, **changes))
    assert order is not None
    assert sentence in order.refused
    assert order.refused.endswith("by another rank")


def test_a_checkpointer_is_for_all_ranks_or_none() -> None:
    job = Job()
    Rank(job, 0).tell()
    order = Rank(job, 1, restored=False).tell()
    assert order is not None
    assert "and others have not" in order.refused


def test_a_job_has_a_limited_number_of_datasets() -> None:
    job = Job()
    rank = Rank(job, 0)
    for number in range(MAX_DATASETS):
        assert rank.tell(spec=replace(SPEC, name=f"{number}"), wants=True) is not None
    order = rank.tell(spec=replace(SPEC, name="one more"), wants=True)
    assert order is not None
    assert order.refused == "a job can hand out at most 64 datasets"


def test_a_checkpoint_that_says_nothing_readable_is_refused_in_a_sentence() -> None:
    job = Job(source="")
    job.work.on_base(m.WorkBase(ROUND, "storage", 4, used="[[1]]"), INFO, inherited=False)
    order = Rank(job, 0).tell()
    assert order is not None
    assert order.refused.startswith("what was used before cannot be read: ")


def test_a_resumed_job_may_change_the_number_of_epochs() -> None:
    job = Job()
    one = Rank(job, 0)
    one.tell()
    one.tell(used=10, wants=False)
    one.mark(5)
    assert job.work.settle((ROUND, 5))
    used = job.work.used_by((ROUND, 5))
    later = Job(source="")
    later.work.on_base(m.WorkBase(ROUND, "storage", 5, used), INFO, inherited=False)
    longer = replace(SPEC, epochs=3)
    order = Rank(later, 0).tell(spec=longer)
    assert order is not None
    assert (order.refused, order.leases) == ("", (10, 20))


def test_a_step_by_which_ranks_had_taken_nothing_counts_each_rank_once() -> None:
    """They are at step 100, take their first work, and save step 100 once more."""
    job = Job()
    one, other = Rank(job, 0, since=100), Rank(job, 1)
    one.tell()
    other.tell()
    one.mark(100)
    assert not job.work.settle((ROUND, 100)), "the other rank may have used something by step 100"
    other.tell(used=5)
    other.mark(100)
    assert job.work.settle((ROUND, 100))
    assert used_by(job, 100) == [(10, 15)]


def test_ranks_that_find_nothing_left_can_save_the_step_that_they_have_restored() -> None:
    job = Job(source="")
    everything = encode_used({SPEC.name: (SPEC, Spans([0, SPEC.total]))})
    job.work.on_base(m.WorkBase(ROUND, "storage", 100, everything), INFO, inherited=False)
    for number in range(2):
        rank = Rank(job, number, since=100)
        order = rank.tell()
        assert order is not None
        assert order.over
        rank.tell(wants=False)
        rank.mark(100)
    assert job.work.settle((ROUND, 100))
    assert used_by(job, 100) == [(0, SPEC.total)]


def test_what_ranks_use_after_a_step_that_is_not_settled_yet_is_no_part_of_it() -> None:
    job = Job()
    one, other = Rank(job, 0), Rank(job, 1, since=10)
    one.tell()
    one.tell(used=10, wants=False)
    one.mark(10)
    other.tell()
    other.tell(used=10)
    job.work.facts()
    assert job.work.settle((ROUND, 10))
    assert used_by(job, 10) == [(0, 10)]


def test_a_rank_that_becomes_idle_can_settle_a_step() -> None:
    job = Job()
    one, other = Rank(job, 0), Rank(job, 1)
    one.tell()
    other.tell()
    other.tell(wants=False)
    one.mark(10)
    assert not job.work.settle((ROUND, 10))
    other.tell(used=10, wants=False)
    assert job.news is WorkNews.NEWS
    assert job.work.settle((ROUND, 10))


def in_memory(source: RoundName) -> m.RoundInfo:
    return m.RoundInfo(ROUND, 2, restore=m.Restore(source, 10, 2))


def test_a_record_without_work_says_that_nothing_was_used() -> None:
    """The round has restored a step in memory, the master is replaced, and only then a rank asks
    for work."""
    job = Job(source="")
    job.work.restore(WorkFacts())
    before = RoundName(1, 0, "x")
    job.work.on_base(m.WorkBase(ROUND, "memory", 10), in_memory(before), inherited=True)
    assert not job.work.needs(done=False), "a member that is gone had used nothing"
    job.work.heard_all()
    order = Rank(job, 0, since=200).tell()
    assert order is not None
    assert order.leases == (0, 10)
    assert job.work.knows((before, 10)), "it can be restored again"


def test_a_master_without_a_record_learns_late_that_work_was_used() -> None:
    job = Job(source="")
    info = in_memory(RoundName(1, 0, "x"))
    news = job.work.on_base(m.WorkBase(ROUND, "memory", 10), info, inherited=True)
    assert news is WorkNews.NOTHING, "perhaps the job uses none"
    assert job.work.note_use(ROUND) is WorkNews.UNKNOWN
    assert job.work.note_use(ROUND) is WorkNews.NOTHING, "it is said once"
