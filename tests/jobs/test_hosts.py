"""--hosts and --hostfile: which hosts are meant, and what is typed on each of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import termios
import tty
from collections.abc import Mapping
from pathlib import Path

import pytest

from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.settings import FlagValues, UsageError
from elasticrun.jobs.hosts import far, fleet
from elasticrun.jobs.hosts.fleet import HostsPlan, Screen
from elasticrun.jobs.hosts.hostfile import HostsError, NamedHost, parse_hostfile, parse_hosts
from elasticrun.jobs.hosts.launching import plan_of
from elasticrun.jobs.hosts.ssh import command
from tests.compat.live import PUPPET
from tests.harness import ELASTICRUN, LIMIT, World, clean_environment


@pytest.mark.parametrize("held", ["[", "7", '{"holder": [1, 2, "boot"], "agent": [1, 2, "boot"]}'])
def test_what_another_version_has_left_on_a_host_ends(held: str, tmp_path: Path) -> None:
    (tmp_path / "holder").write_text(held)
    long_ago = tmp_path.stat().st_mtime - 2 * far.BEGIN_LIMIT
    os.utime(tmp_path, (long_ago, long_ago))
    assert far._end_of(tmp_path) == {"lost": True}
    (tmp_path / "code").write_text("3")
    assert far._end_of(tmp_path) == {"code": 3}


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
    assert parse_hosts(text) == tuple(NamedHost(*host) for host in hosts)


@pytest.mark.parametrize("word", ["-oProxyCommand=x", "a b", "me@", "a:0", "a:ssh", "[::1", "a/b"])
def test_what_is_no_host(word: str) -> None:
    with pytest.raises(HostsError, match="--hosts"):
        parse_hosts(f"good,{word}")


def test_a_host_file() -> None:
    """Open MPI's and DeepSpeed's form, MPICH's, and a batch system's list."""
    text = "# all\na slots=4 max_slots=8\nb:2  # two\n\nc\nd\nd\n"
    slots = {host.name: host.slots for host in parse_hostfile(text, "f")}
    assert slots == {"a": 4, "b": 2, "c": 0, "d": 2}
    with pytest.raises(HostsError, match="f, line 2: 'port=22' is not known"):
        parse_hostfile("a\nb port=22", "f")


def planned(*words: str, environ: Mapping[str, str] | None = None) -> HostsPlan:
    variables = dict(environ or {})
    return plan_of(
        words, FlagValues(get_args_parser(variables).parse_args(words), variables), variables
    )


def test_what_is_started_on_each_host() -> None:
    plan = planned("--hosts", "a:2,b", "--max-restarts=3", "--", "train.py", "--hosts", "x",
                   environ={"NCCL_DEBUG": "INFO", "HOME": "/me", "ELASTICRUN_TOKEN": "s" * 32,
                            "XDG_DATA_HOME": "x", "GIT_SYNC_PASSWORD": "p"})  # fmt: skip
    tail = ["--max-restarts=3", "--", "train.py", "--hosts", "x"]
    job = plan.argv[0][0]
    assert job.startswith("--rdzv-id=train-")
    common = [job, "--name=train", "--nnodes=2"]
    assert list(plan.argv[0]) == [*common, "--node-rank=0", "--nproc-per-node=2", *tail]
    assert list(plan.argv[1]) == [*common, "--node-rank=1", *tail]
    assert plan.variables == {"NCCL_DEBUG": "INFO", "GIT_SYNC_PASSWORD": "p"}
    assert plan.token == "s" * 32
    assert "s" * 32 not in repr(plan)
    assert 20_000 <= plan.port < 29_000
    assert command(plan.hosts[0], plan.ssh)[0] == "ssh"
    assert command(NamedHost("localhost"), plan.ssh)[1:] == [
        "-P",
        "-m",
        "elasticrun.jobs.hosts.far",
    ]


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
        (["--hosts=a", "--hostfile=f"], "exclude each other"),
        (["--hosts=,"], "contains no host"),
        (["--hosts="], "--hosts contains no host"),
        (["--hostfile="], "--hostfile contains no host"),
        (["--hostfile=nosuch"], "--hostfile=nosuch cannot be read: No such file"),
        (["--hostfile=/dev/zero"], "/dev/zero has more than 1048576 characters"),
        (["--hosts=a,b", "--nnodes=3"], "needs more hosts than the 2 given"),
        (["--hosts=a,b", "--standalone"], "--standalone is for one host"),
        (["--hosts=a,b", "--node-id=x"], "--node-id is for one host"),
        (["--hosts=a,b", "--ssh=ssh 'x"], "--ssh=ssh 'x: No closing quotation"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_meant(words: list[str], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        planned(*words, "train.py")


async def test_lines_of_several_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    """Each with its host, and of a progress bar the newest state."""
    screen = Screen()
    screen.show("a", "out", b"one\ntw")
    screen.show("b", "out", b"10%\r20%\r\n")
    screen.show("a", "out", b"o\nthree")
    screen.show("a", "err", b"bad\n")
    screen.print_unfinished()
    told = capfd.readouterr()
    assert told.out == "[a] one\n[b] 20%\n[a] two\n[a] three\n"
    assert told.err == "[a] bad\n"


@pytest.mark.parametrize("columns", [0, 80], ids=["pipe", "terminal"])
async def test_a_line_of_a_host_that_does_not_end(columns: int, monkeypatch) -> None:
    """A prompt is shown, and cut off where another host says something; a bar moves in place."""
    reader, writer = os.openpty() if columns else os.pipe()
    if columns:
        tty.setraw(writer)
        termios.tcsetwinsize(writer, (24, columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(fleet, "_fd", lambda of: writer)

    async def reads(end: bytes) -> bytes:
        told = b""
        while not told.endswith(end):
            told += await asyncio.to_thread(os.read, reader, 4096)
        return told

    screen = Screen()
    screen.show("a", "out", b"go on? ")
    assert await reads(b"? ") == b"[a] go on? "
    screen.show("b", "out", b"one\n")
    screen.show("a", "out", b"yes\n")
    assert await reads(b"yes\n") == b"\n[b] one\n[a] go on? yes\n"
    screen.show("a", "err", b"\r 10%")
    if columns:
        assert await reads(b"10%") == b"[a]  10%"
        screen.show("a", "err", b"\r 20%")
        assert await reads(b"20%\x1b[K") == b"\r[a]  20%\x1b[K"
        screen.show("a", "err", b"\r 99%\n")
        assert await reads(b"\n") == b"\r[a]  99%\x1b[K\n"
    else:
        screen.show("b", "out", b"later")
        assert await reads(b"later") == b"[b] later", "a state of a bar is not shown"
        screen.show("a", "err", b"\r 99%\n")
        assert await reads(b"\n") == b"\n[a]  99%\n"
    screen.print_unfinished()
    os.close(writer)
    os.close(reader)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "code", "part"),
    [
        ("echo welcome; echo; cd /; sh -c \"$last\"", 0, "[far] rank 0 of 1 in {here}\n"),
        ("echo no such program >&2; exit 127", 1, "far cannot be used: there is no Python"),
        ("echo 'x: Permission denied (publickey).' >&2; exit 255", 1, "asks for no password"),
        ("echo 'No module named elasticrun' >&2; exit 1", 1, "No module named elasticrun; the job"),
        ("echo elasticrun-far 1 0.0.0", 1, "another version of elasticrun is installed there"),
        ("yes", 1, "its shell profile prints too much"),
        ("rm -rf gone; sh -c \"$last\"", 1, "far cannot be used: there is no folder"),
    ],
    ids=["noise", "no Python", "no key", "no elasticrun", "another version", "yes", "no folder"],
)  # fmt: skip
def test_what_ssh_says(does: str, code: int, part: str, tmp_path: Path) -> None:
    """A program in the place of ssh: what it does with the command, its last word."""
    here = tmp_path / "gone" if "gone" in does else tmp_path
    here.mkdir(exist_ok=True)
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\ncase \" $* \" in *' -G '*) echo hostname 127.0.0.1; exit;; esac\n"
        f"for last; do :; done\ncd {tmp_path}\n{does}\n"
    )
    ssh.chmod(0o755)
    (here / "train.py").write_text(
        "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], 'in',"
        " os.getcwd())\n"
    )
    environ = {**clean_environment(), "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, "-m", "elasticrun", "--hosts=far", f"--ssh={ssh}", "train.py"],
        env=environ, cwd=here, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert part.format(here=here) in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_second_signal_kills(world: World) -> None:
    """The first lets ranks take their time."""
    job = world.launch(ELASTICRUN, "--hosts=localhost:2", "--shutdown-timeout=200", PUPPET)
    peers = world.hub.ranks(2)
    for peer in peers:
        peer.order("trap", signums=[signal.SIGINT, signal.SIGTERM], how="note")
        world.hub.word(peer, "done")
    job.signal(signal.SIGINT)
    for peer in peers:
        world.hub.word(peer, "signal")
    job.signal(signal.SIGINT)
    world.hub.lost(peers)
    assert job.wait() == 128 + signal.SIGKILL
