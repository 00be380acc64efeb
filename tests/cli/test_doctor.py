"""`elasticrun doctor` as a command: the table, JSON, exit codes, and what a job's master adds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.text import Text

from elasticrun import __version__
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.place import apply_scheduler
from elasticrun.cli.settings import NOT_DETECTED, FlagValues
from elasticrun.cli.verbs import doctor as own
from elasticrun.cli.verbs.columns import print_table
from elasticrun.cli.verbs.masters import MasterQuery, parse_endpoint
from elasticrun.testing.hosts import NETNS, Lab
from elasticrun.wire import auth
from elasticrun.wire.auth import TOKEN_WANTED
from elasticrun.wire.types import Finding, Level
from tests import needs
from tests.certificates import Authority
from tests.cli.detection.commands import NOT_A_POD, machine
from tests.cli.detection.environments import (
    BATCH,
    DLROVER,
    INDEXED,
    LWS,
    PYTORCH_JOB,
    SRUN,
    TRAINER_2,
)
from tests.harness import clean_environment, free_port, program
from tests.host.doctor.child import finding, one
from tests.master.people import LIMIT, serving, status, told

pytestmark = pytest.mark.slow

DOCTOR = (sys.executable, "-m", "elasticrun", "doctor")
TOKEN = "what the nodes of the job know"

WITH_TIME = (
    *(sys.executable, "-c"),
    "import sys; from elasticrun.agent import checkup; from elasticrun.cli import main; "
    "from elasticrun.cli.verbs import doctor; "
    f"checkup.ANSWER_LIMIT = doctor.ANSWER_LIMIT = {LIMIT}; sys.exit(main.main(sys.argv[1:]))",
    "doctor",
)
"""The same where a master is asked that may stand still for a while, as this process does."""

MASTER = (
    "import sys; from elasticrun.cli import main; from elasticrun.master import server; "
    "server.DIAL_LIMIT = float(sys.argv.pop(1)); sys.exit(main.main(sys.argv[1:]))"
)
"""A master by hand that takes so many seconds at most for dialling whoever asks it to."""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    folder = str(tmp_path)
    more = {
        "TMPDIR": folder,
        "XDG_RUNTIME_DIR": folder,
        "COLUMNS": "200",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return clean_environment() | more


def doctor(
    *words: str, environ: dict[str, str], before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    return program(*DOCTOR[1:], *words, env=environ, before=before)


def findings(text: str) -> list[Finding]:
    page = json.loads(text)
    assert page["host"] == socket.gethostname()
    assert page["version"] == __version__
    return [finding(fields) for fields in page["findings"]]


def few_files() -> None:
    """So low a limit that no rank could work."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4096))


# ---------------------------------------------------------------- this machine


def test_the_table(environ: dict[str, str]) -> None:
    done = doctor(environ=environ)
    assert done.stderr == ""
    head, *rows, _, last = done.stdout.splitlines()
    assert head.split() == ["state", "check", "seen", "what", "to", "do"]
    for check in ("disk, temporary folder", "shared memory", "open files", "cores", "kernel log"):
        assert any(check in row for row in rows), done.stdout
    assert f"{socket.gethostname()}, elasticrun {__version__}: " in last
    assert "0 failed" in last
    assert done.returncode == 0


def test_it_is_a_verb(environ: dict[str, str], tmp_path: Path) -> None:
    command = (sys.executable, "-m", "elasticrun", "--help")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT)
    assert "  elasticrun join, doctor, demo  " in done.stdout
    own = doctor("--help", environ=environ).stdout
    for flag in ("--json", "--ckpt-dir", "--rdzv-endpoint", "--log-dir", "--token-file"):
        assert flag in own


def test_a_failure_is_exit_code_1(environ: dict[str, str]) -> None:
    done = doctor(environ=environ, before=few_files)
    assert done.returncode == 1, done.stderr
    assert re.search(r"failed +open files", done.stdout)
    assert "ulimit -n is 100, which is too few for any rank" in done.stdout
    done = doctor("--json", environ=environ, before=few_files)
    assert done.returncode == 1
    assert one(findings(done.stdout), "open files").todo == "ulimit -n 1024"


def test_a_warning_is_exit_code_0(environ: dict[str, str], tmp_path: Path) -> None:
    environ["TMPDIR"] = str(tmp_path / "gone")
    done = doctor("--json", environ=environ)
    assert one(findings(done.stdout), "disk, temporary folder").state is Level.WARNING
    assert done.returncode == 0


def test_the_job_that_is_meant(environ: dict[str, str], tmp_path: Path) -> None:
    """A job of 2000 nodes with 8 ranks: its store needs a file for each rank."""
    words = ("--nnodes=1:2000", "--nproc-per-node=8", f"--log_dir={tmp_path}", "--ckpt-dir=/gone")
    done = doctor("--json", *words, environ=environ)
    found = findings(done.stdout)
    assert [finding.check for finding in found[:2]] == ["torch", "scheduler"]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert one(found, "open files").state is (
        Level.OK if files == resource.RLIM_INFINITY or files >= 16512 else Level.WARNING
    )
    assert str(tmp_path) in one(found, "disk, log folder").seen
    assert "/gone (to be created in /)" in one(found, "disk, checkpoint folder").seen


@pytest.mark.parametrize(
    ("where", "several"),
    [
        ("", False),
        ("localhost:1", False),
        ("[::1]:1", False),
        ("head:1", True),
        ("[fd00::1]", True),
    ],
)
def test_a_job_on_loopback_has_one_host(where: str, several: bool) -> None:
    asked = FlagValues(own.parser({}).parse_args([]), {})
    master = MasterQuery(parse_endpoint(where)) if where else None
    assert own._subject(asked, NOT_DETECTED, "", master).several is several


@pytest.mark.parametrize(
    ("scheduler", "words", "several", "ranks"),
    [
        (SRUN | {"SLURM_GPUS_ON_NODE": "8"}, "", True, 16),
        (SRUN, "--nproc-per-node=3", True, 6),
        (SRUN, "--nnodes=1", False, 1),
        (SRUN, "--standalone", False, 1),
        (SRUN | {"PET_NNODES": "1:4"}, "", True, 4),
        (BATCH, "", True, 2),  # a bare command is a job of one node; --srun would be one of two
        (LWS, "", True, 4),
        (PYTORCH_JOB, "", True, 3),
        (TRAINER_2, "", True, 8),
        (DLROVER, "", True, 4),
        (INDEXED, "", False, 1),
        ({}, "", False, 1),
    ],
)
def test_the_nodes_of_a_scheduler_are_those_of_the_job(
    scheduler: dict[str, str], words: str, several: bool, ranks: int
) -> None:
    asked = FlagValues(own.parser(scheduler).parse_args(words.split()), scheduler)
    place = apply_scheduler(asked, machine(None), NOT_A_POD) if scheduler else NOT_DETECTED
    subject = own._subject(FlagValues(asked.ns, scheduler, place.filled), place, "", None)
    assert (subject.several, subject.ranks) == (several, ranks)


LOOPBACK_NAME = 'hostname localhost && exec "$@"'
"""This host's name is one that no other host could use."""


def test_a_step_of_several_nodes_has_the_checks_of_several_hosts(environ: dict[str, str]) -> None:
    """Without a flag, as a batch script has it. The table below says where the nodes were from."""
    needs.namespaces("--uts")
    del environ["GLOO_SOCKET_IFNAME"]
    command = ["unshare", "--uts", "sh", "-c", LOOPBACK_NAME, "sh", *DOCTOR]
    run = partial(subprocess.run, capture_output=True, text=True, timeout=LIMIT)
    done = run([*command, "--json"], env=environ | SRUN)
    page = json.loads(done.stdout)
    name = one([finding(fields) for fields in page["findings"]], "host name")
    assert name.state is Level.WARNING
    assert "which is only loopback; gloo offers" in name.seen
    told = {one["name"]: (one["value"], one["source"]) for one in page["settings"]}
    assert told["nnodes"] == ("2", "$SLURM_STEP_NUM_NODES")
    assert told["node-rank"] == ("1", "$SLURM_NODEID")
    assert told["nproc-per-node"] == ("1", "default")
    assert told["rdzv-endpoint"] == ("node2:20001", "$SLURM_STEP_NODELIST; port: $SLURM_JOB_ID")
    alone = run([*command, "--json", "--nnodes=1"], env=environ | SRUN)
    found = [finding(fields) for fields in json.loads(alone.stdout)["findings"]]
    assert one(found, "host name").state is Level.OK


def test_the_table_of_settings(environ: dict[str, str]) -> None:
    """Nobody says anything of the place: there is none. A flag, a scheduler: all that counts."""
    nobody = doctor(environ=environ).stdout.splitlines()
    assert not [line for line in nobody if line.startswith("setting")]
    rows = doctor("--node-rank=1", environ=environ | SRUN).stdout.splitlines()
    told = [line.split(maxsplit=2) for line in rows]
    start = told.index(["setting", "value", "source"])
    assert told[start + 1 : -2] == [
        ["nnodes", "1:1", "default"],
        ["nproc-per-node", "1", "default"],
        ["node-rank", "1", "--node-rank"],
        ["rdzv-id", "none", "default"],
        ["rdzv-endpoint", "default"],
    ]


def test_a_small_shm_of_a_container(environ: dict[str, str]) -> None:
    needs.namespaces("--mount")
    shell = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", shell, "sh", *DOCTOR, "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT)
    assert "Docker's default" in one(findings(done.stdout), "shared memory").seen
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rdzv-endpoint=h:x",), "'h:x' is not an endpoint"),
        (("--nproc-per-node=many",), "--nproc-per-node=many is not known"),
        (("--nnodes=3:2",), "--nnodes=3:2"),
        (("--accelerator=abacus",), "--accelerator=abacus is not known"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--rdzv-endpoint=h:1", "--tls-cert=/none"), "--tls-cert"),
    ],
)
def test_bad_input_is_one_sentence(
    words: tuple[str, ...], said: str, environ: dict[str, str]
) -> None:
    done = doctor(*words, environ=environ)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


# ---------------------------------------------------------------- with a job's master


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master in this process dials the doctor's ports."""
    monkeypatch.setattr("elasticrun.master.server.DIAL_LIMIT", LIMIT)


async def test_what_the_master_says(environ: dict[str, str]) -> None:
    environ["ELASTICRUN_TOKEN"] = TOKEN
    async with serving(token=TOKEN) as served:
        where = f"--rdzv-endpoint={served.endpoint}"
        code, out, err = await told(*WITH_TIME, "--json", where, **environ)
        assert (code, err) == (0, "")
        found = findings(out)
        assert "the master of job 'job' answers" in one(found, "master").seen
        assert "has connected to ports" in one(found, "ports").seen
        assert {"clock", "packet size", "host name in the job"} <= {f.check for f in found}
        assert TOKEN not in out


async def test_a_second_host_of_our_name_in_the_job(environ: dict[str, str]) -> None:
    async with serving() as served:
        (node,) = served.brain.page.nodes
        other = replace(node, host=socket.gethostname(), address="198.51.100.9")
        served.brain.page = status(nodes=(other,))
        where = f"--rdzv-endpoint={served.endpoint}"
        _, out, _ = await told(*WITH_TIME, "--json", where, **environ)
        twice = one(findings(out), "host name in the job")
        assert twice.state is Level.WARNING
        assert "198.51.100.9" in twice.seen


def test_a_master_that_does_not_answer(environ: dict[str, str]) -> None:
    done = doctor("--json", f"--rdzv-endpoint=127.0.0.1:{free_port()}", environ=environ)
    master = one(findings(done.stdout), "master")
    assert master.state is Level.FAILED
    assert "does not answer" in master.seen
    assert done.returncode == 1


async def test_a_master_that_refuses_us(environ: dict[str, str]) -> None:
    async with serving(token=TOKEN) as served:
        where = f"--rdzv-endpoint={served.endpoint}"
        code, out, _ = await told(*WITH_TIME, "--json", where, **environ)
        assert code == 1
        assert TOKEN_WANTED in one(findings(out), "master").seen


async def test_over_tls(environ: dict[str, str], tmp_path: Path) -> None:
    files = Authority(tmp_path).create().sign("node", "IP:127.0.0.1")
    flags = (f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}")
    async with serving(tls=auth.read_pem(files)) as served:
        where = f"--rdzv-endpoint={served.endpoint}"
        code, out, err = await told(*WITH_TIME, "--json", where, *flags, **environ)
        assert (code, err) == (0, "")
        assert one(findings(out), "ports").state is Level.OK
        code, out, err = await told(*WITH_TIME, "--json", where, **environ)
        assert (code, err) == (1, "")
        master = one(findings(out), "master")
        assert "uses TLS and this node does not" in master.seen
        assert "--tls-ca" in master.todo


# ---------------------------------------------------------------- between hosts


class Pair:
    """A master on one host, and a doctor on the other."""

    def __init__(self, lab: Lab, environ: dict[str, str], dial_limit: float) -> None:
        self.lab, self.environ = lab, environ
        for name in ("near", "far"):
            lab.add(name)
        self.where = f"{lab.hosts['far'].address}:29400"
        words = ("-c", MASTER, str(dial_limit), "master", "--rdzv-id=job")
        command = [*lab.prefix("far"), sys.executable, *words]
        self.master = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
        for line in self.master.stderr:
            if "serving job" in line:
                break

    def on(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.lab.prefix(name), *command],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    def look(self) -> tuple[int, list[Finding]]:
        done = self.on("near", *WITH_TIME, "--json", f"--rdzv-endpoint={self.where}")
        assert done.stderr == ""
        return done.returncode, [finding(fields) for fields in json.loads(done.stdout)["findings"]]

    def close(self) -> None:
        """Everything goes with the lab."""
        self.lab.close()
        self.master.communicate(timeout=LIMIT)


@pytest.fixture
def pair(tmp_path: Path, environ: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two hosts; skipped where none can be made. The parameter: how long the master dials."""
    del environ["GLOO_SOCKET_IFNAME"]
    needs.several_hosts()
    before = namespaces()  # the Slurm cluster of this process may live for longer
    lab = Lab(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(lab.close)
        made = Pair(lab, environ, getattr(request, "param", LIMIT))
        stack.callback(made.close)
        yield made
    assert namespaces() <= before


def namespaces() -> set[str]:
    """Those that this process has made."""
    names = os.listdir(NETNS) if NETNS.is_dir() else []
    return {name for name in names if f"-{os.getpid()}-" in name}


def test_two_hosts_that_are_well(pair: Pair) -> None:
    code, found = pair.look()
    assert code == 0
    assert "the master's host far has connected to ports" in one(found, "ports").seen
    assert "packets of 1500 bytes" in one(found, "packet size").seen
    own = one(found, "host name")
    assert (own.state, own.seen) == (Level.OK, "near resolves to 192.0.2.1")


def test_packet_sizes_that_differ(pair: Pair) -> None:
    assert pair.on("near", "ip", "link", "set", "eth0", "mtu", "1400").returncode == 0
    code, found = pair.look()
    size = one(found, "packet size")
    assert size.state is Level.WARNING
    assert "sends packets of 1400 bytes" in size.seen
    assert "sends 1500" in size.seen
    assert code == 0


@pytest.mark.parametrize("pair", [2], indirect=True, ids=["as-it-is"])
def test_a_firewall_that_lets_nobody_in(pair: Pair) -> None:
    """The usual one: the node reaches the master's port, and nobody reaches the node."""
    rules = (
        "add table inet wall; add chain inet wall in { type filter hook input priority 0; }; "
        "add rule inet wall in tcp flags & (syn | ack) == syn drop"
    )
    try:
        walled = pair.on("near", "nft", rules)
    except OSError as wrong:
        needs.lacking(f"nft cannot be run: {wrong}")
    if walled.returncode:
        needs.lacking(f"no firewall can be had here: {walled.stderr}")
    code, found = pair.look()
    ports = one(found, "ports")
    assert ports.state is Level.FAILED
    assert "the master's host far cannot connect to port" in ports.seen
    assert "no answer within 2 s" in ports.seen
    assert code == 1


@pytest.mark.parametrize("columns", ["40", "60", "200"])
def test_a_table_breaks_no_word(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names and paths can be copied, however narrow the terminal is."""
    monkeypatch.setenv("COLUMNS", columns)
    cells = (
        "/data/a-long/folder-with/no-blank/in-its-name",
        "set --rdzv-endpoint=host-a:29400 on all",
    )
    print_table(("seen", "what to do"), [tuple(map(Text, cells))])
    shown = capsys.readouterr().out.split()
    for word in " ".join(cells).split():
        assert word in shown


def test_help_breaks_no_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["--help-all"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 200
    assert [line for line in lines if re.search(r"\w[-/]$", line)] == []
