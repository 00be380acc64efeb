"""--hosts and --hostfile: which hosts are meant, and what is typed on each of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.settings import Asked, UsageError
from elasticrun.cli.verbs.hosts import plan_of
from elasticrun.hosts.fleet import HostsPlan, Screen
from elasticrun.hosts.hostfile import HostsError, NamedHost, in_file, listed
from elasticrun.hosts.ssh import command


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a, b ,", [("a", "", 0), ("b", "", 0)]),
        ("a:4,b:8", [("a", "", 4), ("b", "", 8)]),
        ("me@a,you@a:2", [("a", "me", 0), ("a", "you", 2)]),
        ("[2001:db8::1]:8,2001:db8::2,u@[::1]",
         [("2001:db8::1", "", 8), ("2001:db8::2", "", 0), ("::1", "u", 0)]),
        ("a,a,a:2", [("a", "", 4)]),
        ("gpu-1.lab,10.0.0.7:2", [("gpu-1.lab", "", 0), ("10.0.0.7", "", 2)]),
    ],
)  # fmt: skip
def test_a_list_of_hosts(text: str, hosts: list[tuple[str, str, int]]) -> None:
    assert listed(text) == tuple(NamedHost(*host) for host in hosts)


@pytest.mark.parametrize("word", ["-oProxyCommand=x", "a b", "me@", "a:0", "a:ssh", "[::1", "a/b"])
def test_what_is_no_host(word: str) -> None:
    with pytest.raises(HostsError, match="--hosts"):
        listed(f"good,{word}")


def test_a_host_file() -> None:
    """Open MPI's and DeepSpeed's form, MPICH's, and a batch system's list."""
    text = "# all\na slots=4 max_slots=8\nb:2  # two\n\nc\nd\nd\n"
    slots = {host.name: host.slots for host in in_file(text, "f")}
    assert slots == {"a": 4, "b": 2, "c": 0, "d": 2}
    with pytest.raises(HostsError, match="f, line 2: 'port=22' is not known"):
        in_file("a\nb port=22", "f")


def planned(*words: str, environ: Mapping[str, str] | None = None) -> HostsPlan:
    variables = dict(environ or {})
    return plan_of(words, Asked(get_args_parser(variables).parse_args(words), variables), variables)


def test_what_is_started_on_each_host() -> None:
    plan = planned("--hosts", "a:2,b", "--max-restarts=3", "--", "train.py", "--hosts", "x",
                   environ={"NCCL_DEBUG": "INFO", "HOME": "/me", "ELASTICRUN_TOKEN": "s" * 32,
                            "XDG_DATA_HOME": "x", "GIT_SYNC_PASSWORD": "p"})  # fmt: skip
    tail = ["--max-restarts=3", "--", "train.py", "--hosts", "x"]
    job = plan.argv[0][0]
    assert job.startswith("--rdzv-id=train-")
    assert list(plan.argv[0]) == [job, "--nnodes=2", "--node-rank=0", "--nproc-per-node=2", *tail]
    assert list(plan.argv[1]) == [job, "--nnodes=2", "--node-rank=1", *tail]
    assert plan.variables == {"NCCL_DEBUG": "INFO", "GIT_SYNC_PASSWORD": "p"}
    assert plan.token == "s" * 32
    assert "s" * 32 not in repr(plan)
    assert 20_000 <= plan.port < 29_000
    assert command(plan.hosts[0], plan.ssh)[0] == "ssh"
    assert command(NamedHost("localhost"), plan.ssh)[1:] == ["-P", "-m", "elasticrun.hosts.far"]


def test_what_was_said_is_kept() -> None:
    said = ("--rdzv-endpoint=a:7", "--nproc-per-node=1", "--rdzv-id=me", "--nnodes=1:2")
    plan = planned("--hosts=a:2,b,c", "--ssh", "ssh -J gate", *said, "train.py")
    assert list(plan.argv[0]) == ["--node-rank=0", *said, "train.py"]
    assert list(plan.argv[2]) == [*said, "train.py"]  # no third place: a spare has no number
    assert (plan.port, plan.least, plan.job) == (0, 1, "me")
    assert command(plan.hosts[0], plan.ssh)[:3] == ["ssh", "-J", "gate"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--hosts=a", "--hostfile=f"], "both say which hosts"),
        (["--hosts=,"], "names no host"),
        (["--hostfile=nosuch"], "--hostfile=nosuch cannot be read: No such file"),
        (["--hosts=a,b", "--nnodes=3"], "needs more hosts than the 2 given"),
        (["--hosts=a,b", "--standalone"], "--standalone is for one host"),
        (["--hosts=a,b", "--node-id=x"], "--node-id is for one host"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_meant(words: list[str], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        planned(*words, "train.py")


def test_lines_of_several_hosts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A line appears when it is whole, and of a progress bar the newest state."""
    screen = Screen()
    screen.show("a", "out", b"one\ntw")
    screen.show("b", "out", b"10%\r20%\r\n")
    screen.show("a", "out", b"o\nthree")
    screen.show("a", "err", b"bad\n")
    screen.end()
    told = capfd.readouterr()
    assert told.out == "[a] one\n[b] 20%\n[a] two\n[a] three\n"
    assert told.err == "[a] bad\n"
