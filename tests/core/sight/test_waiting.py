"""One look at every rank, and what it says: each fault that was planted in real jobs."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from elasticrun.core.sight.hangs.waiting import Impasse, Klass, Scene, Sighting, fingerprint, judge
from elasticrun.wire.messages import Being, GroupSeen, Position, RankSeen

WORLD = (GroupSeen("0", "dp", ""),)
AR = "all_reduce [1000] float32"


def rank(
    number: int, *at: Position, being: Being = Being.SLEEPS, cpu: float = 0.0, **more: object
) -> RankSeen:
    seen = RankSeen(number, 100 + number, being, forked=True, answers=True, cpu=cpu, io=0.0, at=at)
    return replace(seen, **more)


def inside(done: int = 30, call: str = AR, group: int = 0) -> Position:
    return Position(group, done + 1, done, call=call)


def outside(done: int = 30, group: int = 0) -> Position:
    return Position(group, done, done)


def look(*ranks: RankSeen, groups: tuple[GroupSeen, ...] = WORLD) -> list[Sighting]:
    return [Sighting("ab"[one.rank // 2 % 2], one, groups) for one in ranks]


def found(*ranks: RankSeen, groups: tuple[GroupSeen, ...] = WORLD) -> Impasse | None:
    return judge(Scene(look(*ranks, groups=groups), 71.0))


def three_wait(odd: RankSeen) -> Impasse | None:
    return found(rank(0, inside()), rank(1, inside()), odd, rank(3, inside()))


LINE = "train.py:41 load_shard"
ANSWERLESS = {"answers": False, "place": LINE}

SINKS = {
    "sleeps": (rank(2, outside(), place=LINE), "strong", "idle", "is idle at train.py:41"),
    "spins": (rank(2, outside(), cpu=0.99, place=LINE), "weak", "busy", "(1.0 cores)"),
    "stopped": (rank(2, being=Being.STOPPED, **ANSWERLESS), "strong", "stopped", "by a signal"),
    "loader": (rank(2, outside(), library="torch.utils.data"), "strong", "idle", "for 71 s"),
    "C sleeps": (rank(2, **ANSWERLESS, holds=True), "strong", "held", "C code, asleep"),
    "C computes": (rank(2, **ANSWERLESS, holds=True, cpu=0.7), "strong", "held", "0.7 cores"),
    "C writes": (rank(2, **ANSWERLESS, holds=True, io=2e8), "weak", "busy", "200.0 MB/s"),
    "ended": (rank(2, being=Being.ENDED, answers=False), "certain", "ended", "exited with 0"),
    "saves": (rank(2, outside(), cpu=0.1, io=237e6), "weak", "busy", "0.1 cores, 237.0 MB/s"),
    "evaluates": (rank(2, outside(), cpu=1.0), "weak", "busy", "is busy"),
    "on GPU": (rank(2, outside(), gpu=97), "weak", "busy", "GPU 97 %"),
    "NFS": (
        rank(2, outside(), being=Being.DISK, kernel="nfs_wait"), "strong", "disk", "(nfs_wait)"
    ),
    "NFS writes": (rank(2, outside(), being=Being.DISK, io=1e6), "weak", "busy", "1.0 MB/s"),
    "frozen": (rank(2, being=Being.FROZEN, answers=False), "strong", "frozen", "its cgroup"),
    "debugger": (rank(2, being=Being.TRACED, answers=False), "weak", "traced", "a debugger"),
    "pdb": (rank(2, outside(), library="pdb"), "weak", "traced", "a debugger"),
    "judges": (rank(2, outside(), says="judge", says_left=1140.0), "weak", "said", "reports "
               "judge, for at most 19 min more; 3 ranks wait for it in all_reduce"),
    "judges, held": (rank(2, **ANSWERLESS, holds=True, says="judge"), "weak", "said", "most 0 s"),
    "no counters": (rank(2), "strong", "idle", "is idle"),
}  # fmt: skip


@pytest.mark.parametrize("odd", SINKS)
def test_three_wait_for_one(odd: str) -> None:
    seen, klass, kind, words = SINKS[odd]
    verdict = three_wait(seen)
    assert verdict is not None
    assert (verdict.klass.value, verdict.kind, verdict.odd) == (klass, kind, (2,))
    assert verdict.waiting == (0, 1, 3)
    assert words in verdict.sentence
    assert verdict.of_node == ("b" if kind in ("disk", "frozen") else "")
    assert verdict.held == (kind in ("traced", "said"))
    assert verdict.says == seen.says


@pytest.mark.parametrize("at", [(inside(),), ()])
def test_what_ranks_do_on_purpose_together_is_no_hang(at: tuple[Position, ...]) -> None:
    """All in one collective, or in none: one of them has said why."""
    alone = found(rank(0, *at), rank(1, *at))
    said = found(rank(0, *at), rank(1, *at, says="judge", says_left=60.0))
    assert alone is not None
    assert alone.kind in ("fabric", "still")
    assert said is not None
    assert (said.klass, said.kind, said.held, said.says) == (Klass.WEAK, "said", True, "judge")
    assert said.sentence.startswith("rank 1 reports judge, for at most 60 s more; ")


def test_the_sentence() -> None:
    verdict = three_wait(SINKS["sleeps"][0])
    assert verdict is not None
    assert verdict.sentence == (
        "rank 2 (node b) is idle at train.py:41 load_shard for 71 s; 3 ranks wait for it in "
        "all_reduce #31 [1000] float32 of group dp"
    )


MATES = [inside(call=AR), inside(call=AR), inside(call=AR)]
MISMATCHES = {
    "other collective": (inside(call="broadcast [1000] float32"), True),
    "skipped one": (inside(call="barrier"), True),
    "other size": (inside(call="all_reduce [999] float32"), True),
    "other name": (inside(call="allreduce [1000] float32"), False),
    "other shape": (inside(call="all_reduce [10, 100] float32"), False),
    "no size told": (inside(call="all_reduce"), False),
    "the same": (inside(call=AR), False),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_two_signatures_at_one_number(case: str) -> None:
    at, wrong = MISMATCHES[case]
    verdict = three_wait(rank(2, at, place=LINE))
    assert verdict is not None
    assert (verdict.kind == "mismatch") == wrong
    if wrong:
        assert (verdict.klass, verdict.odd, verdict.number) == (Klass.CERTAIN, (2,), 31)
        said = f"ranks 0,1,3 are in {AR} and rank 2 (node b) is in {at.call} at {LINE}"
        assert said in verdict.sentence


@pytest.mark.parametrize(
    ("other", "odd", "said"),
    [
        (
            AR,
            (1,),
            "; rank 2 went on from broadcast: the collectives do not match, and rank 1 d",
        ),
        ("gather", (0, 1), "#31 of group dp: the collectives do not match"),
    ],
)
def test_a_rank_that_is_further_has_a_say(other: str, odd: tuple[int, ...], said: str) -> None:
    """A broadcast lets its source go on, an all_reduce nobody."""
    verdict = found(
        rank(0, inside(call="broadcast [4]")), rank(1, inside(call=other)), rank(2, inside(31))
    )
    assert verdict is not None
    assert (verdict.kind, verdict.odd) == ("mismatch", odd)
    assert said in verdict.sentence


def test_sizes_of_an_all_gather_may_differ() -> None:
    calls = ("all_gather [4]", "_allgather_base [8]")
    verdict = found(*(rank(one, inside(call=call)) for one, call in enumerate(calls)))
    assert verdict is not None
    assert verdict.kind == "fabric"


@pytest.mark.parametrize(
    "at",
    [
        (inside(10, "send [4]"), inside(20, "recv [4]")),
        (inside(10, "send [4]"), inside(10, "recv [4]")),
        (inside(10, AR), inside(20, AR)),  # sends before have been counted
    ],
)
def test_calls_between_two_ranks_are_not_compared_by_number(at: tuple[Position, Position]) -> None:
    verdict = found(rank(0, at[0]), rank(1, at[1]))
    assert verdict is not None
    assert verdict.klass is Klass.STILL


def test_of_two_parties_of_one_none_is_blamed() -> None:
    verdict = found(rank(0, inside()), rank(1, inside(call="barrier")))
    assert verdict is not None
    assert verdict.odd == (0, 1)


TP_DP = (
    GroupSeen("tp0", "tp", "0,1"),
    GroupSeen("tp1", "tp", "2,3"),
    GroupSeen("dp0", "dp", "0,2"),
    GroupSeen("dp1", "dp", "1,3"),
)


def test_through_groups_of_groups_the_odd_one_is_named() -> None:
    """Rank 3 loads; rank 2 waits for it in tp, rank 1 in dp, and rank 0 for rank 2 in dp."""
    verdict = found(
        rank(0, outside(9, 0), inside(4, group=2)),
        rank(1, outside(9, 0), inside(4, group=3)),
        rank(2, inside(8, group=1), outside(4, 2)),
        rank(3, outside(8, 1), outside(4, 3), place=LINE),
        groups=TP_DP,
    )
    assert verdict is not None
    assert (verdict.kind, verdict.odd, verdict.waiting) == ("idle", (3,), (0, 1, 2))


IN_TORCH = "torch.distributed.distributed_c10d"


def circle(*also: Position, **more: object) -> Impasse | None:
    """Ranks 0 and 1 take two groups in different orders."""
    groups = (GroupSeen("x", "x", "0,1"), GroupSeen("y", "y", "0,1"), GroupSeen("z", "z", "0,1"))
    return found(
        rank(0, inside(5, group=0), outside(5, 1), library=IN_TORCH),
        rank(1, outside(5, 0), inside(5, group=1), *also, **{"library": IN_TORCH, **more}),
        groups=groups,
    )


def test_a_circle_is_a_deadlock() -> None:
    verdict = circle()
    assert verdict is not None
    assert (verdict.klass, verdict.kind, verdict.odd) == (Klass.CERTAIN, "deadlock", (0, 1))
    assert verdict.sentence.startswith(
        "deadlock: rank 0 waits for rank 1 in all_reduce #6 [1000] float32 of group x, "
        "rank 1 waits for rank 0 in"
    )


def test_a_circle_of_which_one_computes_is_none_yet() -> None:
    verdict = circle(cpu=0.9)
    assert verdict is not None
    assert verdict.klass is Klass.WEAK


@pytest.mark.parametrize(
    ("also", "more"),
    [
        ((), {"library": "torch.utils.data"}),  # the call is one of another thread
        ((inside(5, group=2),), {}),  # it may be in either of two
        ((), {"partial": True}),
    ],
)
def test_a_circle_through_another_thread_proves_nothing(
    also: tuple[Position, ...], more: dict[str, object]
) -> None:
    verdict = circle(*also, **more)
    assert verdict is not None
    assert (verdict.klass, verdict.kind) == (Klass.STRONG, "deadlock")


def test_who_does_not_tell_of_all_groups_is_not_waited_for_in_others() -> None:
    verdict = found(rank(0, inside()), rank(1, inside()), rank(2, partial=True))
    assert verdict is not None
    assert verdict.kind == "still", "nor are all members known to be in"


def test_groups_of_one_name_are_told_apart_by_their_members() -> None:
    groups = (GroupSeen("1", "", "0,1"), GroupSeen("1", "", "2,3"))
    ranks = (rank(0, inside(30)), rank(1, inside(30)), rank(2, inside(5, "barrier", 1)))
    verdict = found(*ranks, rank(3, outside(5, 1)), groups=groups)
    assert verdict is not None
    assert (verdict.kind, verdict.odd) == ("idle", (3,))


def test_one_that_has_ended_may_have_done_its_part_of_a_broadcast() -> None:
    root = rank(1, being=Being.ENDED, answers=False)
    verdict = found(rank(0, inside(call="broadcast [4] float32")), root)
    assert verdict is not None
    assert (verdict.klass, verdict.kind) == (Klass.STRONG, "ended")


def test_all_are_in_and_it_does_not_end() -> None:
    verdict = found(*(rank(one, inside()) for one in range(4)))
    assert verdict is not None
    assert (verdict.klass, verdict.kind, verdict.of_node) == (Klass.STRONG, "fabric", "")
    assert "all 4 members of group dp on 2 nodes" in verdict.sentence


def test_a_device_that_has_not_begun_is_waited_for() -> None:
    ranks = [rank(one, replace(inside(), started=31)) for one in (0, 1)]
    verdict = found(*ranks, rank(2, replace(inside(), started=30), gpu=90))
    assert verdict is not None
    assert (verdict.kind, verdict.odd) == ("busy", (2,))


def test_one_that_has_ended_is_no_cause_where_another_works() -> None:
    verdict = found(
        rank(0, inside()), rank(1, outside(), cpu=1.0), rank(2, being=Being.ENDED, answers=False)
    )
    assert verdict is not None
    assert (verdict.kind, verdict.odd) == ("busy", (1,))


def test_one_that_works_is_waited_for_before_one_that_is_idle() -> None:
    """Rank 1 may be waiting for a file that rank 2 writes."""
    verdict = found(rank(0, inside()), rank(1, outside()), rank(2, outside(), io=2e8))
    assert verdict is not None
    assert (verdict.klass, verdict.odd) == (Klass.WEAK, (2,))


@pytest.mark.parametrize("idle", [True, False])
def test_nobody_waits(idle: bool) -> None:
    verdict = found(rank(0, outside()), rank(1, outside(), cpu=0.0 if idle else 0.3))
    assert (verdict is not None and verdict.klass is Klass.STILL) == idle


def test_of_ranks_that_do_nothing_the_one_that_has_done_so_longest_is_named() -> None:
    places = ("a.py:12 main", "a.py:5 fetch")
    spans = ((30.0, 60.0), (60.0, 30.0), (31.0, 30.0), (0.0, 60.0))
    told = [found(*(rank(n, idle=span[n], place=places[n]) for n in (0, 1))) for span in spans]
    assert [one and one.sentence.partition("anything ")[2] for one in told] == [
        "for 30 s, and none waits for another; rank 1 has been idle longest, for 60 s, "
        "and is at a.py:5 fetch",
        "for 30 s, and none waits for another; rank 0 has been idle longest, for 60 s, "
        "and is at a.py:12 main",
        "for 30 s, and none waits for another; rank 0 is at a.py:12 main",
        "for 71 s, and none waits for another; rank 1 is at a.py:5 fetch",
    ]


@pytest.mark.parametrize("at", [(), (outside(),)])
def test_where_torch_counts_nothing_stacks_tell_who_may_be_waited_for(
    at: tuple[Position, ...],
) -> None:
    others = (rank(one, place="train.py:34 step", library="torch.distributed.x") for one in (0, 1))
    verdict = found(*others, rank(2, *at, place=LINE))
    assert verdict is not None
    assert (verdict.kind, verdict.odd) == ("still", (0, 1, 2) if at else (2,))
    assert ("2 ranks may wait in torch.distributed" in verdict.sentence) == (not at)
    assert (f"; rank 2 (node b) is at {LINE}" in verdict.sentence) == (not at)
    all_in = found(*(rank(one, place=LINE, library="torch.distributed.x") for one in (0, 1)))
    assert all_in is not None
    assert "2 ranks may wait in torch.distributed" in all_in.sentence


def test_a_rank_without_a_thread_is_left_out() -> None:
    verdict = found(rank(0, inside()), rank(1, inside()), rank(2, forked=False, answers=False))
    assert verdict is not None
    assert verdict.kind == "still", "nobody knows whether it has entered"


HALTED = {
    "stopped": (Being.STOPPED, 0.9, "strong", "stopped", "rank 2 (node b) is stopped by a signal;"),
    "frozen": (Being.FROZEN, 0.0, "strong", "frozen", "is frozen with its cgroup; it is"),
    "disk": (Being.DISK, 0.0, "strong", "disk", "is in uninterruptible sleep (nfs_wait); it is"),
    "reads": (Being.DISK, 0.9, "", "", ""),
}


@pytest.mark.parametrize("case", HALTED)
def test_of_ranks_without_a_thread_the_kernel_names_the_one_that_does_not_go_on(case: str) -> None:
    """While another rank works (0.9 cores), or none does."""
    being, cpu, klass, kind, words = HALTED[case]
    ranks = rank(0, cpu=cpu), rank(1), rank(2, being=being, kernel="nfs_wait")
    verdict = found(*(replace(one, forked=False, answers=False) for one in ranks))
    if not klass:
        assert verdict is None
        return
    assert verdict is not None
    assert (verdict.klass.value, verdict.kind, verdict.odd) == (klass, kind, (2,))
    assert words in verdict.sentence


def test_one_that_says_it_takes_long_is_not_named_for_what_the_kernel_says() -> None:
    bare = {"forked": False, "answers": False}
    verdict = found(rank(0, **bare), rank(1, being=Being.DISK, says="judge", **bare))
    assert verdict is not None
    assert (verdict.kind, verdict.sentence.count("judge")) == ("said", 1)
    assert "; no rank has used its CPU" in verdict.sentence


def test_nothing_is_ended_beside_a_debugger_where_nobody_tells_whom_it_waits_for() -> None:
    bare = {"forked": False, "answers": False}
    verdict = found(rank(0, being=Being.TRACED, **bare), rank(1, being=Being.STOPPED, **bare))
    assert verdict is not None
    assert (verdict.kind, verdict.held) == ("stopped", True)


def test_what_has_moved_is_seen() -> None:
    before, after = look(rank(0, inside(30))), look(rank(0, inside(31)))
    assert fingerprint(before) == fingerprint(look(rank(0, inside(30), cpu=1.0)))
    assert fingerprint(before) != fingerprint(after)


def test_a_thousand_ranks_are_judged_at_once() -> None:
    groups = (
        *WORLD,
        *(GroupSeen(f"tp{one}", "", f"{8 * one}-{8 * one + 7}") for one in range(128)),
    )
    every = []
    for one in range(1024):
        mine = (groups[0], groups[1 + one // 8])
        at = (outside(), outside(group=1)) if one == 700 else (inside(), outside(group=1))
        every.append(Sighting(f"n{one // 8}", rank(one, *at), mine))
    spent = 1e9
    for _ in range(5):  # the best, as other tests' garbage is collected in between
        began = time.process_time()
        verdict = judge(Scene(every, 71.0))
        spent = min(spent, time.process_time() - began)
    assert verdict is not None
    assert verdict.odd == (700,)
    assert "1023 ranks wait for it" in verdict.sentence
    assert spent < 0.05, f"{spent:.3f} s"


def test_thousands_of_which_torch_counts_nothing_are_judged_at_once() -> None:
    inside = {"place": "train.py:34 step", "library": "torch.distributed.x"}
    scene = Scene(look(*(rank(one, **inside) for one in range(4096)), rank(4096, place=LINE)), 71.0)
    began = time.process_time()
    verdict = judge(scene)
    spent = time.process_time() - began
    assert verdict is not None
    assert verdict.odd == (4096,)
    assert spent < 0.2, f"{spent:.3f} s"
