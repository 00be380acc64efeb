"""The failure summary against torch's own ChildFailedError, character by character."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from elasticrun.agent.farewell import child_failed, format_failures
from elasticrun.agent.workers.exits import describe
from elasticrun.wire.messages import Failure, FailureKind

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
def test_the_text_is_torchs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        describe(
            host=socket.getfqdn(), rank=rank, local_rank=i, pid=100 + i, exitcode=code,
            time_us=(NOON + 100) * SECOND if file else NOON * SECOND + 500_000,
            error_file=file, stopping=False,
        )
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


def test_the_root_is_the_one_handed_in_whatever_the_times() -> None:
    early, late = failure(0), failure(1, time_us=(NOON + 9) * SECOND)
    text = format_failures("a.py", [early, late], late)
    assert text.index("Root Cause") < text.index("m1")
    assert text.index("m0") < text.index("Root Cause")


def test_a_root_of_another_node_is_added() -> None:
    text = format_failures("a.py", [failure(0)], failure(7, host="elsewhere"))
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
    assert "Failures:\n  the same on ranks 1, 2 and 5\n---" in text
    assert text.count("ValueError: boom") == 1
    other = failure(3, message="OSError: another", traceback="OSError: another")
    mixed = format_failures("a.py", [other, alike[1], root], root)
    assert "OSError: another" in mixed
    assert "  the same on rank 1\n" in mixed
