"""Flags and environment to configuration: every rule of `cli.resolve`, as tables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from elasticrun import config
from elasticrun.cli.detection.found import Given, Machine
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.resolve import Resolved, UsageError, resolve
from elasticrun.cli.settings import FlagValues, sources
from elasticrun.cli.table import NO_EFFECT
from elasticrun.config import (
    HealthCommandPlan,
    Identity,
    Launch,
    LogPlan,
    MasterPlan,
    Place,
    RunPlan,
    Tls,
)
from elasticrun.wire.messages import CheckSpec, JobSpec, SaveSpec
from elasticrun.wire.types import EntryKind, Entrypoint

PLUGINS = {"torchrun.handlers": ["mine"], "torchrun.logs_specs": ["fancy"]}


def machine(devices: Mapping[str, int] | None = None, cores: int = 6) -> Machine:
    counts = {"gpu": 0, "xpu": 0, "auto": 0} | dict(devices or {})
    return Machine(lambda: cores, counts.get, lambda group: PLUGINS.get(group, []))


def made(
    words: str = "", environ: Mapping[str, str] | None = None, on: Machine | None = None
) -> Resolved:
    environ = {} if environ is None else environ
    ns = get_args_parser(environ).parse_args([*words.split(), "s.py"])
    return resolve(ns, environ, on or machine())


def notes(found: Resolved) -> str:
    return "\n".join(found.notes)


def test_variables_that_nobody_reads_are_named_once() -> None:
    read = {"ELASTICRUN_NNODES": "1", "ELASTICRUN_TOKEN": "t" * 64, "ELASTICRUN_PRELOAD": "psutil"}
    of_others = {"ELASTICRUN_SERVICE_HOST": "10.0.0.1", "ELASTICRUN_PORT_80_TCP": "x"}
    assert "unknown and ignored" not in notes(made("", read | of_others))
    (line,) = (
        n for n in made("", {"ELASTICRUN_NNODE": "2", "ELASTICRUN_X": "1"}).notes if "X" in n
    )
    assert line == (
        "ELASTICRUN_NNODE, ELASTICRUN_X in the environment are unknown and ignored; did you mean "
        "ELASTICRUN_NNODES?"
    )


def test_every_default() -> None:
    """A bare command, field by field: torchrun's defaults, and ours where it has none."""
    bare = made()
    job_id = bare.identity.job_id
    assert len(job_id) == 36  # a uuid: nobody else needs to find this job
    assert bare.place == Place("standalone", "127.0.0.1", 0)
    assert bare.identity == Identity(job_id)
    assert (bare.notes, bare.delegate) == ((), "")
    assert bare.launch == Launch(
        spec=JobSpec(
            job_id="", min_nodes=1, max_nodes=1, node_unit=1, max_restarts=0,
            restart_backoff=30.0, restart_window=0.0, join_timeout=600.0, last_call_timeout=30.0,
            heartbeat_timeout=config.HEARTBEAT_TIMEOUT, grow="auto", grow_cooldown=600.0,
            restart_grace=30.0, master_lost_timeout=600.0,
        ),
        entry=Entrypoint(EntryKind.SCRIPT, "s.py", ()),
        logs=LogPlan(log_dir=None),
        nproc_per_node=1,
        mode="auto",
        start_method="spawn",
        signals_to_handle=("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"),
        shutdown_timeout=30.0,
        master=MasterPlan(run=RunPlan(name="s", unnamed=True, nproc="1")),
    )  # fmt: skip


# ---------------------------------------------------------------- where nodes meet

KUBEFLOW = {
    "PET_NNODES": "4", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456",
}  # fmt: skip
STALE = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "GROUP_RANK": "2", "MASTER_ADDR": "old",
    "MASTER_PORT": "1234", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "outer",
    "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
DLROVER = {"DLROVER_MASTER_ADDR": "pod-0:50001", "NODE_RANK": "2", "NODE_NUM": "4"}

MEETINGS: list[tuple[str, Mapping[str, str], Place, str, tuple[int, int], int]] = [
    # words, environment, where, job id ("*": fresh), nodes, node rank
    ("", {}, Place("standalone", "127.0.0.1"), "*", (1, 1), -1),
    ("--standalone", {}, Place("standalone", "127.0.0.1"), "*", (1, 1), -1),
    ("--standalone --rdzv-id x", {}, Place("standalone", "127.0.0.1"), "x", (1, 1), -1),
    ("--rdzv-id x", {}, Place("standalone", "127.0.0.1"), "x", (1, 1), -1),
    ("--standalone --rdzv-endpoint h:1 --rdzv-backend c10d", {},
     Place("standalone", "127.0.0.1"), "*", (1, 1), -1),
    ("--master-addr h", {}, Place("standalone", "127.0.0.1"), "*", (1, 1), -1),
    ("--nnodes 1:1 --node-rank 0", {}, Place("standalone", "127.0.0.1"), "*", (1, 1), 0),
    ("--standalone --nnodes 1:4", {}, Place("standalone", "127.0.0.1"), "*", (1, 1), -1),
    # static
    ("--master-port 29611", {}, Place("static", "127.0.0.1", 29611), "none", (1, 1), 0),
    ("--nnodes 2", {}, Place("static", "127.0.0.1", 29500), "none", (2, 2), 0),
    ("--nnodes 2 --node-rank 1 --master-addr h --master-port 7", {},
     Place("static", "h", 7), "none", (2, 2), 1),
    ("--nnodes 2 --master-addr [::1] --master-port 7", {},
     Place("static", "::1", 7), "none", (2, 2), 0),
    ("--nnodes 2 --master-addr ::1 --master-port 7", {},
     Place("static", "::1", 7), "none", (2, 2), 0),
    ("--nnodes 2 --rdzv-endpoint h:7 --master-port 8", {},
     Place("static", "h", 7), "none", (2, 2), 0),
    ("--nnodes 1 --rdzv-endpoint h:7", {}, Place("static", "h", 7), "none", (1, 1), 0),
    ("--nnodes 1:2 --master-port 7", {}, Place("static", "127.0.0.1", 7), "none", (2, 2), 0),
    ("--master-port 0", {}, Place("standalone", "127.0.0.1"), "*", (1, 1), -1),
    ("", KUBEFLOW, Place("static", "job-master-0", 23456), "none", (4, 4), 3),
    ("--node-rank 1", KUBEFLOW, Place("static", "job-master-0", 23456), "none", (4, 4), 1),
    ("--nnodes 2 --master-port 7", {"NODE_RANK": "1"},
     Place("static", "127.0.0.1", 7), "none", (2, 2), 1),
    ("--nnodes 2 --master-port 7 --node-rank 0", {"NODE_RANK": "1"},
     Place("static", "127.0.0.1", 7), "none", (2, 2), 0),
    ("--nnodes 2 --master-port 7", {"NODE_RANK": "1", "PET_NODE_RANK": "0"},
     Place("static", "127.0.0.1", 7), "none", (2, 2), 0),
    ("--nnodes 1 --master-port 7", {"NODE_RANK": "1"},
     Place("static", "127.0.0.1", 7), "none", (1, 1), 0),
    # elastic
    ("--rdzv-backend c10d", {}, Place("elastic", "localhost", 29400), "none", (1, 1), -1),
    ("--rdzv-backend c10d --rdzv-endpoint h --nnodes 2:4", {},
     Place("elastic", "h", 29400), "none", (2, 4), -1),
    # ... also where only min:max and an endpoint say so, which static cannot serve
    ("--rdzv-endpoint h --nnodes 2:4", {},
     Place("elastic", "h", 29400), "none", (2, 4), -1),
    ("--rdzv-endpoint h:7 --nnodes 2:4 --rdzv-backend static", {},
     Place("static", "h", 7), "none", (4, 4), 0),
    ("--rdzv-endpoint h:7 --nnodes 2:4 --node-rank 1", {},
     Place("static", "h", 7), "none", (4, 4), 1),
    ("--rdzv-endpoint h:7 --nnodes 2:4", {"NODE_RANK": "1"},
     Place("static", "h", 7), "none", (4, 4), 1),
    ("--rdzv-endpoint h:7 --nnodes 4", {},
     Place("static", "h", 7), "none", (4, 4), 0),
    ("--rdzv-backend elasticrun --rdzv-endpoint h:7 --rdzv-id j --nnodes 2", {},
     Place("elastic", "h", 7), "j", (2, 2), -1),
    ("--rdzv-backend c10d --rdzv-endpoint [fe80::1]:7", {},
     Place("elastic", "fe80::1", 7), "none", (1, 1), -1),
    ("--rdzv-backend c10d --rdzv-endpoint [::1]", {},
     Place("elastic", "::1", 29400), "none", (1, 1), -1),
    ("--rdzv-backend c10d --rdzv-endpoint ::1", {},
     Place("elastic", "::1", 29400), "none", (1, 1), -1),
    ("--rdzv-backend c10d --rdzv-endpoint localhost:0", {},
     Place("standalone", "127.0.0.1"), "*", (1, 1), -1),
    ("--rdzv-backend c10d --rdzv-endpoint h:7 --rdzv-conf is_host=false", {},
     Place("elastic", "h", 7, is_host=False), "none", (1, 1), -1),
    ("--rdzv-backend c10d --rdzv-endpoint h:7 --rdzv-conf is_host=1,store_type=tcp", {},
     Place("elastic", "h", 7, is_host=True), "none", (1, 1), -1),
    ("--rdzv-backend c10d --rdzv-endpoint h:7 --nnodes 4 --node-rank 2", {},
     Place("elastic", "h", 7), "none", (4, 4), 2),
    ("--rdzv-backend c10d --rdzv-endpoint h:7 --nnodes 4 --node-rank 0", {},
     Place("elastic", "h", 7), "none", (4, 4), 0),
    ("--rdzv-backend c10d --rdzv-endpoint h:7 --nnodes 4", {"NODE_RANK": "2"},
     Place("elastic", "h", 7), "none", (4, 4), -1),
    # dlrover-run's words
    ("", DLROVER, Place("external", "pod-0", 50001), "none", (4, 4), 2),
    ("--nnodes 2:8 --node-rank 1", DLROVER,
     Place("external", "pod-0", 50001), "none", (2, 8), 1),
    ("", DLROVER | {"PET_NNODES": "3", "PET_NODE_RANK": "0"},
     Place("external", "pod-0", 50001), "none", (3, 3), 0),
    ("", {"DLROVER_MASTER_ADDR": "pod-0:50001", "WORKER_RANK": "1", "ELASTIC_JOB_NAME": "j"},
     Place("external", "pod-0", 50001), "j", (1, 1), 1),
    ("--standalone", DLROVER, Place("standalone", "127.0.0.1"), "*", (1, 1), -1),
    ("--rdzv-backend c10d --rdzv-endpoint h:7", DLROVER,
     Place("elastic", "h", 7), "none", (1, 1), -1),
    ("--nnodes 3 --master-port 7", DLROVER,
     Place("static", "127.0.0.1", 7), "none", (3, 3), 2),
    ("--auto-config --rdzv-backend c10d --rdzv-endpoint h:7", {"NODE_NUM": "3"},
     Place("elastic", "h", 7), "none", (3, 3), -1),
    ("--auto-config --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:7", {"NODE_NUM": "3"},
     Place("elastic", "h", 7), "none", (2, 2), -1),
    ("--rdzv-backend c10d", {"NODE_NUM": "3"},
     Place("elastic", "localhost", 29400), "none", (1, 1), -1),
]  # fmt: skip


@pytest.mark.parametrize(("words", "environ", "where", "job", "nodes", "rank"), MEETINGS)
def test_where_nodes_meet(
    words: str, environ: Mapping[str, str], where: Place, job: str,
    nodes: tuple[int, int], rank: int,
) -> None:  # fmt: skip
    found = made(words, environ)
    assert found.place == where
    assert (found.launch.spec.min_nodes, found.launch.spec.max_nodes) == nodes
    assert found.launch.node_rank == rank
    if job == "*":
        assert found.identity.job_id not in ("", "none")
        assert found.identity.job_id != made(words, environ).identity.job_id
    else:
        assert found.identity.job_id == job


@pytest.mark.parametrize("words", ["", "--nnodes 2", "--rdzv-backend c10d"])
def test_nothing_of_an_outer_launcher_leaks_in(words: str) -> None:
    inside, outside = made(words, STALE), made(words, {})
    same_id = replace(outside.identity, job_id=inside.identity.job_id)
    assert inside == replace(outside, identity=same_id)


# ---------------------------------------------------------------- errors

ERRORS = [
    # words, environment, exit code, part of the sentence
    ("--nnodes x", {}, 2, "--nnodes=x is neither"),
    ("--nnodes 1:2:3", {}, 2, "--nnodes=1:2:3 is neither"),
    ("--nnodes 0", {}, 2, "at least 1"),
    ("--nnodes 3:2", {}, 2, "not above the largest"),
    ("--nnodes=-1:2", {}, 2, "at least 1"),
    ("--nnodes 1000000", {}, 2, "100000 nodes"),
    ("--nproc-per-node 0", {}, 2, "at least one rank"),
    ("--nproc-per-node many", {}, 2, "auto, cpu, gpu or xpu"),
    ("--nproc-per-node gpu", {}, 1, "finds no GPU here"),
    ("--nproc-per-node xpu", {}, 1, "finds no XPU here"),
    ("--max-restarts -1", {}, 2, "must not be negative"),
    (f"--node-id {'x' * 1025}", {}, 2, "--node-id: a name has at most 1024 characters, not 1025"),
    (f"--role {'x' * 1025}", {}, 2, "--role: a name has at most 1024"),
    (f"--rdzv-backend c10d --rdzv-id {'x' * 1025}", {}, 2, "--rdzv-id: a name has at most 1024"),
    ("", {"ELASTICRUN_NODE_ID": "a\tb"}, 2, "cannot be printed"),
    ("--standalone --nnodes 2", {}, 2, "--standalone is for one node"),
    ("--nnodes 2 --node-rank 2", {}, 2, "from 0 to 1"),
    ("--nnodes 2 --node-rank -1", {}, 2, "from 0 to 1"),
    ("--nnodes 2", {"NODE_RANK": "x"}, 2, "NODE_RANK=x is not a node rank"),
    ("--nnodes 2 --master-port 0", {}, 2, "give a port"),
    ("--master-port 70000", {}, 2, "from 0 to 65535"),
    ("--nnodes 2 --master-addr a/b", {}, 2, "neither a host name nor an address"),
    ("--nnodes 2 --rdzv-endpoint h", {}, 2, "has no port"),
    ("--rdzv-backend c10d --rdzv-endpoint h:x", {}, 2, "from 0 to 65535"),
    ("--rdzv-backend c10d --rdzv-endpoint h:65536", {}, 2, "from 0 to 65535"),
    ("--rdzv-backend c10d --rdzv-endpoint :7", {}, 2, "neither a host name"),
    ("--rdzv-backend c10d --rdzv-endpoint h:0 --nnodes 2", {}, 2, "cannot know"),
    ("--rdzv-backend c10d --rdzv-conf store_type=file", {}, 2, "store_type=file has no effect"),
    ("--rdzv-backend c10d --rdzv-conf is_host=maybe", {}, 2, "is_host=maybe"),
    ("--rdzv-backend etcd", {}, 2, "use --rdzv-backend=c10d"),
    ("--rdzv-backend etcd-v2 --rdzv-endpoint h:2379", {}, 2, "etcd-v2 needs --rdzv-id=NAME"),
    ("--rdzv-backend etcd --rdzv-endpoint http://h --rdzv-id=j", {}, 2, "--rdzv-endpoint: "),
    ("--rdzv-backend zeus", {}, 2, "static, c10d, elasticrun"),
    ("--rdzv-backend mine --launch exec", {}, 2, "--launch is not a flag of torchrun"),
    ("--rdzv-conf a", {}, 2, "'a' is not KEY=VALUE"),
    ("--rdzv-conf a=", {}, 2, "'a=' is not KEY=VALUE"),
    ("--rdzv-conf =1", {}, 2, "'=1' is not KEY=VALUE"),
    ("--rdzv-conf join_timeout=x", {}, 2, "join_timeout=x is not a positive"),
    ("--rdzv-conf join_timeout=0", {}, 2, "join_timeout=0 is not a positive"),
    ("--rdzv-conf join_timeout=inf", {}, 2, "join_timeout=inf is not a positive"),
    ("--rdzv-conf heartbeat_timeout=nan", {}, 2, "heartbeat_timeout=nan is not"),
    ("-r 4", {}, 2, "--redirects=4 is neither"),
    ("-t 0:1,", {}, 2, "--tee=0:1, is neither"),
    ("--local-ranks-filter 0,x", {}, 2, "--local-ranks-filter=0,x"),
    ("--logs-specs nobody", {}, 2, "torchrun.logs_specs"),
    ("--no-python -m", {}, 2, "contradict each other"),
    ("--signals-to-handle SIGTERM,SIGFOO", {}, 2, "SIGFOO is not a signal"),
    ("--signals-to-handle SIGKILL", {}, 2, "cannot be handled"),
    ("--shutdown-timeout -1", {}, 2, "--shutdown-timeout=-1"),
    ("", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, 2, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon"),
    ("--restart-backoff -1", {}, 2, "--restart-backoff=-1"),
    ("--node-unit 0", {}, 2, "--node-unit=0"),
    ("--node-unit 3 --nnodes 2", {}, 2, "--node-unit=3"),
    ("--rdzv-conf node_unit=x", {}, 2, "--node-unit=0"),
    ("--precheck 3", {}, 2, "--precheck=3: use 0, 1 or 2"),
    ("--straggler-ratio 1", {}, 2, "--straggler-ratio=1 is not a ratio above 1"),
    ("--straggler-ratio=-2", {}, 2, "--straggler-ratio=-2 is not a ratio above 1"),
    ("--comm-perf-threshold=-1", {}, 2, "--comm-perf-threshold=-1 is not 0 GB/s or more"),
    ("--exclude-for 0", {}, 2, "--exclude-for=0 is not a positive number of seconds"),
    ("--restore-step=-3", {}, 2, "--restore-step=-3 is not a step: use a number from 0"),
    ("--save-limit 0", {}, 2, "--save-limit=0 is not a positive number of seconds"),
    ("--hang-limit=-1", {}, 2, "--hang-limit=-1 is neither 0"),
    ("--slot-price=-1", {}, 2, "--slot-price=-1 is not a price, 0 or more"),
    ("--exclude-for 1e10", {}, 2, "the maximum is 1e+09 s"),
    ("--rdzv-conf probe_timeout=0", {}, 2, "probe_timeout=0 is not a positive"),
    ("--rdzv-conf straggler_time=soon", {}, 2, "straggler_time=soon is not a positive"),
    ("--health-cmd-interval 0", {}, 2, "--health-cmd-interval=0 is not a positive number of"),
    ("--health-cmd-timeout=-1", {}, 2, "--health-cmd-timeout=-1 is not a positive number of"),
    ("--accelerator tpu", {}, 2, "--accelerator=tpu is not known: use nvidia, ascend, cpu"),
    ("--preload a-b", {}, 2, "not the name of a module"),
    ("--preload off,a", {}, 2, "off cannot be combined"),
    ("--preload learn", {}, 2, "learn was removed"),
    ("--status-port 99999", {}, 2, "--status-port=99999"),
    ("", {"DLROVER_MASTER_ADDR": "pod"}, 2, "DLROVER_MASTER_ADDR=pod has no port"),
    ("", DLROVER | {"NODE_NUM": "many"}, 2, "NODE_NUM=many"),
    ("", DLROVER | {"NODE_RANK": "-3"}, 2, "NODE_RANK=-3"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "environ", "code", "part"), ERRORS)
def test_one_sentence_for_bad_input(
    words: str, environ: Mapping[str, str], code: int, part: str
) -> None:
    with pytest.raises(UsageError) as caught:
        made(words, environ)
    sentence = str(caught.value)
    assert part in sentence
    assert "\n" not in sentence
    assert caught.value.exit_code == code


PARSE_ERRORS = [
    ("--max-restarts x", {}, "'x' is not a whole number"),
    ("", {"PET_MAX_RESTARTS": "x"}, "(from PET_MAX_RESTARTS) is not a whole number"),
    ("", {"PET_START_METHOD": "x"}, "(from PET_START_METHOD) is not one of spawn, fork"),
    ("", {"PET_STANDALONE": "maybe"}, "PET_STANDALONE: 'maybe' is not a switch"),
    ("", {"ELASTICRUN_LAUNCH": "x"}, "(from ELASTICRUN_LAUNCH) is not one of auto, fork, exec"),
    ("--shutdown-timeout nan", {}, "is not a number of seconds"),
    ("--launch x", {}, "--launch=x: use one of auto, fork, exec"),
    ("--on-hang kill", {}, "--on-hang=kill: use one of auto, tell, restart, off"),
    ("--straggler-ratio inf", {}, "'inf' is not a number"),
    ("--save-limit inf", {}, "'inf' is not a number of seconds"),
    ("--comm-perf-threshold fast", {}, "'fast' is not a number of GB/s"),
    ("--precheck all", {}, "'all' is not a whole number"),
    ("", {"ELASTICRUN_STRAGGLER_RATIO": "x"}, "(from ELASTICRUN_STRAGGLER_RATIO) is not a number"),
    ("--no-such-flag", {}, "there is no flag --no-such-flag"),
    ("--max-retries=3", {}, "there is no flag --max-retries; did you mean --max-restarts?"),
]


@pytest.mark.parametrize(("words", "environ", "part"), PARSE_ERRORS)
def test_argparse_errors_are_one_line(
    words: str, environ: Mapping[str, str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        made(words, environ)
    printed = capsys.readouterr().err
    assert caught.value.code == 2
    assert printed.startswith("elasticrun: error: ")
    assert part in printed
    assert printed.count("\n") == 1


# ---------------------------------------------------------------- ranks on this node

COUNTS = [
    ("3", {}, 3), ("cpu", {}, 6), ("auto", {}, 6), ("auto", {"auto": 4}, 4),
    ("gpu", {"gpu": 8}, 8), ("xpu", {"xpu": 2}, 2), ("npu", {"npu": 5}, 5),
]  # fmt: skip


@pytest.mark.parametrize(("word", "devices", "count"), COUNTS)
def test_ranks_per_node(word: str, devices: Mapping[str, int], count: int) -> None:
    assert made(f"--nproc-per-node {word}", on=machine(devices)).launch.nproc_per_node == count


def test_devices_are_counted_only_when_asked_for() -> None:
    def never(word: str) -> int:
        raise AssertionError(word)

    here = Machine(lambda: 6, never, lambda group: [])
    assert made("--nproc-per-node 2", on=here).launch.nproc_per_node == 2
    assert made("--nproc-per-node cpu", on=here).launch.nproc_per_node == 6


def test_auto_config() -> None:
    words = "--auto-config --rdzv-backend c10d --rdzv-endpoint h:7"
    four = made(words, {"NODE_NUM": "4"}, machine({"gpu": 8}))
    nodes = (four.launch.spec.min_nodes, four.launch.spec.max_nodes)
    assert (nodes, four.launch.nproc_per_node) == ((4, 4), 8)
    flags_win = made(words + " --nproc-per-node 2", {"NODE_NUM": "4"}, machine({"gpu": 8}))
    assert flags_win.launch.nproc_per_node == 2
    bare = made("--auto-config")
    assert (bare.launch.spec.max_nodes, bare.launch.nproc_per_node) == (1, 1)
    assert "NODE_NUM is not set" in notes(bare)
    assert "no GPU" in notes(bare)


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ("", {}, False),
        ("--nproc-per-node 2", {}, True),
        ("--nproc-per-node 2", {"OMP_NUM_THREADS": "4"}, False),
        ("--nproc-per-node 2", {"OMP_NUM_THREADS": ""}, False),
    ],
)
def test_threads_rule(words: str, environ: Mapping[str, str], expected: bool) -> None:
    found = made(words, environ)
    assert found.launch.set_omp_threads is expected
    assert ("OMP_NUM_THREADS" in notes(found)) is expected


# ---------------------------------------------------------------- the rest, field by field

FIELDS: list[tuple[str, Mapping[str, str], str, Any]] = [
    ("--role r", {}, "launch.role", "r"),
    ("--local-addr 10.0.0.1", {}, "launch.local_addr", "10.0.0.1"),
    ("--node-id n7", {}, "identity.node_id", "n7"),
    ("--nnodes 2 --node-rank 1 --master-addr h", {}, "identity.node_id", "rank-1"),
    ("", {"ELASTICRUN_NODE_ID": "n8"}, "identity.node_id", "n8"),
    ("--launch exec", {}, "launch.mode", "exec"),
    ("", {"ELASTICRUN_LAUNCH": "fork"}, "launch.mode", "fork"),
    ("--launch exec", {"ELASTICRUN_LAUNCH": "fork"}, "launch.mode", "exec"),
    ("--start-method forkserver", {}, "launch.start_method", "forkserver"),
    ("", {"PET_START_METHOD": "fork"}, "launch.start_method", "fork"),
    ("--preload a.b,c", {}, "launch.preload", ("a.b", "c")),
    ("--preload off", {}, "launch.preload", ()),
    ("--warm", {}, "launch.warm", True),
    ("", {"ELASTICRUN_PRELOAD": "a"}, "launch.preload", ("a",)),
    ("", {"PYTHON_EXEC": "/opt/python"}, "launch.python_exec", "/opt/python"),
    ("--numa-binding socket", {}, "launch.numa_binding", "socket"),
    ("--numa-binding socket", {}, "launch.numa_may_fail", False),
    ("--numa-affinity", {}, "launch.numa_binding", "node"),
    ("--numa-affinity", {}, "launch.numa_may_fail", True),
    ("--numa-affinity --numa-binding socket", {}, "launch.numa_binding", "socket"),
    ("--numa-affinity --numa-binding socket", {}, "launch.numa_may_fail", False),
    ("--virtual-local-rank", {}, "launch.virtual_local_rank", True),
    ("--signals-to-handle SIGTERM,SIGUSR1,", {},
     "launch.signals_to_handle", ("SIGTERM", "SIGUSR1")),
    ("--shutdown-timeout 5", {}, "launch.shutdown_timeout", 5.0),
    ("--shutdown-timeout 0", {}, "launch.shutdown_timeout", 0.0),
    ("--shutdown-timeout 2.5", {}, "launch.shutdown_timeout", 2.5),
    ("", {"PET_SHUTDOWN_TIMEOUT": "6", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"},
     "launch.shutdown_timeout", 6.0),
    ("--shutdown-timeout 5", {"PET_SHUTDOWN_TIMEOUT": "6", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"},
     "launch.shutdown_timeout", 5.0),
    ("", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, "launch.shutdown_timeout", 7.0),
    ("--exit-barrier-timeout 9", {}, "launch.exit_barrier_timeout", 9.0),
    ("", {"TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT": "8"}, "launch.exit_barrier_timeout", 8.0),
    ("--event-log-handler console", {}, "launch.event_log_handler", "console"),
    ("--status-port 8080", {}, "launch.master.status_port", 8080),
    ("--on-event ./told.sh", {}, "launch.master.on_event", "./told.sh"),
    ("--max-restarts 3", {}, "launch.spec.max_restarts", 3),
    ("", {}, "launch.spec.max_restarts", 0),
    ("--nnodes 2", {}, "launch.spec.max_restarts", 0),
    ("--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint h:1", {}, "launch.spec.max_restarts", 3),
    ("--nnodes 2:2", {}, "launch.spec.max_restarts", 0),
    ("--nnodes 1:2 --max-restarts 0", {}, "launch.spec.max_restarts", 0),
    ("--nnodes 1:2", {"PET_MAX_RESTARTS": "1"}, "launch.spec.max_restarts", 1),
    ("--restart-backoff 0", {}, "launch.spec.restart_backoff", 0.0),
    ("", {"ELASTICRUN_RESTART_BACKOFF": "1.5"}, "launch.spec.restart_backoff", 1.5),
    ("--restart-window 60", {}, "launch.spec.restart_window", 60.0),
    ("--restart-grace 3", {}, "launch.spec.restart_grace", 3.0),
    ("", {}, "launch.departure_grace", 25.0),
    ("--departure-grace 7.5", {}, "launch.departure_grace", 7.5),
    ("--departure-grace 0", {}, "launch.departure_grace", 0.0),
    ("", {}, "launch.child_exit_timeout", 30.0),
    ("--child-exit-timeout 7.5", {}, "launch.child_exit_timeout", 7.5),
    ("--shutdown-timeout 4", {}, "launch.spec.restart_grace", 4.0),
    ("--grow now", {}, "launch.spec.grow", "now"),
    ("--node-unit 2 --nnodes 4", {}, "launch.spec.node_unit", 2),
    ("--node_unit 2 --nnodes 4 --rdzv-conf node_unit=4", {}, "launch.spec.node_unit", 2),
    ("--nnodes 4 --rdzv-conf node_unit=4", {}, "launch.spec.node_unit", 4),
    ("--rdzv-conf join_timeout=1.5", {}, "launch.spec.join_timeout", 1.5),
    ("--rdzv-conf last_call_timeout=0", {}, "launch.spec.last_call_timeout", 0.0),
    ("--rdzv-conf lastcall_timeout=4", {}, "launch.spec.last_call_timeout", 4.0),
    ("--rdzv-conf heartbeat=4", {}, "launch.spec.heartbeat_timeout", 4.0),
    ("--rdzv-conf heartbeat_timeout=4", {}, "launch.spec.heartbeat_timeout", 4.0),
    ("--rdzv-conf master_lost_timeout=4,grow_cooldown=0", {}, "launch.spec.grow_cooldown", 0.0),
    ("", {"KUBERNETES_SERVICE_HOST": "192.0.2.1"}, "launch.spec.nodes_return", True),
    ("--master-port 7 --rdzv-conf timeout=40", {}, "launch.spec.join_timeout", 40.0),
    ("--master-port 7 --rdzv-conf timeout=40,join_timeout=30", {},
     "launch.spec.join_timeout", 30.0),
    ("--log-dir /x", {}, "launch.logs.log_dir", "/x"),
    ("-r 3", {}, "launch.logs.redirects_all", 3),
    ("-t 2", {}, "launch.logs.tee_all", 2),
    ("-r 12:1,3:0", {}, "launch.logs.redirects", {12: 1, 3: 0}),
    ("-t 0:3", {}, "launch.logs.tee", {0: 3}),
    ("--local-ranks-filter 2,0,2", {}, "launch.logs.local_ranks_filter", (0, 2)),
    ("--duplicate-stdout-filters a,,b,c", {}, "launch.logs.stdout_filters", ("a,b", "c")),
    ("--duplicate_stderr_filters x", {}, "launch.logs.stderr_filters", ("x",)),
    ("--log-line-prefix-template ${hostname}", {}, "launch.logs.prefix_template", "${hostname}"),
    ("", {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}"},
     "launch.logs.prefix_template", "${rank}"),
    ("--log-line-prefix-template a", {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "b"},
     "launch.logs.prefix_template", "a"),
    ("--logs-specs fancy", {}, "launch.logs.logs_specs", "fancy"),
    ("-m", {}, "launch.entry", Entrypoint(EntryKind.MODULE, "s.py")),
    ("--no-python", {}, "launch.entry", Entrypoint(EntryKind.COMMAND, "s.py")),
    ("--run-path --no-python", {}, "launch.entry", Entrypoint(EntryKind.RUN_PATH, "s.py")),
    ("--run-path -m --no-python", {}, "launch.entry", Entrypoint(EntryKind.RUN_PATH, "s.py")),
    ("--rdzv-backend mine", {}, "delegate", "mine"),
    # node health
    ("--network-check", {}, "launch.spec.checks", CheckSpec(network=True)),
    ("--network_check", {}, "launch.spec.checks", CheckSpec(network=True)),
    ("", {"PET_NETWORK_CHECK": "1"}, "launch.spec.checks", CheckSpec(network=True)),
    ("--comm-perf-test", {}, "launch.spec.checks", CheckSpec(perf=True)),
    ("--comm-perf-test --comm-perf-threshold 2.5", {}, "launch.spec.checks",
     CheckSpec(perf=True, perf_floor=2.5)),
    ("--precheck 0", {}, "launch.spec.checks", CheckSpec()),
    ("--precheck 1", {}, "launch.spec.checks", CheckSpec(network=True)),
    ("--precheck 2", {}, "launch.spec.checks", CheckSpec(network=True, perf=True)),
    ("", {"PET_PRECHECK": "2"}, "launch.precheck", 2),
    ("--precheck 1", {"PET_PRECHECK": "2"}, "launch.precheck", 1),
    ("--network-check", {}, "launch.precheck", 0),
    ("--exclude-straggler", {}, "launch.spec.checks", CheckSpec(exclude_stragglers=True)),
    ("--straggler-ratio 2", {}, "launch.spec.checks.slow_ratio", 2.0),
    ("", {"ELASTICRUN_STRAGGLER_RATIO": "1.2"}, "launch.spec.checks.slow_ratio", 1.2),
    ("--exclude-for 60", {}, "launch.spec.checks.exclude_for", 60.0),
    ("", {"ELASTICRUN_EXCLUDE_FOR": "0.5"}, "launch.spec.checks.exclude_for", 0.5),
    ("--rdzv-conf probe_timeout=7,straggler_time=2.5", {}, "launch.spec.checks",
     CheckSpec(probe_limit=7.0, slow_for=2.5)),
    ("", {}, "launch.health_command", HealthCommandPlan("", 60.0, 30.0)),
    ("--health-cmd=check.sh --health-cmd-interval 5 --health-cmd-timeout=2.5", {},
     "launch.health_command", HealthCommandPlan("check.sh", 5.0, 2.5)),
    ("", {"ELASTICRUN_HEALTH_CMD": " a b "}, "launch.health_command.command", "a b"),
    ("", {}, "launch.watch_devices", "auto"),
    ("--watch-devices tell", {}, "launch.watch_devices", "tell"),
    ("--accelerator nvidia", {}, "launch.accelerator", "nvidia"),
    ("--accelerator nvidia.com/gpu", {}, "launch.accelerator", "nvidia"),
    ("--accelerator ascend-npu", {}, "launch.accelerator", "ascend"),
    ("", {"PET_ACCELERATOR": "cpu"}, "launch.accelerator", "cpu"),
    ("--accelerator=", {"PET_ACCELERATOR": "cpu"}, "launch.accelerator", ""),
    ("--accelerator metax-tech.com/gpu", {}, "launch.accelerator", ""),
    ("--auto-config --nnodes 4", {}, "launch.spec.checks", CheckSpec(network=True)),
    ("--auto-config --nnodes 3:8 --rdzv-backend c10d", {}, "launch.spec.checks", CheckSpec()),
    ("--auto-config --nnodes 4:8 --rdzv-backend c10d", {}, "launch.spec.checks.network", True),
    # snapshots
    ("", {}, "launch.spec.saves", SaveSpec()),
    ("--save-at-breakpoint", {}, "launch.spec.saves", SaveSpec(at_breakpoint=True)),
    ("--save_at_breakpoint", {}, "launch.spec.saves.at_breakpoint", True),
    ("", {"PET_SAVE_AT_BREAKPOINT": "1"}, "launch.spec.saves.at_breakpoint", True),
    ("", {"PET_SAVE_AT_BREAKPOINT": "0"}, "launch.spec.saves.at_breakpoint", False),
    ("--save-limit 7.5", {}, "launch.spec.saves", SaveSpec(limit=7.5)),
    ("--on-hang tell", {}, "launch.spec.watch.on_hang", "tell"),
    ("--hang-limit 90", {}, "launch.spec.watch.hang_limit", 90.0),
    ("", {}, "launch.spec.watch.hang_limit", 0.0),
    ("--slot-price 2.5", {}, "launch.spec.watch.slot_price", 2.5),
    ("--restore-step 1200", {}, "launch.spec.saves", SaveSpec(restore_step=1200)),
    ("--save_limit=600", {"ELASTICRUN_SAVE_LIMIT": "5"}, "launch.spec.saves.limit", 600.0),
    ("", {"ELASTICRUN_SAVE_LIMIT": "5"}, "launch.spec.saves.limit", 5.0),
]  # fmt: skip


@pytest.mark.parametrize(("words", "environ", "field", "expected"), FIELDS)
def test_fields(words: str, environ: Mapping[str, str], field: str, expected: Any) -> None:
    value: Any = made(words, environ)
    for name in field.split("."):
        value = getattr(value, name)
    assert value == expected
    assert type(value) is type(expected)


def test_arguments_of_the_script_are_left_alone() -> None:
    ns = get_args_parser({}).parse_args(["s.py", "--lr", "1", "--", "-t", "${local_rank}"])
    entry = resolve(ns, {}, machine()).launch.entry
    assert entry.args == ("--lr", "1", "--", "-t", "${local_rank}")


# ---------------------------------------------------------------- notes

NOTES = [
    ("--rdzv-conf close_timeout=3,read_timeout=1", {}, "close_timeout, read_timeout has no effect"),
    (
        "--rdzv-conf colour=red",
        {},
        "colour is not known and has no effect; the keys are join_",
    ),
    ("--rdzv-conf jointimeout=3", {}, "no effect; did you mean join_timeout? The keys are join_"),
    ("--nnodes 1:2 --master-port 7", {}, "a fixed number of nodes, 2"),
    ("--rdzv-backend c10d --master-addr h", {}, "are only used with --rdzv-backend=static"),
    ("--standalone --nnodes 1:2", {}, "no other node can join"),
    ("--standalone", DLROVER, "DLROVER_MASTER_ADDR is not used: --standalone"),
    ("", DLROVER, "expected at pod-0:50001"),
    ("", DLROVER, "NODE_NUM=4"),
    ("--accelerator mthreads.com/gpu", {}, "mthreads.com/gpu is not supported: probes use the"),
    ("--comm-perf-threshold 3", {}, "no effect without --comm-perf-test"),
    ("--auto-config --nnodes 4", {}, "--auto-config: the network is checked before training"),
]


@pytest.mark.parametrize(("words", "environ", "part"), NOTES)
def test_notes(words: str, environ: Mapping[str, str], part: str) -> None:
    assert part in notes(made(words, environ))


@pytest.mark.parametrize(
    "words",
    ["", "--standalone", "--nnodes 2 --master-port 7",
     "--rdzv-backend c10d --rdzv-endpoint localhost:7",
     "--master-port 7 --rdzv-conf timeout=900", "--rdzv-conf join_timeout=5,is_host=1",
     "--numa-affinity", "--network-check --exclude-straggler",
     "--precheck 2 --comm-perf-threshold 3", "--exclude-straggler --accelerator cpu",
     "--rdzv-conf probe_timeout=5,straggler_time=9"],
)  # fmt: skip
def test_ordinary_commands_have_no_notes(words: str) -> None:
    assert made(words).notes == ()


VALUES_THAT_DIFFER = {"membind_policy": "bind", "training_port": "61000", "ucp_device_type": "gpu"}


@pytest.mark.parametrize("dest", NO_EFFECT)
def test_one_line_for_what_does_nothing_yet(dest: str) -> None:
    for name in ("--" + dest, "--" + dest.replace("_", "-")):
        found = made(f"{name} {VALUES_THAT_DIFFER.get(dest, '')}")
        assert [note for note in found.notes if "has no effect" in note] == [
            f"--{dest.replace('_', '-')} is accepted, but has no effect in this version"
        ]


# ---------------------------------------------------------------- whose word a value is

VARIABLE = {"PET_NNODES": "3"}


def asked(*words: str, environ: dict[str, str] | None = None, filled: str = "") -> FlagValues:
    environ = environ or {}
    namespace = get_args_parser(environ).parse_args([*words, "s.py"])
    found = {"nnodes": Given(filled, "$SLURM_JOB_NUM_NODES")} if filled else {}
    return FlagValues(namespace, environ, found)


@pytest.mark.parametrize(
    ("given", "value", "source"),
    [
        (asked(), "1:1", "default"),
        (asked("--nnodes=2"), "2", "--nnodes"),
        (asked(environ=VARIABLE), "3", "$PET_NNODES"),
        (asked("--nnodes=2", environ=VARIABLE), "2", "--nnodes"),
        (asked(filled="5"), "5", "$SLURM_JOB_NUM_NODES"),
        (asked(environ=VARIABLE, filled="5"), "5", "$SLURM_JOB_NUM_NODES"),
        (FlagValues(argparse.Namespace(nnodes="7"), {}), "7", "the caller"),
        (FlagValues(argparse.Namespace(), {}), "1:1", "default"),
    ],
)
def test_a_value_and_whose_it_is(given: FlagValues, value: str, source: str) -> None:
    assert (given.text("nnodes"), given.source("nnodes")) == (value, source)
    assert given.is_given("nnodes") is (source != "default")


def test_the_page_is_told_who_has_set_what() -> None:
    given = asked("--max-restarts=3", "--on-hang", "auto", environ=VARIABLE)
    assert sources(given, {"straggler_time": "60", "other": "1"}) == {
        "max_restarts": "--max-restarts",
        "on_hang": "--on-hang",
        "min_nodes": "$PET_NNODES",
        "max_nodes": "$PET_NNODES",
        "slow_for": "--rdzv-conf",
    }


@pytest.mark.parametrize(
    ("namespace", "on", "source"),
    [
        (argparse.Namespace(), False, "default"),
        (argparse.Namespace(standalone=False), False, "default"),
        (argparse.Namespace(standalone=True), True, "the caller"),
    ],
)
def test_a_switch_of_another_maker(namespace: argparse.Namespace, on: bool, source: str) -> None:
    given = FlagValues(namespace, {})
    assert (given.switch("standalone"), given.source("standalone")) == (on, source)


# ---------------------------------------------------------------- namespaces of other makers


def test_a_namespace_without_our_flags() -> None:
    """What torch's own parser, or accelerate, would hand in: only torch's names."""
    ours = get_args_parser({}).parse_args(["--nnodes=2", "--node-rank=1", "s.py", "a"])
    contract = get_args_parser({}).torchrun_dests | {"training_script", "training_script_args"}
    theirs = argparse.Namespace(**{k: v for k, v in vars(ours).items() if k in contract})
    environ = {"NODE_RANK": "0"}
    assert resolve(theirs, environ, machine()) == resolve(ours, environ, machine())


def test_a_namespace_as_accelerate_fills_it() -> None:
    """Numbers as texts, and a port that no flag has given."""
    ns = get_args_parser({}).parse_args(["s.py"])
    ns.nproc_per_node, ns.nnodes, ns.master_port, ns.node_rank = "2", "2", "29612", 1
    found = resolve(ns, {}, machine())
    assert found.place == Place("static", "127.0.0.1", 29612)
    launch = found.launch
    assert (launch.nproc_per_node, launch.node_rank, launch.spec.max_nodes) == (2, 1, 2)


def test_the_legacy_launcher_passes_the_local_rank() -> None:
    ns = get_args_parser({}).parse_args(["s.py", "a"])
    ns.use_env = False
    assert resolve(ns, {}, machine()).launch.entry.args == ("--local-rank=${local_rank}", "a")


def test_choices_are_checked_whoever_made_the_namespace() -> None:
    ns = get_args_parser({}).parse_args(["s.py"])
    ns.start_method = "thread"
    with pytest.raises(UsageError, match="--start-method=thread: use one of spawn"):
        resolve(ns, {}, machine())


# ---------------------------------------------------------------- Launch, Place, Identity


def test_no_fact_is_in_two_of_them() -> None:
    names = [field.name for kind in (Launch, Place, Identity) for field in fields(kind)]
    assert len(names) == len(set(names))
    assert made("--rdzv-id x").launch.spec.job_id == "", "the job's id is in Identity alone"


def test_with_git_paths_are_those_of_the_folder_in_which_the_command_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards the process changes to the folder of the commit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ca").touch()
    commit = "0" * 40
    words = [f"--git=file:///r@{commit}", "--run-dir=run", "--tensorboard", "--logdir=/tb"]
    words += ["--tls-ca=ca", "s.py"]
    ns = get_args_parser({}).parse_args(words)
    found = resolve(ns, {}, machine(), ("elasticrun", *words))
    run = found.launch.master.run
    assert (run.folder, run.tensorboard) == (f"{tmp_path}/run", "/tb")
    assert (run.workdir, run.git_commit) == (str(tmp_path), commit)
    assert run.command == ("elasticrun", *words)
    assert run.program == found.launch.entry.words()
    assert found.launch.logs.log_dir == f"{tmp_path}/run/logs"
    assert found.identity.tls == Tls(ca=f"{tmp_path}/ca")
    called = resolve(ns, {}, machine()).launch.master.run
    assert (called.folder, called.workdir, called.git_commit) == ("run", "", ""), "not checked out"


@pytest.mark.parametrize(
    ("words", "expected"), [("", "tell"), ("--nnodes=2", "auto"), ("--on-hang=restart", "restart")]
)
def test_a_rank_at_a_breakpoint_is_no_hang(words: str, expected: str) -> None:
    """With several nodes, all have to agree on that."""
    assert made(words).launch.spec.watch.on_hang != "tell"
    found = made(words, on=machine()._replace(debugged=True))
    assert found.launch.spec.watch.on_hang == expected
