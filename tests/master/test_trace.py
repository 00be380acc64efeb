"""The trace: what the brain took in and said, best effort, in a ring of two files."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from elasticrun.core.events import (
    Attached,
    Detached,
    Filed,
    Hangup,
    Heard,
    JobEvent,
    JobOver,
    Judged,
    Note,
    Overslept,
    Record,
    Send,
    Tick,
)
from elasticrun.core.sight.picture import IncidentRow, PhaseRow, VerdictRow
from elasticrun.master.trace import writer as trace_writer
from elasticrun.master.trace.chrome import ChromeTrace
from elasticrun.master.trace.words import effect_in_words, event_from_plain, event_to_plain
from elasticrun.master.trace.writer import MasterStart, TraceWriter
from elasticrun.wire import messages as m
from tests.master.facts import facts
from tests.master.people import LIMIT, ROUND, SPEC, hello
from tests.starts import changed

LIFE = MasterStart("job", 7, SPEC, None)

FAILURE = m.Failure("host", 3, 1, 4711, -11, 5, m.FailureKind.SIGNAL, "boom", "trace", "")

START = m.Start(m.RoundInfo(ROUND, 4), 0, 2, 0, 0, 4, m.Endpoint("a", 1), host_store=True)

EVENTS: list[JobEvent] = [
    Attached(1, hello(attached=START)),
    Heard(1, m.Join(m.Endpoint("a", 1))),
    Heard(1, m.Running(ROUND, (1, 2))),
    Heard(1, m.RanksFailed(ROUND, (FAILURE,))),
    Heard(1, m.Stopping(ROUND, 2.5)),
    Heard(1, m.Stopped(ROUND)),
    Heard(1, m.Finished(ROUND)),
    Heard(1, m.Leaving("SIGTERM", 15)),
    Heard(1, m.Beat(3)),
    Detached(1, clean=False),
    Overslept(0.1 + 0.2),
    Tick(),
]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(getattr(e, "report", e)).__name__)
def test_an_event_survives_its_text(event: JobEvent) -> None:
    assert event_from_plain(json.loads(json.dumps(event_to_plain(event)))) == event


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"Tick": {}, "Tack": {}}', '{"Heard": {"session": 1}}', '{"Nothing": {}}',
             '{"Heard": {"session": 1, "report": {"Start": {}}}}', '{"Overslept": {"by": "long"}}'],
)  # fmt: skip
def test_what_is_no_event_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        event_from_plain(json.loads(text))


def test_effects_in_words_tell_themselves_apart() -> None:
    effects = [
        Send((1,), START),
        Send((2,), START),
        Send((1,), m.Stop(ROUND, "why")),
        Send((1,), m.End(1, "why", ())),
        Send((1,), m.Refused("why", 78)),
        Send((1,), m.Wait("why")),
        Send((1,), m.Welcome(2, "v", "job", 7, 1.0, 600.0, "")),
        Hangup(1),
        Note("why"),
        Note("why", "warning"),
        JobOver(1, "why"),
        Record(facts(1)),
        Record(facts(2)),
        Record(facts(2, outcome=m.End(0, "", ()))),
    ]
    words = [effect_in_words(effect) for effect in effects]
    assert len(set(words)) == len(effects)
    assert not [line for line in words if "\n" in line]
    assert len(effect_in_words(Send(tuple(range(10_000)), START))) < 300


def test_a_trace_has_everything_with_its_time(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, LIFE, mint=lambda: "0badcafe")
    writer.record(EVENTS[0], 1.5, [Note("hello")])
    writer.record(Heard(1, m.Beat(1)), 2.0, [])
    writer.record(Heard(1, m.Beat(2)), 2.25, [])
    assert writer.mint() == "0badcafe"
    writer.record(Tick(), 2.5, [Hangup(1), Record(facts())])
    writer.record_fault(Tick(), 3.0, KeyError("a defect"))
    writer.record(Heard(1, m.Beat(3)), 3.5, [])
    writer.close(LIMIT)
    head, first, beats, second, third, last = _lines(tmp_path / "trace")
    assert (head["trace"], head["job"], head["term"]) == (3, "job", 7)
    assert head["spec"]["job_id"] == "job"
    assert (first["t"], first["do"]) == (1.5, ["info: hello"])
    assert beats == {"beats": [[2.0, 1, 1], [2.25, 1, 2]]}
    assert (second["mint"], len(second["do"])) == (["0badcafe"], 2)
    assert third["raised"] == "KeyError: 'a defect'"
    assert "mint" not in third
    assert last == {"beats": [[3.5, 1, 3]]}
    assert (tmp_path / "trace").stat().st_mode & 0o777 == 0o600


def test_beats_do_not_wait_for_ever(tmp_path: Path) -> None:
    """At rest nothing but beats comes: a second of them is a line."""
    writer = TraceWriter(tmp_path, LIFE)
    for number in range(25):
        writer.record(Heard(1, m.Beat(number)), 100.0 + number / 10, [])
    writer.close(LIMIT)
    lines = _lines(tmp_path / "trace")[1:]
    assert [len(line["beats"]) for line in lines] == [11, 11, 3]


def test_what_does_not_fit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    begin = trace_writer._Ring.open

    def slow(ring: trace_writer._Ring) -> None:
        assert gate.wait(LIMIT)
        begin(ring)

    monkeypatch.setattr(trace_writer._Ring, "open", slow)
    monkeypatch.setattr(trace_writer, "MAX_QUEUED", 10)
    writer = TraceWriter(tmp_path, LIFE)
    for number in range(17):
        writer.record(Overslept(float(number)), 1.0, [])
    gate.set()
    monkeypatch.setattr(trace_writer, "MAX_QUEUED", 1000)
    writer.record(Tick(), 2.0, [])
    writer.close(LIMIT)
    lines = _lines(tmp_path / "trace")[1:]
    assert [line["e"]["Overslept"]["by"] for line in lines[:10]] == list(range(10))
    assert lines[10:11] == [{"dropped": 7}]
    assert lines[11]["e"] == {"Tick": {}}


def test_the_ring_stays_in_its_bounds_and_each_file_has_a_head(tmp_path: Path) -> None:
    ring = 512 * 1024
    writer = TraceWriter(tmp_path, LIFE, ring=ring)
    writer.record(Attached(1, hello("here")), 1.0, [])
    writer.record(Attached(2, hello("gone")), 1.0, [])
    writer.record(Detached(2, clean=True), 1.0, [Record(facts(9))])
    for number in range(4000):
        writer.record(Overslept(1.0), float(number), [Note("x" * 500)])
    writer.close(LIMIT)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"trace", "trace.1"}
    assert sum(sizes.values()) < ring + 8 * 1024
    head = _lines(tmp_path / "trace")[0]
    assert head["midst"]
    assert head["facts"]["number"] == 9
    assert [s["Attached"]["hello"]["node"] for s in head["streams"]] == ["here"]


def test_a_successor_writes_on_behind_half_a_line(tmp_path: Path) -> None:
    TraceWriter(tmp_path, LIFE).close(LIMIT)
    with (tmp_path / "trace").open("a") as file:
        file.write('{"t": 1.0, "e": {"Ti')
    TraceWriter(tmp_path, LIFE).close(LIMIT)
    lines = (tmp_path / "trace").read_text().splitlines()
    assert [line[:10] for line in lines] == ['{"trace":3', '{"t": 1.0,', '{"trace":3']


def test_no_disk_no_trace_and_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    writer = TraceWriter(tmp_path / "file", LIFE)
    for _ in range(100):
        writer.record(Tick(), 1.0, [])
    writer.close(LIMIT)
    writer = TraceWriter(tmp_path, LIFE, ring=1000)
    writer.close(LIMIT)
    assert caplog.text.count("tracing of this job stopped") == 2
    assert not (tmp_path / "trace").exists()


def test_a_hang_that_was_told_is_a_span(tmp_path: Path) -> None:
    """From its last movement until it is over, or until the trace ends."""
    found = VerdictRow(
        "strong", "idle", "rank 3 is idle", 60.0, "3", "", "it is not restarted automatically"
    )
    chrome = ChromeTrace()
    chrome.add(100.0, [])
    for now, over in ((170.0, False), (180.0, True), (300.0, False)):
        chrome.add(now, [Judged(found, over=over)])
    chrome.write(tmp_path / "out.json", 310.0)
    spans = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    hangs = [(one["name"], one["ts"], one["dur"]) for one in spans if one["ph"] == "X"]
    assert hangs == [
        ("idle (strong)", 10_000_000, 70_000_000),
        ("idle (strong)", 140_000_000, 70_000_000),
    ]


def test_rounds_end_with_their_incidents_and_each_of_those_is_one_span(tmp_path: Path) -> None:
    """Also where the only node is lost, so that nobody is told to stop; written anew, an incident
    stays where it began."""
    chrome = ChromeTrace()
    number = ROUND.number
    row = IncidentRow(1, "node_lost", "node a is dead", "", "", 0.0, number, over=False)
    later = changed(START, m.RoundName(ROUND.term, number + 1, "next"))
    phases = (PhaseRow("detect", 4.0), PhaseRow("stop", 6.0), PhaseRow("warm", 2.0))
    over = replace(row, age=20.0, over=True, phases=phases)
    chrome.add(100.0, [])
    chrome.add(101.0, [Send((1,), START)])
    chrome.add(110.0, [Filed(row)])
    chrome.add(117.0, [Send((1,), later)])
    chrome.add(130.0, [Filed(over)])
    chrome.add(131.0, [Filed(replace(over, last_lines="it failed"))])
    chrome.write(tmp_path / "out.json", 131.0)
    spans = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    drawn = {one["name"]: (one["ts"] / 1e6, one["dur"] / 1e6) for one in spans if one["ph"] == "X"}
    assert drawn == {
        f"round {number}": (1.0, 9.0),
        f"round {number + 1}": (17.0, 14.0),
        "incident 1": (6.0, 12.0),
        "detect": (6.0, 4.0),
        "stop": (10.0, 6.0),
        "warm": (16.0, 2.0),
    }
    assert sum(one["ph"] == "X" for one in spans) == len(drawn)
