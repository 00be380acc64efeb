"""The saver as a real process, forked and exec'd: hashes, checkpoints, and how it ends."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from inotify_simple import INotify, flags
from torch.distributed.checkpoint import load

from elasticrun.snapshots.storage.folder import Folder
from elasticrun.wire import snapshots as s
from elasticrun.wire.spawning import SHIELDED, Keepalive, Notice, Quit, SendSignal
from elasticrun.wire.types import EntryKind, Entrypoint, RoundName, key_of_name
from tests.forkserver.driver import LIMIT, Driver, alive, gone, plain_environment
from tests.further import cases
from tests.snapshots.saver.play import Agent, part, persist, saver, state

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executing() -> Iterator[Driver]:
    """A fork server that executes whatever it starts."""
    with Driver(
        Entrypoint(EntryKind.SCRIPT, "none.py"), env=plain_environment(), launch="exec"
    ) as made:
        made.ready()
        yield made


@pytest.fixture(params=cases(["fork", "exec"], kept=["fork"]))
def agent(request) -> Iterator[Agent]:
    server = request.getfixturevalue("server" if request.param == "fork" else "executing")
    with saver(server) as made:
        yield made


@pytest.fixture
def forked(server: Driver) -> Iterator[Agent]:
    with saver(server) as made:
        yield made


def loaded(folder: Path, world: int) -> dict[str, Any]:
    """What plain torch reads, in one process."""
    found: dict[str, Any] = {
        "model": {"weight": torch.zeros(world, 1024), "bias": torch.zeros(7)},
        "epoch": 0,
        **{
            f"__rank{r}": {"rng": torch.zeros(2, dtype=torch.uint8), "seed": 0}
            for r in range(world)
        },
    }
    load(found, checkpoint_id=folder / "step-000000007", no_dist=True)
    return found


# ---------------------------------------------------------------- hashes


def test_a_snapshot_is_hashed_and_found_whole(agent: Agent) -> None:
    shared = agent.open(state().segment())
    assert agent.hash() == s.Checked(1, 0, 1, True, "")
    snapshot = shared.segment.read(0)
    assert snapshot is not None
    mine = state().segment(hashed=True)
    theirs = mine.read(0)
    assert theirs is not None
    assert shared.segment.hashes(snapshot) == mine.hashes(theirs)


@pytest.mark.parametrize("where", ["tensors", "values"])
def test_a_flipped_byte_is_found(forked: Agent, where: str) -> None:
    shared = forked.open(state().segment(), local_rank=5)
    assert forked.hash().ok
    layout = shared.segment.layout()
    at = layout.own_bytes + 1000 if where == "tensors" else layout.own_bytes + layout.shared_bytes
    shared.segment.payload(0)[at] ^= 1
    checked = forked.check()
    assert not checked.ok
    assert "step 7 of local rank 5 is not what was written: block" in checked.reason


def test_hashes_of_an_earlier_life_are_not_believed(forked: Agent, tmp_path: Path) -> None:
    """All was withdrawn, and a new life of the rank counts its snapshots from one again."""
    shared = forked.open(state().segment())
    assert forked.hash().ok
    segment = shared.segment
    layout = segment.layout()
    first = segment.read(0)
    segment.withdraw(0)
    segment.payload(0)[layout.tensors[-1].payload] ^= 1
    again = RoundName(1, 4, "eeff")
    values = first.values_bytes
    segment.commit(0, round=again, sequence=1, step=7, layout=layout.key, values=values)
    checked = forked.check()
    assert (checked.ok, "had not been hashed" in checked.reason) == (True, True)
    forked.writes(persist(tmp_path, part(), round=RoundName(1, 4, "eeff")))
    assert forked.commits().ok
    assert Folder(str(tmp_path)).verify(7) == ""


def test_what_cannot_be_compared_is_said(forked: Agent) -> None:
    shared = forked.open(state().segment())
    assert forked.check() == s.Checked(1, 0, 1, True, "step 7 of local rank 0 had not been hashed")
    for order in (s.CheckSnapshot(1, 0, 2), s.CheckSnapshot(1, 1, 1), s.CheckSnapshot(1, 9, 1)):
        forked.tell(order)
        checked = forked.wait(s.Checked)
        assert not checked.ok
        assert "now holds another snapshot" in checked.reason
    shared.segment.withdraw(0)
    assert not forked.check().ok
    forked.tell(s.SegmentClosed(1))
    assert forked.check().reason == "the saver does not have that segment"


def digests(agent: Agent, number: int, first: int = 0, last: int = 0, out: str = "") -> s.Digested:
    left_out = (key_of_name(out),) if out else ()
    agent.tell(s.DigestSnapshot(1, 0, 1, number, first, last, left_out))
    found = agent.wait(s.Digested)
    assert (found.key, found.number) == (1, number)
    return found


def test_what_replicas_have_in_common_is_hashed(forked: Agent) -> None:
    """Neither what is the rank's own nor its opaque values; and parts of it later, though the slot
    holds something else by then."""
    shared = forked.open(state().segment())
    layout = shared.segment.layout()
    names = [item.fqn for item in layout.compared]
    assert names == sorted(item.fqn for item in layout.tensors if not item.own)
    payload = shared.segment.payload(0)
    whole = digests(forked, 1)
    assert (whole.reason, whole.count, len(whole.digests), whole.names) == ("", len(names), 1, ())
    own = next(item for item in layout.tensors if item.own)
    for at in (own.payload, layout.tensor_bytes):
        payload[at] ^= 1
    assert digests(forked, 2).digests == whole.digests
    parts = digests(forked, 3, 0, len(names))
    assert (parts.names, len(parts.digests)) == (tuple(names), len(names))
    payload[layout.compared[1].payload] ^= 1
    assert digests(forked, 4).digests != whole.digests
    changed = digests(forked, 5, 0, len(names))
    differ = [a != b for a, b in zip(changed.digests, parts.digests, strict=True)]
    assert differ == [n == 1 for n in range(len(names))]
    left = digests(forked, 6, out=names[1]).digests
    payload[layout.compared[1].payload] ^= 2
    assert digests(forked, 7, out=names[1]).digests == left
    shared.segment.withdraw(0)
    assert digests(forked, 8, 1, 2).names == (names[1],)
    assert "now holds another snapshot" in digests(forked, 9).reason


def test_garbage_for_a_segment_is_said(forked: Agent) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    forked.tell(s.SegmentOpen(1, 3), null)
    os.close(null)
    assert "the segment of local rank 3 cannot be read" in forked.wait(s.Remark).text
    assert not forked.check().ok


# ---------------------------------------------------------------- checkpoints


def test_two_ranks_are_written_and_plain_torch_reads_them(agent: Agent, tmp_path: Path) -> None:
    for rank in range(2):
        agent.open(state(rank, 2).segment(), key=rank + 1)
    assert agent.hash(2).ok
    done = agent.writes(persist(tmp_path, part(0, 1), part(1, 2)))
    files = list((tmp_path / "step-000000007").iterdir())
    assert done.nbytes == sum(file.stat().st_size for file in files)
    assert not (tmp_path / "step-000000007" / ".metadata").exists()
    assert agent.commits("a1", 2) == s.CommitDone("a1", True, "")
    found = loaded(tmp_path, 2)
    assert torch.equal(found["model"]["weight"], torch.arange(2048.0).reshape(2, 1024))
    assert torch.equal(found["model"]["bias"], torch.full((7,), 0.5))
    assert found["epoch"] == 3
    assert [found[f"__rank{r}"]["seed"] for r in range(2)] == [0, 11]
    assert found["__rank1"]["rng"].tolist() == [1, 5]


def test_orders_that_come_again_are_answered_again(forked: Agent, tmp_path: Path) -> None:
    forked.open(state().segment())
    order = persist(tmp_path, part())
    done = forked.writes(order)
    forked.tell(order)
    assert forked.wait(s.PartsDone) == done
    for _ in range(2):
        assert forked.commits().ok


def test_parts_are_counted_before_a_commit(forked: Agent, tmp_path: Path) -> None:
    forked.open(state().segment())
    assert "does not know that attempt" in forked.commits().reason
    forked.writes(persist(tmp_path, part(), world_size=2))
    assert forked.commits("a1", 2) == s.CommitDone("a1", False, "1 of 2 parts have arrived")
    forked.tell(s.GiveUp("a1"))
    assert "it is over" in forked.commits().reason


def test_what_is_given_up_goes_and_what_is_committed_stays(forked: Agent, tmp_path: Path) -> None:
    forked.open(state().segment())
    forked.writes(persist(tmp_path, part(), attempt="first"))
    assert forked.commits("first", 1).ok
    forked.writes(persist(tmp_path, part(), attempt="second"))
    forked.tell(s.GiveUp("second"))
    forked.tell(s.GiveUp("first"))
    forked.tell(s.GiveUp("unheard of"))
    # storage is done with in order: the files of the second are gone now
    forked.writes(persist(tmp_path / "other", part(), attempt="third"))
    (file,) = (tmp_path / "step-000000007").glob("*.distcp")
    assert "first" in file.name
    assert loaded(tmp_path, 1)["epoch"] == 3


def test_old_checkpoints_are_removed_after_a_commit(forked: Agent, tmp_path: Path) -> None:
    for step in (7, 8, 9):
        forked.open(state().segment(step), key=step)
        forked.tell(persist(tmp_path, part(key=step), attempt=f"a{step}", step=step, keep_last=2))
        forked.written()
        assert forked.commits(f"a{step}", 1).ok
    forked.writes(persist(tmp_path / "other", part(key=7), attempt="last"))
    forked.tell(s.GiveUp("last"))  # its turn comes after the sweep's
    forked.writes(persist(tmp_path / "other", part(key=7), attempt="later"))
    assert sorted(os.listdir(tmp_path)) == ["other", "step-000000008", "step-000000009"]


def test_a_folder_that_cannot_be_is_a_sentence(forked: Agent, tmp_path: Path) -> None:
    forked.open(state().segment())
    (tmp_path / "file").write_text("")
    for folder, attempt in ((tmp_path / "file", "a"), ("relative", "b"), ("none://x", "c")):
        forked.tell(persist(folder, part(), attempt=attempt))
        done = forked.wait(s.PartsDone)
        assert not done.ok
        assert done.reason.count("\n") == 0
        assert "Traceback" not in done.reason
        assert "Error" not in done.reason, done.reason


# ---------------------------------------------------------------- a file system that hangs


@contextmanager
def opening_waits(path: Path) -> Iterator[threading.Event]:
    """A file whose opening for writing does not return (the kernel lets go of it after 45 s); the
    event is set when somebody waits for that (fcntl(2), leases)."""
    begun = threading.Event()
    before = signal.signal(signal.SIGIO, lambda *_: begun.set())
    fd = os.open(path, os.O_RDONLY | os.O_CREAT)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        yield begun
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


def test_a_hanging_file_system_makes_it_neither_deaf_nor_immortal(
    server: Driver, tmp_path: Path
) -> None:
    folder = tmp_path / "step-000000007"
    folder.mkdir()
    file = folder / "__0_3.1.slow.distcp"
    with opening_waits(file) as begun, saver(server) as agent:
        agent.open(state().segment())
        agent.writes(persist(tmp_path / "other", part(), attempt="quick"))
        agent.tell(persist(tmp_path, part(), attempt="slow"))
        assert begun.wait(LIMIT)
        assert agent.check().ok
        agent.tell(s.GiveUp("slow"))
        assert agent.wait(s.PartsDone).reason == "it was given up"
        remark = agent.wait(s.Remark).text
        assert f"{tmp_path} did not stop writing an attempt within 10 s" in remark
        assert agent.ended().code == 76


# ---------------------------------------------------------------- its life


def test_it_ends_with_its_conversation(agent: Agent) -> None:
    assert agent.close().code == 0


def test_it_is_named_and_shielded(agent: Agent) -> None:
    assert Path(f"/proc/{agent.pid}/comm").read_text().strip() == "elasticrun-save"
    assert Path(f"/proc/{agent.pid}/cmdline").read_text().strip("\0") == "elasticrun: saver"
    for signum in SHIELDED:
        os.kill(agent.pid, signum)
    assert not agent.check().ok
    status = Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()
    assert int(status[3]) == agent.pid  # a session of its own


def test_its_environment_is_the_orders_with_one_thread(executing: Driver) -> None:
    with saver(executing, env={"OMP_NUM_THREADS": "7", "MARK": "there"}) as agent:
        variables = Path(f"/proc/{agent.pid}/environ").read_bytes().split(b"\0")
        assert {b"MARK=there", b"OMP_NUM_THREADS=1"} <= set(variables)
        assert b"OMP_NUM_THREADS=7" not in variables


def test_one_that_is_ordered_anew_takes_the_place_of_the_old(server: Driver) -> None:
    with saver(server) as old, saver(server) as new:
        assert old.ended().code == -signal.SIGKILL
        assert not new.check().ok


def test_one_killed_in_mid_persist_leaves_no_checkpoint(server: Driver, tmp_path: Path) -> None:
    folder = tmp_path / "step-000000007"
    folder.mkdir()
    with INotify() as watch, saver(server) as agent:
        watch.add_watch(folder, flags.CREATE)
        shared = agent.open(state(elements=32 << 20).segment())
        for thread in psutil.Process(agent.pid).threads():
            os.setpriority(os.PRIO_PROCESS, thread.id, 19)  # this process is to be the quicker one
        agent.tell(persist(tmp_path, part(), attempt="killed"))
        assert watch.read(timeout=int(LIMIT * 1000))  # it has begun to write
        server.tell(SendSignal(agent.key, signal.SIGKILL))
        assert agent.ended().code == -signal.SIGKILL
        assert not any(isinstance(message, s.PartsDone) for message in agent.heard)
        (left,) = folder.iterdir()
        assert "killed" in left.name
        with saver(server) as another:
            another.tell(s.SegmentOpen(1, 0), shared.fd)
            another.writes(persist(tmp_path, part(), attempt="again"))
            assert another.commits("again", 1).ok
    (file,) = folder.glob("*.distcp")  # what the killed one has left is gone, too
    assert "again" in file.name


def test_words_that_nobody_understands_end_it(server: Driver) -> None:
    with saver(server) as agent:
        agent.socket.sendall(b"\0\0\0\2{}")
        assert agent.ended().code == 2
    with saver(server) as agent:
        agent.tell(s.SegmentOpen(1, 0))  # without its descriptor
        assert agent.ended().code == 2


@pytest.mark.parametrize("launch", ["fork", "exec"])
def test_it_outlives_silence_but_not_its_fork_server(launch: str) -> None:
    entry = Entrypoint(EntryKind.COMMAND if launch == "exec" else EntryKind.SCRIPT, "none.py")
    with Driver(
        entry, env=plain_environment(), launch="auto" if launch == "fork" else "exec"
    ) as own:
        own.ready()
        agent = Agent(own)
        own.tell(Keepalive(0.05))
        own.wait(Notice, lambda notice: "no keepalive from the agent" in notice.text)
        assert not agent.check().ok
        assert alive(agent.pid)
        if launch == "fork":
            own.tell(Quit())
        else:
            own.process.kill()
        assert not gone([agent.pid], LIMIT)
        agent.socket.close()
