"""Copies from CUDA devices, with a device played by this process: its streams run only when the
test lets them, or when something waits for them. What CUDA itself does is in `make gpu`."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from elasticrun.snapshots.shm.layout import PAGE
from elasticrun.snapshots.shm.segment import VERSION
from elasticrun.training import Checkpointer
from elasticrun.training.checkpointing.agent_connection import AgentConnection
from elasticrun.training.checkpointing.capture import INLINE_BYTES, SaveOutcome, SnapshotTaker
from elasticrun.training.checkpointing.memory import devices
from elasticrun.training.checkpointing.parts import StateError
from elasticrun.training.checkpointing.restore import MemoryRestore
from elasticrun.training.checkpointing.state import TrainingState
from elasticrun.wire.snapshots import Committed, RankHere, Resume
from elasticrun.wire.types import RoundName
from tests.training.checkpointing.played import PlayedAgent, playing

ROUND = RoundName(1, 1, "a")


class Stream:
    """A queue of copies of the device."""

    def __init__(self, device: PlayedDevice) -> None:
        self._device = device
        self.queue: list[Callable[[], None]] = []

    def wait_stream(self, other: Stream) -> None:
        """What the training's stream was told to do is done already."""
        assert other is self._device.main

    def wait_event(self, event: Event) -> None:
        """The training's stream waits: whatever it is told next comes after these copies."""
        event.run()


class Event:
    def __init__(self, device: PlayedDevice) -> None:
        self._device = device
        self._stream: Stream | None = None
        self._done = threading.Event()

    def record(self, stream: Stream) -> None:
        self._stream = stream
        self._device.events.append(self)

    def run(self) -> None:
        """Carry out the copies before this event."""
        assert self._stream is not None
        with self._device.running:
            while self._stream.queue:
                self._stream.queue.pop(0)()
        self._done.set()

    def synchronize(self) -> None:
        if self._device.is_at_once:
            self.run()
        assert self._done.wait(60)
        if self._device.is_broken:
            raise RuntimeError("CUDA error: device-side assert triggered")


class PlayedDevice:
    """Takes the place of torch.cuda. Tensors of at least 16 values count as the device's."""

    def __init__(self) -> None:
        self.running = threading.Lock()
        self.main, self.events = Stream(self), list[Event]()
        self.is_at_once = self.is_broken = self.is_capturing = False
        self.locked: dict[int, int] = {}
        self.most_locks: int | None = None
        self.copied_locked = 0
        self._current: Stream | None = None

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() >= 16 and tensor.is_floating_point()

    def Stream(self, _: torch.device) -> Stream:
        return Stream(self)

    def Event(self, blocking: bool) -> Event:
        assert blocking
        return Event(self)

    def current_stream(self, _: torch.device) -> Stream:
        return self.main

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    @contextmanager
    def stream(self, one: Stream) -> Iterator[None]:
        self._current = one
        yield
        self._current = None

    @contextmanager
    def device(self, _: torch.device) -> Iterator[None]:
        yield

    def cudart(self) -> PlayedDevice:
        return self

    def cudaHostRegister(self, at: int, size: int, flags: int) -> int:
        assert flags == 1
        assert all(at + size <= other or other + n <= at for other, n in self.locked.items())
        if self.most_locks is not None and len(self.locked) >= self.most_locks:
            return 2
        self.locked[at] = size
        return 0

    def cudaHostUnregister(self, at: int) -> int:
        with open("/proc/self/maps") as maps:  # still mapped
            assert any(in_range(at, line) for line in maps)
        del self.locked[at]
        return 0

    def copy_all(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        non_blocking: bool = False,
    ) -> None:
        for tensor in (*targets, *sources):
            self._check_locks(tensor)

        def work() -> None:
            with torch.no_grad():
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)

        if non_blocking:
            assert self._current is not None
            self._current.queue.append(work)
        else:
            work()

    def _check_locks(self, tensor: torch.Tensor) -> None:
        """CUDA copies memory that was page-locked in one call, or not at all."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        touched = [(at, at + n) for at, n in self.locked.items() if at < end and begin < at + n]
        if touched and tensor.is_contiguous():
            ((at, to),) = touched
            assert at <= begin
            assert end <= to
            self.copied_locked += tensor.nbytes


def in_range(at: int, line: str) -> bool:
    begin, end = (int(word, 16) for word in line.split()[0].split("-"))
    return begin <= at < end


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PlayedDevice:
    one = PlayedDevice()
    monkeypatch.setattr(devices, "cuda", one)
    monkeypatch.setattr(devices, "is_on_device", one.on_device)
    monkeypatch.setattr(devices, "copy_all", one.copy_all)
    return one


class Trained:
    """A training of a model with a buffer, and its snapshots."""

    def __init__(
        self, agent: PlayedAgent, overlap: bool, width: int = 8, transposed: bool = False
    ) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(32))
        if transposed:
            self.model[0].weight = nn.Parameter(self.model[0].weight.detach().clone().T)
        self.model[1].running_mean = torch.zeros(32)
        self.optim = torch.optim.Adam(self.model[0].parameters(), lr=0.1)
        self.change()
        self.parts = {"model": self.model, "optim": self.optim}
        self.line = AgentConnection(agent.place(0))
        self.line.request(RankHere(VERSION, 0, 0, 1, "/nowhere", 3, 0), Resume)
        state = TrainingState(self.parts, 0)
        self.taker = SnapshotTaker(self.line, state, 2, ROUND, overlap=overlap)

    def change(self) -> None:
        """A forward that changes the buffer, and an optimizer's step."""
        self.model[1].running_mean += 1
        for parameter in self.model[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optim.step()

    def tensors(self) -> list[torch.Tensor]:
        rows = self.optim.state.values()
        own = [v for row in rows for v in row.values()]
        return [one.detach() for one in (*self.model.state_dict().values(), *own)]

    def copy(self) -> list[torch.Tensor]:
        return [one.clone() for one in self.tensors()]

    def take(self, step: int, *, persist: bool = False) -> SaveOutcome:
        return self.taker.take(step, persist=persist, wait=0)

    def steps(self) -> list[int]:
        """The steps that another process finds in memory."""
        assert self.taker._mapped is not None
        return [snapshot.step for snapshot in self.taker._mapped.segment.snapshots()]

    def finish(self) -> None:
        """Wait for the thread that commits."""
        assert self.taker._pending is not None
        assert self.taker._pending.thread is not None
        self.taker._pending.thread.join(60)

    def restored(self, agent: PlayedAgent, step: int) -> list[torch.Tensor]:
        """What the next life restores."""
        agent.next_life(step, 1)
        transposed = not self.model[0].weight.is_contiguous()
        again = Trained(agent, False, self.model[0].in_features, transposed)
        for one in again.tensors():
            one.zero_()
        resume = agent.resume
        MemoryRestore(again.line, TrainingState(again.parts, 0), resume).run(1)
        again.line.close()
        return again.tensors()


def same(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, two))


@pytest.fixture
def agent() -> Iterator[PlayedAgent]:
    with playing() as one:
        yield one


def test_training_goes_on_while_a_step_is_copied(agent: PlayedAgent, device: PlayedDevice) -> None:
    """The optimizer's next step waits for the copies; the buffer that a forward changes does not,
    because it was cloned. Both are of the step of the snapshot."""
    train = Trained(agent, overlap=True)
    before = train.copy()
    assert train.take(1) is SaveOutcome.TAKEN
    assert train.steps() == []
    assert not agent.of(Committed)
    train.change()
    assert not same(train.copy(), before)
    train.finish()
    assert train.steps() == [1]
    train.taker.collect()
    assert [(c.step, c.persist) for c in agent.until(Committed)] == [(1, False)]
    train.taker.close()
    assert same(train.restored(agent, 1), before)


def test_the_previous_snapshot_is_whole_until_the_next_one_is(
    agent: PlayedAgent, device: PlayedDevice
) -> None:
    train = Trained(agent, overlap=True)
    train.take(1)
    train.change()
    train.finish()
    train.take(2)
    assert train.steps() == [1]  # what a rank leaves that dies now
    assert train.take(3) is SaveOutcome.BUSY
    train.change()
    train.finish()
    assert train.steps() == [1, 2]
    train.taker.close()
    assert [c.step for c in agent.until(Committed, 2)] == [1, 2]


def test_close_waits_for_copies(agent: PlayedAgent, device: PlayedDevice) -> None:
    train = Trained(agent, overlap=True)
    train.take(1)
    device.events[-1].run()
    train.taker.close()
    assert [c.step for c in agent.until(Committed)] == [1]
    train.change()  # without the hook
    assert not train.optim._optimizer_step_pre_hooks


@pytest.mark.parametrize("when", ["no optimizer steps", "before the optimizer steps"])
def test_a_state_that_something_else_changes_is_no_snapshot(
    agent: PlayedAgent, device: PlayedDevice, when: str
) -> None:
    train = Trained(agent, overlap=True)
    train.take(1)
    with torch.no_grad():
        train.model[0].weight.mul_(2)
    if when.startswith("before"):
        train.change()
    device.events[-1].run()
    train.finish()
    train.taker.collect()
    assert train.steps() == []
    with pytest.raises(StateError, match=r"step 1 was changed by something other than.*overlap="):
        train.take(2)
    assert train.take(2) is SaveOutcome.TAKEN
    train.change()
    train.finish()
    assert train.steps() == [2]
    train.taker.close()


def test_an_optimizer_in_a_cuda_graph(agent: PlayedAgent, device: PlayedDevice) -> None:
    """A graph would not wait for the copies when it is replayed."""
    train = Trained(agent, overlap=True)
    train.take(1)
    device.is_capturing = True
    train.change()
    device.events[-1].run()
    train.finish()
    assert train.steps() == []
    with pytest.raises(StateError, match="pass overlap=False"):
        train.taker.close()


def test_a_device_that_fails_leaves_the_previous_snapshot(
    agent: PlayedAgent, device: PlayedDevice
) -> None:
    train = Trained(agent, overlap=True)
    train.take(1)
    train.change()
    train.finish()
    train.take(2)
    device.is_broken = True
    train.change()
    train.finish()
    assert train.steps() == [1]
    with pytest.raises(StateError, match=r"step 2 could not be copied.*device-side assert"):
        train.take(3)


def test_close_after_a_copy_that_failed_closes_the_connection(
    agent: PlayedAgent, device: PlayedDevice, new: Callable[..., Checkpointer], monkeypatch
) -> None:
    monkeypatch.setenv("ELASTICRUN_SNAPSHOTS", agent.place(0))
    state = {"weights": torch.zeros(64)}
    ckpt = new(state=state, every_steps=1, persist_every_seconds=None, overlap=True)
    ckpt.step(1)
    device.is_broken = True
    device.events[-1].run()
    with pytest.warns(UserWarning, match="step 1 could not be copied"):
        ckpt.close()
    agent.until_gone()
    assert agent.of(Committed) == []


def test_a_device_without_memory_for_clones(
    agent: PlayedAgent, device: PlayedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Trained(agent, overlap=True)
    before = train.copy()

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    device.is_at_once = True
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", refuse)
        assert train.take(1) is SaveOutcome.TAKEN
    train.change()
    train.finish()
    train.taker.close()
    assert same(train.restored(agent, 1), before)


@pytest.mark.parametrize(("overlap", "persist"), [(False, False), (True, True)])
def test_a_copy_that_is_waited_for(
    agent: PlayedAgent, device: PlayedDevice, overlap: bool, persist: bool
) -> None:
    """A snapshot that is written to storage is there when `take` returns."""
    device.is_at_once = True
    train = Trained(agent, overlap)
    before = train.copy()
    train.take(1, persist=persist)
    assert train.steps() == [1]
    train.change()
    train.taker.close()
    assert same(train.restored(agent, 1), before)


@pytest.mark.parametrize("most", [None, 0, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_slots_are_page_locked_in_pieces_until_they_are_unmapped(
    agent: PlayedAgent,
    device: PlayedDevice,
    most: int | None,
    transposed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors of 5.8 MB and pieces of 1 MiB. The driver may refuse, from some piece on."""
    monkeypatch.setattr(devices, "PIECE", 1 << 20)
    device.is_at_once, device.most_locks = True, most
    train = Trained(agent, False, 1200, transposed)
    before = train.copy()
    train.taker.prepare(wait=True)
    mapped = train.taker._mapped
    assert mapped is not None
    assert len(mapped.memory) > INLINE_BYTES
    for thread in threading.enumerate():
        if thread.name == "elasticrun-prefault":
            thread.join(60)
    whole = 2 * (mapped.segment.slot_bytes + PAGE)
    if most is None:
        assert sum(device.locked.values()) == whole
    else:
        assert len(device.locked) == most
    assert max(device.locked.values(), default=0) <= 1 << 20
    train.take(1)
    train.taker.close()
    size = sum(one.nbytes for one in before)
    assert device.copied_locked == 0 if most == 0 else device.copied_locked > 1 << 20
    assert most is not None or device.copied_locked > 0.9 * size
    del mapped, train.taker
    gc.collect()
    assert not device.locked  # `cudaHostUnregister` finds them mapped
    device.most_locks, device.copied_locked = None, 0
    assert same(train.restored(agent, 1), before)
    if transposed:  # read from copies that are not page-locked
        assert device.copied_locked < 0.1 * size
    else:
        assert device.copied_locked > 0.9 * size
    gc.collect()
    assert not device.locked


def test_copies_of_any_type_are_cut_at_pieces(
    device: PlayedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "PIECE", 64)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex128):
        memory = torch.zeros(1024, dtype=torch.uint8)
        begin = -memory.data_ptr() % 64 + 16
        mapped = memory[begin : begin + 16 * 37].view(dtype)
        other = torch.randn(mapped.numel()).to(dtype)
        parts, others = devices.cut([mapped], [other])
        assert [part.nbytes for part in parts] == [48, *[64] * 8, 32]
        assert torch.equal(torch.cat(others), other)
        for part, one in zip(parts, others, strict=True):
            part.copy_(one)
        assert torch.equal(mapped, other)
    small = [torch.zeros(0), torch.ones(())]
    assert [len(part) for part in devices.cut(small, small)] == [2, 2]
