"""Real standbys: where they park, what drops them, and what they are as ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from elasticrun.forkserver.standby.reads import RACY_NS
from elasticrun.forkserver.standby.rules import Mark
from elasticrun.forkserver.standby.tracer import MARKED, SHARE
from elasticrun.testing.processes import children, command
from elasticrun.wire.spawning import DropStandby, SpawnRank, SpawnStandby, StandbyIs, StandbyState
from elasticrun.wire.types import EntryKind, Entrypoint
from tests.forkserver.driver import Driver, forking, gone, script
from tests.further import cases, further
from tests.harness import LIMIT, await_true

pytestmark = pytest.mark.slow


TRACER = "elasticrun: tracer of standbys"


class Life:
    """One local rank: its next life as a standby, then its start."""

    def __init__(self, server: Driver, folder: Path, text: str, *, idle: bool = False) -> None:
        self.server, self.folder = server, folder
        self.out, self.outside = folder / "out", folder / "outside"
        self.outside.mkdir(exist_ok=True)
        entry = self.entry(text)
        env = {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1", "OUTSIDE": str(self.outside)}
        self.rank = SpawnRank(0, 0, entry, env, (), str(self.out), str(folder / "err"), "")
        self.key = server.new_key()
        time.sleep(2 * RACY_NS / 1e9)  # the moment is what is tested
        before = (str(folder / "before"), str(folder / "err"))
        server.tell(SpawnStandby(self.key, self.rank, *before, idle=idle))

    def entry(self, text: str) -> Entrypoint:
        program = self.folder / "program"
        program.mkdir()
        return script(program / "script.py", f"import os\nOUTSIDE = os.environ['OUTSIDE']\n{text}")

    def parked(self) -> str:
        """Wait until it is parked; the call. (Where all cores are busy, one that only uses idle
        ones takes a minute to come that far, and more beside other tests.)"""
        return self.heard(StandbyState.READY, 3 * LIMIT).detail

    def heard(self, state: StandbyState, limit: float = LIMIT) -> StandbyIs:
        return self.server.wait(StandbyIs, lambda m: (m.key, m.state) == (self.key, state), limit)

    def start(self, **changes: str) -> str:
        """Start the rank, and wait for its end; what it has printed."""
        before = self.folder / "before"
        if before.exists():
            before.rename(self.out)
        key = self.server.new_key()
        self.server.tell(replace(self.rank, key=key, **changes))  # type: ignore[arg-type]
        self.server.spawned(key)
        assert self.server.exited(key).code == 0, (self.folder / "err").read_text()
        return self.out.read_text()

    def states(self) -> list[StandbyState]:
        return [m.state for m in self._messages()]

    def ended(self) -> str:
        """Why it is no standby any more: the path that has changed, say."""
        return self._messages()[-1].detail

    def _messages(self) -> list[StandbyIs]:
        return [m for m in self.server.all_of(StandbyIs) if m.key == self.key]


LISTS = "print(sorted(os.listdir(OUTSIDE)))"
READS = "print(open(OUTSIDE + '/flag').read() if os.path.exists(OUTSIDE + '/flag') else 'none')"


def _nothing(outside: Path) -> None:
    """Leave everything as it is."""


def _touch(outside: Path) -> None:
    outside.joinpath("flag").write_text("new")


def _replace(outside: Path) -> None:
    """Another content of the same length, with the same time."""
    flag = outside / "flag"
    times = flag.stat()
    flag.write_text("two")
    os.utime(flag, ns=(times.st_atime_ns, times.st_mtime_ns))


ONE = {"flag": "one"}


@pytest.mark.parametrize(
    ("text", "there", "change", "printed"),
    [
        (READS, {}, _nothing, "none"),
        (READS, {}, _touch, "new"),
        (READS, ONE, _nothing, "one"),
        (READS, ONE, _replace, "two"),
        (LISTS, ONE, _nothing, "['flag']"),
        (LISTS, {}, _touch, "['flag']"),
        ("from glob import glob\nprint(len(glob(OUTSIDE + '/f*')))", {}, _touch, "1"),
        ("print(os.path.lexists(OUTSIDE + '/flag'))", {}, _touch, "True"),
        ("print(os.access(OUTSIDE + '/flag', os.R_OK))", {}, _touch, "True"),
        ("os.chdir(OUTSIDE)\nprint(os.path.exists('flag'))", {}, _touch, "True"),
    ],
)
def test_what_it_has_read_is_validated(
    server: Driver,
    tmp_path: Path,
    text: str,
    there: dict[str, str],
    change: Callable[[Path], object],
    printed: str,
) -> None:
    """A flag file, a checkpoint's content, a listing: never answered from the past."""
    tmp_path.joinpath("outside").mkdir()
    for name, content in there.items():
        tmp_path.joinpath("outside", name).write_text(content)
    life = Life(server, tmp_path, text)
    assert life.parked() == "write"
    change(life.outside)
    assert life.start() == printed + "\n"
    end = StandbyState.ACTIVE if change is _nothing else StandbyState.CHANGED
    assert life.states()[-1] is end, life.ended()


def _relink(outside: Path) -> None:
    """One name less, one more: only the time tells."""
    outside.with_name("cached").unlink()
    outside.with_name("copied").hardlink_to(outside / "flag")


def _unlink(outside: Path) -> None:
    outside.with_name("cached").unlink()


def _replace_linked(outside: Path) -> None:
    _replace(outside)
    _unlink(outside)


@pytest.mark.parametrize(
    ("change", "printed", "end"),
    [
        (_unlink, "one", StandbyState.ACTIVE),
        (_relink, "one", StandbyState.ACTIVE),
        (_replace_linked, "two", StandbyState.CHANGED),
    ],
)
def test_another_name_of_a_file_drops_no_standby(
    server: Driver,
    tmp_path: Path,
    change: Callable[[Path], object],
    printed: str,
    end: StandbyState,
) -> None:
    """Installed files are links to uv's cache: to make or remove another environment changes their
    times."""
    tmp_path.joinpath("outside").mkdir()
    tmp_path.joinpath("cached").write_text("one")
    tmp_path.joinpath("outside", "flag").hardlink_to(tmp_path / "cached")
    life = Life(server, tmp_path, READS)
    assert life.parked() == "write"
    change(life.outside)
    assert life.start() == printed + "\n"
    assert life.states()[-1] is end, life.ended()


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("os.mkdir(OUTSIDE + '/made')", "mkdir"),
        ("open(OUTSIDE + '/made', 'w').close()", "openat"),
        ("open(OUTSIDE + '/there', 'r+').close(); os.unlink(OUTSIDE + '/there')", "openat"),
        ("os.close(os.open(OUTSIDE + '/lockfile', os.O_CREAT | os.O_EXCL | os.O_RDWR))", "openat"),
        ("import threading; threading.Event().wait(0.3); os.mkdir(OUTSIDE + '/made')", "futex"),
        ("bytearray(300 << 20); os.mkdir(OUTSIDE + '/made')", "mmap"),
        ("os.unlink(OUTSIDE + '/there')", "unlink"),
        ("os.rename(OUTSIDE + '/there', OUTSIDE + '/made')", "rename"),
        ("import fcntl; fcntl.flock(os.open(OUTSIDE + '/there', os.O_RDONLY), 2)\n"
         "os.unlink(OUTSIDE + '/there')", "flock"),
        ("import socket; socket.socket().bind(('127.0.0.1', 0)); os.mkdir(OUTSIDE + '/made')",
         "bind"),
        ("import socket; s = socket.socket(); s.connect_ex(('127.0.0.1', 1))\n"
         "os.mkdir(OUTSIDE + '/made')", "connect"),
        ("import subprocess; subprocess.run(['touch', OUTSIDE + '/made'])", "vfork"),
        ("os.system('touch ' + OUTSIDE + '/made')", "clone3"),
        ("pid = os.fork()\nif not pid: os.mkdir(OUTSIDE + '/made'); os._exit(0)\nos.wait()",
         "clone"),
        ("import time; time.sleep(0.001); os.mkdir(OUTSIDE + '/made')", "clock_nanosleep"),
        ("import sys; sys.stdin.read(0); os.read(0, 0); os.mkdir(OUTSIDE + '/made')", "read"),
        ("os.kill(os.getpid(), 0); os.mkdir(OUTSIDE + '/made')", "kill"),
        ("open('/proc/self/status').read(); os.mkdir(OUTSIDE + '/made')", "openat"),
        ("import threading\n"
         "t = threading.Thread(target=os.mkdir, args=[OUTSIDE + '/made'])\nt.start(); t.join()",
         "mkdir"),
    ],
)  # fmt: skip
def test_an_effect_waits_for_the_rank(server: Driver, tmp_path: Path, text: str, call: str) -> None:
    """A folder, a file, a lock, a port, a process, a signal, a thread's own effect."""
    tmp_path.joinpath("outside").mkdir()
    tmp_path.joinpath("outside", "there").write_text("x")
    life = Life(server, tmp_path, f"{text}\nprint('done')")
    assert life.parked() == call
    assert [each.name for each in life.outside.iterdir()] == ["there"]
    assert life.start() == "done\n"
    assert [each.name for each in life.outside.iterdir()] != ["there"]
    assert life.states()[-1] is StandbyState.ACTIVE, life.ended()


@pytest.mark.parametrize(
    "text",
    [
        "import time; print(time.time())",
        "import time; print(time.clock_gettime(time.CLOCK_REALTIME))",
        "from time import time_ns; print(time_ns() / 1e9)",
        "import datetime; print(datetime.datetime.now().timestamp())",
        "import time; print(time.mktime(time.localtime()) + 1)",
        "import logging, sys\n"
        "logging.basicConfig(stream=sys.stdout, format='%(created)f'); logging.error('x')",
    ],
)
def test_the_script_reads_no_time_of_the_past(server: Driver, tmp_path: Path, text: str) -> None:
    life = Life(server, tmp_path, text)
    assert life.parked() == MARKED[Mark.CLOCK.value]
    before = time.time()
    assert float(life.start()) >= before
    assert life.states()[-1] is StandbyState.ACTIVE, life.ended()


LIMIT_OF_WAIT = 1.5

WAITS = {
    "sleep": "time.sleep(LIMIT)",
    "lock": "held = threading.Lock(); held.acquire(); held.acquire(timeout=LIMIT)",
    "timer": "waits = threading.Timer(LIMIT, int); waits.start(); waits.join()",
    "faulthandler": "faulthandler.dump_traceback_later(LIMIT, exit=True)\n"
    "for _ in range(1_000_000): pass  # its thread comes to its wait meanwhile\n"
    "faulthandler.cancel_dump_traceback_later()",
}


@pytest.mark.parametrize("wait", cases(WAITS, kept=["sleep", "faulthandler"]))
def test_a_limit_counts_from_the_start_of_the_rank(
    server: Driver, tmp_path: Path, wait: str
) -> None:
    """The deadline was computed before the standby parked, and has passed meanwhile."""
    imports = f"import faulthandler, threading, time\nLIMIT = {LIMIT_OF_WAIT}"
    life = Life(server, tmp_path, f"{imports}\n{WAITS[wait]}\nprint(time.time())")
    assert life.parked() == ("clock_nanosleep" if wait == "sleep" else "futex")
    after = time.monotonic() + LIMIT_OF_WAIT
    await_true(lambda: time.monotonic() > after, "the end of the limit")
    before = time.time()
    waited = float(life.start()) - before
    assert waited > (0 if wait == "faulthandler" else LIMIT_OF_WAIT / 2)
    assert life.states()[-1] is StandbyState.ACTIVE, life.ended()


def test_a_deadline_in_shared_memory_is_not_moved(server: Driver, tmp_path: Path) -> None:
    text = """
import ctypes, mmap, struct, time
room = mmap.mmap(-1, 4096)
room[:16] = struct.pack("qq", 1, 0)
place = ctypes.addressof(ctypes.c_char.from_buffer(room))
ctypes.CDLL(None).clock_nanosleep(time.CLOCK_MONOTONIC, 1, ctypes.c_void_p(place), None)
print("woke up")
"""
    life = Life(server, tmp_path, text)
    assert life.parked() == "clock_nanosleep"
    assert life.start() == "woke up\n"
    assert life.states()[-1] is StandbyState.LIMIT


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("print(os.getloadavg())", Mark.LOAD),
        (
            "import torch.distributed as dist\n"
            "print(dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False).port)",
            Mark.STORE,
        ),
    ],
)
def test_it_parks_before_the_load_is_read_or_a_store_made(
    server: Driver, tmp_path: Path, text: str, what: Mark
) -> None:
    """A TCPStore computes its deadline before its first system call."""
    life = Life(server, tmp_path, text)
    assert life.parked() == MARKED[what.value]
    assert life.start()
    assert life.states()[-1] is StandbyState.ACTIVE, life.ended()


SELF = """
import ctypes, json, random, sys, threading, time
import torch
held = threading.Event()
threading.Thread(target=held.wait, daemon=True).start()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
row = ctypes.c_void_p.from_address(id(time.time) + object.__basicsize__).value
slot = object.__basicsize__ + 37 * ctypes.sizeof(ctypes.c_void_p)
about = {
    "store": ctypes.c_void_p.from_address(id(torch.distributed.TCPStore) + slot).value,
    "tracer": status["TracerPid"].strip(),
    "clock": ctypes.c_void_p.from_address(row + 8).value,
    "policy": [os.sched_getscheduler(int(tid)) for tid in os.listdir("/proc/self/task")],
    "nice": os.nice(0),
    "session": os.getsid(0) == os.getpid(),
    "modules": sorted(sys.modules),
    "meta_path": len(sys.meta_path),
    "threads": threading.active_count(),
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "stdout": os.readlink("/proc/self/fd/1"),
}
print(json.dumps(about))
print(random.random(), torch.rand(1).item(), os.getpid())
"""


@pytest.mark.parametrize("idle", cases([False, True], kept=[False]))
def test_nothing_tells_a_rank_that_it_was_a_standby(
    server: Driver, tmp_path: Path, idle: bool
) -> None:
    life = Life(server, tmp_path, SELF, idle=idle)
    assert life.parked() == "openat"
    about, drawn = life.start().splitlines()
    assert life.states()[-1] is StandbyState.ACTIVE, life.ended()
    forked, drawn_later = life.start().splitlines()
    assert json.loads(about) == json.loads(forked)
    assert not set(drawn.split()) & set(drawn_later.split())


def test_another_order_starts_another_process(server: Driver, tmp_path: Path) -> None:
    """The environment of the next life is not the one that was expected."""
    life = Life(server, tmp_path, "print(os.environ['TORCHELASTIC_RESTART_COUNT'])")
    assert life.parked() == "write"
    assert life.start(env={**life.rank.env, "TORCHELASTIC_RESTART_COUNT": "2"}) == "2\n"
    assert life.states()[-1] is StandbyState.DIFFERENT


def test_a_standby_that_has_not_parked_becomes_the_rank(server: Driver, tmp_path: Path) -> None:
    """It is far enough to be compared, and continues from where it is."""
    text = "while not os.path.exists(OUTSIDE): pass\nprint('went on')"
    life = Life(server, tmp_path, text)
    life.heard(StandbyState.REHEARSING)
    assert life.start() == "went on\n"


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Driver]:
    """A fork server under a policy that it could not return to: as while all cores are busy, its
    standbys run for a share of the time."""
    with forking(Entrypoint(EntryKind.SCRIPT, "none.py"), cold=True) as server:
        os.sched_setscheduler(server.process.pid, os.SCHED_BATCH, os.sched_param(0))
        yield server


@further("test_an_order_ends_the_pause_of_a_standby")
def test_standbys_that_compete_with_ranks_use_a_tenth_of_a_core(
    batch: Driver, tmp_path: Path
) -> None:
    text = "while not os.path.exists(OUTSIDE + '/flag'): pass\nprint('went on')"
    life = Life(batch, tmp_path, text, idle=True)
    life.heard(StandbyState.REHEARSING)
    pids = _processes(batch)
    began, before = time.monotonic(), _cpu_time(pids)
    await_true(lambda: _cpu_time(pids) > before + 0.2, "some computation")
    used = _cpu_time(pids) - before
    assert used / (time.monotonic() - began) < 2.5 * SHARE


def test_an_order_ends_the_pause_of_a_standby(batch: Driver, tmp_path: Path) -> None:
    """It would last nine times as long as the standby has computed."""
    text = "sum(range(50_000_000))\nos.path.exists(OUTSIDE)\nprint('went on')"
    life = Life(batch, tmp_path, text, idle=True)
    life.heard(StandbyState.REHEARSING)
    pids = _processes(batch)
    stands = psutil.STATUS_TRACING_STOP

    def is_paused() -> bool:
        return _cpu_time(pids) > 0.3 and psutil.Process(pids[0]).status() == stands

    await_true(is_paused, "pause after the computation")
    assert life.start() == "went on\n"
    assert life.states()[-1] is StandbyState.ACTIVE, life.ended()


def _cpu_time(pids: tuple[int, int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def test_it_ends_with_its_tracer_and_the_rank_is_forked(server: Driver, tmp_path: Path) -> None:
    life = Life(server, tmp_path, "print('here')")
    assert life.parked() == "write"
    standby, tracer = _processes(server)
    os.kill(tracer, signal.SIGKILL)
    life.heard(StandbyState.NO_ANSWER)
    assert not gone([standby, tracer])
    assert life.start() == "here\n"
    assert StandbyState.ACTIVE not in life.states()


def test_a_signal_to_a_standby_is_not_for_the_rank(server: Driver, tmp_path: Path) -> None:
    text = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('for me'))\nprint('here')"
    life = Life(server, tmp_path, text)
    assert life.parked() == "write"
    os.kill(_processes(server)[0], signal.SIGUSR1)
    assert life.start() == "here\n"
    assert StandbyState.ACTIVE not in life.states()


def test_a_standby_uses_no_cpu_and_is_gone_when_it_is_dropped(
    server: Driver, tmp_path: Path
) -> None:
    life = Life(server, tmp_path, "print('here')")
    assert life.parked() == "write"
    standby, _ = _processes(server)
    assert psutil.Process(standby).status() == psutil.STATUS_TRACING_STOP
    assert psutil.Process(standby).num_threads() == 1
    server.tell(DropStandby(life.key))
    assert not gone([standby])


@pytest.mark.parametrize("how", ["end", "kill"])
def test_nothing_outlives_the_fork_server(tmp_path: Path, how: str) -> None:
    with forking(Entrypoint(EntryKind.SCRIPT, "none.py"), cold=True) as server:
        assert Life(server, tmp_path, "print('here')").parked() == "write"
        pids = _processes(server)
        if how == "kill":
            os.kill(server.process.pid, signal.SIGKILL)
    assert not gone(pids)


def _processes(server: Driver) -> tuple[int, int]:
    """The standby and the tracer; those of earlier tests may be about to end."""
    found: list[tuple[int, int]] = []

    def alone() -> bool:
        found.clear()
        below = {pid: command(pid) for pid in children(server.process.pid)}
        tracers = [pid for pid, words in below.items() if words == TRACER]
        for pid in below:
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                found.extend((pid, each) for each in tracers if f"TracerPid:\t{each}\n" in status)
        return len(found) == 1

    await_true(alone, "one standby alone")
    return found[0]


def test_a_later_standby_takes_the_place_of_an_earlier_one(server: Driver, tmp_path: Path) -> None:
    """A rank that kept its process did not need the earlier one."""
    life = Life(server, tmp_path, "print('here')")
    assert life.parked() == "write"
    key = server.new_key()
    files = (str(tmp_path / "before"), str(tmp_path / "err"))
    server.tell(SpawnStandby(key, life.rank, *files, idle=False))
    life.heard(StandbyState.DIFFERENT)
    server.wait(StandbyIs, lambda m: (m.key, m.state) == (key, StandbyState.READY))
    assert life.start() == "here\n"
    assert [m.state for m in server.all_of(StandbyIs) if m.key == key][-1] is StandbyState.ACTIVE
