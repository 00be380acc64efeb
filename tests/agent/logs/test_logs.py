"""The output of ranks: the tree of files against torch's own, and the copy for people."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrun.agent.logs import console as console_module
from elasticrun.agent.logs.console import ConsoleWriter
from elasticrun.agent.logs.output import KEPT_FOR, LogFolder, LogsUnusable, RankOutput, sweep
from elasticrun.agent.logs.tail import MAX_LINE_BYTES, READ_BYTES, Reader, Tail
from elasticrun.config import LogPlan
from tests.harness import LIMIT, await_true, until_file


class Pipe:
    """A console that a test reads: blocking reads, with a limit."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        self.seen = b""

    def until(self, needle: bytes) -> bytes:
        """Read until `needle` was seen; everything seen so far."""
        timer = threading.Timer(LIMIT, self.close_writer)
        timer.start()
        try:
            while needle not in self.seen:
                data = os.read(self.out, 65536)
                assert data, f"{needle!r} never came, only {self.seen[-500:]!r}"
                self.seen += data
        finally:
            timer.cancel()
        return self.seen

    def rest(self) -> bytes:
        """What is in the pipe after all writers have closed it."""
        self.close_writer()
        while data := os.read(self.out, 65536):
            self.seen += data
        return self.seen

    def close_writer(self) -> None:
        if self.into >= 0:
            os.close(self.into)
            self.into = -1

    def close(self) -> None:
        self.close_writer()
        os.close(self.out)


Pipes = tuple[Pipe, Pipe]


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    both = Pipe(), Pipe()
    yield both
    for pipe in both:
        pipe.close()


def make_envs(nproc: int, run_id: str = "job") -> dict[int, dict[str, str]]:
    return {
        i: {
            "RANK": str(i + 4),
            "LOCAL_RANK": str(i),
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        for i in range(nproc)
    }


def make(plan: LogPlan, pipes: Pipes, nproc: int = 2, **more: float) -> RankOutput:
    return RankOutput(
        plan, "job", "default", nproc, stdout_fd=pipes[0].into, stderr_fd=pipes[1].into, **more
    )


class Shown:
    """What ranks print in a first life, and the two consoles on which it is shown."""

    def __init__(
        self, folder: Path, pipes: Pipes, nproc: int, more: dict[str, float], plan: Any
    ) -> None:
        self.out, self.err = pipes
        plan = {"log_dir": str(folder), "tee_all": 1, **plan}
        self.output = make(LogPlan(**plan), pipes, nproc, **more)
        self.logs = self.output.open_attempt(0, make_envs(nproc))
        self.stdout, self.stderr = Path(self.logs[0].stdout), Path(self.logs[0].stderr)

    def at_end(self) -> bytes:
        """All that stdout's console showed."""
        self.output.close(LIMIT)
        return self.out.rest()


Show = Callable[..., Shown]


@pytest.fixture
def shown(tmp_path: Path, pipes: Pipes, caplog) -> Show:
    """Stdout of one rank, by default."""
    caplog.set_level("WARNING", logger="elasticrun")

    def made(nproc: int = 1, *, at: Pipes = pipes, more: Any = None, **plan: Any) -> Shown:
        return Shown(tmp_path, at, nproc, more or {}, plan)

    return made


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch) -> Path:
    """Where folders are made that nobody has named."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


PLANS = {
    "nothing": {},
    "redirect all": {"redirects_all": 3},
    "redirect out of one": {"redirects": {1: 1}},
    "tee err": {"tee_all": 2},
    "tee and redirect": {"redirects_all": 1, "tee": {0: 2}},
    "filter": {"local_ranks_filter": (1,)},
    "filter and tee": {"tee_all": 3, "local_ranks_filter": (0,)},
    "filter and redirect": {"redirects_all": 2, "local_ranks_filter": (0,)},
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("log_dir", ["given", "none", "/dev/null"])
def test_places_are_torchs(
    name: str, log_dir: str, tmp_path: Path, pipes: Pipes, monkeypatch
) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    words = PLANS[name]
    base = {"given": str(tmp_path / "logs"), "none": None}.get(log_dir, log_dir)
    nproc = 2

    def std(key: str) -> object:
        if key in words:
            return {rank: Std(value) for rank, value in words[key].items()}
        return Std(words.get(f"{key}_all", 0))

    envs = make_envs(nproc)
    shown = words.get("local_ranks_filter")
    theirs = DefaultLogsSpecs(
        base, std("redirects"), std("tee"), set(shown) if shown else None
    ).reify(envs)
    our_envs = make_envs(nproc)
    output = make(LogPlan(log_dir=base, **words), pipes)
    ours = output.open_attempt(0, our_envs)
    output.close(LIMIT)

    def relative(path: str) -> str:
        return path.partition("/attempt_0/")[2] or path

    for rank in range(nproc):
        assert relative(ours[rank].stdout) == relative(theirs.stdouts[rank])
        assert relative(ours[rank].stderr) == relative(theirs.stderrs[rank])
        error_file = envs[rank]["TORCHELASTIC_ERROR_FILE"]
        assert relative(our_envs[rank]["TORCHELASTIC_ERROR_FILE"]) == relative(error_file)
        assert ours[rank].error_file == our_envs[rank]["TORCHELASTIC_ERROR_FILE"]


def test_the_runs_folder_is_named_like_torchs(tmp_path: Path, pipes: Pipes) -> None:
    output = make(LogPlan(log_dir=str(tmp_path / "a" / "b")), pipes)
    logs = output.open_attempt(3, make_envs(1))
    (run,) = (tmp_path / "a" / "b").iterdir()
    assert run.name.startswith("job_")
    assert len(run.name) == len("job_") + 8
    assert logs[0].error_file == str(run / "attempt_3" / "0" / "error.json")


def test_an_id_with_slashes_makes_one_folder(tmp_path: Path) -> None:
    output = RankOutput(LogPlan(log_dir=str(tmp_path)), "../a/b", "default", 1)
    output.open_attempt(0, make_envs(1))
    (run,) = tmp_path.iterdir()
    assert run.name.startswith(".._a_b_")


def test_earlier_attempts_stay(tmp_path: Path, pipes: Pipes) -> None:
    output = make(LogPlan(log_dir=str(tmp_path), redirects_all=3), pipes, nproc=1)
    files = []
    for attempt in (0, 1, 1):
        files.append(Path(output.open_attempt(attempt, make_envs(1))[0].stdout))
        files[-1].write_text(str(len(files)))
    output.close(LIMIT)
    assert [file.read_text() for file in files] == ["1", "2", "3"]
    assert [file.parent.parent.name for file in files] == ["attempt_0", "attempt_1", "attempt_1.1"]


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"log_dir": "file"}, "is a file"),
        ({"log_dir": "file/logs"}, "^no folder can be created in .* for logs: "),
        (
            {"log_dir": None, "logs_specs": "nowhere"},
            "--logs-specs nowhere cannot be used: no entry point",
        ),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    plan: dict[str, Any], why: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(LogsUnusable, match=why) as caught:
        RankOutput(LogPlan(**plan), "job", "default", 1).prepare()
    assert "\n" not in str(caught.value)


def test_tee_copies_lines_with_their_prefix(shown: Show) -> None:
    made = shown(2, tee_all=3)
    with open(made.logs[0].stdout, "wb") as zero, open(made.logs[1].stderr, "wb") as one:
        zero.write(b"first\nsec")
        zero.flush()
        assert made.out.until(b"first\n") == b"[default0]:first\n"
        zero.write(b"ond\r10%\r\nlast")
        one.write(b"oops\n")
    assert made.err.until(b"oops\n") == b"[default1]:oops\n"
    lines = [b"first", b"second", b"10%", b"last"]
    assert made.at_end() == b"".join(b"[default0]:" + line + b"\n" for line in lines)


def test_lines_arrive_while_the_rank_lives(shown: Show) -> None:
    made = shown()
    script = "import sys\nfor line in sys.stdin: print('heard', line, end='', flush=True)"
    with made.stdout.open("wb") as file:
        rank = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=file, text=True
        )
    for word in ("one", "two", "three"):
        rank.stdin.write(f"{word}\n")
        rank.stdin.flush()
        made.out.until(f"[default0]:heard {word}\n".encode())
    rank.stdin.close()
    rank.wait(LIMIT)
    made.output.rank_exited(0)
    assert made.at_end().count(b"\n") == 3


def test_what_a_rank_leaves_behind_does_not_hold_the_end_up(shown: Show) -> None:
    made = shown()
    with made.stdout.open("wb", buffering=0) as still_open:
        still_open.write(b"rank\n")
        made.output.rank_exited(0)
        still_open.write(b"grandchild")
        assert made.at_end() == b"[default0]:rank\n[default0]:grandchild\n"


def test_the_template(shown: Show) -> None:
    template = "${role_name}|${local_rank}|${rank}|${hostname}|${other}> "
    made = shown(2, prefix_template=template)
    Path(made.logs[1].stdout).write_text("x\n")
    host = os.uname().nodename
    assert made.at_end().decode() == f"default|1|5|{host}|${{other}}> x\n"


def test_lines_of_one_life_come_before_those_of_the_next(shown: Show) -> None:
    made = shown()
    for attempt in range(20):
        logs = made.output.open_attempt(attempt, make_envs(1)) if attempt else made.logs
        Path(logs[0].stdout).write_text(f"{attempt}\nend of {attempt}")
        made.output.rank_exited(0)
    expected = [f"[default0]:{text}" for i in range(20) for text in (str(i), f"end of {i}")]
    assert made.at_end().decode().splitlines() == expected


def test_duplicate_filters(shown: Show) -> None:
    made = shown(2, tee_all=3, stdout_filters=("loss", "a,b"), stderr_filters=("warn",))
    made.stdout.write_text("loss 1\nother\nsee a,b\n")
    Path(made.logs[1].stderr).write_text("loss 2\nwarning\n")
    assert b"other" in made.at_end()
    attempt = made.stdout.parent.parent
    out = (attempt / "filtered_stdout.log").read_text()
    assert out == "[default0]:loss 1\n[default0]:see a,b\n"
    assert (attempt / "filtered_stderr.log").read_text() == "[default1]:warning\n"


def test_no_inotify_is_made_up_for(tmp_path: Path, pipes: Pipes, caplog) -> None:
    def none_left() -> object:
        raise OSError(24, "Too many open files")

    output = make(LogPlan(log_dir=str(tmp_path), tee_all=1), pipes, nproc=1)
    output._readers[1].make_inotify = none_left
    with caplog.at_level("WARNING", logger="elasticrun"):
        logs = output.open_attempt(0, make_envs(1))
        with open(logs[0].stdout, "wb", buffering=0) as file:
            for number in range(3):
                file.write(b"%d\n" % number)
                pipes[0].until(b"[default0]:%d\n" % number)
        output.close(LIMIT)
    assert "no inotify for log files (Too many open files)" in caplog.text


def test_a_log_that_its_script_cuts_is_read_from_the_start(shown: Show) -> None:
    made = shown()
    made.stdout.write_text("a long line before\n")
    made.out.until(b"before\n")
    os.truncate(made.stdout, 0)
    with made.stdout.open("ab", buffering=0) as file:
        file.write(b"after\n")
        made.out.until(b"after\n")
    assert made.at_end() == b"[default0]:a long line before\n[default0]:after\n"


def test_a_line_without_an_end_is_passed_on_in_pieces(shown: Show) -> None:
    made = shown()
    size = 1_000_000
    made.stdout.write_bytes(b"x" * size + b"\nend\n")
    text = made.out.until(b":end\n")
    made.output.close(LIMIT)
    assert text.count(b"x") == size
    assert max(map(len, text.splitlines())) < READ_BYTES + MAX_LINE_BYTES + 100


@pytest.mark.slow
def test_a_frozen_console_drops_lines_and_counts_them(shown: Show, caplog) -> None:
    """Nobody reads the pipe: the file is read on, all filters get their lines, close returns."""
    made = shown(stdout_filters=("needle",), more={"patience": 0.05})
    made.stdout.write_text("".join(f"line {number}\n" for number in range(50_000)) + "needle\n")
    filtered = made.stdout.parent.parent / "filtered_stdout.log"
    until_file(filtered, lambda text: text.endswith("needle\n"))
    made.output.rank_exited(0)
    cut = made.output.close(0.2)
    assert 0 < cut <= made.stdout.stat().st_size
    amount = f"{cut / 1e6:.1f} MB"
    said = f"{amount} of the ranks' stdout were not shown, because nobody read the console"
    assert said in caplog.text
    assert f"{made.stdout} ({amount})" in caplog.text
    assert filtered.read_text() == "[default0]:needle\n"


def test_a_long_rest_is_progress_at_each_turn(tmp_path: Path) -> None:
    """`stop` gives up on a reader that makes none, and that is not one which reads on."""
    reader = Reader()
    seen: list[int] = []

    class Console:
        is_over = is_terminal = False

        def put(self, _lines: list[bytes], _source: Tail) -> None:
            seen.append(reader.progress)

    path = tmp_path / "stdout.log"
    path.write_bytes(b"line\n" * READ_BYTES)
    tail = Tail(0, str(path), b"", Console())
    tail.fd = os.open(path, os.O_RDONLY)
    reader._tails.append(tail)
    reader._finish([tail])
    assert seen == [turn * READ_BYTES for turn in range(5)]


def fill(pipe: Pipe) -> int:
    """Have nothing more go into it; how many bytes it took."""
    os.set_blocking(pipe.into, False)
    filled = 0
    for piece in (b"." * 4095 + b"\n", b"\n"):
        with contextlib.suppress(BlockingIOError):
            while True:
                filled += os.write(pipe.into, piece)
    os.set_blocking(pipe.into, True)
    return filled


def test_a_console_that_thaws_says_how_many_lines_are_missing(pipes: Pipes) -> None:
    full = fill(pipes[0])
    console = ConsoleWriter(pipes[0].into, capacity=10, patience=0.05)
    console.put([b"%06d\n" % 0])
    await_true(lambda: not console._lines, "writer that waits for the console")
    console.put(b"%06d\n" % number for number in range(1, 1000))
    dropped = console.dropped
    assert dropped > 0
    shown = 1000 - dropped
    text = pipes[0].until(b"%06d\n" % (shown - 1))
    assert text[full:].split() == [b"%06d" % number for number in range(shown)]
    console.put([b"thawed\n"])
    text = pipes[0].until(b"thawed\n")
    assert (
        b"elasticrun: %d lines were not shown: the console was frozen\nthawed\n" % dropped in text
    )
    assert console.close(LIMIT) == dropped


def test_a_console_is_not_frozen_while_this_process_stands_still(pipes: Pipes, monkeypatch) -> None:
    """Its reader may have been suspended with it."""
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(console_module, "time", clock)
    fill(pipes[0])
    console = ConsoleWriter(pipes[0].into, capacity=1, patience=1.0)
    putting = threading.Thread(target=console.put, args=([b"a\n", b"b\n", b"c\n"],))
    putting.start()
    await_true(lambda: console.is_awaited, "line that waits for room")
    with console._changed:
        ahead[0] = 3600.0
    pipes[0].until(b"c\n")
    putting.join(LIMIT)
    assert console.close(LIMIT) == 0


@pytest.mark.slow
def test_a_slow_console_loses_nothing(pipes: Pipes) -> None:
    console = ConsoleWriter(pipes[0].into, capacity=10, patience=LIMIT)
    writer = threading.Thread(target=lambda: console.put(b"%d\n" % n for n in range(30_000)))
    writer.start()
    text = pipes[0].until(b"\n29999\n")
    writer.join(LIMIT)
    assert console.close(LIMIT) == 0
    assert text.split() == [b"%d" % n for n in range(30_000)]


@pytest.mark.slow
def test_a_reader_that_waits_for_its_console_is_no_hung_disk(shown: Show, caplog) -> None:
    made = shown(more={"patience": LIMIT})
    os.truncate(made.stdout, 40 * 1024 * 1024)  # more than the queue takes
    await_true(lambda: made.output._consoles[1].is_awaited, "reader that waits for room")
    made.output.hurry(4.0)
    assert made.output.close(1.5) > 0
    assert "the disk does not respond" not in caplog.text
    assert "because the time limit was reached" in caplog.text
    os.close(
        made.out.out
    )  # the write that still waits ends, before another test has its descriptor
    made.out.out = os.open("/dev/null", os.O_RDONLY)
    writer = made.output._consoles[1]._thread
    assert writer is not None
    writer.join(LIMIT)
    assert not writer.is_alive()


class SlowReader(threading.Thread):
    """Reads a pipe to its end, `size` bytes at a time and with a rest after each."""

    def __init__(self, pipe: Pipe, size: int, rest: float) -> None:
        super().__init__()
        self._pipe, self._size, self._rest = pipe, size, rest
        self.hurry = threading.Event()

    def run(self) -> None:
        while data := os.read(self._pipe.out, self._size):
            self._pipe.seen += data
            self.hurry.wait(self._rest)  # the pace of a slow reader; no rest once it hurries


@pytest.mark.slow
def test_all_is_shown_as_long_as_somebody_reads(shown: Show, caplog) -> None:
    """A reader that takes minutes is no frozen one: neither the whole time counts, nor that one
    write waits for room in the pipe longer than the console's patience."""
    made = shown(tee_all=3, more={"patience": 1.0})
    filled = fill(made.out)
    made.stdout.write_bytes(b"line\n" * 2_000)
    made.stderr.write_bytes(b"the cause\n")
    slow = SlowReader(made.out, 512, 0.2)  # a page, for which a write waits: in 1.6 s
    slow.start()
    made.output.rank_exited(0)
    ending = threading.Thread(target=made.output.close, args=(1.0,))
    ending.start()
    made.err.until(b"[default0]:the cause\n")  # which no stdout holds up
    await_true(lambda: len(made.out.seen) > 8 * 1024, "two pages, read in more than three seconds")
    slow.hurry.set()
    ending.join(LIMIT)
    made.out.close_writer()
    slow.join(LIMIT)
    assert made.out.seen[filled:] == b"[default0]:line\n" * 2_000
    assert caplog.text == ""


@pytest.mark.slow
def test_when_time_is_up_stderr_is_first(shown: Show, pipes: Pipes, caplog) -> None:
    """Both go to one terminal, as with `2>&1 | less`, which is read on only after the signal."""
    made = shown(tee_all=3, at=(pipes[0], pipes[0]), more={"patience": LIMIT})
    size = 40 * 1024 * 1024
    os.truncate(made.stdout, size)  # more than is ever shown, in lines without an end
    console = made.output._consoles[1]
    await_true(lambda: console._lines or console._writing, "stdout under way")
    made.stderr.write_bytes(b"the cause\n" * 20_000)
    made.output.rank_exited(0)
    cut: list[int] = []
    ending = threading.Thread(target=lambda: cut.append(made.output.close(LIMIT)))
    ending.start()
    made.output.hurry(10.0)  # a busy machine may need seconds for stderr
    reader = SlowReader(pipes[0], 4096, 0.001)
    reader.start()
    await_true(lambda: pipes[0].seen.count(b"the cause") == 20_000, "all of stderr")
    reader._rest = LIMIT  # nobody reads any more
    ending.join(LIMIT)
    reader.hurry.set()
    pipes[0].close_writer()
    reader.join(LIMIT)
    assert 0 < cut[0] < size
    assert "of the ranks' stdout were not shown, because the time limit was reached" in caplog.text
    assert f"it is all in these files: {made.stdout} (" in caplog.text


def test_a_console_that_is_closed_stops_nobody(shown: Show) -> None:
    made = shown()
    os.close(made.out.out)
    made.out.out = os.open("/dev/null", os.O_RDONLY)
    made.stdout.write_text("line\n" * 100_000)
    made.output.close(LIMIT)


PLUGIN = """
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class Mine(LogsSpecs):
        def reify(self, envs):
            name = self._root_log_dir + "/rank{RANK}.txt"
            paths = {rank: name.format(**env) for rank, env in envs.items()}
            return LogsDest(
                stdouts=paths,
                stderrs={rank: "" for rank in envs},
                tee_stdouts={0: paths[0]},
                error_files={rank: path + ".json" for rank, path in paths.items()},
            )

        @property
        def root_log_dir(self):
            return self._root_log_dir
"""


def test_a_plug_in_decides(tmp_path: Path, pipes: Pipes, monkeypatch, caplog) -> None:
    about = tmp_path / "h7plug-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: h7plug\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = h7plug:Mine\n")
    (tmp_path / "h7plug.py").write_text(textwrap.dedent(PLUGIN))
    monkeypatch.syspath_prepend(str(tmp_path))
    output = make(LogPlan(log_dir=str(tmp_path), logs_specs="mine", tee_all=1), pipes)
    envs = make_envs(2)
    with caplog.at_level("WARNING", logger="elasticrun"):
        logs = output.open_attempt(0, envs)
    assert "loading torch in the agent for --logs-specs mine" in caplog.text
    assert logs[0].stdout == str(tmp_path / "rank4.txt")
    assert logs[1].error_file == str(tmp_path / "rank5.txt.json")
    assert envs[1]["TORCHELASTIC_ERROR_FILE"] == logs[1].error_file
    for rank in (0, 1):
        Path(logs[rank].stdout).write_text(f"of {rank}\n")
    output.close(LIMIT)
    assert pipes[0].rest() == b"[default0]:of 0\n"


TEE = LogPlan(log_dir=None, tee_all=3)
BOTH = ["error.json", "stdout.log"]


@pytest.mark.parametrize(
    ("plan", "used", "well", "kept"),
    [
        (LogPlan(log_dir=None), False, False, []),
        (LogPlan(log_dir=None), True, False, ["error.json"]),
        (LogPlan(log_dir=None), True, True, []),
        (TEE, True, True, []),
        (TEE, True, False, BOTH),
        (LogPlan(log_dir=None, redirects_all=1), True, True, BOTH),
        (LogPlan(log_dir=None, tee_all=3, local_ranks_filter=(1,)), True, True, BOTH),
    ],
)
def test_what_is_kept_of_a_folder_that_nobody_asked_for(
    plan: LogPlan, used: bool, well: bool, kept: list[str], tmp: Path, pipes: Pipes
) -> None:
    output = make(plan, pipes)
    logs = output.open_attempt(0, make_envs(1))
    assert len(list(tmp.iterdir())) == 1
    if used:
        Path(logs[0].error_file).write_text("{}")  # of a life before
    if logs[0].stdout:
        Path(logs[0].stdout).write_text("a line\n")
    output.close(LIMIT)
    output.tidy(ended_well=well)
    files = [path for path in tmp.rglob("*") if path.is_file() and path.stat().st_size]
    assert sorted(path.name for path in files) == kept
    assert bool(list(tmp.iterdir())) == bool(kept)


def test_folders_of_killed_runs_are_swept(tmp: Path) -> None:
    living, empty, fresh, old = (LogFolder() for _ in range(4))
    kept = LogFolder()
    for folder in (fresh, old, kept):
        (Path(folder.path) / "stdout.log").write_text("a line\n")
    os.utime(Path(old.path) / "stdout.log", (1, 1))
    kept.leave(())
    os.utime(Path(kept.path) / "stdout.log", (1, 1))
    for folder in (empty, fresh, old):
        os.close(folder._fd)  # as the kernel does it
    torchruns = tmp / "torchelastic_abcdefgh"
    torchruns.mkdir()
    sweep()
    left = {living.path, fresh.path, kept.path, str(torchruns)}
    assert {str(path) for path in tmp.iterdir()} == left
    sweep(time.time() + 2 * KEPT_FOR)
    assert {str(path) for path in tmp.iterdir()} == left - {fresh.path}
    living.leave(())
