"""A warm process: what is forked from it, who is refused and why, and that nobody depends on it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.agent.warm import connect
from elasticrun.forkserver.warm import surroundings
from elasticrun.wire import frames, spawning
from elasticrun.wire.types import EntryKind, Entrypoint
from tests.forkserver.driver import (
    LIMIT,
    Driver,
    alive,
    gone,
    plain_environment,
    script,
    started,
    tells,
    warm_process,
)
from tests.further import cases, further
from tests.harness import await_true, program, ran

pytestmark = pytest.mark.slow

NONE = Entrypoint(EntryKind.SCRIPT, "none.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("warm") / "warm.sock"
    with warm_process(path, plain_environment()) as there:
        yield there


def described(place: Path) -> spawning.Description:
    with connect(place, LIMIT) as conn:
        conn.sendall(frames.encode(spawning.Describe()))
        (answer,) = frames.FrameBuffer(spawning.FromWarm).feed(conn.recv(4096))
    assert isinstance(answer, spawning.Description)
    return answer


def guard_of(driver: Driver) -> int:
    stat = Path(f"/proc/{driver.process.pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


SLEEPER = """
import os, subprocess, time
below = subprocess.Popen(["sleep", "600"], start_new_session=True)
say(os.getpid(), below.pid)
time.sleep(600)
"""


def running(driver: Driver, folder: Path) -> list[int]:
    """A rank, and a process below it in a session of its own."""
    return [int(word) for word in tells(driver, folder, SLEEPER)[1].split()]


# ---------------------------------------------------------------- who ends with whom


def test_ranks_have_torch_and_the_launchers_place(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    entry = script(
        tmp_path / "s.py",
        "import os, torch\n"
        "print(os.getcwd(), os.environ['WORD'], 'NEVER' in os.environ, torch.ones(2).sum().item(),"
        " torch.get_num_threads())\n",
    )
    env = plain_environment(WORD="w", OMP_NUM_THREADS="1")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        with Driver(entry, env=env, warm=place) as driver:
            assert driver.ready().mode == "fork"
            assert driver.run(entry, stdout=str(out)).code == 0
    assert out.read_text().split() == [str(tmp_path), "w", "False", "2.0", "1"]


def test_the_wish_of_one_job_is_no_other_ones(place: Path, tmp_path: Path) -> None:
    """--preload imports in the job's own fork server."""
    entry = script(tmp_path / "s.py", "import sys\nprint('wave' in sys.modules)\nimport wave\n")
    before = described(place)
    with started(entry, warm=place, preload=["wave"]) as driver:
        assert driver.run(entry).code == 0
    assert described(place).modules == before.modules


SEEDED = """
import os, torch
torch.manual_seed(0)
{late}
print(torch.randperm(8).tolist())
"""

LATE = {
    "torch.save": "torch.save({}, os.devnull)\ntorch.get_default_device()",
    "torch.compile": "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))",
}
"""What imports more of torch, and what it is called here."""


@pytest.mark.parametrize("late", cases(LATE, kept=["torch.save"]))
def test_a_seed_stays(place: Path, tmp_path: Path, late: str) -> None:
    """Whatever the script imports after it, in a first life and in later ones."""
    entry = script(tmp_path / "s.py", SEEDED.replace("{late}", LATE[late]))
    drawn = set()
    with started(entry, warm=place) as driver:
        for life in ("first", "second"):
            out = tmp_path / life
            assert driver.run(entry, stdout=str(out)).code == 0
            drawn.add(out.read_text())
    assert drawn == {"[4, 0, 7, 3, 2, 5, 1, 6]\n"}


@pytest.mark.parametrize("stands_still", [False, True])
def test_all_ends_with_the_agent(place: Path, tmp_path: Path, stands_still: bool) -> None:
    """Also where the fork server cannot hear of it."""
    with started(NONE, warm=place) as driver:
        below = running(driver, tmp_path)
        everything = [driver.process.pid, guard_of(driver), *below]
        if stands_still:
            os.kill(driver.process.pid, signal.SIGSTOP)
        driver.process.abandon()
        driver.socket.close()
        assert not gone(everything)


def test_the_guard_ends_what_a_killed_fork_server_leaves(place: Path, tmp_path: Path) -> None:
    with started(NONE, warm=place) as driver:
        below = running(driver, tmp_path)
        guard = guard_of(driver)
        driver.process.kill()
        assert driver.process.wait(LIMIT) == -signal.SIGKILL
        assert not [pid for pid in below if alive(pid)]
        assert not gone([guard])


def test_the_fork_server_ends_all_once_its_guard_was_killed(place: Path, tmp_path: Path) -> None:
    """By itself: its agent may stand still. Stopped itself, it is woken up for that."""
    with started(NONE, warm=place) as driver:
        below = running(driver, tmp_path)
        os.kill(driver.process.pid, signal.SIGSTOP)
        os.kill(guard_of(driver), signal.SIGKILL)
        assert not gone([driver.process.pid, *below])
        driver.process.abandon()


def test_jobs_do_not_need_the_warm_process(tmp_path: Path) -> None:
    entry = script(tmp_path / "s.py", "import torch\n")
    with warm_process(tmp_path / "w.sock", plain_environment()) as own:
        pid = described(own).pid
        with started(entry, warm=own) as driver:
            os.kill(pid, signal.SIGKILL)
            assert not gone([pid])
            assert driver.run(entry).code == 0


# ---------------------------------------------------------------- who is refused

REFUSED = {
    "umask": (
        "umask 077",
        {},
        "umask 0077 here, 0022 in the warm process; run `elasticrun warm --stop`",
    ),
    "limit": ("ulimit -S -c 7", {}, "limit of core file size 3584 bytes (hard "),
    "nice": ("exec nice -n 3", {}, "nice value "),
    "cores": ("exec taskset -c 0", {}, "cores 0 here, 0-"),
    "out of memory": ("echo 123 > /proc/self/oom_score_adj", {}, "OOM score 123 here, "),
    "privileges": ("exec setpriv --no-new-privs", {}, "no_new_privs 1 here, 0 in the warm process"),
    "network": ("exec unshare --net", {}, "net namespace net:["),
    "loader": ("", {"LD_BIND_NOW": "1"}, "LD_BIND_NOW 1 here, not set in the warm process"),
    "interpreter": ("", {"PYTHONHASHSEED": "5"}, "PYTHONHASHSEED 5 here, not set in"),
    "a C library": ("", {"MKL_CBWR": "AVX2"}, "MKL_CBWR AVX2 here"),
    "read by an import": ("", {"PYTORCH_JIT": "0"}, "PYTORCH_JIT 0 here"),
    "heap": ("", {"MALLOC_ARENA_MAX": "1"}, "MALLOC_ARENA_MAX 1 here"),
    "threads": ("", {"OMP_NUM_THREADS": "7"}, "OMP_NUM_THREADS 7 here, 1 in the warm process"),
    "policy": ("exec chrt --batch 0", {}, "scheduling policy BATCH here, OTHER in the warm"),
    "of a launcher": ("", {"LOGLEVEL": "ERROR", "COLUMNS": "99", "LINES": "9"}, ""),
    "nobody reads it": ("", {"WANDB_MODE": "offline"}, ""),
}
"""Shell that makes the asking process differ, variables that do, and what is said of it."""

ASK = (
    "import logging, os, pathlib, sys\n"
    "logging.basicConfig(level='INFO', stream=sys.stdout, format='%(message)s', force=True)\n"
    "from elasticrun.agent import warm\n"
    "from elasticrun.host.log import logger\n"
    "warm.ANSWER_LIMIT = float(sys.argv[2]) if sys.argv[2:] else warm.ANSWER_LIMIT\n"
    "logger.setLevel('INFO'); logger.propagate = True\n"
    "print('served' if warm.ask(pathlib.Path(sys.argv[1]), os.environ, ()) else 'refused')\n"
)


@pytest.mark.parametrize("case", REFUSED)
def test_who_differs_is_told_in_what(place: Path, case: str) -> None:
    shell, more, sentence = REFUSED[case]
    tail = f"{shell} " if shell.startswith("exec") else f"{shell or ':'}; exec "
    done = subprocess.run(
        ["sh", "-c", f'{tail}"$@"', "sh", sys.executable, "-c", ASK, str(place), str(LIMIT)],
        env=plain_environment(**more), capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    if sentence and "Operation not permitted" in done.stderr:
        pytest.skip(f"not allowed here: {shell}")
    assert done.returncode == 0, done.stderr
    if sentence:
        assert f"the warm process is not used: {sentence}" in done.stdout
    assert done.stdout.split()[-1] == ("refused" if sentence else "served")


def test_every_process_looks_like_itself() -> None:
    mine = surroundings.read_process("self")
    assert surroundings.difference(mine, surroundings.read_process(os.getpid())) == ""
    assert len(mine) > 30


def test_a_warm_process_that_stands_still_holds_nobody_up(tmp_path: Path) -> None:
    with warm_process(tmp_path / "w.sock", plain_environment()) as own:
        pid = described(own).pid
        os.kill(pid, signal.SIGSTOP)
        done = program("-c", ASK, str(own), env=plain_environment())
        os.kill(pid, signal.SIGCONT)
    assert done.stdout.splitlines() == [
        "the warm process is not used: it does not answer within 2 s",
        "refused",
    ]


def test_what_is_no_request_is_hung_up_on(place: Path) -> None:
    for data in (b"", b"\0\0\0\4null", b"\xff" * 64, frames.encode(spawning.Forked(1))):
        with connect(place, LIMIT) as conn:
            conn.sendall(data)
            conn.shutdown(socket.SHUT_WR)
            assert conn.recv(1) == b""
    with connect(place, LIMIT) as conn:  # without its descriptors
        conn.sendall(frames.encode(spawning.Ask(plain_environment(), (), ())))
        heard = frames.FrameBuffer(spawning.FromWarm)
        assert [*heard.feed(conn.recv(4096))] == [spawning.Granted()]
        conn.sendall(b".")
        assert [*heard.feed(conn.recv(4096))] == [
            spawning.Declined("its descriptors did not arrive")
        ]
    assert described(place).torch


# ---------------------------------------------------------------- the command, and its end


COMMAND = (
    "import sys; from elasticrun.agent import warm; from elasticrun.cli import main; "
    "from elasticrun.cli.verbs import warm as verb; "
    f"warm.ANSWER_LIMIT = verb.ANSWER_LIMIT = {LIMIT}; sys.exit(main.main(sys.argv[1:]))"
)
"""elasticrun, to which a warm process may answer as late as it likes."""


def test_the_command(tmp_path: Path) -> None:
    env = plain_environment(XDG_RUNTIME_DIR=str(tmp_path))
    for name in ("ELASTICRUN_WARM_SERVER", "OMP_NUM_THREADS"):
        env.pop(name, None)

    def run(*words: str, code: int = 0, mask: int = 0o022) -> str:
        before = os.umask(mask)
        done = program("-c", COMMAND, "warm", *words, env=env)
        os.umask(before)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert run("--list") == "no warm process\n"
    several = "for jobs with several ranks per node (--one-rank: for jobs with one)"
    started = run("--idle", "20")
    assert "is warm, with torch" in started
    assert f", {several}; it ends" in started
    assert "is already warm" in (again := run())
    assert several in again
    assert "--idle has no effect on it" in run("--idle=3", code=1)
    umask = "umask 0077 here, 0022 in the warm process"
    assert f"of this shell cannot use it: {umask}; run `elasticrun warm --stop`" in run(
        code=1, mask=0o077
    )
    assert f"  not here: {umask}\n" in run("--list", mask=0o077)
    assert "--idle has no effect with --list" in run("--list", "--idle=3", code=2)
    row = run("--list").splitlines()[1].split()
    assert row[0].isdigit()
    assert row[-1] == "here"
    assert alive(int(row[0]))
    assert "1 ended" in run("--stop")
    assert not gone([int(row[0])])
    assert run("--list") == "no warm process\n"
    assert not list((tmp_path / "elasticrun").glob("*.sock*"))


def test_a_job_leaves_one_behind(tmp_path: Path) -> None:
    env = plain_environment(XDG_RUNTIME_DIR=str(tmp_path), ELASTICRUN_WARM_SERVER="")
    nothing = script(tmp_path / "nothing.py", "").target
    done = ran("--warm", "--no-python", "true", env=env)
    assert "no warm process is kept: no rank of this job is forked" in done.stderr
    done = ran("--warm", nothing, env=env)
    assert "stays warm for later jobs" in done.stderr

    def there() -> list[Path]:
        return list((tmp_path / "elasticrun").glob("warm-*.sock"))

    await_true(there, "warm process")
    pid = described(there()[0]).pid
    with connect(there()[0], LIMIT) as conn:
        conn.sendall(frames.encode(spawning.Leave()))
    assert not gone([pid])


def test_ctrl_c_ends_one_that_is_starting(tmp_path: Path) -> None:
    endless = tmp_path / "endless"
    endless.mkdir()
    endless.joinpath("torch.py").write_text("import signal\nsignal.pause()\n")
    env = plain_environment(XDG_RUNTIME_DIR=str(tmp_path), PYTHONPATH=str(endless))
    command = subprocess.Popen([sys.executable, "-m", "elasticrun", "warm"], env=env)
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children")

    def named() -> list[int]:
        pids = [int(word) for word in children.read_text().split()]
        return [p for p in pids if "elasticrun-warm" in Path(f"/proc/{p}/comm").read_text()]

    await_true(named, "warm process")
    pids = named()
    command.send_signal(signal.SIGINT)
    command.wait(LIMIT)
    assert not gone(pids)


def test_it_ends_when_nobody_comes(tmp_path: Path) -> None:
    env = plain_environment(XDG_RUNTIME_DIR=str(tmp_path))
    done = ran("warm", "--idle", "0.001", env=env)
    pid = int(done.stderr.split("process ")[1].split()[0])
    assert not gone([pid])
    assert not list((tmp_path / "elasticrun").glob("*.sock*"))


TWICE = """
import sys
modules = frozenset(sys.modules)
from elasticrun.forkserver import lazy_imports, prepare
from elasticrun.forkserver.warm import keeper
from elasticrun.wire.spawning import Configure
from elasticrun.wire.types import EntryKind, Entrypoint

stock = keeper._import_stock(lazy_imports.Baseline(modules))
index, again = lazy_imports.HiddenModules._index, []
lazy_imports.HiddenModules._index = lambda self: (again.append(self), index(self))
entry = Entrypoint(EntryKind.SCRIPT, sys.argv[1])
made = prepare.prepare(Configure("fork", (), entry, "spawn", False), None, [], stock)
print(made.mode, len(again))
"""


@further("test_a_job_leaves_one_behind")
def test_a_fork_server_takes_over_the_index_of_what_is_imported(tmp_path: Path) -> None:
    """It takes a tenth of a second, so the warm process has made it; to prepare imports nothing
    that would make it stale."""
    script = tmp_path / "script.py"
    script.touch()
    done = program("-c", TWICE, str(script))
    assert done.stdout.split() == ["fork", "0"], done.stderr
