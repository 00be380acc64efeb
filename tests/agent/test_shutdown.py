"""The end of an agent: its steps, whatever becomes of each, and torchrun's summary."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from elasticrun.agent import shutdown
from elasticrun.agent.logs.output import RankOutput
from elasticrun.agent.shutdown import ShutdownSteps, child_failed, format_failures
from elasticrun.agent.workers.exits import describe
from elasticrun.config import EXIT_FAILED, EXIT_FINAL, EXIT_SAVED, LogPlan, MasterPlan
from elasticrun.core.events import Exit
from elasticrun.forkserver.program import write_error_file
from elasticrun.host.log import NOTICE
from elasticrun.master.main import _attempt
from elasticrun.wire.messages import Failure, FailureKind
from tests.agent.configs import launched, node_context


async def test_a_step_that_fails_or_is_late_is_told_and_the_next_is_done(caplog) -> None:
    done: list[str] = []

    async def broken() -> None:
        raise OSError("the disk is gone")

    async def sound() -> None:
        done.append("sound")

    def defect() -> None:
        raise KeyError("defect")

    end = ShutdownSteps()
    end.start()
    end.run_now("the first", defect)
    await end.run_step("the second", broken(), 5.0)
    await end.run_step("the third", asyncio.Event().wait(), 0.01)
    await end.run_step("the fourth", sound(), 5.0)
    assert done == ["sound"]
    for told in ("the first failed", "the second failed", "the third did not finish within 0.01 s"):
        assert told in caplog.text


def test_the_steps_have_one_bound_and_each_its_least(monkeypatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    end = ShutdownSteps()
    assert end.time_for(1e6) == 1e6
    end.start()
    assert (end.time_for(3.0), end.time_for(1e6)) == (3.0, shutdown.TOTAL_LIMIT)
    now += shutdown.TOTAL_LIMIT
    assert (end.time_for(0.5), end.time_for(1e6)) == (0.5, shutdown.LEAST_STEP_TIME)


@pytest.mark.parametrize(("took", "bound"), [(1.0, 20.0), (15.0, 14.0), (26.0, 4.0), (90.0, 4.0)])
def test_what_ranks_took_of_a_pods_grace_is_gone(took: float, bound: float, monkeypatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    end = ShutdownSteps()
    end.note_death_signal()
    now += took / 2
    end.note_death_signal()  # a second one does not put the end off
    now += took / 2
    end.start()
    assert end.time_for(1e6) == bound


async def test_output_is_shown_until_a_death_signal(tmp_path: Path, monkeypatch, caplog) -> None:
    """A console that nobody reads, with an endless patience: the signal alone ends the wait."""
    monkeypatch.setattr(shutdown, "SHOW_LIMIT", 0.1)
    monkeypatch.setattr(shutdown, "SHOW_PATIENCE", 3600.0)
    out, into = os.pipe()
    plan = LogPlan(log_dir=str(tmp_path), tee_all=1)
    output = RankOutput(plan, "job", "default", 1, stdout_fd=into, patience=3600.0)
    logs = output.open_attempt(0, {0: {}})
    Path(logs[0].stdout).write_bytes(b"line\n" * 100_000)

    end = ShutdownSteps()
    end._until = 0.0
    showing = asyncio.create_task(end.show_output(output, hurried=False))
    done, _ = await asyncio.wait({showing}, timeout=0.5)
    assert not done  # the bound of the other steps is over, and does not count here
    hurried_at = time.monotonic()
    end.hurry()
    await showing
    assert time.monotonic() - hurried_at < shutdown.SHOW_PATIENCE
    assert "because the time limit was reached" in caplog.text
    os.close(out)
    os.close(into)


async def test_the_master_takes_every_step_of_its_end_too(caplog) -> None:
    done: list[str] = []

    async def broken() -> None:
        raise OSError("the disk is gone")

    await _attempt("the first", broken)
    await _attempt("the second", lambda: done.append("sound"))
    assert done == ["sound"]
    assert "the first failed" in caplog.text


SECOND = 1_000_000
NOON = 1_795_229_851


def error_file(path: Path, message: Any, **more: Any) -> str:
    path.write_text(json.dumps({"message": message, **more}))
    return str(path)


def with_stack(text: str, stack: str, when: int) -> dict[str, Any]:
    return {"message": text, "extraInfo": {"py_callstack": stack, "timestamp": str(when)}}


def cases(folder: Path) -> dict[str, dict[int, tuple[int, str]]]:
    """By name: rank to (exit code, error file)."""
    stack = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: boom\n'
    one = error_file(folder / "1.json", with_stack("ValueError: boom", stack.rstrip(), NOON))
    two = error_file(folder / "2.json", with_stack("E: " + "long " * 30, "one line", NOON + 5))
    new = error_file(folder / "3.json", "the new format", timestamp=NOON + 1)
    return {
        "alone": {0: (1, one)},
        "alone, by a signal, without a file": {3: (-9, "")},
        "alone, short": {0: (7, "")},
        "three": {0: (1, two), 1: (1, one), 2: (7, new)},
        "root last": {4: (-6, two), 5: (2, new)},
        "a signal without a name": {0: (-63, two)},
    }


NAMES = (
    "alone",
    "alone, by a signal, without a file",
    "alone, short",
    "three",
    "root last",
    "a signal without a name",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_torchs(name: str, tmp_path: Path, monkeypatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    monkeypatch.setattr("time.time", lambda: NOON + 0.5)
    ranks = cases(tmp_path)[name]
    theirs = ChildFailedError(
        "train.py",
        {
            rank: ProcessFailure(local_rank=i, pid=100 + i, exitcode=code, error_file=file)
            for i, (rank, (code, file)) in enumerate(ranks.items())
        },
    )
    ours = [
        describe(failure(
            rank, host=socket.getfqdn(), local_rank=i, pid=100 + i, exitcode=code, error_file=file,
            time_us=(NOON + 100) * SECOND if file else NOON * SECOND + 500_000,
        ), stopping=False)
        for i, (rank, (code, file)) in enumerate(ranks.items())
    ]  # fmt: skip
    root = min(ours, key=lambda failure: failure.time_us)
    assert format_failures("train.py", ours, root) == theirs.format_msg()


def failure(rank: int, kind: FailureKind = FailureKind.SCRIPT, **more: Any) -> Failure:
    words = {"host": "h", "local_rank": rank, "pid": rank, "exitcode": 1, "time_us": NOON * SECOND,
             "message": f"m{rank}", "traceback": "", "error_file": ""}  # fmt: skip
    return Failure(rank=rank, kind=kind, **{**words, **more})


def test_the_headline_is_what_people_search_for() -> None:
    text = child_failed("a.py", [failure(0)], failure(0))
    first, border, title, *_ = text.split("\n")
    assert first == "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    assert set(border) == {"="}
    assert title == "a.py FAILED"


def test_the_root_is_the_one_handed_in_whatever_the_times_and_of_whichever_node() -> None:
    early, late = failure(0), failure(1, time_us=(NOON + 9) * SECOND)
    text = format_failures("a.py", [early, late], late)
    assert text.index("m0") < text.index("Root Cause") < text.index("m1")
    text = format_failures("a.py", [early], failure(7, host="elsewhere"))
    assert text.index("Root Cause") < text.index("elsewhere")


def test_killed_survivors_are_no_failures() -> None:
    stopped = failure(1, FailureKind.STOPPED, exitcode=-15, message="Signal 15")
    text = format_failures("a.py", [stopped, failure(0)], failure(0))
    assert "Signal 15" not in text
    assert "<NO_OTHER_FAILURES>" in text
    assert "Signal 15" in format_failures("a.py", [stopped], stopped)


def test_ranks_that_failed_alike_are_one_line() -> None:
    """Also where one was being told to stop when it had failed already."""
    root = failure(0, message="ValueError: boom", traceback="ValueError: boom")
    alike = [replace(root, rank=rank, local_rank=rank) for rank in (5, 1)]
    alike.append(replace(root, rank=2, local_rank=2, kind=FailureKind.STOPPED))
    text = format_failures("a.py", [*alike, root], root)
    assert "Failures:\n  ranks 1, 2 and 5: same exception as the root cause\n---" in text
    assert text.count("ValueError: boom") == 1
    other = failure(3, message="OSError: another", traceback="OSError: another")
    mixed = format_failures("a.py", [other, alike[1], root], root)
    assert "OSError: another" in mixed
    assert "  rank 1: same exception as the root cause\n" in mixed


@pytest.mark.parametrize(("code", "level"), [(EXIT_SAVED, NOTICE), (EXIT_FAILED, logging.ERROR)])
async def test_an_end_that_has_saved_is_no_error(code: int, level: int, monkeypatch) -> None:
    """It has the colour of progress messages, not of an error."""
    said: list[tuple[str, int]] = []
    monkeypatch.setattr(shutdown, "log_last_word", lambda text, at: said.append((text, at)))
    node = node_context(writer=SimpleNamespace(flush=lambda limit: True))
    outcome = Exit(code, "received SIGINT", (), 2, 7)
    await shutdown.print_outcome(node, outcome, 1.0, ran=True)
    assert said == [(shutdown.outcome_sentence(outcome), level)]


@pytest.mark.parametrize(
    ("most", "by_user", "code", "error", "told"),
    [
        (0, False, EXIT_FAILED, ValueError("bad luck"), True),
        (0, False, EXIT_FAILED, ModuleNotFoundError("No module named 'apex'"), False),
        (0, True, EXIT_FAILED, None, False),
        (3, False, EXIT_FAILED, None, False),
        (0, False, EXIT_FINAL, None, False),
    ],
)
async def test_a_job_without_restarts_says_that_it_is_the_default(
    most: int,
    by_user: bool,
    code: int,
    error: Exception | None,
    told: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In its last line, with the flag that changes it; not where the user has chosen, and not if
    another attempt cannot load the program either."""
    file = tmp_path / "error.json"
    if error is not None:
        write_error_file(str(file), error)
    plan = MasterPlan(sources={"max_restarts": "--max-restarts"} if by_user else {})
    written: list[str] = []
    node = node_context(
        launched({"max_restarts": most}, master=plan),
        writer=SimpleNamespace(flush=lambda limit: True, write=written.append),
    )
    root = replace(failure(0), error_file=str(file))
    outcome = Exit(code, "rank 0: boom; no restarts left", (root,), 0)
    await shutdown.print_outcome(node, outcome, 1.0, ran=True)
    last = "0 is the default, as under torchrun; --max-restarts=3 allows 3 restarts"
    assert (caplog.messages[-1] == last) is told
    assert caplog.text.count("is the default") == int(told)
    assert "Root Cause" in written[0]
