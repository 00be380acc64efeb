"""The record: orders wait for their facts, and whatever is wrong with a disk costs no job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from elasticrun.config import Identity, MasterConfig
from elasticrun.core.events import Heard, JobEffect, JobEvent, JobOver, Record, Send
from elasticrun.core.persisted import Facts, RestartFacts, aged
from elasticrun.master import file_store, records
from elasticrun.master.file_store import FileStore
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, dumps
from tests import aio, needs
from tests.master.facts import facts, round_facts
from tests.master.people import LIMIT, ROUND, Recorder, hear, serving

JOIN = m.Join(Endpoint("127.0.0.1", 1))
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _a_patient_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """No record is given up because this process, or its disk, stands still for a while."""
    monkeypatch.setattr(file_store, "LOAD_LIMIT", LIMIT)
    monkeypatch.setattr(file_store, "GIVEN_UP", LIMIT)


class Held:
    """A store whose writes become durable when the test says so."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.term = 0
        self.leading = True
        self.written: list[tuple[Facts, Callable[[], None]]] = []

    def leads(self) -> bool:
        return self.leading

    async def load(self) -> Facts | None:
        return None

    def write(self, what: Facts, done: Callable[[], None]) -> None:
        self.written.append((what, done))

    def term_seen(self, term: int) -> None:
        pass

    async def close(self) -> None:
        pass

    def release(self) -> None:
        self.written.pop(0)[1]()


def _stop(reason: str) -> m.Stop:
    return m.Stop(ROUND, reason)


# ---------------------------------------------------------------- the loop


async def test_orders_wait_for_their_facts_and_beats_for_nothing() -> None:
    def on(event: JobEvent) -> list[JobEffect]:
        if isinstance(event, Heard) and event.report == JOIN:
            return [
                Send((event.session,), m.Wait("before")),
                Record(facts(1)),
                Send((event.session,), _stop("first")),
                Record(facts(2)),
                Send((event.session,), m.Wait("second")),
                JobOver(0, "over"),
            ]
        return []

    store = Held()
    async with serving(store=store) as served:
        served.brain.on = on
        async with served.agent() as stream:
            await stream.send(JOIN)
            assert await hear(stream) == m.Wait("before")
            for number in (1, 2):  # the loop turns, and says so
                await stream.send(m.Beat(number))
                assert await hear(stream) == m.Echo(number)
            assert [f.number for f, _ in store.written] == [1, 2]
            assert served.over == []
            store.release()
            assert await hear(stream) == _stop("first")
            await stream.send(m.Beat(3))
            assert await hear(stream) == m.Echo(3)
            assert served.over == []
            store.release()
            assert await hear(stream) == m.Wait("second")
            assert len(served.over) == 1
            await stream.send(m.Leaving("nothing is in the way any more", 0))
            assert isinstance(await hear(stream), m.End)


async def test_a_long_wait_for_the_record_is_the_reason_on_the_page() -> None:
    now = [100.0]
    brain = Recorder()
    brain.on = lambda event: [Record(facts())]
    from elasticrun.master.loop import Loop

    store = Held()
    loop = Loop(brain, store=store, clock=lambda: now[0])
    loop.put(Heard(1, JOIN))
    loop._turn()
    assert loop.status().reason == brain.page.reason
    now[0] += 3.0
    assert "has not been written for 3 s" in loop.status().reason
    store.release()
    assert loop.status().reason == brain.page.reason


async def test_who_leads_no_more_says_nothing() -> None:
    store = Held()
    async with serving(store=store) as served:
        served.brain.on = lambda event: (
            [Send((event.session,), _stop("an order"))]
            if isinstance(event, Heard) and event.report == JOIN
            else []
        )
        async with served.agent() as stream:
            store.leading = False
            await stream.send(JOIN)
            await served.brain.until(lambda e: isinstance(e, Heard) and e.report == JOIN)
            store.leading = True
            await stream.send(m.Beat(7))
            assert await hear(stream) == m.Echo(7)


# ---------------------------------------------------------------- the file


@contextlib.asynccontextmanager
async def opened(folder: Path, now: float | None = None) -> AsyncIterator[FileStore]:
    """A store on its folder; closed at the end."""
    store = FileStore(folder, now=None if now is None else lambda: now)
    try:
        yield store
    finally:
        await store.close()
        store._thread.join(LIMIT)  # a slow disk's last word may come after `close`


async def _written(store: FileStore, what: Facts) -> None:
    done = asyncio.get_running_loop().create_future()
    store.write(what, lambda: done.set_result(None))
    async with asyncio.timeout(LIMIT):
        await done


async def _load(folder: Path, now: float | None = None) -> Facts | None:
    async with opened(folder, now) as store:
        return await store.load()


async def _keep(folder: Path, *versions: Facts, now: float | None = None) -> None:
    async with opened(folder, now) as store:
        await store.load()
        for version in versions:
            await _written(store, version)


async def test_the_newest_facts_are_loaded_and_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert await _load(folder) is None
    last = facts(
        3,
        outcome=m.End(1, "boom", ()),
        restarts=RestartFacts(charges=(1.0, 2.5)),
        rendezvous=round_facts(3, starved=3.25),
    )
    await _keep(folder, facts(1), facts(2, nodes=5), last, now=100.0)
    assert await _load(folder, now=100.0) == last
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(f.stat().st_mode & 0o077 == 0 for f in folder.iterdir())


async def test_what_was_recorded_has_aged_when_it_is_loaded(tmp_path: Path) -> None:
    """A wait neither begins anew at each crash, nor ends at once."""
    await _keep(tmp_path, facts(), now=1000.0)
    found = await _load(tmp_path, now=1090.0)
    assert found == aged(facts(), 90.0) != facts()
    assert found.age == 90.0


async def test_facts_in_between_are_not_written_and_every_wait_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    saved: list[int] = []
    save = file_store._Disk.save

    def slow(disk: file_store._Disk, what: Facts) -> None:
        assert gate.wait(LIMIT)
        saved.append(what.number)
        save(disk, what)

    monkeypatch.setattr(file_store._Disk, "save", slow)
    async with opened(tmp_path) as store:
        await store.load()
        ended: list[int] = []
        for number in range(1, 6):
            store.write(facts(number), lambda number=number: ended.append(number))
        await asyncio.sleep(0)
        assert ended == []
        gate.set()
        await _written(store, facts(6))
        assert ended == [1, 2, 3, 4, 5]
        assert saved == [1, 6]


async def test_a_folder_that_is_gone_costs_one_line_and_the_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "record"
    async with opened(folder) as store:
        await store.load()
        await _written(store, facts(1))
        shutil.rmtree(folder)
        await _written(store, facts(2))
        await _written(store, facts(3))
    assert not folder.exists()
    assert caplog.text.count("no longer has a record") == 1
    assert "has been removed" in caplog.text


FULL = """
import asyncio, sys
from pathlib import Path
from elasticrun.master import file_store
from tests.master.test_record import facts, opened, _load, _written

file_store.LOAD_LIMIT = file_store.GIVEN_UP = float(sys.argv[2])

async def main(folder):
    async with opened(folder) as store:
        await store.load()
        await _written(store, facts(1))
        await _written(store, facts(2, nodes=10_000))
        await _written(store, facts(3))  # nobody waits for a disk any more
    print(await _load(folder), sorted(each.name for each in folder.iterdir()))

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_full_disk_costs_the_record_and_leaves_no_stale_one(tmp_path: Path) -> None:
    command = [*needs.tmpfs(tmp_path, "64k"), sys.executable, "-c", FULL]
    command += [str(tmp_path), str(LIMIT)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.stdout == "None ['record.aside']\n", done.stderr
    assert done.stderr.count("no longer has a record: [Errno 28] No space left on device") == 1


async def test_a_disk_that_hangs_is_given_up_and_set_aside_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_store, "SLOW", 0.05)
    monkeypatch.setattr(file_store, "GIVEN_UP", 0.1)
    gate = threading.Event()
    save = file_store._Disk.save

    def hangs(disk: file_store._Disk, what: Facts) -> None:
        assert gate.wait(LIMIT)
        save(disk, what)

    async with opened(tmp_path) as store:
        await store.load()
        await _written(store, facts(1))
        monkeypatch.setattr(file_store._Disk, "save", hangs)
        await _written(store, facts(2))
        await _written(store, facts(3))
        gate.set()
    assert await _load(tmp_path) is None
    assert "orders have waited for" in caplog.text
    assert caplog.text.count("no longer has a record") == 1


def _garbage(path: Path) -> None:
    path.write_bytes(b"this is no record, and never was one" * 100)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _newer(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"elasticrun record 2 ", b"elasticrun record 99 "))


def _checked(body: bytes) -> bytes:
    return b"elasticrun record 2 %08x\n%s\n" % (zlib.crc32(body), body)


def _other_facts(path: Path) -> None:
    content = json.loads(path.read_bytes().splitlines()[1])
    content["facts"]["favourite_colour"] = "green"
    path.write_bytes(_checked(json.dumps(content).encode()))


def _deep(path: Path) -> None:
    path.write_bytes(_checked(b"[" * 100_000))


@pytest.mark.parametrize("spoil", [_garbage, _empty, _cut, _flipped, _newer, _other_facts, _deep])
async def test_a_record_that_cannot_be_used_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    await _keep(tmp_path, facts(1))
    spoil(tmp_path / "record")
    async with opened(tmp_path) as store:
        assert await store.load() is None
        await _written(store, facts(2))
    assert (tmp_path / "record.aside").exists()
    found = await _load(tmp_path)
    assert found.number == 2
    assert caplog.text.count("set aside") == 1


@pytest.mark.parametrize(("gap", "kept"), [(10.0, False), (40.0, True)])
async def test_three_masters_that_fail_on_one_state_within_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gap: float, kept: bool
) -> None:
    await _keep(tmp_path, facts(4), now=1000.0)
    for crash in range(3):
        store = FileStore(tmp_path, now=lambda crash=crash: 1000.0 + gap * crash)
        assert await store.load() is not None
        await store.crashed()
        store._thread.join(LIMIT)  # a slow disk's last word may come after `crashed`
    assert (await _load(tmp_path, now=1000.0 + 2 * gap) is not None) == kept
    assert (await _load(tmp_path, now=1000.0 + 2 * gap) is not None) == kept
    assert ("3 masters have failed on it" in caplog.text) != kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "rounds", [120, pytest.param(720, marks=pytest.mark.soak)], ids=["five-days", "thirty-days"]
)
async def test_it_stays_small_and_is_loaded_whole(tmp_path: Path, rounds: int) -> None:
    """1,000 nodes, a round an hour: what is kept does not grow with the length of a job."""
    async with opened(tmp_path) as store:
        await store.load()
        for number in range(1, rounds + 1):
            await _written(store, facts(number, nodes=1000))
    size = sum(f.stat().st_size for f in tmp_path.iterdir())
    assert size <= 1024 * 1024, f"{size} bytes"
    found = await _load(tmp_path)
    assert (found.number, len(found.order)) == (rounds, 1000)


WRITER = """
import asyncio, itertools, sys
from pathlib import Path
from msgspec import structs
from elasticrun.wire.types import loads
from elasticrun.core.persisted import Facts
from elasticrun.master import file_store
from elasticrun.master.file_store import FileStore

file_store.LOAD_LIMIT = file_store.GIVEN_UP = float(sys.argv[2])

async def main():
    store = FileStore(Path(sys.argv[1]))
    made = loads(sys.stdin.read(), Facts)
    await store.load()
    for number in itertools.count(1):
        done = asyncio.get_running_loop().create_future()
        order = tuple(f"{number}-{i}" for i in range(50))
        facts = structs.replace(made, number=number, order=order)
        store.write(facts, lambda: done.set_result(None))
        await done
        print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 7, 30])
def test_a_kill_at_any_moment_leaves_whole_facts(tmp_path: Path, after: int) -> None:
    """What was called done is there, and never one half of a version."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), str(LIMIT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with writer:
        writer.stdin.write(dumps(facts(nodes=50)))
        writer.stdin.close()
        told = 0
        for line in writer.stdout:
            told = int(line)
            if told >= after:
                writer.send_signal(signal.SIGKILL)
    found = aio.run(_load(tmp_path))
    assert found.number in (told, told + 1)
    assert [each.name for each in tmp_path.iterdir()] == ["record"], "no draft is left behind"
    assert set(found.order) == {f"{found.number}-{i}" for i in range(50)}


# ---------------------------------------------------------------- a folder that answers too late


async def test_a_folder_that_answers_too_late_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and what comes afterwards disturbs nobody and holds no lock."""
    monkeypatch.setattr(records, "FOLDER_LIMIT", 0.01)
    may, troubles, held = threading.Event(), list[object](), list[int]()

    class Slow(records.Records):
        def _lock(self, folder: Path) -> int:
            assert may.wait(LIMIT)
            held.append(os.open(folder, os.O_RDONLY))
            return held[0]

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: troubles.append(context))
    try:
        config = MasterConfig(Identity("job"), "127.0.0.1", 0, None, record_dir=str(tmp_path))
        assert await Slow(config, hosted=True).open(1) is None
        (late,) = (t for t in threading.enumerate() if t.name == "elasticrun-folder")
        may.set()
        await asyncio.to_thread(late.join, LIMIT)  # before which it has handed over its answer
    finally:
        loop.set_exception_handler(None)
    assert not troubles
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held[0])
    assert caplog.text.count(f"{tmp_path} has not answered for 0.01 s") == 1
