"""The master as a process: how it starts, what it survives, when it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from elasticrun.config import EXIT_FAILED, EXIT_PORT_TAKEN, EXIT_USAGE, Identity, MasterConfig
from elasticrun.host import user_folder
from elasticrun.host.runs.index import all_runs, runs_root
from elasticrun.wire import messages as m
from elasticrun.wire.rpc.channel import attend, get_status, open_channel
from elasticrun.wire.types import Endpoint, dumps
from tests import aio
from tests.further import further
from tests.harness import await_true
from tests.master.people import LIMIT, SPEC, enter, hear, hello

pytestmark = pytest.mark.slow

STRANGERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


@dataclasses.dataclass
class Process:
    """A master that an agent (this test) has started."""

    popen: subprocess.Popen[str]
    answer: dict[str, Any]
    lifeline: int

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.answer["port"])

    def status(self) -> m.JobStatus:
        return aio.run(get_status(self.endpoint, LIMIT))

    def cut(self) -> None:
        os.close(self.lifeline)
        self.lifeline = -1

    def ended(self) -> tuple[int, str]:
        _, said = self.popen.communicate(timeout=LIMIT)
        return self.popen.returncode, said


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder of this test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("ELASTICRUN_RUNS", str(tmp_path / "runs"))
    return tmp_path / "elasticrun"


def _spawn(config: MasterConfig, lifeline: tuple[int, int] | None = None) -> Process:
    config_read, config_write = os.pipe()
    ready_read, ready_write = os.pipe()
    life_read, life_write = lifeline or os.pipe()
    config = dataclasses.replace(config, ready_fd=ready_write, lifeline_fd=life_read)
    popen = subprocess.Popen(
        [sys.executable, "-m", "elasticrun.master", "--config-fd", str(config_read)],
        pass_fds=(config_read, ready_write, life_read),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for fd in (config_read, ready_write, life_read):
        os.close(fd)
    with open(config_write, "w") as pipe:
        pipe.write(dumps(config))
    with open(ready_read) as pipe:
        line = pipe.readline()
    return Process(popen, json.loads(line) if line else {}, life_write)


@contextlib.contextmanager
def started(**changes: Any) -> Iterator[Process]:
    """A master of job `job` on a free port of loopback; killed at the end if it still runs."""
    made = _spawn(
        dataclasses.replace(MasterConfig(Identity("job"), "127.0.0.1", 0, SPEC), **changes)
    )
    try:
        yield made
    finally:
        if made.lifeline >= 0:
            made.cut()
        made.popen.kill()
        made.popen.communicate()


def _page(process: Process, path: str) -> tuple[int, bytes]:
    page = http.client.HTTPConnection("127.0.0.1", process.answer["status_port"], timeout=LIMIT)
    with contextlib.closing(page):
        page.request("GET", path)
        answer = page.getresponse()
        return answer.status, answer.read()


def test_it_serves_and_ends_with_its_owner(home: Path) -> None:
    with started() as master:
        page = master.status()
        assert page.job_id == "job"
        assert page.reason, "a wait without a reason"
        assert _page(master, "/healthz") == (200, b"ok\n")
        master.cut()
        assert master.ended() == (0, "")


def test_it_ignores_what_every_process_of_a_job_is_sent(home: Path) -> None:
    with started() as master:
        for number in (*STRANGERS, signal.SIGUSR2):
            master.popen.send_signal(number)
        assert master.status().job_id == "job"
        assert master.popen.poll() is None


def test_a_taken_port_is_one_sentence_and_a_code(home: Path) -> None:
    with started() as first, started(port=first.answer["port"]) as second:
        code, said = second.ended()
        assert code == second.answer["exit_code"] == EXIT_PORT_TAKEN
        assert "another process listens there" in second.answer["error"]
        assert said == ""
        assert first.status().job_id == "job"


def test_it_ends_when_no_agent_comes(home: Path) -> None:
    lost = structs.replace(SPEC, master_lost_timeout=0.2)
    with started(spec=lost) as master:
        code, said = master.ended()
        assert code == EXIT_FAILED
        assert said == ""


async def test_with_outlive_it_stays_for_those_who_are_attached(home: Path) -> None:
    with started(outlive=True) as master:
        async with open_channel(master.endpoint) as channel:
            stream = attend(channel)
            assert isinstance(await enter(stream, hello()), m.Welcome)
            master.cut()
            await stream.send(m.Beat(1))
            while await hear(stream) != m.Echo(1):
                pass
        code, _ = master.ended()
        assert code == 0


def test_a_job_that_is_over_ends_it_with_the_outcome(home: Path) -> None:
    """Fixed nodes, no restarts: the only node leaves, the real brain ends the job."""
    spec = structs.replace(SPEC, min_nodes=1, max_nodes=1, max_restarts=0)

    async def leave(master: Process) -> list[m.Order]:
        heard: list[m.Order] = []
        async with open_channel(master.endpoint) as channel:
            stream = attend(channel)
            await enter(stream, hello(spec=spec))
            await stream.send(m.Join(Endpoint("127.0.0.1", 1)))
            while not (heard and isinstance(heard[-1], m.Start)):
                order = await hear(stream)
                assert order is not None
                heard.append(order)
            await stream.send(m.Running(heard[-1].round, (1, 2)))
            await stream.send(m.Finished(heard[-1].round))
            while (order := await hear(stream)) is not None:
                heard.append(order)
                if isinstance(order, m.End):
                    await stream.close()
        return heard

    with started(spec=spec) as master:
        heard = aio.run(leave(master))
        assert [order.exit_code for order in heard if isinstance(order, m.End)] == [0]
        assert master.ended()[0] == 0
    (kept,) = all_runs(runs_root(os.environ))
    job, result = kept.job(), kept.result()
    assert job is not None
    assert result is not None
    assert (job.name, job.id, result.state, result.nodes) == ("job", "job", "succeeded", 1)
    texts = [json.loads(line)["text"] for line in (kept.path / "events.jsonl").open()]
    assert texts[-1] == "the job is over: every rank exited with 0"


def _listed(home: Path, master: Process) -> list[user_folder.Published]:
    """What the user's folder says, once this master (a thread of it) has written its file."""
    found: list[user_folder.Published] = []

    def listed() -> bool:
        with contextlib.suppress(OSError):
            found[:] = [p for p in user_folder.published(home) if p.pid == master.popen.pid]
        return bool(found)

    await_true(listed, "entry of this master")
    return found


def test_it_is_found_in_the_run_folder_and_leaves_nothing_of_its_own(home: Path) -> None:
    with started() as killed:
        _listed(home, killed)
        killed.popen.kill()
        killed.popen.wait()
        (stale,) = home.iterdir()
    with started() as master:
        found = _listed(home, master)
        assert not stale.exists()
        assert [(entry.job_id, entry.pid) for entry in found] == [("job", master.popen.pid)]
        assert found[0].endpoint == master.endpoint
        assert home.stat().st_mode & 0o777 == 0o700
        master.cut()
        master.ended()
    kept = [path.name for path in home.iterdir()]
    assert kept == [f"dead-{stale.name}"], "of the killed one, for an agent that looks late"


def test_a_job_is_as_old_as_its_first_master_that_was_killed_here(home: Path) -> None:
    with started() as killed:
        (before,) = _listed(home, killed)
        killed.popen.kill()
        killed.popen.wait()
    with started(port=before.port) as master:  # whoever looked would take the old file away
        await_true(lambda: list(home.glob(f"master-{master.popen.pid}-*.json")), "its file")
        (entry,) = user_folder.published(home)
        assert entry.began == before.began


@pytest.mark.parametrize("text", ["", "{}", "[1]", "nonsense", '{"job_id": 1}'])
def test_a_bad_configuration_is_a_sentence(text: str) -> None:
    read, write = os.pipe()
    with open(write, "w") as pipe:
        pipe.write(text)
    done = subprocess.run(
        [sys.executable, "-m", "elasticrun.master", "--config-fd", str(read)],
        pass_fds=(read,),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    os.close(read)
    assert done.returncode == EXIT_USAGE
    assert "not a master's configuration" in done.stderr
    assert "Traceback" not in done.stderr


def test_by_hand_it_ends_on_sigterm_with_a_sentence_for_a_taken_port(home: Path) -> None:
    code = (
        "import sys; from elasticrun.config import Identity, MasterConfig;"
        "from elasticrun.master.main import main;"
        "sys.exit(main(MasterConfig(Identity('job'), '127.0.0.1', int(sys.argv[1]), None)))"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", code, str(port)], capture_output=True, text=True, timeout=LIMIT
        )
    assert done.returncode == EXIT_PORT_TAKEN
    assert done.stderr.count("\n") == 1
    assert "another process listens there" in done.stderr
    with subprocess.Popen(
        [sys.executable, "-c", code, "0"], stderr=subprocess.PIPE, text=True
    ) as popen:
        assert "serving job 'job'" in popen.stderr.readline()
        popen.send_signal(signal.SIGTERM)
        said = popen.stderr.read()
        assert popen.wait(LIMIT) == 128 + signal.SIGTERM
    assert "SIGTERM" in said
    assert "Traceback" not in said


def test_a_folder_of_the_users_does_not_stand_in_for_a_library(home: Path, tmp_path: Path) -> None:
    (tmp_path / "cwd" / "grpc").mkdir(parents=True)
    (tmp_path / "cwd" / "grpc" / "__init__.py").write_text("raise SystemExit('the wrong grpc')")
    (tmp_path / "cwd" / "json.py").write_text("raise SystemExit('the wrong json')")
    with contextlib.chdir(tmp_path / "cwd"), started() as master:
        assert master.status().job_id == "job"


def test_an_idle_master_sleeps(home: Path) -> None:
    """Nobody is attached and nothing is due: the loop comes to rest and is not woken at all, even
    after the page has been read. (gRPC's own threads wake some ten times a second in all.)"""
    with started() as master:
        assert master.status()
        assert _page(master, "/status")[0] == 200
        with contextlib.suppress(subprocess.TimeoutExpired):
            master.popen.wait(6)  # past uvicorn's keep-alive of the connection just closed

        process = psutil.Process(master.popen.pid)  # counts for the thread of the loop alone

        def rests() -> bool:
            before = process.num_ctx_switches().voluntary
            with contextlib.suppress(subprocess.TimeoutExpired):
                master.popen.wait(4)
            assert master.popen.returncode is None
            return process.num_ctx_switches().voluntary - before <= 2

        # a master that stood still does late what was due; memory that it has to wait for counts
        await_true(rests, "rest of the loop")


# ---------------------------------------------------------------- many real sessions


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "idle_sessions.py"


def measure(
    tmp_path: Path, sessions: int, seconds: int, limit: float, *more: str
) -> dict[str, float]:
    """What the benchmark finds, whether or not its limits held."""
    target = tmp_path / "found.json"
    words = (f"--sessions={sessions}", f"--seconds={seconds}", f"--json={target}", *more)
    done = subprocess.run(
        (sys.executable, str(BENCHMARK), *words), capture_output=True, text=True, timeout=limit
    )
    assert target.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, float] = {
        name: value
        for name, value in json.loads(target.read_text()).items()
        if isinstance(value, float)
    }
    return found


def nobody_was_lost(found: dict[str, float]) -> None:
    """Idle sessions stay what they are."""
    wrong = {name: found[name] for name in ("dead", "suspect", "broken", "stopped") if found[name]}
    assert not wrong


@pytest.mark.slow
@further(why="benchmarks/idle_sessions.py measures it")
def test_five_hundred_idle_sessions(tmp_path: Path) -> None:
    """They attach, start, idle, are started again after a failure; nobody is taken for dead. (With
    the usual 5 s of silence: below. A third of them is one process, which may stand still.)"""
    found = measure(tmp_path, 500, 5, 600, "--heartbeat=60")
    assert found["sessions"] == 500
    assert not found["dead"]
    assert not found["stopped"]


@further(why="benchmarks/idle_sessions.py measures it")
@pytest.mark.timeout(1800)
def test_five_thousand_idle_sessions(tmp_path: Path) -> None:
    """Nobody is suspected or taken for dead in two minutes. (CPU and times are the benchmark's.)"""
    found = measure(tmp_path, 5000, 120, 1500)
    assert found["sessions"] == 5000
    nobody_was_lost(found)
