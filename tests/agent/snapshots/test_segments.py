"""Segments: where they lie, who may have them, what is left of whom, what if there is no room."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from inotify_simple import INotify, flags

from elasticrun.agent.snapshots import segments as segments_module
from elasticrun.agent.snapshots.folder import LocalRound, take
from elasticrun.agent.snapshots.segments import Held, Segments, Sizes
from elasticrun.config import ORPHAN_GRACE
from elasticrun.snapshots.shm import memory
from elasticrun.snapshots.shm.layout import PAGE
from elasticrun.snapshots.shm.memory import NoMemory
from elasticrun.snapshots.shm.segment import NONE
from elasticrun.snapshots.shm.throttle import Throttle
from elasticrun.wire import snapshots as s
from elasticrun.wire.messages import RoundInfo
from elasticrun.wire.types import RoundName
from tests import needs
from tests.agent.snapshots.played import BOTH, CONTENT, LAYOUT, LIMIT, ONE, Node
from tests.further import cases

pytestmark = pytest.mark.slow

LIFE = LocalRound(RoundInfo(RoundName(7, 1, "n1"), 2), 0, 2, "/runs/a", 3, 0)
SIZES = Sizes(LAYOUT.key, len(LAYOUT.encode()), LAYOUT.slot_bytes, 2)


class Used(Segments):
    """The segments of a node, which are given back in good order."""

    taken_over: list[LocalRound]


@asynccontextmanager
async def using(shm: Path, job: str = "a-job", node: str = "node-a") -> AsyncIterator[Used]:
    segments = Used(job, 2, {"ELASTICRUN_SHM_DIR": str(shm)})
    segments.taken_over = await segments.open(node)
    try:
        yield segments
    finally:
        await segments.close(job_over=True)


def write(held: Held, step: int) -> None:
    """As a rank does."""
    encoded = LAYOUT.encode()
    held.map[PAGE : PAGE + len(encoded)] = encoded
    held.segment.commit(step % 2, round=ONE, sequence=step, step=step, layout=LAYOUT.key, values=0)


def killed(shm: Path, job: str = "a-job", node: str = "node-a") -> Path:
    """An agent that had a snapshot of step 1 of local rank 0 and was killed: its folder."""
    before = set(shm.iterdir())
    code = f"import asyncio, sys; from {__name__} import *; asyncio.run(be_killed(*sys.argv[1:]))"
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", code, str(shm), job, node]
    done = subprocess.run(command, cwd=root, timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL
    (folder,) = set(shm.iterdir()) - before
    return folder


async def be_killed(shm: str, job: str, node: str) -> None:
    async with using(Path(shm), job, node) as segments:
        held = await segments.segment_for(0, SIZES, LAYOUT.content, Throttle())
        await segments.note([LIFE])
        write(held, 1)
        held.pin(1, "something")
        os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------- whose they are


async def test_a_folder_is_made_when_it_is_needed_and_is_this_users_alone(shm: Path) -> None:
    async with using(shm) as segments:
        assert not list(shm.iterdir())
        held = await segments.segment_for(1, SIZES, LAYOUT.content, Throttle())
        (folder,) = shm.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert Path(held.path).stat().st_mode & 0o777 == 0o600
        assert Path(held.path).stat().st_blocks * 512 >= SIZES.nbytes  # its pages are there
        assert await segments.segment_for(1, SIZES, LAYOUT.content, Throttle()) is held
    assert not list(shm.iterdir())


async def test_the_next_agent_of_the_node_adopts_what_a_killed_one_had(shm: Path) -> None:
    killed(shm)
    async with using(shm) as segments:
        assert segments.taken_over == [LIFE]
        (held,) = segments.held
        (snapshot,) = held.snapshots()
        assert snapshot.is_of(ONE)
        assert snapshot.step == 1
        assert (held.local_rank, held.content, held.written) == (0, LAYOUT.content, True)
        assert not held.segment.pinned(snapshot.slot)
        assert await segments.segment_for(0, SIZES, LAYOUT.content, Throttle()) is held
    assert not list(shm.iterdir())


async def test_replicas_are_adopted_too(shm: Path) -> None:
    """Their rank stands in the file's name; it may be any number."""
    folder = killed(shm)
    (own,) = folder.glob("0-*")
    own.rename(folder / f"r70-{LAYOUT.key:016x}-1")
    async with using(shm) as segments:
        (held,) = segments.held
        assert (held.local_rank, held.replica, held.is_temporary) == (-1, 70, False)
        assert [one.step for one in held.snapshots()] == [1]
        assert await segments.replica_of(70, SIZES, LAYOUT.content) is held
        other = await segments.replica_of(71, SIZES, LAYOUT.content)
        assert Path(other.path).name.startswith("r71-")
        assert await segments.segment_for(0, SIZES, LAYOUT.content, Throttle()) is not held
    assert not list(shm.iterdir())


async def test_what_cannot_be_believed_is_not_adopted(shm: Path) -> None:
    folder = killed(shm)
    (good,) = folder.glob("0-*")
    whole = good.read_bytes()
    (folder / f"1-{LAYOUT.key:016x}-7").write_bytes(b"\0" * 8192)
    (folder / f"1-{LAYOUT.key:016x}-8").write_bytes(whole[: len(whole) // 2])
    (folder / f"1-{LAYOUT.key + 1:016x}-9").write_bytes(whole)
    (folder / f"2-{LAYOUT.key:016x}-9").write_bytes(whole)  # no such local rank
    (folder / f"1-{LAYOUT.key:016x}-10").symlink_to(good)
    async with using(shm) as segments:
        assert [held.path for held in segments.held] == [str(good)]
        assert sorted(p.name for p in folder.glob("?-*")) == [good.name]


BAD_NAMES = ["[", '[{"term": "x"}]', '[{"evil": 1}]', "7"]


@pytest.mark.parametrize("text", cases(BAD_NAMES, kept=BAD_NAMES[1:2]))
async def test_without_the_names_of_its_rounds_nothing_is_adopted(shm: Path, text: str) -> None:
    folder = killed(shm)
    (folder / "lives.json").write_text(text)
    async with using(shm) as segments:
        assert segments.held == []
        assert not list(folder.glob("0-*"))


@pytest.mark.parametrize("what", cases(["folder", "file", "link"], kept=["link"]))
async def test_a_name_that_another_has_taken_costs_nothing(shm: Path, what: str, caplog) -> None:
    """Another name is: what lies there outlives this agent, and the next one finds it."""
    folder = killed(shm)
    name = folder.name
    shutil.rmtree(folder)
    if what == "folder":
        if os.geteuid() != 0:
            needs.lacking("a folder can only be given to another user by root")
        folder.mkdir()
        os.chown(folder, 65534, 65534)
    elif what == "file":
        folder.write_text("")
    else:
        folder.symlink_to("/tmp")
    killed(shm)
    assert sorted(path.name[-2:] for path in shm.iterdir()) == [".0", ".1"]
    async with using(shm) as segments:
        (held,) = segments.held
        assert name.replace(".0", ".1") in held.path
    assert "do not outlive" not in caplog.text


async def test_what_a_thread_brings_too_late_is_given_back(shm: Path, monkeypatch) -> None:
    """A file system that stands still for a while: no lock, no mapping and no file stays."""
    folder = killed(shm)
    goes_on, ended = threading.Event(), threading.Event()
    adopt, leave = Segments._adopt, segments_module._leave_folder

    def slow(segments: Segments, node: str) -> object:
        assert goes_on.wait(LIMIT)
        return adopt(segments, node)

    def late(found: tuple[float | None, segments_module.Adopted | None]) -> None:
        leave(found)
        ended.set()

    monkeypatch.setattr(Segments, "_adopt", slow)
    monkeypatch.setattr(segments_module, "OPEN_LIMIT", 0.01)
    monkeypatch.setattr(segments_module, "_leave_folder", late)
    segments = Segments("a-job", 2, {"ELASTICRUN_SHM_DIR": str(shm)})
    assert await segments.open("node-a") == []
    assert segments.held == []
    goes_on.set()
    assert await asyncio.to_thread(ended.wait, LIMIT)
    await segments.close(job_over=False)
    maps = Path("/proc/self/maps").read_text()
    assert str(folder) not in maps
    lock = take(str(shm), "a-job", "node-a", make=False)
    assert lock is not None, "its lock is free"
    assert lock.path == str(folder)
    assert len(list(lock.files())) == 1, "and what lay there stays"
    lock.remove(job_over=True)


def age(folder: Path, seconds: float) -> None:
    """It was found without its agent so long ago."""
    then = time.time() - seconds
    os.utime(folder / "orphan", (then, then))


async def test_what_another_job_may_come_back_for_is_kept_for_a_while(shm: Path) -> None:
    """Whatever other agents start meanwhile; the next agent of the job takes it over."""
    folder = killed(shm, job="back-soon")
    for then in (0, ORPHAN_GRACE - 60):
        if then:
            age(folder, then)
        async with using(shm):
            assert list(folder.glob("0-*"))
    assert (folder / "orphan").exists()
    async with using(shm, job="back-soon") as segments:
        assert segments.taken_over == [LIFE]
        assert len(segments.held) == 1
        assert not (folder / "orphan").exists(), "killed again, it has as much time again"
    assert not list(shm.iterdir())


async def test_who_finds_it_removes_it_when_its_time_is_over(shm: Path, monkeypatch) -> None:
    monkeypatch.setattr("elasticrun.config.ORPHAN_GRACE", 0.2)
    folder = killed(shm, job="gone")
    async with using(shm):
        assert folder.exists()
        with INotify() as changes:
            changes.add_watch(shm, flags.DELETE)
            while folder.exists():
                assert await asyncio.to_thread(changes.read, 60_000), "it is still there"


async def test_a_job_without_room_does_not_wait_for_it(shm: Path, monkeypatch, caplog) -> None:
    folder = killed(shm, job="gone")
    monkeypatch.setattr(memory, "available_in", lambda _: 0 if folder.exists() else 2**40)
    async with using(shm) as segments:
        held = await segments.segment_for(0, SIZES, LAYOUT.content, Throttle())
        assert held.path
    assert not folder.exists()
    assert "removed snapshots of 1 killed agents of other jobs" in caplog.text


async def test_what_is_of_before_a_start_of_the_machine_is_not_believed(shm: Path, caplog) -> None:
    """ELASTICRUN_SHM_DIR may be on a disk, where only half of a snapshot may have come."""
    for job in ("a-job", "gone"):
        killed(shm, job=job)
    for folder in shm.iterdir():
        assert len((folder / "lock").read_text()) == 36, "the kernel names its starts"
        (folder / "lock").write_text("11111111-2222-3333-4444-555555555555")
    async with using(shm) as segments:
        assert segments.taken_over == []
        assert segments.held == []
        assert not list(shm.glob("*/0-*"))
    assert not list(shm.iterdir())
    assert "from before the last reboot" in caplog.text


async def test_folders_of_killed_agents_of_others_are_removed(shm: Path, tmp_path: Path) -> None:
    killed(tmp_path, job="gone")
    killed(shm, job="a-job", node="node-b")  # it may be back in a moment
    (gone,) = tmp_path.glob("elasticrun-*")
    (ours,) = shm.glob("elasticrun-*")
    (gone / "orphan").touch()
    age(gone, ORPHAN_GRACE)
    shutil.move(gone, shm)
    (shm / "elasticrun-of-somebody").mkdir()
    living = take(str(shm), "another-job", "node-a", make=True)
    staying = {"elasticrun-of-somebody", os.path.basename(living.path)}
    async with using(
        shm
    ) as segments:  # when this job is over, its node-b will not come back either
        assert {path.name for path in shm.iterdir()} == {*staying, ours.name}
        await segments.segment_for(0, SIZES, LAYOUT.content, Throttle())
    assert {path.name for path in shm.iterdir()} == staying
    living.remove(job_over=False)


def test_an_agent_that_calls_itself_the_same_has_a_folder_of_its_own(shm: Path) -> None:
    first = take(str(shm), "a-job", "node-a", make=True)
    second = take(str(shm), "a-job", "node-a", make=True)
    assert first.path != second.path
    first.remove(job_over=False)
    second.remove(job_over=False)
    assert not list(shm.iterdir())


async def test_a_segment_that_is_dropped_is_no_file_any_more(shm: Path) -> None:
    async with using(shm) as segments:
        held = await segments.segment_for(0, SIZES, LAYOUT.content, Throttle())
        segments.drop(held)
        assert held.is_lost
        assert held.snapshots() == []
        await segments._tasks.wait()
        assert not Path(held.path).exists()


# ---------------------------------------------------------------- sizes


async def test_sizes_that_no_segment_has_are_refused(shm: Path) -> None:
    async with using(shm) as segments:
        for sizes in (
            Sizes(1, 100, PAGE, 1),
            Sizes(1, 100, PAGE, 5),
            Sizes(1, 0, PAGE, 2),
            Sizes(1, 100, PAGE + 1, 2),
            Sizes(1, 2**40, PAGE, 2),
            Sizes(1, 100, -PAGE, 2),
        ):
            with pytest.raises(NoMemory, match=r"slots|is invalid"):
                await segments.segment_for(0, sizes, 1, Throttle())


async def test_more_than_the_machine_has_is_refused_before_it_is_taken(shm: Path, caplog) -> None:
    async with using(shm) as segments:
        with pytest.raises(
            NoMemory, match=r"are needed, but the (machine|cgroup .*) has only .* left"
        ):
            await segments.segment_for(0, Sizes(1, 100, 2**46, 2), 1, Throttle())
        assert "snapshots take 2 x 64 TiB of shared memory for each of 2 local ranks" in caplog.text


async def test_a_folder_without_room_is_done_without(shm: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(memory, "available_in", lambda folder: PAGE)
    async with using(shm) as segments:
        held = await segments.segment_for(0, SIZES, LAYOUT.content, Throttle())
        write(held, 1)
        assert (held.path, held.find_newest() is not None) == ("", True)
        assert "has space for 4 KiB: snapshots are kept in anonymous memory" in caplog.text


async def test_two_ranks_at_once_do_not_take_more_than_there_is(shm: Path, monkeypatch) -> None:
    """The second waits until it is known what the first has taken."""
    room = [SIZES.nbytes + 100]

    def take_file(path: str, nbytes: int, *more: Any) -> int:
        room[0] -= nbytes
        return taking(path, nbytes, *more)

    taking = memory.allocate_file
    monkeypatch.setattr(memory, "allocate_file", take_file)
    monkeypatch.setattr(memory, "available_memory", lambda: (room[0], "the machine"))
    async with using(shm) as segments:
        both = [segments.segment_for(rank, SIZES, LAYOUT.content, Throttle()) for rank in range(2)]
        found = await asyncio.gather(*both, return_exceptions=True)
        assert {type(one) for one in found} == {Held, NoMemory}  # either may be first


def test_a_cgroup_has_what_its_page_cache_could_give_back(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 400\nfile 500\nshmem 200\n")
    assert memory._bytes_left_in(tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._bytes_left_in(tmp_path) is None
    assert memory._bytes_left_in(tmp_path / "none") is None


def test_pages_are_made_warm_without_stopping_others() -> None:
    fd = memory.allocate_anonymous("test", 3 * PAGE, PAGE, Throttle())
    try:
        assert memory.populate(fd, 3 * PAGE, Throttle())
        assert os.fstat(fd).st_blocks * 512 >= 3 * PAGE
        assert os.pread(fd, PAGE, 0) == bytes(PAGE)
    finally:
        os.close(fd)


SMALL_TMPFS = """
import asyncio, sys
from pathlib import Path
from typing import Any
from tests.agent.snapshots.test_segments import NoMemory, Sizes, Throttle, memory, using

async def main(shm):
    memory.available_in = lambda folder: 1 << 40  # as if others had taken it since we looked
    async with using(shm) as segments:
        try:
            await segments.segment_for(0, Sizes(1, 100, 1 << 20, 2), 1, Throttle())
        except NoMemory as error:
            print(error)
        print("left", [p.name for p in shm.rglob("?-*")])

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_tmpfs_that_is_full_is_told_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    command = [*needs.tmpfs(tmp_path, "1m"), sys.executable, "-c", SMALL_TMPFS, str(tmp_path)]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=240, check=False
    )
    assert "could not be allocated (No space left on device)" in done.stdout, done.stderr
    assert "left []" in done.stdout


# ---------------------------------------------------------------- spoiled by another process


def flip_at(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 0x40]), at)


@pytest.mark.parametrize("at", cases([0, 8, 16, 24, 32, 40, PAGE + 5], kept=[8, PAGE + 5]))
async def test_a_segment_that_another_process_has_overwritten_is_not_lent_again(
    node: Node, shm: Path, caplog, at: int
) -> None:
    """Each static word of the control page, and the layout. What the other rank holds counts."""
    ranks = await node.life(1)
    inode = ranks[1].inode
    flip_at(next(shm.glob("*/1-*")), at)
    assert node.held() == [(1, 1, (CONTENT, 0), False)]
    assert "local rank 1 in this node's memory are lost: another process has overwritten" in (
        caplog.text
    )
    node.goes_on()
    ranks = await node.ranks()
    assert [rank.fresh for rank in ranks] == [False, True]
    assert ranks[1].inode != inode
    await node.both(ranks, 2)
    assert node.held()[0] == (2, 2, BOTH, False)


async def test_a_truncated_segment_does_not_end_the_agent(node: Node, shm: Path, caplog) -> None:
    """To touch the pages that are missing would raise SIGBUS in this process."""
    ranks = await node.life(1)
    (path,) = shm.glob("*/1-*")
    os.truncate(path, 0)
    ranks[0].commit(2)
    ranks[1].say(s.Committed(2, 0, 2, True))
    ranks[1].say(s.AwaitRoom(NONE))
    await node.heard(ranks)
    assert node.held() == [(1, 2, (CONTENT, 0), False), (1, 1, (CONTENT, 0), False)]
    assert "another process has truncated its file" in caplog.text
    node.goes_on()
    ranks = await node.ranks()
    await node.both(ranks, 2)
    assert node.held()[0] == (2, 2, BOTH, False)


async def test_memory_without_a_name_cannot_be_truncated() -> None:
    fd = memory.allocate_anonymous("test", PAGE, PAGE, Throttle())
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
