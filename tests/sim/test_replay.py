"""A trace replayed: the real brain says again what it said, whatever befell it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrun.cli.main import main
from elasticrun.core.events import JobEffect, JobEvent, Tick
from elasticrun.core.job.job import Job
from elasticrun.core.nodes.membership import Death, Membership
from elasticrun.core.persisted import Facts
from elasticrun.master.trace import writer as trace_writer
from elasticrun.master.trace.replay import DIFFERS, SAME, Selection, replay
from elasticrun.master.trace.words import event_from_plain
from elasticrun.master.trace.writer import MasterStart, TraceWriter
from elasticrun.wire.messages import JobSpec
from elasticrun.wire.types import plain
from tests.further import cases
from tests.master.people import LIMIT
from tests.simulator import master as sim_master
from tests.simulator.chaos import Chaos
from tests.simulator.script import read, run

pytestmark = pytest.mark.slow

STORY = """# a rank dies, then a node
job 1:2 max_restarts=3 last_call_timeout=2
world beats=1
0 node a b nproc=2
8 fail b 1 ValueError: boom
30 vanish a
60 end
"""


class Traced(Job):
    """The brain, with a writer where the real master has one."""

    folder: Path
    ring = 64 * 1024 * 1024
    now = 0.0
    writers: list[TraceWriter]

    def __init__(
        self, spec: JobSpec | None, term: int, mint: Callable[[], str], facts: Facts | None = None
    ) -> None:
        life = MasterStart("job", term, spec, facts)
        self.trace = TraceWriter(self.folder, life, ring=self.ring, mint=mint, now=Traced.now)
        if self.writers:
            self.writers[-1].close(LIMIT)
        self.writers.append(self.trace)
        super().__init__(spec, term, self.trace.mint, facts)

    def step(self, event: JobEvent, now: float) -> list[JobEffect]:
        Traced.now = now
        effects = super().step(event, now)
        self.trace.record(event, now, effects)
        return effects


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which the masters of a simulated world leave their trace."""
    Traced.folder = tmp_path / "record"
    Traced.writers = []
    Traced.now = 0.0
    monkeypatch.setattr(sim_master, "Job", Traced)
    # a thread writes, and may stand still while days of the world pass
    monkeypatch.setattr(trace_writer, "MAX_QUEUED", 10**9)
    yield Traced.folder
    for writer in Traced.writers:
        writer.close(LIMIT)


def _flush() -> None:
    Traced.writers[-1].close(LIMIT)


def _told(story: str = STORY) -> None:
    run(read(story))
    _flush()


def _replayed(folder: Path, **wanted: Any) -> tuple[int, list[str]]:
    lines: list[str] = []
    code = replay(folder, Selection(**wanted), lines.append)
    return code, lines


def test_the_story_is_told_with_times_and_reasons(traced: Path) -> None:
    _told()
    code, lines = _replayed(traced)
    text = "\n".join(lines)
    assert code == SAME, text
    assert lines[-1].endswith("the replay matches the recording")
    assert "round 1 begins: 4 ranks on 2 nodes" in text
    assert "b: RanksFailed 1: " in text
    assert "node a is dead" in text
    decisions = [line for line in lines if not line.startswith(("==", "--"))]
    assert all(line[:10].strip() == "" or float(line[:10]) >= 0 for line in decisions)


HANG = """# a rank waits for its data
job 128:128 max_restarts=0
world beats=1
0 node NODES nproc=8
10 hang n3 1 idle
100 end
"""


def test_looks_are_packed_and_say_the_same_again(traced: Path) -> None:
    """1,024 ranks are looked at: less than a third of what their answers are as text."""
    _told(HANG.replace("NODES", " ".join(f"n{number}" for number in range(128))))
    code, lines = _replayed(traced)
    assert code == SAME, "\n".join(lines[-40:])
    assert "hang (strong): rank " in "\n".join(lines)
    rows = [line for line in (traced / "trace").read_text().splitlines() if '"packed"' in line]
    events = [event_from_plain(json.loads(row)["e"]) for row in rows]
    assert len(events) >= 3 * 128
    bare = sum(len(json.dumps(plain(event), separators=(",", ":"))) for event in events)
    assert sum(map(len, rows)) < bare / 3


def test_only_what_was_asked_for(traced: Path) -> None:
    _told()
    whole = _replayed(traced)[1]
    later = _replayed(traced, since=20.0)[1]
    of_b = _replayed(traced, node="b")[1]
    everything = _replayed(traced, everything=True)[1]
    assert len(later) < len(whole) < len(everything)
    assert not [line for line in later if "RanksFailed 1" in line]
    assert [line for line in of_b if "RanksFailed" in line]
    assert not [line for line in of_b if "a attaches" in line]


@pytest.mark.parametrize("checks", [False, True], ids=["plain", "checks"])
@pytest.mark.parametrize("seed", cases(range(25), kept=range(2)))
def test_chaos_replays_exactly(traced: Path, seed: int, checks: bool) -> None:
    """Masters die and are succeeded with their record or without, messages are lost and doubled:
    every life of every brain says the same again."""
    Chaos(seed, checks=checks).run()
    _flush()
    code, lines = _replayed(traced)
    assert code == SAME, "\n".join(lines[-40:])
    assert "DIFFERS" not in "\n".join(lines)


def test_a_trace_cut_off_anywhere_replays_up_to_there(traced: Path) -> None:
    _told()
    path = traced / "trace"
    data = path.read_bytes()
    head = data.index(b"\n") + 1
    for end in range(head, len(data), max(1, len(data) // 60)):
        path.write_bytes(data[:end])
        code, lines = _replayed(traced)
        assert code == SAME, lines
        whole = b"\n" in data[end - 1 : end + 1]  # all of a line but its end is the line
        assert whole != any("is incomplete" in line for line in lines)


def test_a_successor_after_a_cut_is_replayed_too(traced: Path) -> None:
    _told()
    data = (traced / "trace").read_bytes()
    (traced / "trace").write_bytes(data[:-50] + b"\n" + data)
    code, lines = _replayed(traced)
    assert code == SAME
    assert sum(line.startswith("==") for line in lines) == 2
    assert lines[-1].endswith("the replay matches the recording")


def test_a_ring_that_has_lost_its_beginning(traced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The brain begins with the facts and the streams of that moment, and no difference counts."""
    monkeypatch.setattr(Traced, "ring", 256 * 1024)
    story = STORY.replace("60 end", "") + "".join(
        f"{100 + 40 * i} node a nproc=2\n{120 + 40 * i} vanish a\n" for i in range(200)
    )
    _told(story + "9000 end\n")
    assert (traced / "trace.1").exists()
    code, lines = _replayed(traced)
    assert code == SAME
    assert "earlier events are lost" in "\n".join(lines[:3])
    assert sum("earlier events are lost" in line for line in lines) == 1
    (traced / "trace.1").unlink()
    code, lines = _replayed(traced)
    assert code == SAME
    assert "earlier events are lost" in "\n".join(lines[:3])


def test_what_was_recorded_otherwise_is_shown(traced: Path) -> None:
    """As a trace of another version would be, or of a brain with a defect."""
    _told()
    path = traced / "trace"
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if "round 1 begins" in line:
            lines[number] = line.replace("4 ranks", "3 ranks", 1)
    path.write_text("\n".join(lines) + "\n")
    code, shown = _replayed(traced)
    assert code == DIFFERS
    where = next(number for number, line in enumerate(shown) if "DIFFERS:" in line)
    assert "3 ranks on 2 nodes" in shown[where + 1]
    assert "4 ranks on 2 nodes" in shown[where + 2]


def test_a_brain_that_raised_raises_again(traced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace of a defect shows the defect, and, when it is mended, that it is."""

    real = Membership.due

    def defect(self: Membership, now: float, *rest: Any) -> list[Death]:
        if now > 25.0:
            raise KeyError("a defect")
        return real(self, now, *rest)

    monkeypatch.setattr(Membership, "due", defect)
    with pytest.raises(KeyError):
        run(read(STORY))
    Traced.writers[-1].record_fault(Tick(), 26.0, KeyError("a defect"))
    _flush()
    code, lines = _replayed(traced)
    assert code == SAME
    assert "the state machine raised KeyError: 'a defect'" in "\n".join(lines)
    monkeypatch.setattr(Membership, "due", real)
    code, lines = _replayed(traced)
    assert code == DIFFERS
    assert "  recorded: raised KeyError: 'a defect'" in lines
    assert "  replayed: raised nothing" in lines


def test_the_verb(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _told()
    assert main(["replay", str(traced)]) == 0
    folder = capsys.readouterr().out
    assert main(["replay", str(traced / "trace"), "--node", "a", "--since", "25"]) == 0
    assert len(capsys.readouterr().out) < len(folder)
    assert "== job 'job', a master of term 1" in folder


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        ("", "it is empty"),
        ("hello\n", "not text of that form"),
        ("[]\n", "a line is not a JSON object"),
        ('{"t": 1.0, "e": {"Tick": {}}}\n', "does not begin with a master's head"),
        ('{"trace": 99}\n', "version 99"),
        ('{"trace": 2}\n', "version 2, but this elasticrun reads 3"),
        ('{"trace": 3}\n', "is not a trace"),
        ("\x00" * 1000, "not text of that form"),
    ],
)
def test_what_is_no_trace_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, why: str
) -> None:
    path = tmp_path / "trace"
    if content is not None:
        path.write_text(content)
    assert main(["replay", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert why in said.err


def test_damage_in_the_midst_is_said_and_what_follows_not_judged(traced: Path) -> None:
    _told()
    path = traced / "trace"
    lines = path.read_text().splitlines()
    joined = next(n for n, line in enumerate(lines) if '"Join"' in line)
    lines[joined] = json.dumps({"t": 1.0, "e": {"Nothing": {}}})
    path.write_text("\n".join(lines) + "\n")
    code, shown = _replayed(traced)
    assert code == SAME
    assert f"line {joined + 1} of trace is damaged" in "\n".join(shown)
    assert "which is expected" in shown[-1]
