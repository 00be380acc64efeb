"""The order of shards, what is asked of a script, and work without elasticrun."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun import training
from elasticrun.training import Checkpointer, WorkShard, work
from elasticrun.training.checkpointing.agent_connection import costs
from elasticrun.training.work import Spec, _Client, _Share, shuffled
from elasticrun.wire import env
from elasticrun.wire.frames import Connection, FrameBuffer, encode
from elasticrun.wire.progress import (
    DATAGRAM_BYTES,
    RankQuiet,
    address,
    bound_socket,
    decode,
    mint_name,
    place,
)
from elasticrun.wire.snapshots import (
    FromPeer,
    FromWorker,
    RankLeases,
    RankRefused,
    RankWork,
    WorkHere,
)
from elasticrun.wire.types import MAX_DATASETS, MAX_LEASES


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (env.WORLD_SIZE, env.PROGRESS, env.SNAPSHOTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(work, "_restored_step", -1)
    monkeypatch.setattr(work, "_has_restored", False)
    monkeypatch.setattr(work, "_has_restored_alone", False)
    monkeypatch.setattr(work, "_is_unknown", False)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000])
def test_the_order_is_a_permutation_of_its_own_for_each_seed_and_epoch(count: int) -> None:
    orders = {
        tuple(shuffled(place, count, seed, epoch) for place in range(count))
        for seed in range(3)
        for epoch in range(3)
    }
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len(orders) == 9 or count < 16


def test_it_needs_no_memory_for_a_large_dataset() -> None:
    assert len({shuffled(place, 10**12, 7, 0) for place in range(1000)}) == 1000


@pytest.mark.parametrize(("total", "size"), [(1, 1), (10, 3), (12, 4), (7, 100)])
def test_one_process_gets_everything(total: int, size: int) -> None:
    shards = list(training.shards("train", total, size, epochs=2, shuffle=7))
    used = Counter((shard.epoch, index) for shard in shards for index in shard.indices)
    assert used == Counter({(epoch, index): 1 for epoch in (0, 1) for index in range(total)})
    assert all(0 < len(shard) <= size for shard in shards)
    ascending = [shard.start for shard in training.shards("train", total, size)]
    assert ascending == list(range(0, total, size))


def test_iterating_counts_each_sample_once_it_is_yielded() -> None:
    shard = WorkShard(0, 10, 15)
    assert len(shard) == 5
    found = iter(shard)
    assert [next(found), next(found)] == [10, 11]
    assert list(shard.indices) == [12, 13, 14]
    shard.done(2)
    assert list(shard) == [14]
    assert not shard.indices
    with pytest.raises(ValueError, match="1 samples are done, and 0 are left"):
        shard.done(1)


def test_the_count_of_a_short_shard_ends_with_its_positions() -> None:
    share = _Share(Spec("train", 10, 4, 1, -1), marks=1)
    share.add(RankLeases("train", 0, (8, 12, 0, 4), 0, over=False, record=1))
    shard = share.begin()
    assert (shard.start, shard.stop) == (8, 10)
    assert share.used == 0
    shard.done(1)
    assert share.used == 1
    shard.done()
    assert share.used == 4
    share.begin().done(3)
    assert share.used == 7
    share.add(RankLeases("train", 4, (0, 4), 4, over=True, record=2))  # it has that one already
    assert (share.dropped, share.received, list(share.leases)) == (4, 8, [(0, 4)])
    assert share.report().marks == (0,)


@pytest.mark.parametrize(
    ("words", "options", "sentence"),
    [
        (("", 10, 2), {}, "is no name"),
        (("a\nb", 10, 2), {}, "is no name"),
        (("a", 0, 2), {}, "total is 0; it must be a whole number from 1"),
        (("a", 10, 2.5), {}, "size is 2.5; it must be a whole number from 1"),
        (("a", 10, True), {}, "size is True"),
        (("a", 10, 2), {"epochs": -1}, "epochs is -1"),
        (("a", 10, 2), {"shuffle": True}, "shuffle is True; it must be a seed"),
        (("a", 10, 2), {"shuffle": -1}, "shuffle is -1; it must be a seed"),
    ],
)
def test_invalid_values_are_refused_at_once(
    words: tuple[object, ...], options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        training.shards(*words, **options)  # type: ignore[arg-type]


def test_several_ranks_need_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.WORLD_SIZE, "2")
    with pytest.raises(RuntimeError, match="start the script with elasticrun"):
        training.shards("train", 10, 2)


def test_a_process_that_a_rank_started_takes_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.PROGRESS, "x/0")
    with pytest.raises(RuntimeError, match="such as a data loader's worker"):
        training.shards("train", 10, 2)


def test_the_restore_comes_first(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, state={"a": 1})
    with pytest.raises(RuntimeError, match=r"call the Checkpointer's restore\(\) before"):
        training.shards("train", 10, 2)
    ckpt.restore()
    assert len(list(training.shards("train", 10, 2))) == 5
    ckpt.close()


def test_without_elasticrun_a_restored_step_has_no_place_in_the_data(tmp_path: Path) -> None:
    first = Checkpointer(tmp_path, state={"a": 1}, persist_every_steps=1)
    first.restore()
    first.step(1)
    first.close()
    second = Checkpointer(tmp_path, state={"a": 1})
    assert second.restore() == 1
    with pytest.raises(RuntimeError, match="continues from step 1, and only elasticrun keeps"):
        training.shards("train", 10, 2)
    second.close()


def test_a_rank_that_waits_for_the_master_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for this one are not reported as hung meanwhile."""
    name, reports = mint_name(), mint_name()
    progress = bound_socket(reports)
    progress.setblocking(True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(address(name))
    server.listen()
    monkeypatch.setattr(work, "agent_address", lambda: place(name, 0))
    monkeypatch.setattr(work, "_client", None)
    monkeypatch.setattr(work, "QUIET_AFTER", 0.01)
    monkeypatch.setenv(env.PROGRESS, place(reports, 0))
    monkeypatch.setenv(env.RANK, "0")
    found: list[WorkShard] = []
    take = lambda: found.append(next(training.shards("train", 10, 4)))  # noqa: E731
    rank = threading.Thread(target=take, daemon=True)
    rank.start()
    agent = Connection(server.accept()[0], FromWorker)
    quiet = decode(progress.recv(DATAGRAM_BYTES))
    assert isinstance(quiet, RankQuiet)
    assert quiet.what == "waiting for work"
    sent = list(agent.receive() or ())
    assert sent[0] == WorkHere(0, 0)
    assert isinstance(sent[1], RankWork)
    assert sent[1].shares[0].wants
    agent.send(RankLeases("train", 0, (4, 8), 0, over=False, record=1))
    rank.join()
    assert [(one.start, one.stop) for one in found] == [(4, 8)]
    assert decode(progress.recv(DATAGRAM_BYTES)) == RankQuiet(0, "", 0.0)
    found[0].done()
    agent.send(RankRefused("dataset 'train' is opened with other values"))
    with pytest.raises(ValueError, match="is opened with other values"):
        list(training.shards("train", 10, 4))
    agent.close()
    work.begin_round()
    progress.close()
    server.close()


class Agent:
    """The agent of this process, played by the test."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._buffer = FrameBuffer(FromPeer)
        self._peer: socket.socket | None = None

    def heard(self) -> RankWork:
        """The newest report."""
        found = [one for one in self.all_heard() if not isinstance(one, WorkHere)]
        assert isinstance(found[-1], RankWork)
        return found[-1]

    def all_heard(self) -> list[object]:
        if self._peer is None:
            self._peer, _ = self._listener.accept()
        return list(self._buffer.feed(self._peer.recv(1 << 20)))

    def give(self, *edges: int, first: int = 0, dropped: int = 0, over: bool = False) -> None:
        assert self._peer is not None
        message = RankLeases("train", first, edges, dropped, over=over, record=1)
        self._peer.sendall(encode(message))

    def hang_up(self) -> None:
        assert self._peer is not None
        self._peer.close()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    name = mint_name()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(name))
        listener.listen()
        monkeypatch.setenv(env.RANK, "0")
        monkeypatch.setattr(costs, "_step", 4)
        monkeypatch.setattr(work, "_client", _Client(place(name, 0)))
        monkeypatch.setattr(work, "agent_address", lambda: place(name, 0))
        yield Agent(listener)
        assert work._client is not None
        work._client.close()


def taken(agent: Agent, *edges: int) -> tuple[_Client, Iterator[WorkShard]]:
    """This rank has these leases."""
    client = work._client
    assert client is not None
    shards = training.shards("train", 10_000, 10)
    client._send()
    agent.heard()
    agent.give(*edges)
    return client, shards


def test_a_step_before_the_first_shard_needs_no_mark(agent: Agent) -> None:
    """This rank counts once: it says since when it takes work."""
    client, shards = taken(agent, 0, 10)
    next(shards).done()
    client.mark(4)
    client.mark(5)
    report = agent.heard()
    assert (report.since, report.marked) == (4, (5,))
    assert report.shares[0].marks == (10,)


def test_a_step_is_not_saved_again_with_more_data(agent: Agent) -> None:
    client, shards = taken(agent, 0, 10)
    shard = next(shards)
    client.mark(5)
    shard.done(4)
    client.mark(5)  # an evaluation, say: what was used since then belongs to later steps
    client.mark(6)
    client.mark(6)
    shard.done(2)
    with pytest.raises(RuntimeError, match="step 6 is saved again after more of 'train' was used"):
        client.mark(6)
    assert agent.heard().shares[0].marks == (0, 4)


def test_skipped_steps_are_abandoned_before_the_master_refuses_more(agent: Agent) -> None:
    count = MAX_LEASES // 2
    client, shards = taken(
        agent, *(edge for at in range(count + 2) for edge in (10 * at, 10 * at + 10))
    )
    for step in range(5, 8):
        client.mark(step)
        client.note_skipped(step)
        next(shards).done()
    assert client._marked == [7], "the newest is not known to be skipped when it is marked"
    agent.give(first=10 * (count + 2), dropped=10 * (count + 2))
    client._receive()
    client.mark(8)
    client.note_skipped(8)
    client.mark(9)
    assert client._marked == [7, 8, 9]


def test_what_is_finished_is_reported_while_this_rank_waits(agent: Agent) -> None:
    """Otherwise the loss of this rank would have it used again."""
    _, shards = taken(agent, 0, 10)
    next(shards).done()
    agent.heard()
    agent.give(first=10, over=True)
    assert next(shards, None) is None
    assert agent.heard().shares[0].used == 10


def test_a_second_pass_needs_another_name(agent: Agent) -> None:
    _, shards = taken(agent, 0, 10)
    next(shards).done()
    agent.give(first=10, over=True)
    assert next(shards, None) is None
    with pytest.raises(ValueError, match="all of 'train' is used: give another pass another name"):
        training.shards("train", 10_000, 10)


def test_an_agent_that_is_gone_is_one_sentence(agent: Agent) -> None:
    _, shards = taken(agent, 0, 10)
    next(shards).done()
    agent.hang_up()
    with pytest.raises(RuntimeError, match="this rank can take no more work"):
        next(shards)


def test_a_checkpointer_without_the_agent_takes_no_part(agent: Agent) -> None:
    work.resumed(3, with_agent=False)
    with pytest.raises(RuntimeError, match="has no connection to the agent"):
        training.shards("train", 10_000, 10)


def test_a_checkpoint_that_does_not_say_what_was_used_is_a_warning(agent: Agent) -> None:
    work.resumed(3, with_agent=True, is_known=False)
    with pytest.warns(UserWarning, match="step 3 was written without elasticrun's agent"):
        training.shards("train", 10_000, 10)


def test_a_name_for_each_of_many_passes(agent: Agent) -> None:
    for epoch in range(MAX_DATASETS):
        training.shards(f"test-{epoch}", 10_000, 10)
    with pytest.raises(ValueError, match="at most 64 datasets"):
        training.shards("one more", 10_000, 10)
