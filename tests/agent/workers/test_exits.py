"""What a rank died of: its error file, its exit code, the kernel's word; and whom its log names."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from elasticrun.agent.workers import exits
from elasticrun.agent.workers.exits import NEAR_US, KillLog, OomKills, count_files
from elasticrun.wire.messages import Failure, FailureKind
from elasticrun.wire.types import MAX_TEXT
from tests.further import examples

LATER_US = 1_795_229_860_000_000
"""When a rank is reaped whose error file is of 1795229851 or the second after."""


def now_us() -> int:
    return time.time_ns() // 1000


def describe(path: Path | str, **more: Any) -> Failure:
    words: dict[str, Any] = {
        "host": "here", "rank": 5, "local_rank": 1, "pid": 77, "exitcode": 1, "message": "",
        "time_us": now_us(), "error_file": str(path), "kind": FailureKind.SCRIPT, "traceback": "",
    }  # fmt: skip
    stopping = more.pop("stopping", False)
    return exits.describe(Failure(**(words | more)), stopping=stopping)


def recorded(path: Path, monkeypatch) -> None:
    """An error file written by torch itself."""
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    try:
        raise ValueError("boom\nand more")
    except ValueError as error:
        ErrorHandler().record_exception(error)


@pytest.mark.slow
def test_a_file_that_torch_wrote(path: Path, monkeypatch) -> None:
    recorded(path, monkeypatch)
    stamp = int(json.loads(path.read_text())["message"]["extraInfo"]["timestamp"])
    os.utime(path, ns=(0, stamp * 1_000_000_000 + 250_000_000))  # torch may pause in between
    failure = describe(path, time_us=(stamp + 1) * 1_000_000)  # reaped after it was written
    assert failure.message == "ValueError: boom and more"
    assert failure.traceback.startswith("Traceback (most recent call last)")
    assert failure.traceback.endswith("and more")
    assert failure.kind is FailureKind.SCRIPT
    assert failure.error_file == str(path)
    assert failure.time_us == path.stat().st_mtime_ns // 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a rank has its error file."""
    return tmp_path / "error.json"


def write(path: Path, message: str, stack: str, timestamp: str) -> None:
    """As torch does."""
    extra = {"py_callstack": stack, "timestamp": timestamp}
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def test_the_time_is_the_files_when_the_rank_took_long_to_exit(path: Path) -> None:
    write(path, "m", "tb", "1795229851")
    assert describe(path, time_us=LATER_US).time_us == 1_795_229_851_000_000
    os.utime(path, ns=(0, 1_795_229_852_250_000_000))
    assert describe(path, time_us=LATER_US).time_us == 1_795_229_852_250_000
    assert describe(path, time_us=5).time_us == 5


def test_the_new_format(path: Path) -> None:
    path.write_text(json.dumps({"message": "it broke", "timestamp": 1_795_229_851}))
    failure = describe(path, time_us=LATER_US)
    assert (failure.message, failure.traceback) == ("it broke", "")
    assert failure.time_us == 1_795_229_851_000_000


def test_no_file() -> None:
    assert describe("").message == exits.NO_TRACEBACK
    failure = describe("/nowhere/error.json", exitcode=-9)
    assert failure.message == "Signal 9 (SIGKILL) received by PID 77"
    assert failure.error_file == ""
    assert failure.kind is FailureKind.SIGNAL
    assert describe("", exitcode=-63).message == "Signal 63 (<N/A>) received by PID 77"
    assert describe("", exitcode=-15, stopping=True).kind is FailureKind.STOPPED, "it is no cause"


def test_a_long_traceback_keeps_its_end(path: Path) -> None:
    write(path, "m" * 5000, "begin\n" + "x" * 100_000 + "\nTheError: end\n", "1")
    failure = describe(path)
    assert len(failure.traceback) == MAX_TEXT
    assert failure.traceback.startswith("begin\n")
    assert failure.traceback.endswith("\nTheError: end")
    assert len(failure.message) == exits.MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty, as on a disk that is full"),
        (b"\xff\xfe{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no message"),
        (b"{}", "no message"),
        (b'{"message": "%s"}' % (b"x" * exits.MAX_ERROR_FILE_BYTES), "longer than"),
    ],
)
def test_rubbish_is_named(path: Path, content: bytes, why: str) -> None:
    path.write_bytes(content)
    failure = describe(path)
    assert why in failure.message
    assert failure.error_file == str(path)


def test_what_is_no_plain_file_does_not_block(path: Path) -> None:
    os.mkfifo(path)
    assert "not a plain file" in describe(path).message
    assert "its error file cannot be read" in describe(path.parent).message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["message", "extraInfo", "py_callstack", "timestamp", "other"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None)
@given(data=json_values | st.dictionaries(st.just("message"), json_values, min_size=1))
def test_any_json_is_described(tmp_path_factory, data: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_text(json.dumps(data))
    failure = describe(path)
    assert failure.message
    assert "\n" not in failure.message
    assert len(failure.traceback) <= MAX_TEXT
    assert 0 < failure.time_us <= now_us()


# ---------------------------------------------------------------- the launcher's own error file


def test_the_launchers_copy_is_torchs(tmp_path: Path, monkeypatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    rank_file, own, theirs = (tmp_path / name for name in ("rank.json", "own.json", "torch.json"))
    recorded(rank_file, monkeypatch)
    failure = describe(rank_file, exitcode=3)
    assert exits.write_own(failure, {"TORCHELASTIC_ERROR_FILE": str(own)}) == str(own)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(theirs))
    ErrorHandler().dump_error_file(str(rank_file), 3)
    assert json.loads(own.read_text()) == json.loads(theirs.read_text())


def test_the_launchers_copy_of_a_failure_on_another_node(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text("an older one")
    failure = Failure(
        "there", 9, 1, 5, -11, 1_795_229_851_500_000, FailureKind.SIGNAL, "Signal 11", "tb",
        "/on/another/node/error.json",
    )  # fmt: skip
    exits.write_own(failure, {"TORCHELASTIC_ERROR_FILE": str(own)})
    message = json.loads(own.read_text())["message"]
    assert message == {
        "message": "Signal 11",
        "extraInfo": {"py_callstack": "tb", "timestamp": "1795229851"},
        "errorCode": -11,
    }
    assert list(tmp_path.iterdir()) == [own]


def test_no_copy_where_torchrun_makes_none(tmp_path: Path) -> None:
    own = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "own.json")}
    assert exits.write_own(describe(""), own) == ""
    assert exits.write_own(describe(""), {}) == ""
    assert exits.write_own_words("SignalException", "s", 1, {}) == ""
    cannot = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "no" / "such" / "folder")}
    assert exits.write_own_words("SignalException", "sentence", 1, cannot) == ""
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- out of memory


def test_the_kernels_count_explains_deaths_near_its_rise(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 4\noom_kill 3\n")
    kills = OomKills(lambda: [tmp_path / "missing", events])
    assert not kills.has_risen_near(NEAR_US)
    events.write_text("low 0\noom 5\noom_kill 5\n")
    assert kills.has_risen_near(2 * NEAR_US)
    assert kills.has_risen_near(2 * NEAR_US + 1000)
    assert not kills.has_risen_near(4 * NEAR_US)


def test_the_count_of_a_cgroup_that_was_entered_later(tmp_path: Path) -> None:
    """A scheduler, or a test, may put a running agent into another one."""
    old, new, host = (tmp_path / name for name in ("old", "new", "host"))
    old.write_text("oom_kill 3\n")
    host.write_text("oom_kill 9\n")
    own = [old, host]
    kills = OomKills(lambda: own)
    own[0] = new
    assert not kills.has_risen_near(NEAR_US), "the host's count is not new"
    new.write_text("oom_kill 0\n")
    assert not kills.has_risen_near(NEAR_US)
    new.write_text("oom_kill 1\n")
    assert kills.has_risen_near(2 * NEAR_US)
    assert not kills.has_risen_near(4 * NEAR_US)


def test_on_cgroup_v2_the_groups_own_count_comes_first() -> None:
    """`memory.events` counts what died in all groups below, in other people's jobs."""
    own, below, *others = count_files("0::/user/job\n")
    assert own == Path("/sys/fs/cgroup/user/job/memory.events.local")
    assert below == Path("/sys/fs/cgroup/user/job/memory.events")
    assert others == [Path("/proc/vmstat")]


def test_this_hosts_count_can_be_read_and_none_explains_nothing(tmp_path: Path) -> None:
    for kills in (OomKills(), OomKills(lambda: [tmp_path / "missing"])):
        assert not kills.has_risen_near(now_us())


def test_oom_is_told(tmp_path: Path, monkeypatch) -> None:
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 0\n")
    kills = OomKills(lambda: [events])
    monkeypatch.setattr(exits, "oom_watcher", lambda: kills)
    events.write_text("oom_kill 1\n")
    failure = describe("", exitcode=-9)
    assert failure.kind is FailureKind.OOM
    assert "out of memory" in failure.message


KILLED = Failure("h", 3, 1, 4711, -9, 1, FailureKind.SIGNAL, "Signal 9", "", "")


def looked(root: Path, caplog, level: int) -> list[str]:
    async def twice() -> None:
        killers = KillLog(root)
        await killers.log_killer(KILLED)
        await killers.log_killer(KILLED)

    with caplog.at_level(level, "elasticrun"):
        asyncio.run(twice())
    return caplog.messages


def test_a_log_that_cannot_be_read_is_told_once(tmp_path: Path, caplog) -> None:
    assert looked(tmp_path, caplog, logging.WARNING) == [
        "rank 3: the cause of the kill is unknown: no OOM kill was counted, and the kernel's "
        "log cannot be read here (no such file or directory); read it as root with dmesg"
    ]


def test_a_log_that_names_nobody_is_no_matter(tmp_path: Path, caplog) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").touch()
    assert looked(tmp_path, caplog, logging.WARNING) == []
    assert looked(tmp_path, caplog, logging.INFO) != []
