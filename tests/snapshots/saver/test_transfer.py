"""Two savers of two fork servers on one host: snapshots fetched, parts handed over, strangers."""

from __future__ import annotations

import errno
import mmap
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticrun.snapshots.saver import peers, transfer
from elasticrun.snapshots.saver.peers import MAX_PEERS, Peers, listen
from elasticrun.snapshots.saver.pool import Inbox, WorkerPool
from elasticrun.snapshots.shm.segment import Segment, initialize, segment_bytes
from elasticrun.wire import snapshots as s
from elasticrun.wire.frames import encode
from elasticrun.wire.types import Endpoint, EntryKind, Entrypoint
from tests.forkserver.driver import LIMIT, Driver, plain_environment
from tests.further import cases
from tests.snapshots.dcp.slots import NAMED, ROUND
from tests.snapshots.saver.play import SECRET, Agent, part, persist, saver, state
from tests.snapshots.saver.test_saver import loaded

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def second() -> Iterator[Driver]:
    """Another node's fork server."""
    with Driver(Entrypoint(EntryKind.SCRIPT, "none.py"), env=plain_environment()) as made:
        made.ready()
        yield made


@pytest.fixture
def holder(second: Driver) -> Iterator[Agent]:
    """A saver that others can dial."""
    with saver(second, host=HOST, secret=SECRET) as made:
        assert made.here.port
        yield made


@pytest.fixture
def agent(server: Driver) -> Iterator[Agent]:
    """A saver that knows the secret."""
    with saver(server, secret=SECRET) as made:
        yield made


def ask(agent: Agent, port: int, *, step: int = 7, rank: int = 0) -> s.FetchSize:
    agent.tell(s.Fetch(5, NAMED, step, rank, HOST, port))
    return agent.wait(s.FetchSize)


@contextmanager
def memory(size: s.FetchSize) -> Iterator[int]:
    """A fresh segment for a copy; its descriptor."""
    fd = os.memfd_create("copy")
    os.ftruncate(fd, segment_bytes(size.layout_length, size.slot_bytes, 2))
    with mmap.mmap(fd, 0) as mapping:
        sizes = {"layout_length": size.layout_length, "slot_bytes": size.slot_bytes}
        view = memoryview(mapping)
        initialize(view, **sizes, slots=2)
        view.release()
    yield fd
    os.close(fd)


def mapped(fd: int) -> Segment:
    return Segment(memoryview(mmap.mmap(fd, 0)))


# ---------------------------------------------------------------- fetch


@pytest.mark.parametrize("secret", cases([SECRET, ""], kept=[SECRET]))
def test_a_snapshot_is_fetched_as_it_is(server: Driver, second: Driver, secret: str) -> None:
    made = state(elements=17 << 20).segment()  # 68 MiB: two blocks
    with (
        saver(second, host=HOST, secret=secret) as holder,
        saver(server, secret=secret) as agent,
    ):
        original = holder.serve(made).segment
        size = ask(agent, holder.here.port)
        assert size.ok, size.reason
        with memory(size) as fd:
            agent.tell(s.FetchInto(5), fd)
            assert agent.wait(s.Fetched) == s.Fetched(5, True, "")
            copy = mapped(fd)
            snapshot, theirs = copy.read(0), original.read(0)
            assert snapshot == theirs
            assert snapshot.is_of(ROUND)
            assert copy.layout() == original.layout()
            end = size.slot_bytes
            assert copy.payload(0)[:end] == original.payload(0)[:end]
            assert len(copy.hashes(snapshot)) == 3
            agent.tell(s.SegmentOpen(6, 0), fd)
            assert agent.check(6, 0, 1) == s.Checked(6, 0, 1, True, "")


def test_a_replica_goes_into_the_slot_that_is_named(agent: Agent, holder: Agent) -> None:
    """Beside an older one, which stays as it is; never one of another layout."""
    holder.serve(state().segment())
    replica = s.Fetch(5, NAMED, 7, 0, HOST, holder.here.port, replica=True)
    agent.tell(replica)
    size = agent.wait(s.FetchSize)
    assert size.layout
    with memory(size) as fd:
        for slot in (0, 1):
            agent.tell(replica)
            agent.wait(s.FetchSize)
            agent.tell(s.FetchInto(5, slot, size.layout), fd)
            assert agent.wait(s.Fetched).ok
        copy = mapped(fd)
        assert [one.slot for one in copy.snapshots()] == [0, 1]
        assert copy.payload(0) == copy.payload(1)
        agent.tell(replica)
        agent.wait(s.FetchSize)
        agent.tell(s.FetchInto(5, 1, size.layout + 1), fd)
        assert "not the announced one" in agent.wait(s.Fetched).reason
        assert copy.read(0) is not None
        assert copy.read(1) is None


def test_what_rotted_on_the_other_node_is_found(agent: Agent, holder: Agent) -> None:
    shared = holder.serve(state().segment())
    assert holder.hash().ok
    shared.segment.payload(0)[9000] ^= 1
    size = ask(agent, holder.here.port)
    with memory(size) as fd:
        agent.tell(s.FetchInto(5), fd)
        fetched = agent.wait(s.Fetched)
        assert not fetched.ok
        assert "block 1 of 2 is not what was written" in fetched.reason
        assert mapped(fd).read(0) is None


def test_a_slot_that_was_used_again_is_another_snapshot(agent: Agent, holder: Agent) -> None:
    """A later life may give the same number to another step."""
    holder.serve(state().segment(step=8), step=7)
    size = ask(agent, holder.here.port)
    assert not size.ok
    assert "step 7 was withdrawn" in size.reason


def test_memory_that_is_too_small_is_refused(agent: Agent, holder: Agent) -> None:
    holder.serve(state().segment())
    size = ask(agent, holder.here.port)
    with memory(s.FetchSize(5, True, "", size.layout_length, 4096)) as fd:
        agent.tell(s.FetchInto(5), fd)
        fetched = agent.wait(s.Fetched)
        assert "too small" in fetched.reason
    with memory(size) as fd:
        agent.tell(s.FetchInto(77), fd)
        assert "no fetch was ordered" in agent.wait(s.Fetched).reason


def test_one_that_is_served_later_is_waited_for(agent: Agent, holder: Agent, monkeypatch) -> None:
    """Who asks is in this process: it tells that it was refused, and has all the time it needs."""
    monkeypatch.setattr(peers, "FETCH_LIMIT", LIMIT)
    refused, woken = threading.Event(), threading.Event()
    asks = transfer.ask_size

    def ask_size(*words: Any) -> transfer.Head:
        try:
            return asks(*words)
        except transfer.PeerRefused:
            refused.set()
            raise

    monkeypatch.setattr(transfer, "ask_size", ask_size)
    inbox = Inbox(woken.set)
    said: list[s.FromSaver] = []
    pool = WorkerPool("fetch", 1, inbox.post)
    fetches = peers.Fetches(SECRET, said.append, pool, pool)
    shared = holder.open(state().segment())
    fetches.start(s.Fetch(5, NAMED, 7, 0, HOST, holder.here.port))
    assert refused.wait(LIMIT)
    holder.tell(s.Serve(1, 0, 1, NAMED, 7, 0))
    while not said:
        assert woken.wait(LIMIT)
        woken.clear()
        for call in inbox.drain():
            call()
    (size,) = said
    assert isinstance(size, s.FetchSize)
    assert size.ok, size.reason
    shared.segment.withdraw(0)
    size = ask(agent, holder.here.port)
    assert not size.ok
    assert "now holds another snapshot" in size.reason


# ---------------------------------------------------------------- who is let in


@pytest.mark.parametrize(
    ("mine", "sentence"),
    [("a0a0", "does not know this job's secret"), ("", transfer.SECRET_WANTED)],
)
def test_another_secret_is_refused(server: Driver, holder: Agent, mine: str, sentence: str) -> None:
    holder.serve(state().segment())
    with saver(server, secret=mine) as agent:
        size = ask(agent, holder.here.port)
        assert not size.ok
        assert sentence in size.reason


def test_a_client_that_cannot_prove_itself_is_refused(monkeypatch) -> None:
    """It knows the protocol, not the secret."""
    with door(monkeypatch) as opened, socket.create_connection((HOST, opened.port), LIMIT) as sock:
        sock.sendall(encode(transfer.Dial(transfer.VERSION, "aa", True)))
        sock.sendall(encode(transfer.Shown("bb")) + encode(transfer.Get("ff", 7, 0, True)))
        opened.until(lambda: bool(opened.said))
        (remark,) = opened.said
        said = b""
        while more := sock.recv(65536):
            said += more
    assert b"Refusal" in said
    assert isinstance(remark, s.Remark)
    assert transfer.WRONG in remark.text


def test_garbage_on_the_port_is_dropped(agent: Agent, holder: Agent) -> None:
    holder.serve(state().segment())
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\0\2", b"\xff" * 100_000, b""):
        with socket.create_connection((HOST, holder.here.port), LIMIT) as sock:
            try:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
            except ConnectionError:
                pass  # it was hung up on while it still spoke
            except OSError as error:
                if error.errno != errno.ENOTCONN:  # hung up on before it could end what it said
                    raise
    assert ask(agent, holder.here.port).ok


def test_strangers_that_say_nothing_keep_nobody_out_for_long(server: Driver, holder: Agent) -> None:
    holder.serve(state().segment())
    silent = [socket.create_connection((HOST, holder.here.port), LIMIT) for _ in range(70)]
    try:
        with saver(server, secret=SECRET) as agent:
            assert ask(agent, holder.here.port).ok
    finally:
        for sock in silent:
            sock.close()


class Door:
    """A saver's door in this process, where a stranger may take the time that a test needs."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.said: list[s.FromSaver] = []
        self.woken, self.woke = socket.socketpair()
        self.inbox = Inbox(lambda: self.woke.sendall(b"x"))
        refusal = transfer.Refusal("nothing of it is here", False)
        self.peers = Peers(listener, SECRET, lambda *_: refusal, self.said.append, self.inbox.post)
        self.port = self.peers.port
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.woken, selectors.EVENT_READ)
        self.selector.register(listener, selectors.EVENT_READ)

    def until(self, over: Callable[[], bool]) -> None:
        """Let in who comes, until then."""
        while not over():
            ready = {key.fileobj for key, _ in self.selector.select(LIMIT)}
            assert ready, "nobody else is let in"
            if self.woken in ready:
                self.woken.recv(1)
            for call in self.inbox.drain():
                call()
            if self.peers.listening() in ready:
                self.peers.accept()


@contextmanager
def door(monkeypatch) -> Iterator[Door]:
    monkeypatch.setattr(transfer, "AUTH_LIMIT", LIMIT)
    listener, _ = listen(HOST)
    assert listener is not None
    made = Door(listener)
    with made.selector, listener, made.woken, made.woke:
        yield made


def test_who_is_silent_for_ever_goes_when_others_come(monkeypatch) -> None:
    """The one that has waited longest, of those that have proved nothing."""
    get = transfer.Get("00" * 16, 7, 0, body=False)
    with ThreadPoolExecutor(1) as pool, door(monkeypatch) as opened:
        where = Endpoint(HOST, opened.port)
        silent = [
            socket.create_connection((HOST, opened.port), LIMIT) for _ in range(MAX_PEERS + 6)
        ]
        asked = pool.submit(transfer.ask_size, where, SECRET, get)
        asked.add_done_callback(lambda _: opened.inbox.post(lambda: None))
        opened.until(asked.done)
        with pytest.raises(transfer.PeerRefused, match="nothing of it is here"):
            asked.result()
        assert all(sock.recv(1) == b"" for sock in silent[:7])  # one more had come by then
        for sock in silent:
            sock.close()
        opened.until(lambda: not opened.peers._open)


def test_nobody_serves_where_no_host_was_given(server: Driver) -> None:
    with saver(server) as agent:
        assert agent.here.port == 0


def test_an_address_that_is_not_ours_is_said(server: Driver) -> None:
    with saver(server, host="192.0.2.7") as agent:
        assert agent.here.port
        assert "192.0.2.7 is not its own" in agent.wait(s.Remark).text


# ---------------------------------------------------------------- a checkpoint of two nodes


def away(folder: Path, port: int) -> s.PersistParts:
    """Rank 1's part, which a saver at this port coordinates."""
    where = {"coordinates": False, "coordinator_host": HOST, "coordinator_port": port}
    return persist(folder, part(1, 4), world_size=2, **where)


def test_two_nodes_make_one_checkpoint(agent: Agent, holder: Agent, tmp_path: Path) -> None:
    agent.open(state(1, 2).segment(), key=4)
    agent.tell(away(tmp_path, holder.here.port))
    # The coordinator hears of the attempt later than the part comes in.
    agent.check(4, 0, 1)
    holder.open(state(0, 2).segment())
    holder.writes(persist(tmp_path, part(0, 1), world_size=2))
    assert agent.written().nbytes > 0
    assert holder.commits("a1", 2) == s.CommitDone("a1", True, "")
    found = loaded(tmp_path, 2)
    assert torch.equal(found["model"]["weight"], torch.arange(2048.0).reshape(2, 1024))
    assert found["__rank1"]["seed"] == 11


def test_who_has_given_up_takes_nothing(agent: Agent, holder: Agent, tmp_path: Path) -> None:
    holder.open(state(0, 2).segment())
    holder.writes(persist(tmp_path, part(0, 1), world_size=2))
    holder.tell(s.GiveUp("a1"))
    holder.check()  # it has heard the one before
    agent.open(state(1, 2).segment(), key=4)
    agent.tell(away(tmp_path, holder.here.port))
    done = agent.wait(s.PartsDone)
    assert not done.ok
    assert "that attempt is over" in done.reason


def test_a_part_that_cannot_be_handed_over_is_given_up(server: Driver, tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as nobody, saver(server) as agent:
        port = nobody.getsockname()[1]
        nobody.settimeout(LIMIT)
        agent.open(state(1, 2).segment(), key=4)
        agent.tell(away(tmp_path, port))
        nobody.accept()[0].close()  # its part is written, and it tries to hand it over
        agent.tell(s.GiveUp("a1"))
        assert agent.wait(s.PartsDone).reason == "it was given up"
        agent.writes(persist(tmp_path / "other", part(1, 4), world_size=2, attempt="b"))
        agent.tell(s.GiveUp("b"))
        # Storage is done with in order.
        agent.writes(persist(tmp_path / "other", part(1, 4), world_size=2, attempt="c"))
        assert not list((tmp_path / "step-000000007").glob("*"))
