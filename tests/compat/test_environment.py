"""What a rank sees of its start: environment, arguments, folder, streams; variable by variable."""

from __future__ import annotations

import re
import socket
import sys
from typing import Any

import pytest

from tests.compat.pair import Case, Outcome, Pairs
from tests.further import cases, further

pytestmark = pytest.mark.slow

TWO_AGENTS = ("--local-addr", "127.0.0.1")
PATIENT = "--rdzv-conf=heartbeat_timeout=60"
"""An agent of ours that stands still for a while is not dead; torchrun reads no such word."""

CASES = {
    "one rank": Case(program=("dump.py", "a", "--b=c", "-d", "e f")),
    "two ranks": Case(("--nproc-per-node=2",)),
    "underscores and abbreviations": Case(("--nproc_per_node=2", "--stand", "--max-rest", "2")),
    "threads are set": Case(("--nproc-per-node=2",), env={"OMP_NUM_THREADS": "3"}),
    "standalone": Case(("--standalone", "--nproc-per-node=2", "--role=trainer")),
    "a word for nproc": Case(("--nproc-per-node=cpu",)),
    "run id, elastic": Case(
        ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}", "--rdzv-id=mine")
    ),
    "static, a named port": Case(
        ("--nnodes=1", "--master-port={port}", "--nproc-per-node=2"), user_port=True
    ),
    "static, a named endpoint": Case(
        ("--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=mine"), user_port=True
    ),
    "module": Case(("-m",), ("bag.dump_in_package", "x", "y"), cwd="scripts"),
    "no python": Case(
        ("--no-python", "--nproc-per-node=2"),
        ("shell.sh", "one", "two"),
        env={"PYTHON_FOR_TEST": sys.executable},
    ),
    "run path": Case(("--run-path",), ("dump.py", "p", "q")),
    "virtual local rank": Case(
        ("--nproc-per-node=2", "--virtual-local-rank"), env={"CUDA_VISIBLE_DEVICES": "5,7"}
    ),
    "no logs": Case(("--log-dir=/dev/null",)),
    "signals named": Case(("--signals-to-handle=SIGTERM,SIGUSR1",)),
    "variables for flags": Case(
        env={
            "PET_NPROC_PER_NODE": "2",
            "PET_MAX_RESTARTS": "4",
            "PET_ROLE": "fromenv",
            "PET_STANDALONE": "1",
            "PET_LOG_DIR": "{scratch}/logs",
        }
    ),
    "flags beat variables": Case(("--role=flag",), env={"PET_ROLE": "fromenv"}),
    "nccl handling set by the user": Case(env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}),
    "local rank in the arguments": Case(
        ("--nproc-per-node=2",), ("dump.py", "--dev=${local_rank}", "$local_rank", "${other}", "$$")
    ),
    "a umask": Case(umask=0o027),
    "a script's &": Case(ignoring="INT QUIT USR1"),
    "restarts": Case(("--max-restarts=2", "--nproc-per-node=2"), env={"DUMP_FAIL_UNTIL": "2"}),
    "two agents, static": Case(
        (
            *("--nnodes=2", "--master-addr=127.0.0.1", "--master-port={port}"),
            *("--nproc-per-node=2", PATIENT),
        ),
        agents=(("--node-rank=0",), ("--node-rank=1",)),
        user_port=True,
    ),
    "two agents, elastic": Case(
        (
            *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}"),
            *("--rdzv-id=two", PATIENT),
        ),
        agents=(TWO_AGENTS, TWO_AGENTS),
    ),
    "two agents, unlike": Case(
        ("--nnodes=2", "--master-addr=127.0.0.1", "--master-port={port}", PATIENT),
        agents=(("--node-rank=0", "--nproc-per-node=1"), ("--node-rank=1", "--nproc-per-node=2")),
        user_port=True,
    ),
}

KEPT = (*("two ranks", "no python", "two agents, static"),)

HARNESS = {
    *("ELASTICRUN_TEST_MARK", "ELASTICRUN_TEST_SOCKET", "TMPDIR", "XDG_RUNTIME_DIR"),
    *("ELASTICRUN_WARM_SERVER", "ELASTICRUN_PRELOAD", "ELASTICRUN_SHM_DIR"),
}

DIFFERENCES: dict[str, tuple[str, str, str]] = {
    # variable: torchrun's value, ours, the reason
    "MASTER_ADDR": (
        socket.getfqdn(),
        "127.0.0.1",
        "where the user names no address: the one a node is really reached by, not a host name "
        "that peers may be unable to resolve",
    ),
}
"""Deliberate differences, each asserted on both sides wherever the values are not alike."""

ADDED = {
    # variable: the form of its value, the reason
    "ELASTICRUN_PROGRESS": (
        r"elasticrun-[0-9a-f]{32}/\d+",
        "where elasticrun.training.progress tells the steps; read by nobody else",
    ),
    "ELASTICRUN_SNAPSHOTS": (
        r"elasticrun-[0-9a-f]{32}/\d+",
        "where elasticrun.training.Checkpointer speaks to its agent; read by nobody else",
    ),
}
"""What torchrun does not set, in every rank of ours."""


def seen(outcome: Outcome, rank: int, restart: int, case: Case) -> dict[str, str]:
    """A rank's environment with what must differ between two runs made plain."""
    environ: dict[str, str] = dict(outcome.dumps[rank, restart]["environ"])
    for name in HARNESS:
        environ.pop(name, None)
    port = environ.pop("MASTER_PORT")
    if case.user_port:
        assert port == str(outcome.port)
    assert 0 < int(port) < 65536
    return {name: outcome.plain(value) for name, value in environ.items()}


@pytest.mark.parametrize("name", cases(CASES, kept=KEPT))
def test_every_variable_is_torchruns(pairs: Pairs, name: str) -> None:
    case = CASES[name]
    theirs, ours = pairs(case)
    assert (theirs.codes, ours.codes) == ([0] * len(case.agents),) * 2, ours.stderr
    assert theirs.dumps.keys() == ours.dumps.keys()
    for rank, restart in theirs.dumps:
        expected = seen(theirs, rank, restart, case)
        got = seen(ours, rank, restart, case)
        for variable, (before, after, _) in DIFFERENCES.items():
            pair = expected.pop(variable), got.pop(variable)
            assert pair[0] == pair[1] or pair == (before, after)
        for variable, (form, _) in ADDED.items():
            assert variable not in expected
            assert re.fullmatch(form, got.pop(variable))
        assert got == expected


PLACES = (
    *("argv", "cwd", "umask", "own_group", "own_session", "name", "file", "spec", "package"),
    *("unbuffered", "executable", "stdin", "stdin_target", "signals", "blocked", "limits"),
    *("affinity", "nice", "path0", "orig_argv"),
)

RUN_PATH: dict[str, tuple[object, object]] = {
    # place: torchrun's value, ours; "*": of no meaning to a script
    "own_group": (False, True),  # so that signals reach all that the rank started
    "own_session": (False, True),
    "unbuffered": (False, True),  # as every other rank
    "orig_argv": ("*", "*"),  # multiprocessing's own words there
    "path0": ("*", "*"),  # there what the launcher's happened to be; run_path adds nothing
}
"""Deliberate differences: --run-path is a child of multiprocessing under torchrun."""


@pytest.mark.parametrize("name", cases(CASES, kept=KEPT))
def test_a_rank_sees_itself_as_under_torchrun(pairs: Pairs, name: str) -> None:
    theirs, ours = pairs(CASES[name])
    compared = 0
    for key, dump in theirs.dumps.items():
        places = [what for what in PLACES if what in dump]
        if name == "run path":
            places = [what for what in places if what not in RUN_PATH]
            for what, (before, after) in RUN_PATH.items():
                found = dump[what], ours.dumps[key][what]
                assert before == "*" or found == (before, after), what
        got = {what: plain(ours, ours.dumps[key][what]) for what in places}
        assert got == {what: plain(theirs, dump[what]) for what in places}
        compared += len(places)
    assert compared


def plain(outcome: Outcome, value: Any) -> Any:
    """A value of a dump with folders and ports made plain."""
    if isinstance(value, str):
        return outcome.plain(value)
    return [plain(outcome, item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "name", cases(["one rank", "two ranks", "module", "no python"], soaked=["one rank", "module"])
)
def test_a_rank_inherits_no_descriptor_of_ours(pairs: Pairs, name: str) -> None:
    """torchrun's Popen closes all but the three; so must a fork."""
    theirs, ours = pairs(CASES[name])
    for key, dump in theirs.dumps.items():
        assert ours.dumps[key].get("fds", {}) == dump.get("fds", {})


@pytest.mark.parametrize(
    ("name", "said"),
    cases([("two ranks", True), ("one rank", False)], kept=[("two ranks", True)], several=True),
)
def test_the_banner_about_threads(pairs: Pairs, name: str, said: bool) -> None:
    """OMP_NUM_THREADS=1 is set, and said, only where there is more than one rank."""
    for outcome in pairs(CASES[name]):
        assert ("OMP_NUM_THREADS" in outcome.stderr[0]) == said, outcome.launcher


@further(
    "agent/link/test_port_proxy::test_a_tcpstore_goes_through",
    "test_every_variable_is_torchruns",
)
def test_a_user_port_serves_tcp_init(pairs: Pairs) -> None:
    """`init_method="tcp://127.0.0.1:<--master-port>"` works from two agents."""
    case = Case(
        ("--nnodes=2", "--master-addr=127.0.0.1", "--master-port={port}", PATIENT),
        ("tcp_init.py", "{port}"),
        agents=(("--node-rank=0",), ("--node-rank=1",)),
        user_port=True,
    )
    for outcome in pairs(case):
        assert outcome.codes == [0, 0], outcome.stderr
        assert sum("sum 2" in text for text in outcome.stdout) == 2
