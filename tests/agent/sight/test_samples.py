"""What a look tells the master, at the ends of what the wire takes; no process."""

from __future__ import annotations

from elasticrun.agent.sight import samples
from elasticrun.agent.sight.activity import Activity
from elasticrun.agent.sight.pulse import RankBeat
from elasticrun.wire import messages as m
from elasticrun.wire.progress import (
    GroupAnswer,
    RankAnswer,
    ThreadAnswer,
    encode_answer,
    read_answer,
)
from elasticrun.wire.rpc import protobuf
from elasticrun.wire.types import RoundName

ROUND = RoundName(1, 1, "nonce")


def rank(number: int, said: RankAnswer) -> samples.RankSample:
    return samples.RankSample(
        rank=number,
        pid=100 + number,
        forked=True,
        queried=True,
        answer=said,
        activity=Activity(m.Being.SLEEPS),
        idle=0.0,
        beat=RankBeat(),
        quiet=10.0,
        progress=(-1, 0.0),
    )


def test_a_limit_of_a_century_is_no_limit() -> None:
    group = GroupAnswer("0", 3, -1, 2, "0", "dp", "", "all_reduce [4]", age=-1.0, limit=3.2e9)
    (report,) = samples.reports(ROUND, 1, [rank(0, RankAnswer(1, (group,)))])
    protobuf.report_to_wire(report)
    assert (report.ranks[0].at[0].age, report.ranks[0].at[0].limit) == (0.0, 0.0)


def test_stacks_fit_into_a_message_the_rarest_first() -> None:
    rows = []
    for number in range(m.MAX_STACKS):
        frames = tuple((f"/u/{number}.py", line, "ü" * 199) for line in range(19))
        says = RankAnswer(1, (), (ThreadAnswer("main", frames),))
        rows += [rank(10 * number + one, says) for one in range(number + 1)]
    report = samples.stacks(ROUND, 1, rows)
    protobuf.report_to_wire(report)
    assert 1 < len(report.groups) < m.MAX_STACKS
    assert report.groups[0].count == 1


def test_a_path_that_is_no_text_is_read() -> None:
    from elasticrun.training.monitor.monitor import _utf8

    frame = (_utf8("/u/\udce9.py"), 3, "main")
    said = RankAnswer(1, (), (ThreadAnswer("main", (frame,)),))
    assert read_answer(encode_answer(said)) == said
