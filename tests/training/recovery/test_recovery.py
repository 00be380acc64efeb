"""Recoverable functions in this process, with a stand-in for the agent at the other end."""

from __future__ import annotations

import datetime
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from elasticrun import training
from elasticrun.training import recovery
from elasticrun.training.checkpointing import agent_connection
from elasticrun.wire import env
from elasticrun.wire.frames import FrameBuffer, encode
from elasticrun.wire.progress import RankCosts, address, decode, mint_name, place
from elasticrun.wire.snapshots import (
    EnterRound,
    FromRecoverable,
    LeaveRound,
    Left,
    Raised,
    RecoverableHere,
    Reraise,
    Returned,
)
from tests.harness import LIMIT


def lose_a_peer() -> NoReturn:
    raise RuntimeError("Connection closed by peer")


class StandIn:
    """The agent: it answers each message as it is told."""

    def __init__(self) -> None:
        self.name = mint_name()
        self.heard: SimpleQueue[FromRecoverable | None] = SimpleQueue()
        self.answers: dict[type, list[object]] = {}
        self._connected = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address(self.name))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.peer, _ = self._listener.accept()
        except OSError:
            return
        self._connected.set()
        frames = FrameBuffer(FromRecoverable)
        with self.peer:
            while data := self.peer.recv(65536):
                for message in frames.feed(data):
                    self.heard.put(message)
                    for answer in self.answers.get(type(message), ()):
                        self.send(answer)
        self.heard.put(None)

    def send(self, message: Any) -> None:
        assert self._connected.wait(LIMIT)
        self.peer.sendall(encode(message))

    def expect(self, *kinds: type) -> None:
        found = [type(self.heard.get(timeout=LIMIT)) for _ in kinds]
        assert found == list(kinds)

    def hang_up(self) -> None:
        assert self._connected.wait(LIMIT)
        self.peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LIMIT)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    found = StandIn()
    monkeypatch.setenv(env.SNAPSHOTS, place(found.name, 1))
    yield found
    found.close()
    agent_connection._places.clear()


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(recovery, "_kept", {})


def entered(count: str) -> EnterRound:
    return EnterRound({env.RESTART_COUNT: count, "OWN": "x"}, "", "", True)


def test_without_an_agent_it_is_an_ordinary_call() -> None:
    @training.recoverable
    def double(number: int) -> int:
        """What it does."""
        return 2 * number

    assert (double(2), double(number=3)) == (4, 6)
    assert double.__doc__ == "What it does."


def test_what_is_kept_is_built_once() -> None:
    built: list[int] = []

    def build() -> list[int]:
        built.append(1)
        return built

    assert training.keep("a list", build) is training.keep("a list", build)
    assert built == [1]


def kept_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    model[1].eval()
    return model


@pytest.mark.parametrize("pack", [lambda m: m, lambda m: (1, m), lambda m: {"model": m}])
def test_a_kept_module_has_its_mode_again_and_no_gradients(pack: Callable[[Any], Any]) -> None:
    model = kept_model()
    assert training.keep("packed", lambda: pack(model)) == pack(model)
    model(torch.ones(1, 2)).sum().backward()
    assert model[2].weight.grad is not None
    model.eval()
    model.requires_grad_(True)
    recovery._renew_kept(restores=True)
    assert [one.training for one in model.modules()] == [True, True, False, True]
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    assert all(p.grad is None for p in model.parameters())


def test_what_nothing_rolls_back_is_built_anew() -> None:
    model, words = training.keep("a model", kept_model), ["a", "dataset"]
    training.keep("words", lambda: words, stateless=True)
    assert not recovery.keeps_trained_state()
    recovery._renew_kept(restores=False)
    assert training.keep("words", list, stateless=True) is words
    again = training.keep("a model", kept_model)
    assert again is not model
    recovery._renew_kept(restores=True)
    assert training.keep("a model", kept_model) is again
    assert recovery.keeps_trained_state()


def test_it_returns_what_the_function_returns(agent: StandIn) -> None:
    assert training.recoverable(lambda: 7)() == 7
    agent.expect(RecoverableHere, Returned)
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL


def test_one_inside_another_and_one_in_a_thread_are_ordinary_calls(agent: StandIn) -> None:
    inner = training.recoverable(lambda: 7)
    assert training.recoverable(inner)() == 7
    agent.expect(RecoverableHere, Returned, type(None))
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(inner()))
    thread.start()
    thread.join(LIMIT)
    assert found == [7]


def test_a_lost_peer_is_reported_and_the_function_called_again(agent: StandIn) -> None:
    calls: list[str] = []
    agent.answers = {Raised: [LeaveRound()], Left: [entered("1")]}

    @training.recoverable
    def train() -> str:
        calls.append(os.environ.get("OWN", ""))
        if len(calls) == 1:
            lose_a_peer()
        return os.environ[env.RESTART_COUNT]

    assert train() == "1"
    assert calls == ["", "x"]
    assert isinstance(agent.heard.get(timeout=LIMIT), RecoverableHere)
    raised = agent.heard.get(timeout=LIMIT)
    assert isinstance(raised, Raised)
    assert raised.message == "RuntimeError: Connection closed by peer"
    assert "in lose_a_peer" in raised.traceback
    agent.expect(Left, Returned)


def test_groups_have_the_names_that_a_new_rank_gives_them(agent: StandIn) -> None:
    """Also if the peers were lost while the group was made: else the ranks never meet again."""
    names: list[str] = []
    agent.answers = {Raised: [LeaveRound()], Left: [entered("1")]}

    @training.recoverable
    def train() -> None:
        peers = 1 if names else 2  # the second one never comes
        names.append("none")
        timeout = datetime.timedelta(seconds=0.1 if peers == 2 else LIMIT)
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=peers, timeout=timeout
        )
        names[-1] = str(dist.group.WORLD.group_name)
        dist.destroy_process_group()

    train()
    assert names == ["none", "0"]


def test_an_exception_of_its_own_is_raised(agent: StandIn) -> None:
    agent.answers = {Raised: [Reraise()]}

    @training.recoverable
    def train() -> None:
        raise ValueError("bad luck")

    with pytest.raises(ValueError, match="bad luck"):
        train()
    agent.expect(RecoverableHere, Raised, Returned)


@pytest.mark.parametrize("how", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_is_no_failure_of_a_peer(agent: StandIn, how: BaseException) -> None:
    @training.recoverable
    def train() -> None:
        raise how

    with pytest.raises(type(how)):
        train()
    agent.expect(RecoverableHere, Returned)


def test_an_agent_that_ends_leaves_the_exception(agent: StandIn) -> None:
    @training.recoverable
    def train() -> None:
        agent.hang_up()
        lose_a_peer()

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        train()


def wait_in_a_sleep() -> None:
    time.sleep(10 * LIMIT)  # the moment is what is tested


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_a_descriptor() -> None:
    select.select(os.pipe()[:1], [], [])


def wait_in_a_loop_that_catches_exceptions() -> None:
    while True:
        try:
            os.sched_yield()
        except Exception:
            continue


@pytest.mark.parametrize(
    "wait",
    [
        wait_in_a_sleep,
        wait_for_a_lock,
        wait_for_a_descriptor,
        wait_in_a_loop_that_catches_exceptions,
    ],
)
def test_a_wait_ends_when_the_round_is_over(agent: StandIn, wait: Callable[[], None]) -> None:
    calls: list[str] = []
    agent.answers = {Left: [entered("1")]}

    @training.recoverable
    def train() -> str:
        calls.append("")
        if len(calls) == 1:
            agent.send(LeaveRound())
            wait()
        return os.environ[env.RESTART_COUNT]

    assert train() == "1"
    agent.expect(RecoverableHere, Left, Returned)


def test_a_process_that_gets_nowhere_is_given_up(agent: StandIn) -> None:
    calls: list[str] = []
    agent.answers = {Raised: [LeaveRound()], Left: [entered("1")]}

    @training.recoverable
    def train() -> None:
        calls.append("")
        lose_a_peer()

    with pytest.raises(RuntimeError, match="Connection closed"):
        train()
    assert len(calls) == recovery.MOST_IDLE + 1


def test_only_connections_between_ranks_are_shut_down() -> None:
    """Event loops of others have a pipe and sockets too, but not only these."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        select.epoll() as loop,
    ):
        accepted, _ = server.accept()
        pipe = os.pipe()
        for one in (server, accepted, pipe[0]):
            loop.register(one, select.EPOLLIN)
        with accepted:
            assert recovery._gloo_sockets() == {accepted.fileno()}
            one, other = socket.socketpair()
            with one, other:
                loop.register(one, select.EPOLLIN)
                assert recovery._gloo_sockets() == set()
        os.environ[env.MASTER_PORT] = str(server.getsockname()[1])
        assert recovery._store_sockets() == {client.fileno()}
        for descriptor in pipe:
            os.close(descriptor)


def test_output_goes_to_the_files_of_the_next_round(agent: StandIn, tmp_path: Any) -> None:
    before = os.dup(1)
    path = str(tmp_path / "stdout.log")
    agent.answers = {Raised: [LeaveRound()], Left: [EnterRound({}, path, "", False)]}
    calls: list[str] = []

    @training.recoverable
    def train() -> None:
        calls.append("")
        if len(calls) == 1:
            lose_a_peer()
        os.write(1, b"second\n")

    try:
        train()
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert (tmp_path / "stdout.log").read_text() == "second\n"


def test_each_round_counts_the_cost_of_its_own_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = agent_connection.SaveCosts()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hears:
        name = mint_name()
        hears.bind(address(name))
        monkeypatch.setenv(env.PROGRESS, place(name, 0))
        costs.add_save(3.0, taken=True)
        costs.note_step(7)
        costs.begin_round()
        assert costs.newest_step == -1
        costs.add_restore(2.0)
        found = [decode(hears.recv(65536)) for _ in range(2)]
    assert found == [RankCosts(0, -1, 1, 3.0, 0.0), RankCosts(0, -1, 0, 0.0, 2.0)]
