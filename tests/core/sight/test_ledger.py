"""Where the time went, by stories of two nodes of two slots; the brain by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from elasticrun.core import events as fx
from elasticrun.core.persisted import LedgerEnd, aged
from elasticrun.core.sight.goodput import Account, goodput
from elasticrun.core.sight.hangs.watch import Watch
from elasticrun.core.sight.picture import VerdictRow
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName
from tests.core.by_hand import SPEC, Master, failure, hello


def passes(master: Master, seconds: float) -> None:
    master.now += seconds
    master.feed(fx.Tick())


def rows(master: Master) -> dict[str, float]:
    page = master.job.goodput()
    assert page is not None
    assert sum(row.seconds for row in page.rows) == pytest.approx(page.slot_seconds)
    return {f"{row.category} {row.cause}".strip(): row.seconds for row in page.rows}


def starts(master: Master, session: int = 2) -> RoundName:
    (start,) = master.orders(session)
    assert isinstance(start, m.Start)
    return start.round


def begins(master: Master) -> RoundName:
    """Attached at 0, b joins 4 s later, ranks run after 1 s."""
    for session, node in ((1, "a"), (2, "b")):
        master.feed(fx.Attached(session, hello(node, local_world_size=2)))
    master.hear(1, m.Join(Endpoint("10.0.0.1", 4000)))
    master.now += 4.0
    master.hear(2, m.Join(Endpoint("10.0.0.2", 4000)))
    name = starts(master)
    master.now += 1.0
    master.both(m.Running(name, (1, 2)))
    return name


def trains(master: Master, *, first: int = 0, steps: int = 10) -> RoundName:
    """Two seconds until the first step, steps of a second after that."""
    name = begins(master)
    told(master, name, first, steps)
    return name


def told(master: Master, name: RoundName, first: int, steps: int) -> None:
    master.now += 2.0 + steps
    master.both(m.Steps(name, first + steps, steps, 1.0, 1.0, 0.0))


def nothing_told(master: Master) -> None:
    begins(master)
    passes(master, 20.0)


def counted(master: Master) -> None:
    name = begins(master)
    master.both(m.Quiet(name, 1.0, counted=True))
    passes(master, 3.0)
    master.both(m.Quiet(name, 0.0, first=3.0, counted=True))
    passes(master, 20.0)


def steps(master: Master) -> None:
    trains(master)


def rank_fails(master: Master) -> RoundName:
    name = trains(master)
    master.hear(1, m.RanksFailed(name, (failure(0),)))
    master.now += 3.0
    master.both_back(name)
    again = starts(master)
    master.both(m.Running(again, (1, 2)))
    told(master, again, 6, 8)
    return again


def node_dies(master: Master) -> None:
    trains(master)
    master.feed(fx.Detached(2, clean=False, silent=0.0, quiet=0.0))
    passes(master, SPEC.heartbeat_timeout + 60.0)


def spare(master: Master) -> None:
    name = begins(master)
    master.feed(fx.Attached(3, hello("c", local_world_size=2)))
    master.hear(3, m.Join(Endpoint("10.0.0.3", 4000)))
    told(master, name, 0, 8)


def master_changes(master: Master) -> None:
    """Its record is 30 s old when the next one begins; the ranks run on."""
    name = trains(master)
    passes(master, 30.0)
    succeeds(master, name)


def saves(master: Master) -> None:
    """The state was read for half a second, and each rank saves twice a report, 0.4 s in all; what
    is told twice counts once, also under the next master."""
    name = trains(master)
    for report in (1, 2, 2):
        sums = (2 * report, 0.8 * report, 1.0)
        master.now += 10.0
        master.both(m.Steps(name, 10 + 10 * report, 10, 1.0, 1.0, 0.0, *sums))


def one_is_slow(master: Master) -> None:
    """Steps of a second for a minute; then of two for ten, when b is known to be slow."""
    name = trains(master)
    for second in range(60):
        master.now += 1.0
        master.both(m.Steps(name, 11 + second, 1, 1.0, 1.0, 0.0))
    master.job._sight.ledger.found_slow("b", 1.5)
    for second in range(10):
        master.now += 2.0
        master.both(m.Steps(name, 71 + second, 1, 2.0, 2.0, 0.0))


def one_was_always_slow(master: Master) -> None:
    """Steps of two seconds from the first on; b's own part is by half a second longer."""
    name = trains(master)
    master.job._sight.ledger.found_slow("b", 1.5)
    for second in range(10):
        master.now += 2.0
        master.both(m.Steps(name, 11 + second, 1, 2.0, 2.0, 0.0))


def succeeds(master: Master, name: RoundName) -> None:
    assert master.facts is not None
    recorded = sum(line.micros for line in master.facts.ledger.lines)
    total = master.job.goodput()
    assert total is not None
    gone = total.slot_seconds - recorded / 1e6
    new = Master(facts=aged(master.facts, gone / 4), now=0.0)
    master.job, master.now = new.job, 0.0
    for session, node in ((1, "a"), (2, "b")):
        one = next(order for order in master.told[session] if isinstance(order, m.Start))
        changes: dict[str, object] = {"local_world_size": 2, "attached": one, "last_term": 1}
        master.feed(fx.Attached(session, hello(node, **changes)))
        master.hear(session, m.Running(name, (1, 2)))
    told(master, name, 50, 8)


STORIES: dict[Callable[[Master], None], dict[str, float]] = {
    nothing_told: {"start wait": 16.0, "start spawn": 4.0, "moving": 80.0},
    counted: {"start wait": 16.0, "start spawn": 4.0, "start init": 12.0, "moving": 80.0},
    steps: {"start wait": 16.0, "start spawn": 4.0, "start init": 8.0, "step": 40.0},
    rank_fails: {
        "start wait": 16.0,
        "start spawn": 4.0,
        "start init": 8.0,
        "step": 24.0 + 32.0,
        "redone rank_failed": 16.0,
        "down rank_failed": 4 * (3.0 + 2.0),
    },
    saves: {
        "start wait": 16.0,
        "start spawn": 4.0,
        "start init": 6.0,
        "restore": 2.0,
        "step": 160.0 - 3.2,
        "save": 3.2,
    },
    one_is_slow: {
        "start wait": 16.0,
        "start spawn": 4.0,
        "start init": 8.0,
        "step": 280.0 + 40.0,
        "slow b": 40.0,
    },
    one_was_always_slow: {
        "start wait": 16.0,
        "start spawn": 4.0,
        "start init": 8.0,
        "step": 40.0 + 60.0,
        "slow b": 20.0,
    },
    spare: {
        "start wait": 16.0,
        "start spawn": 4.0,
        "start init": 8.0,
        "step": 32.0,
        "idle spare": 20.0,
    },
}


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_where_the_time_went(story: Callable[[Master], None]) -> None:
    master = Master()
    story(master)
    assert rows(master) == pytest.approx(STORIES[story])


def test_a_lost_node_costs_from_its_last_word_on() -> None:
    master = Master(replace(SPEC, min_nodes=1))
    node_dies(master)
    found = rows(master)
    assert found["step"] == pytest.approx(40.0)
    assert found["down node_lost"] > 0.0


def test_the_ledger_goes_on_under_the_next_master() -> None:
    master = Master()
    master_changes(master)
    found = rows(master)
    assert "unknown" not in found
    assert sum(found.values()) == pytest.approx(4 * (17.0 + 30.0 + 10.0))
    assert found["step"] >= 4 * (30.0 + 10.0)


def test_what_the_master_before_has_counted_is_not_counted_again() -> None:
    master = Master()
    saves(master)
    passes(master, 30.0)  # it is in the record
    name = master.job._ctx.round.name  # type: ignore[union-attr]
    succeeds(master, name)
    assert rows(master)["save"] == pytest.approx(3.2)
    master.now += 1.0
    master.both(m.Steps(name, 60, 2, 1.0, 1.0, 0.0, 6, 2.0, 1.0))
    assert rows(master)["save"] == pytest.approx(4.0)


def test_the_share_of_the_clock_is_no_share_of_slots() -> None:
    """A spare waits for the whole time: half as much again is held, and the job is no slower."""
    master = Master()
    spare(master)
    page = master.job.goodput()
    assert page is not None
    assert (page.share, page.ettr) == (pytest.approx(32.0 / 80.0), pytest.approx(8.0 / 15.0))
    assert page.line.startswith(
        "goodput 40.0 % (rank time in steps that were kept; ETTR, the share of wall time, 53.3 %): "
        "start 5.25 s, idle "
    )


FAILED, BACK = LedgerEnd("rank_failed", 4, "", 0), LedgerEnd("rank_failed", 5, "", 0)
ADVICE: dict[str, tuple[dict[tuple[str, str], int], tuple[LedgerEnd, ...], int, str]] = {
    "saves come too often": (
        {("save", ""): 1000, ("redone", "rank_failed"): 20}, (FAILED,), 1000,
        "every_seconds=71 (now about 9) would have saved about 7.7 %",
    ),
    "and too seldom": (
        {("save", ""): 3, ("redone", "rank_failed"): 1000}, (FAILED,), 3,
        "every_seconds=71 (now about 2999) would have saved about 7.5 %",
    ),
    "somebody was missing": (
        {("idle", "below_min"): 900, ("slow", "b"): 300}, (), 0,
        "a spare node would have saved about 9.0 %",
    ),
    "one was slow": (
        {("slow", "b"): 300, ("hang", "strong"): 90}, (), 0,
        "leaving out node b, which is slow (--exclude-stragglers), would have saved about 3.0 %",
    ),
    "nodes were lost with what they had": (
        {("redone", "node_lost"): 500, ("hang", "strong"): 350}, (), 0,
        "a Checkpointer with replicas=1 (or more frequent checkpoints) would have saved "
        "about 5.0 %",
    ),
    "it stood still": (
        {("hang", "strong"): 1300}, (), 0, "--on-hang=restart would have saved about 10.0 %"
    ),
    "a restart was quicker than the start": (
        {("start", "init"): 700, ("down", "rank_failed"): 600}, (BACK,), 0,
        "a warm process (--warm in the job before; training began 700 s after the start, 90 s "
        "after a restart) would have saved about 6.1 %",
    ),
    "nothing worth the words": ({("hang", "strong"): 345}, (FAILED,), 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVICE)
def test_advice(name: str) -> None:
    """Of 10,000 s of one slot."""
    lost, ends, saves, said = ADVICE[name]
    book = {("step", ""): 10_000 - sum(lost.values()), **lost}
    micros = {key: seconds * 1_000_000 for key, seconds in book.items()}
    backs = (400.0, 90.0, 185.0, 95.0) if BACK in ends else ()
    found = Account(micros, 10**10, 10**10, micros["step", ""], ends, saves, True, backs)
    assert goodput(found, SPEC).advice == said
    assert goodput(dataclasses.replace(found, wall=599 * 10**6), SPEC).advice == "", "it is early"


def test_the_line() -> None:
    master = Master()
    rank_fails(master)
    assert master.job.status().goodput == (
        "goodput 46.7 % (rank time in steps that were kept): 1 interruption cost 5.00 s (rank "
        "failure 5.00 s), 4 steps repeated, start 7.00 s"
    )


@pytest.mark.parametrize(
    ("restarts", "which"), [(0, "the end cost"), (1, "1 interruption and the end cost")]
)
def test_a_failure_that_ends_the_job_is_no_restart(restarts: int, which: str) -> None:
    master = Master(replace(SPEC, max_restarts=restarts))
    name = rank_fails(master) if restarts else trains(master)
    lost = replace(failure(0), kind=m.FailureKind.PEER_LOST)  # whose doing shows when all are back
    master.hear(1, m.RanksFailed(name, (lost,)))
    master.both_back(name)
    passes(master, 5.0)
    assert master.job.status().outcome
    assert f"): {which} " in master.job.status().goodput


def test_what_a_rank_does_on_purpose_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no hang that others are told of, nor a stillness to wake somebody for."""
    master = Master()
    trains(master)
    master.now += 20.0
    found = VerdictRow("weak", "said", "", 20.0, "0", "", "", says="judge")
    monkeypatch.setattr(Watch, "verdict", lambda _: found)
    assert not [one for one in master.feed(fx.Tick()) if isinstance(one, fx.Judged)]
    assert master.job.quiet() == 0.0
    passes(master, 5.0)
    monkeypatch.setattr(Watch, "verdict", lambda _: replace(found, kind="busy", says=""))
    master.feed(fx.Tick())  # its minutes are over
    passes(master, 5.0)
    assert rows(master) == pytest.approx(
        {**STORIES[steps], "wait judge": 4 * 25.0, "wait": 4 * 5.0}
    )
    assert "waits for one rank 5.00 s" in master.job.status().goodput
    assert "waits for judge 25 s" in master.job.status().goodput


def test_what_was_quiet_goes_with_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent for 6 s: weak, then strong for 5 s more, then all move again."""
    master = Master()
    trains(master)
    master.now += 6.0
    for klass, since, passed in (("weak", 6.0, 2.0), ("strong", 8.0, 5.0), ("", 0.0, 7.0)):
        found = VerdictRow(klass, "idle", "", since, "0", "a", "") if klass else None
        monkeypatch.setattr(Watch, "verdict", lambda _, found=found: found)
        master.feed(fx.Tick())
        master.now += passed
    master.feed(fx.Tick())
    assert rows(master) == pytest.approx(
        {**STORIES[steps], "step": 40.0 + 4 * 7.0, "hang strong": 4 * 13.0}
    )
