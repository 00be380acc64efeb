"""The lines of --event-log-handler=console against those of torch's own agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elasticrun.agent import shutdown
from elasticrun.agent.workers.events import EventLog, check_handler
from elasticrun.core.events import Exit
from elasticrun.wire.messages import Failure, FailureKind, RoundInfo, Start
from elasticrun.wire.types import Endpoint, RoundName
from tests.further import cases
from tests.harness import clean_environment, program

START = Start(
    info=RoundInfo(RoundName(1, 1, "n"), world_size=2), group_rank=0, group_world_size=1,
    first_rank=0, role_first_rank=0, role_world_size=2, store=Endpoint("h", 1), host_store=True,
)  # fmt: skip
BOOM = Failure("h", 1, 1, 11, 3, 5, FailureKind.SCRIPT, "m", "", "")


def log(lines: list[str], handler: str = "console", level: str = "") -> EventLog:
    return EventLog(
        handler, lines.append, run_id="r", role="default", host="h", backend="c10d",
        entry_point="e", environ={"LOGLEVEL": level} if level else {},
    )  # fmt: skip


def say_all(events: EventLog, failures: list[Failure]) -> None:
    events.write_rendezvous(START, 0.25, 1)
    events.write_started(START, {0: 10, 1: 11}, 2)
    events.write_ended(
        START, {0: 10, 1: 11}, failures, succeeded=not failures, run_seconds=1.5, now_ms=3
    )


def shape(value: Any) -> Any:
    """Keys in order and types; what numbers and texts stand there is another matter."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value).__name__


LAST = """
import os, sys
if os.environ["RANK"] == "0":
    with open("{pid}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("{pid}.new", "{pid}")
    sys.exit()
while not os.path.exists("{pid}"):
    pass
while os.path.exists("/proc/" + open("{pid}").read()):
    pass
sys.exit({code})
"""
"""Rank 1 ends once rank 0 has been reaped, which torchrun might otherwise kill."""


@pytest.mark.slow
@pytest.mark.parametrize("code", cases([0, 3], kept=[3]))
def test_names_and_fields_are_torchs(code: int, tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text(LAST.format(code=code, pid=str(tmp_path / "pid")))
    words = ("torch.distributed.run", "--event-log-handler=console", "--nproc-per-node=2")
    done = program("-m", *words, str(script), env=clean_environment())
    theirs = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    lines: list[str] = []
    say_all(log(lines), [BOOM] if code else [])
    ours = [json.loads(line) for line in lines]
    assert len(theirs) == 7
    for our, their in zip(ours, theirs, strict=True):
        inner = json.loads(their["metadata"].pop("metadata"))
        our_inner = json.loads(our["metadata"].pop("metadata"))
        assert list(our) == list(their)
        assert list(our["metadata"]) == list(their["metadata"])
        assert list(our_inner) == list(inner)
        assert (our["name"], our["source"]) == (their["name"], their["source"])
        for key in ("global_rank", "role", "state"):
            assert our["metadata"][key] == their["metadata"][key]
        if our["name"].endswith(("SUCCEEDED", "FAILED", "TERMINATED")):
            assert shape(our["metadata"]) == shape(their["metadata"])
        for key in ("local_rank", "role_rank", "role_world_size", "exit_code"):
            assert our_inner.get(key) == inner.get(key)


def test_torch_can_read_them_back() -> None:
    from torch.distributed.elastic.events import Event, EventSource

    lines: list[str] = []
    say_all(log(lines), [BOOM])
    events = [Event.deserialize(line) for line in lines]
    assert [event.source for event in events].count(EventSource.WORKER) == 4
    assert events[0].timestamp == 1


@pytest.mark.parametrize(
    ("handler", "level", "expected"),
    [
        ("null", "", 0),
        ("dynamic_rendezvous", "", 0),
        # LOGLEVEL counts as under torchrun
        *(("console", level, 0) for level in ("WARNING", "warning", "30")),
        *(("console", level, 7) for level in ("debug", "10", "nonsense")),
    ],
)
def test_who_says_something(handler: str, level: str, expected: int) -> None:
    lines: list[str] = []
    say_all(log(lines, handler, level), [])
    assert len(lines) == expected


@pytest.mark.parametrize(
    ("outcome", "states", "why"),
    [
        (Exit(0, "", (), 0), ["SUCCEEDED", "SUCCEEDED", "SUCCEEDED"], None),
        (Exit(1, "", (BOOM,), 0), ["TERMINATED", "FAILED", "SUCCEEDED"], None),  # ChildFailedError
        (Exit(1, "", (), 15), ["FAILED"], "ended by SIGTERM (15); the ranks have been shut down"),
        (Exit(1, "too few nodes", (), 0), ["FAILED"], "too few nodes"),
    ],
)
@pytest.mark.parametrize("start", [START, None])
async def test_the_agent_fails_where_torchruns_run_raises(
    start: Start | None, outcome: Exit, states: list[str], why: str | None
) -> None:
    lines: list[str] = []
    await shutdown.write_last_events(log(lines), start, {0: 10, 1: 11}, outcome)
    told = [json.loads(line)["metadata"] for line in lines]
    assert [one["state"] for one in told] == (states if start else states[-1:])
    assert told[-1]["raw_error"] == why


def test_an_unknown_handler_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="--event-log-handler=kafka is not known: use one of null"):
        check_handler("kafka")
