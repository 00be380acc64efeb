"""Which system calls pass, which are reads and which park a standby; what is compared of a
read."""

from __future__ import annotations

import os
import platform
import stat
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from elasticrun.forkserver.standby import rules
from elasticrun.forkserver.standby.reads import MAX_READS, RACY_NS, Reads, is_racy, look
from elasticrun.forkserver.standby.rehearsal import MAIN, is_for_script
from elasticrun.forkserver.standby.rules import (
    AT_FDCWD,
    Parked,
    Read,
    Seen,
    Verdict,
    WaitEnd,
    deadline,
    judge,
)
from elasticrun.forkserver.standby.standbys import Forks, StandbyPool
from elasticrun.forkserver.standby.syscalls import names_of
from elasticrun.wire.spawning import FromSpawner, SpawnRank, SpawnStandby, StandbyIs, StandbyState
from elasticrun.wire.types import EntryKind, Entrypoint

FOLDER = stat.S_IFDIR | 0o755
FILE = stat.S_IFREG | 0o644


@dataclass
class Played:
    """A process with some files; its memory is a list of texts, by address."""

    texts: list[bytes] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    links: dict[int, str] = field(default_factory=dict)
    pid: int = 4711
    probes: set[str] = field(default_factory=set)
    made: str = ""
    search_path: frozenset[str] = frozenset(["/program"])
    temporary: frozenset[str] = frozenset(["/tmp"])
    above: frozenset[str] = frozenset(["/", "/tmp"])
    writable: bool = True
    waits: float = 1.0

    def path(self, address: int, folder: int) -> str:
        name = self.texts[address].decode()
        at = "/cwd" if folder == AT_FDCWD else self.links[folder]
        return os.path.join(at, name) if name else ""

    def opened(self, descriptor: int) -> str:
        return self.links.get(descriptor, "")

    def memory(self, address: int, length: int) -> bytes:
        return self.texts[address][:length]

    def left(self, address: int, clock: int | None) -> float:
        return self.waits

    def may_create(self, path: str) -> bool:
        return self.writable

    def mode(self, path: str) -> int:
        return self.files.get(path, 0)


NOW_CWD = AT_FDCWD & 0xFFFFFFFFFFFFFFFF
"""As a 64-bit register has it."""


def judged(name: str, *arguments: int, **about: object) -> Verdict:
    tracee = Played(**about)  # type: ignore[arg-type]
    return judge(name, (*arguments, *[0] * (6 - len(arguments))), tracee)


def opened(path: str, flags: int = os.O_RDONLY, **about: object) -> Verdict:
    return judged("openat", NOW_CWD, 0, flags, texts=[path.encode()], **about)


def test_what_is_not_known_parks() -> None:
    assert judged("") == Parked("")
    assert {name for name in rules.MAY_PASS if name.startswith(("rename", "kill", "fork"))} == set()
    assert judged("rename") == Parked("rename")


@pytest.mark.parametrize(
    ("machine", "some"),
    [
        ("x86_64", {0: "read", 37: "alarm", 137: "statfs", 202: "futex", 334: "rseq"}),
        ("aarch64", {0: "io_setup", 43: "statfs", 98: "futex", 243: "recvmmsg", 260: "wait4"}),
    ],
)
def test_each_call_has_a_name(machine: str, some: dict[int, str]) -> None:
    found = names_of(machine)
    assert found is not None
    names = found[1]
    assert len(set(names.values())) == len(names)
    later = {424: "pidfd_send_signal", 435: "clone3", 439: "faccessat2", 449: "futex_waitv"}
    assert {number: names[number] for number in some | later} == some | later
    if machine == "x86_64":
        assert set(names.values()) >= rules.MAY_PASS


AT, DURATION = WaitEnd(99, time.CLOCK_MONOTONIC), None
OF_DAY = WaitEnd(99, time.CLOCK_REALTIME)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("futex", (0, 0x189, 0, 99), OF_DAY),  # FUTEX_WAIT_BITSET
        ("futex", (0, 0x89, 0, 99), AT),
        ("futex", (0, 0x89, 0, 0), None),
        ("futex", (0, 0x80, 0, 99), DURATION),  # FUTEX_WAIT
        ("futex", (0, 0x81, 1, 99), None),  # FUTEX_WAKE
        ("futex", (0, 0x86, 0, 99), OF_DAY),  # FUTEX_LOCK_PI
        ("futex_waitv", (0, 1, 0, 99, 1), AT),
        ("futex_wait", (0, 0, 0, 0, 99, 0), OF_DAY),
        ("clock_nanosleep", (1, 1, 99, 0), AT),
        ("clock_nanosleep", (1, 0, 99, 0), DURATION),
        ("clock_nanosleep", (2, 1, 99, 0), None),  # the CPU time of the process
        ("mq_timedreceive", (3, 0, 0, 0, 99), OF_DAY),
        ("timerfd_settime", (3, 1, 83, 0), AT),
        ("timerfd_settime", (3, 0, 83, 0), DURATION),
        ("semtimedop", (3, 0, 1, 99), DURATION),
    ],
)
def test_which_calls_wait_for_a_deadline(
    name: str, arguments: tuple[int, ...], expected: WaitEnd | None
) -> None:
    assert deadline(name, (*arguments, *[0] * (6 - len(arguments)))) == expected


def test_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    said: list[FromSpawner] = []
    rank = SpawnRank(0, 0, Entrypoint(EntryKind.SCRIPT, "none.py"), {}, (), "", "", "")
    StandbyPool(cast("Forks", None), said.append).start(SpawnStandby(1, rank, "", ""))
    why = "the system calls of riscv64 are not known; of x86_64 and aarch64 they are"
    assert said == [StandbyIs(1, StandbyState.REFUSED, why)]


@pytest.mark.parametrize(
    ("path", "flags", "files", "verdict"),
    [
        ("/data/x", os.O_RDONLY, {"/data/x": FILE}, Read("/data/x")),
        ("x", os.O_RDONLY | os.O_CLOEXEC, {"/cwd/x": FILE}, Read("/cwd/x")),
        ("/data/x", os.O_RDONLY, {}, Read("/data/x")),
        ("/data/x", os.O_RDONLY | os.O_NOFOLLOW, {}, Read("/data/x", follow=False)),
        ("/data", os.O_RDONLY | os.O_DIRECTORY, {"/data": FOLDER}, Read("/data")),
        ("/program", os.O_RDONLY, {"/program": FOLDER}, Read("/program", Seen.NAMES)),
        ("/data/x", os.O_WRONLY, {"/data/x": FILE}, Parked("openat")),
        ("/data/x", os.O_RDWR, {"/data/x": FILE}, Parked("openat")),
        ("/data/x", os.O_RDONLY | os.O_CREAT, {}, Parked("openat")),
        ("/data/x", os.O_RDONLY | os.O_TRUNC, {"/data/x": FILE}, Parked("openat")),
        ("/data", os.O_TMPFILE | os.O_RDWR, {"/data": FOLDER}, Parked("openat")),
        ("/data/pipe", os.O_RDONLY, {"/data/pipe": stat.S_IFIFO}, Parked("openat")),
        ("/dev/null", os.O_RDWR, {}, None),
        ("/dev/nvidiactl", os.O_RDONLY, {}, Parked("openat")),
        ("/dev/stdin", os.O_RDONLY, {}, Parked("openat")),
        ("/proc/self/maps", os.O_RDONLY, {}, None),
        ("/proc/4711/maps", os.O_RDONLY, {}, None),
        ("/proc/self/status", os.O_RDONLY, {}, Parked("openat")),
        ("/proc/self/fd/0", os.O_RDONLY, {}, Parked("openat")),
        ("/proc/1/maps", os.O_RDONLY, {}, Parked("openat")),
        ("/proc/meminfo", os.O_RDONLY, {}, Parked("openat")),
        ("/proc/cpuinfo", os.O_RDONLY, {}, Read("/proc/cpuinfo", Seen.BYTES)),
        ("/sys/x", os.O_RDONLY, {"/sys/x": FILE}, Read("/sys/x", Seen.BYTES)),
    ],
)
def test_opening(path: str, flags: int, files: dict[str, int], verdict: Verdict) -> None:
    assert opened(path, flags, files=files) == verdict


def test_a_file_that_its_user_cannot_make_is_no_effect() -> None:
    """Imports try to compile packages of another user in each life."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    assert opened("/lib/p/x.pyc", flags, writable=False) == Read("/lib/p", Seen.EXISTENCE)
    assert opened("/lib/p/x.pyc", flags, writable=False, files={"/lib/p/x.pyc": FILE}) == Parked(
        "openat"
    )


def test_tempfile_finds_a_folder_once() -> None:
    tracee = Played([b"/tmp/abcd_123"], links={3: "/tmp/abcd_123", 4: "/tmp/other"})
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    assert judge("openat", (NOW_CWD, 0, flags, 0, 0, 0), tracee) is None
    assert judge("write", (3, 0, 4), tracee) is None
    assert judge("write", (4, 0, 4), tracee) == Parked("write")
    assert judge("unlink", (0,), tracee) is None
    assert judge("openat", (NOW_CWD, 0, flags, 0, 0, 0), tracee) == Parked("openat")


def test_a_lock_file_is_no_probe() -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    assert opened("/tmp/lockfile", flags) == Parked("openat")
    assert opened("/data/lockfile", flags | os.O_NOFOLLOW) == Parked("openat")


def test_a_folder_that_is_listed_is_compared_by_its_names() -> None:
    """Asking whether it is there needs no more than that."""
    assert opened("/tmp", files={"/tmp": FOLDER}) == Read("/tmp", Seen.NAMES)
    tracee = Played([b"/data/made"], files={"/data/made": FOLDER})
    assert judge("mkdir", (0, 0o777), tracee) == Read("/data/made", Seen.EXISTENCE)
    assert judge("openat", (NOW_CWD, 0, 0, 0), tracee) == Read("/data/made")
    assert judge("stat", (0, 0), tracee) == Read("/data/made")


def test_a_folder_that_exists_is_made_again() -> None:
    tracee = Played([b"/data/made"], files={"/data/made": FOLDER})
    assert judge("mkdir", (0, 0o777), tracee) == Read("/data/made", Seen.EXISTENCE)
    assert judge("stat", (0, 0), tracee) == Read("/data/made", Seen.EXISTENCE)
    assert judge("stat", (0, 0), tracee) == Read("/data/made")
    assert judged("mkdir", 0, texts=[b"/data/new"]) == Parked("mkdir")


@pytest.mark.parametrize(
    ("name", "arguments", "about", "passes"),
    [
        ("read", (3, 0, 9), {}, True),
        ("read", (0, 0, 9), {}, False),
        ("dup", (1,), {}, False),
        ("write", (1, 0, 9), {"links": {1: "pipe:[1]"}}, False),
        ("write", (5, 0, 9), {"links": {5: "pipe:[1]"}}, True),
        ("write", (5, 0, 9), {"links": {5: "/data/x"}}, False),
        ("fcntl", (1, 3, 0), {}, True),
        ("fcntl", (1, 4, 0o4000), {}, False),
        ("fcntl", (5, 4, 0o4000), {}, True),
        ("fcntl", (5, 6, 0), {}, False),  # F_SETLK
        ("ioctl", (1, 0x5401), {}, True),
        ("ioctl", (1, 0x5413), {"links": {1: "/dev/pts/3"}}, False),
        ("ioctl", (1, 0x5413), {"links": {1: "/data/out"}}, True),
        ("ioctl", (5, 0xC020462A), {}, False),
        ("futex", (0, 0x80, 0, 0), {}, True),
        ("futex", (0, 0x80, 0, 99), {}, False),
        ("futex", (0, 0x189, 0, 99), {}, False),
        ("futex", (0, 0x189, 0, 99), {"waits": 0.005}, True),
        ("futex", (0, 0x81, 1, 99), {}, True),  # FUTEX_WAKE
        ("epoll_wait", (5, 0, 9, 0xFFFFFFFF), {}, True),
        ("epoll_wait", (5, 0, 9, 100), {}, False),
        ("mmap", (0, rules.MOST_AT_ONCE, 3, 0x22), {}, True),
        ("mmap", (0, rules.MOST_AT_ONCE + 1, 3, 0x22), {}, False),
        ("mmap", (0, rules.MOST_AT_ONCE + 1, 1, 2, 5), {}, True),
        ("sched_setaffinity", (0, 8, 0), {}, True),
        ("sched_setaffinity", (1, 8, 0), {}, False),
        ("setsockopt", (5, 1, 2), {}, True),
        ("setsockopt", (5, 6, 1), {}, True),
        ("setsockopt", (5, 0, 35), {}, False),  # IP_ADD_MEMBERSHIP
        ("clone", (0x3D0F00,), {}, True),
        ("clone", (0x1200011,), {}, False),
        ("clone3", (0, 88), {"texts": [struct.pack("Q", 0x3D0F00)]}, True),
        ("clone3", (0, 88), {"texts": [struct.pack("Q", 0x4100)]}, False),
        ("clock_nanosleep", (0, 0, 0), {"texts": [struct.pack("qq", 0, 0)]}, True),
        ("clock_nanosleep", (0, 0, 0), {"texts": [struct.pack("qq", 0, 1)]}, False),
        ("clock_nanosleep", (0, 1, 0), {"texts": [struct.pack("qq", 0, 0)]}, False),
        ("prlimit64", (0, 7, 0), {}, True),
        ("prlimit64", (1, 7, 0), {}, False),
        ("prctl", (15, 0), {}, True),
        ("prctl", (1, 9), {}, False),  # PR_SET_PDEATHSIG
        ("ftruncate", (5, 9), {"links": {5: "/memfd:x (deleted)"}}, True),
        ("ftruncate", (5, 9), {"links": {5: "/data/x"}}, False),
        ("socket", (1, 1), {}, True),
        ("socket", (16, 3), {}, False),  # AF_NETLINK
        ("unlink", (0,), {"texts": [b"/data/x"]}, False),
        ("newfstatat", (3, 0, 0, 0x1000), {"texts": [b""], "links": {3: "/x"}}, True),
    ],
)
def test_calls(
    name: str, arguments: tuple[int, ...], about: dict[str, object], passes: bool
) -> None:
    assert judged(name, *arguments, **about) == (None if passes else Parked(name))


def test_the_name_of_the_host_is_a_read() -> None:
    assert judged("uname", 0) == Read("/proc/sys/kernel/hostname", Seen.BYTES)


def test_connecting() -> None:
    nscd = b"\x01\x00/run/nscd\0"
    assert judged("connect", 3, 0, 110, texts=[nscd]) == Read("/run/nscd", Seen.EXISTENCE)
    there = {"/run/nscd": stat.S_IFSOCK}
    assert judged("connect", 3, 0, 110, texts=[nscd], files=there) == Parked("connect")
    assert judged("connect", 3, 0, 16, texts=[b"\x02\x00\x1f\x90\x7f\0\0\1"]) == Parked("connect")
    assert judged("connect", 3, 0, 16, texts=[b"\x01\x00\0abstract"]) == Parked("connect")


@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("/data/x", Read("/data/x")),
        ("x", Read("/cwd/x")),
        ("/program", Read("/program", Seen.NAMES)),
        ("/tmp", Read("/tmp", Seen.EXISTENCE)),
        ("/proc/self/smaps", None),
        ("/proc/1", Read("/proc/1", Seen.EXISTENCE)),
        ("/dev/nvidia0", Read("/dev/nvidia0", Seen.EXISTENCE)),
        ("/dev/shm/x", Read("/dev/shm/x")),
        ("", None),
    ],
)
def test_asking_about_a_path(path: str, read: Verdict) -> None:
    assert judged("newfstatat", NOW_CWD, 0, 0, 0, texts=[path.encode()]) == read


def test_links_are_followed_as_the_call_does() -> None:
    assert judged("newfstatat", NOW_CWD, 0, 0, 0x100, texts=[b"/x"]) == Read("/x", follow=False)
    assert judged("readlink", 0, 0, 9, texts=[b"/x"]) == Read("/x", follow=False)
    assert judged("access", 0, 4, texts=[b"/x"]) == Read("/x")


# ---------------------------------------------------------------- reads


def changed(read: Read, change: object, path: Path) -> bool:
    """Whether a change is seen by this read."""
    reads = Reads()
    for each in [path, *path.parent.iterdir(), path.parent]:
        if each.exists():
            os.utime(each, ns=(1, 1))
    reads._seen[read] = look(read)
    assert not reads.changed({})
    change(path)  # type: ignore[operator]
    return reads.changed({}) == read.path


def test_every_change_of_a_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert changed(Read(str(path)), Path.touch, path)
    assert changed(Read(str(path)), lambda it: it.write_text("1"), path)
    assert changed(Read(str(path)), lambda it: it.chmod(0o600), path)
    assert changed(Read(str(path)), lambda it: it.rename(tmp_path / "y"), path)
    (tmp_path / "y").unlink()
    path.symlink_to(tmp_path / "z")
    assert changed(Read(str(path)), lambda it: (tmp_path / "z").write_text("1"), path)
    (tmp_path / "z").unlink()
    assert not changed(
        Read(str(path), follow=False), lambda it: (tmp_path / "z").write_text("1"), path
    )


def test_folders(tmp_path: Path) -> None:
    names, exists = Read(str(tmp_path), Seen.NAMES), Read(str(tmp_path), Seen.EXISTENCE)
    path = tmp_path / "x"
    assert changed(names, Path.touch, path)
    assert not changed(names, lambda it: it.write_text("1"), path)
    assert not changed(names, _replace, path)
    assert changed(names, lambda it: (it.unlink(), it.mkdir()), path)
    assert not changed(exists, lambda it: it.rmdir(), path)
    assert changed(Read(str(tmp_path)), Path.touch, path)


def _replace(path: Path) -> None:
    """Another file takes its place, as a checkpoint does."""
    new = path.parent.parent / "new"
    new.write_text("2")
    new.replace(path)


def test_files_of_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("model\ncpu MHz : 1\n")
    read = Read(str(path), Seen.BYTES)
    assert not changed(read, lambda it: it.write_text("model\ncpu MHz : 2\n"), path)
    assert changed(read, lambda it: it.write_text("other\ncpu MHz : 2\n"), path)


def test_a_file_that_has_just_changed_counts_as_changed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("1")
    then = path.stat().st_ctime_ns
    assert is_racy(look(Read(str(path))), then + RACY_NS - 1)
    assert not is_racy(look(Read(str(path))), then + RACY_NS)
    assert not is_racy((), then)
    reads = Reads()
    assert reads.note(Read(str(path)))
    assert reads.changed({}) == str(path)


def test_there_is_a_limit() -> None:
    reads = Reads()
    for number in range(MAX_READS):
        reads._seen[Read(str(number))] = ()
    assert not reads.note(Read("/one more"))


# ---------------------------------------------------------------- the clock

INSTALLED = ("/lib/python/", "/site/")


@pytest.mark.parametrize(
    ("callers", "expected"),
    [
        ([("/program/script.py", "<module>")], True),
        ([("/site/p/log.py", "info"), ("/program/script.py", "main")], True),
        ([("<string>", "f"), ("/program/script.py", "main")], True),
        ([("/lib/python/logging.py", "<module>"), ("/program/script.py", "<module>")], False),
        (
            [
                ("/site/p/x.py", "now"),
                ("/site/p/y.py", "<module>"),
                ("<frozen importlib>", "exec"),
                ("/program/script.py", "<module>"),
            ],
            False,
        ),
        ([("/program/local.py", "<module>"), ("/program/script.py", "<module>")], True),
        ([("/lib/python/threading.py", "_bootstrap")], True),
        ([("/site/p/tool.py", "main"), (MAIN, "<module>"), ("<frozen runpy>", "run")], True),
    ],
)
def test_who_reads_the_clock(callers: list[tuple[str, str]], expected: bool) -> None:
    assert is_for_script(iter(callers), INSTALLED) is expected
