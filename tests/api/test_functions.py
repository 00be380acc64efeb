"""elastic_launch with functions: results, failures, restarts, signals, and nothing left behind."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from elasticrun.forkserver.functions.function_spawner import FunctionSpawner
from elasticrun.host.system.title import AGENT
from elasticrun.launcher import LaunchConfig, elastic_launch
from elasticrun.testing.processes import command
from elasticrun.wire.frames import FrameBuffer
from elasticrun.wire.spawning import FromSpawner, Notice
from tests.api import functions
from tests.further import cases, further
from tests.harness import LIMIT, await_exit, free_port, until_file

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
METHODS = ("fork", "spawn", "forkserver")
IN_BOTH_WAYS = pytest.mark.parametrize("method", cases(METHODS[:2], kept=["fork"]))


def config(nproc: int = 2, **more: Any) -> LaunchConfig:
    words = {"run_id": "job", "start_method": "fork", "max_restarts": 0} | more
    words.setdefault("rdzv_configs", {"heartbeat_timeout": 60})  # a stall ends no node
    return LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=nproc, **words)


@pytest.mark.parametrize("method", cases(METHODS, kept=["fork"]))
def test_ranks_meet_and_return(method: str) -> None:
    results = elastic_launch(config(start_method=method), functions.reduce_sum)(10)
    assert results == {0: (0, 21.0), 1: (1, 21.0)}


@IN_BOTH_WAYS
def test_what_a_rank_sees(method: str) -> None:
    results = elastic_launch(
        config(start_method=method, role="trainer", max_restarts=3), functions.places
    )()
    assert sorted(results) == [0, 1]
    for rank, seen in results.items():
        assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert seen["ROLE_NAME"] == "trainer"
        assert seen["TORCHELASTIC_RUN_ID"] == "job"
        assert seen["TORCHELASTIC_MAX_RESTARTS"] == "3"
        assert seen["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert seen["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_0/{rank}/error.json")
        assert seen["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        assert seen["group"] == seen["pid"]
        assert seen["sigterm"], "the launcher's handler was inherited"
    assert results[0]["MASTER_PORT"] == results[1]["MASTER_PORT"]


@IN_BOTH_WAYS
def test_no_rank_ends_before_all_have_returned(method: str, tmp_path: Path) -> None:
    results = elastic_launch(config(start_method=method), functions.return_before_the_other)(
        str(tmp_path)
    )
    assert float((tmp_path / "ended").read_text()) > results[1]


NODE = """
import sys
from elasticrun.launcher import LaunchConfig, elastic_launch
from tests.api import functions
port, folder = sys.argv[1:]
config = LaunchConfig(2, 2, 2, run_id="job", start_method="fork", max_restarts=0,
    rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{port}",
    rdzv_configs={"heartbeat_timeout": 60})
returned = max(elastic_launch(config, functions.return_before_the_other)(folder).values())
assert float(open(f"{folder}/ended").read()) > returned
"""


@further("test_no_rank_ends_before_all_have_returned")
def test_no_rank_of_two_nodes_ends_before_all_of_its_node_have_returned(tmp_path: Path) -> None:
    port, folders = str(free_port()), [tmp_path / name for name in ("a", "b")]
    env, how = {**os.environ, "PYTHONPATH": str(ROOT)}, {"stderr": subprocess.PIPE, "text": True}
    nodes: list[subprocess.Popen[str]] = []
    for folder in folders:
        folder.mkdir()
        command = [sys.executable, "-c", NODE, port, str(folder)]
        nodes.append(subprocess.Popen(command, env=env, **how))
    ends = [(node.communicate(timeout=LIMIT)[1], node.returncode) for node in nodes]
    assert [code for _, code in ends] == [0, 0], ends


def test_arguments_arrive_and_local_rank_is_filled_in() -> None:
    lock = threading.Lock()  # cannot be pickled, and need not be: the rank is a fork
    results = elastic_launch(config(), functions.echo)("at ${local_rank} of ${other}", 5, None)
    assert results == {rank: (f"at {rank} of ${{other}}", 5, None) for rank in (0, 1)}
    (held,) = elastic_launch(config(1), lambda: lock.locked())().values()
    assert held is False


def test_results_larger_than_a_pipe() -> None:
    size = 20_000_000
    results = elastic_launch(config(), functions.big)(size)
    assert results == {rank: bytes([rank]) * size for rank in (0, 1)}


@pytest.mark.parametrize("how", cases(["sys.exit(0)", "os._exit(0)"], kept=["os._exit(0)"]))
def test_a_rank_that_ends_well_without_returning(how: str) -> None:
    assert elastic_launch(config(), functions.end_early)(how) == {0: None, 1: "result"}


def launch_failing(entry: Callable[..., Any], *args: Any, **more: Any) -> Any:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(**more), entry)(*args)
    return caught.value


@IN_BOTH_WAYS
def test_an_exception_in_a_rank(method: str) -> None:
    error = launch_failing(functions.fail_on_rank, "1", start_method=method)
    assert list(error.failures) == [1]
    rank, failure = error.get_first_failure()
    assert (rank, failure.local_rank, failure.exitcode) == (1, 1, 1)
    assert failure.message["message"] == "KeyError: 'rank 1 has lost its key'"
    assert "fail_on_rank" in failure.message["extraInfo"]["py_callstack"]
    assert error.name == "fail_on_rank"
    text = str(error)
    assert "fail_on_rank FAILED" in text
    assert "rank 1 has lost its key" in text
    assert "<NO_OTHER_FAILURES>" in text


@further("test_an_exception_in_a_rank")
def test_an_exit_code_of_its_own() -> None:
    error = launch_failing(functions.end_early, "7")
    assert error.failures[0].exitcode == 7


def test_a_result_that_cannot_be_sent() -> None:
    assert "pickle" in str(launch_failing(functions.no_pickle, nproc=1))


@further("test_a_result_that_cannot_be_sent")
def test_a_function_that_cannot_be_sent_to_a_rank_that_is_spawned() -> None:
    error = launch_failing(lambda: None, nproc=1, start_method="spawn")
    assert "the function cannot be started" in str(error)


def test_a_restart() -> None:
    results = elastic_launch(config(max_restarts=1), functions.fail_once)()
    assert results == {0: ("0", "1"), 1: ("1", "1")}


def test_output_goes_where_torchs_logs_specs_say(tmp_path: Path, capfd) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    specs = DefaultLogsSpecs(
        str(tmp_path / "logs"), redirects={0: Std.OUT}, tee={1: Std.ALL}, local_ranks_filter={1}
    )
    elastic_launch(config(logs_specs=specs, role="r"), functions.say)()
    (attempt,) = (tmp_path / "logs").glob("job_*/attempt_0")
    assert (attempt / "0" / "stdout.log").read_text() == "rank 0 to stdout\n"
    assert (attempt / "1" / "stderr.log").read_text() == "rank 1 to stderr\n"
    out, err = capfd.readouterr()
    assert out == "[r1]:rank 1 to stdout\n"
    assert "[r1]:rank 1 to stderr\n" in err
    assert "rank 0" not in err


def test_what_a_rank_leaves_behind_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ELASTICRUN_CHILD_EXIT_TIMEOUT", "1.5")
    results = elastic_launch(config(shutdown_timeout=5), functions.leave_a_child)("")
    assert await_exit(results.values()) == set()
    assert "terminating 2 processes that ranks have left running: " in capfd.readouterr().err


def test_in_another_thread(caplog) -> None:
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(elastic_launch(config(), functions.echo)(1))
    )
    with caplog.at_level("WARNING", logger="elasticrun"):
        thread.start()
        thread.join(LIMIT)
    assert results == [{0: (1,), 1: (1,)}]
    assert "not in the main thread" in caplog.text


def test_handlers_and_environment_of_the_caller_are_put_back() -> None:
    before = {number: signal.getsignal(number) for number in (1, 2, 3, 15)}
    elastic_launch(config(1), functions.echo)()
    assert before == {number: signal.getsignal(number) for number in (1, 2, 3, 15)}
    assert "RANK" not in os.environ


CALLER = """
import sys
from elasticrun.launcher import LaunchConfig, elastic_launch
from tests.api import functions
config = LaunchConfig(1, 1, 2, run_id="job", start_method=sys.argv[1], max_restarts=0)
if __name__ == "__main__":
    try:
        elastic_launch(config, functions.wait_with_child)(sys.argv[2])
    finally:
        print(sorted({"grpc", "torch"} & set(sys.modules)), flush=True)
"""


def start_caller(folder: Path, method: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A program that launches two ranks; it, and the pids of ranks and their children."""
    script = folder / "caller.py"
    script.write_text(CALLER)
    caller = subprocess.Popen(
        [sys.executable, str(script), method, str(folder)], text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    pids: list[int] = []
    for rank in (0, 1):
        pids += map(int, until_file(folder / f"ready-{rank}", bool).split())
    return caller, pids


@pytest.mark.parametrize("method", cases(METHODS, kept=["fork"]))
def test_sigterm_to_the_caller(method: str, tmp_path: Path) -> None:
    caller, pids = start_caller(tmp_path, method)
    caller.send_signal(signal.SIGTERM)
    out, err = caller.communicate(timeout=LIMIT)
    assert caller.returncode == 1
    assert "SignalException" in err
    assert out == "[]\n", "the caller has imported what it need not have"
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["15", "15"]
    assert await_exit(pids) == set()


@pytest.mark.parametrize("method", cases(METHODS, kept=["fork"]))
def test_kill_9_of_the_caller(method: str, tmp_path: Path) -> None:
    caller, pids = start_caller(tmp_path, method)
    below = psutil.Process(caller.pid).children(recursive=True)
    caller.kill()
    caller.communicate(timeout=LIMIT)
    assert await_exit([process.pid for process in below] + pids) == set()


@further("test_kill_9_of_the_caller")
def test_kill_9_of_the_agent(tmp_path: Path) -> None:
    caller, pids = start_caller(tmp_path, "fork")
    (agent,) = [
        process
        for process in psutil.Process(caller.pid).children()
        if command(process.pid) == AGENT.decode()
    ]
    agent.kill()
    _, err = caller.communicate(timeout=LIMIT)
    assert "LaunchError: the agent was killed by signal 9" in err
    assert await_exit(pids) == set()


def test_an_agent_that_does_not_read_holds_its_caller_up_nowhere(caplog) -> None:
    caller = FunctionSpawner(functions.places, (), "fork", b"")
    caller._selector.register(caller._connection, selectors.EVENT_READ, caller._read_orders)
    caller.agents_end.setblocking(False)
    reports = [Notice(str(number) * 200) for number in range(700)]
    for report in reports:
        caller._send(report)
    heard: list[Any] = []
    incoming = FrameBuffer(FromSpawner)
    while len(heard) < len(reports):
        heard += incoming.feed(caller.agents_end.recv(1 << 20))
        for key, _ in caller._selector.select(0):
            key.data()
    assert heard == reports
    said = 0
    while caller._connected:
        caller._send(reports[0])
        said += 1
    assert 1000 < said < 100_000
    assert "does not read" in caplog.text
    caller._end_all()
    caller.agents_end.close()
