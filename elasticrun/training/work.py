"""`shards`: work that the job's master hands out to the ranks that ask for it (decision 042).

A rank has at most two leases that it has not finished: when it begins one, it asks for the next. It
uses them in the order in which it got them. So a count tells the master what it has used; the
Checkpointer has it reported, as a mark, before a snapshot is taken.

The order of the shards is a permutation of their numbers: a Feistel network, whose keys depend on
the seed and the epoch. It needs no memory.
"""

from __future__ import annotations

import hashlib
import operator
import os
import socket
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Final

from elasticrun.training.checkpointing.agent_connection import agent_address, costs
from elasticrun.training.reporting import quiet
from elasticrun.wire import env
from elasticrun.wire.frames import FrameBuffer, FrameError, encode
from elasticrun.wire.progress import address, read_place
from elasticrun.wire.snapshots import (
    RankLeases,
    RankRefused,
    RankShare,
    RankWork,
    ToWorker,
    WorkHere,
)
from elasticrun.wire.types import (
    MAX_DATASET_NAME,
    MAX_DATASETS,
    MAX_EPOCHS,
    MAX_LEASES,
    MAX_MARKS,
    MAX_SAMPLES,
)

CONNECT_LIMIT: Final = 10.0
"""Seconds for the agent to accept the connection, or a message."""

QUIET_AFTER: Final = 1.0
"""Seconds of waiting for a lease after which this rank reports that it waits for the master."""

QUIET_MINUTES: Final = 24 * 60.0

NO_WORK: Final = "this rank can take no work"

READ_BYTES: Final = 64 * 1024
ROUNDS: Final = 4
MASK: Final = 2**64 - 1


class WorkShard:
    """Samples `start` to `stop` - 1 of epoch `epoch`, for this rank alone. Iterating over it yields
    their indices; each counts as used once it is yielded. Or take them from `indices`, and call
    `done(n)` when n more are used."""

    def __init__(self, epoch: int, start: int, stop: int) -> None:
        self.epoch, self.start, self.stop = epoch, start, stop
        self._next = start

    @property
    def indices(self) -> range:
        """The indices that are not used yet."""
        return range(self._next, self.stop)

    def done(self, samples: int | None = None) -> None:
        """Note that the next `samples` indices are used; None: all. Raises ValueError if there are
        not as many."""
        many = len(self.indices) if samples is None else operator.index(samples)
        if not 0 <= many <= len(self.indices):
            raise ValueError(f"{many} samples are done, and {len(self.indices)} are left")
        self._next += many

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        while self._next < self.stop:
            self._next += 1
            yield self._next - 1

    def __repr__(self) -> str:
        return f"<shard of samples {self.start} to {self.stop - 1}, epoch {self.epoch}>"


def shards(
    name: str, total: int, size: int, *, epochs: int = 1, shuffle: int | None = None
) -> Iterator[WorkShard]:
    """Iterate over shards of `size` samples of a dataset of `total`, which the master hands out:
    each to one rank, in each of `epochs` epochs::

        for shard in training.shards("train", len(dataset), 512, epochs=2, shuffle=7):
            for index in shard:
                ...

    `shuffle` is the seed of the order of the shards, None for ascending. All ranks must pass the
    same values, after `Checkpointer.restore()` if they have one, in the thread that calls the
    Checkpointer. The loop ends when nothing is left; another pass needs another name, or `epochs`.
    After a failure the ranks get exactly the samples that were not used by the restored step;
    without a Checkpointer, the shards that no rank has finished.

    Without elasticrun a single process gets all shards. Raises ValueError for invalid values, and
    RuntimeError if no work can be had here."""
    spec = _checked(name, total, size, epochs, shuffle)
    _refuse_unrestored()
    if place := agent_address():
        if _has_restored_alone:
            raise RuntimeError(
                "the Checkpointer has no connection to the agent, so no checkpoint says what its "
                "step had used: elasticrun has said at the start why"
            )
        if _is_unknown:
            warnings.warn(
                f"elasticrun: the checkpoint of step {_restored_step} was written without "
                "elasticrun's agent and does not say what had been used by then, so everything is "
                "handed out",
                stacklevel=2,
            )
        client = _connected(place)
        return _leased(client, client.share(spec))
    if env.PROGRESS in os.environ:
        raise RuntimeError(
            "this process has no connection to the agent of its node: take work in the rank's own "
            "process, and not in one that it has started, such as a data loader's worker"
        )
    if int(os.environ.get(env.WORLD_SIZE, "1")) > 1:
        raise RuntimeError(
            "several ranks take work from elasticrun's master: start the script with elasticrun"
        )
    if _restored_step > 0:
        raise RuntimeError(
            f"training continues from step {_restored_step}, and only elasticrun keeps what was "
            "used by then: start the script with elasticrun"
        )
    return _alone(spec)


class Spec:
    """A dataset, and the order of its shards."""

    def __init__(self, name: str, total: int, size: int, epochs: int, shuffle: int) -> None:
        self.name, self.total, self.size, self.epochs = name, total, size, epochs
        self.shuffle = shuffle  # -1: none
        self.per_epoch = -(-total // size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and vars(self) == vars(other)

    def shard(self, start: int, stop: int) -> WorkShard:
        """The samples at these positions, which are those of one shard, or its rest."""
        number, offset = divmod(start, self.size)
        epoch, place = divmod(number, self.per_epoch)
        if self.shuffle >= 0:
            place = shuffled(place, self.per_epoch, self.shuffle, epoch)
        first = place * self.size
        return WorkShard(
            epoch, min(first + offset, self.total), min(first + offset + stop - start, self.total)
        )


def shuffled(place: int, count: int, seed: int, epoch: int) -> int:
    """The number at this place in a pseudo-random permutation of `count` numbers."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    keys = [int.from_bytes(digest[at : at + 8], "big") for at in range(0, 8 * ROUNDS, 8)]
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:  # at most four times on average: the network permutes up to 4 * count numbers
        left, right = place >> half, place & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        place = left << half | right
        if place < count:
            return place


def _mixed(number: int) -> int:
    """The finalizer of splitmix64."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


def _checked(name: str, total: int, size: int, epochs: int, shuffle: int | None) -> Spec:
    is_name = isinstance(name, str) and 0 < len(name) <= MAX_DATASET_NAME and name.isprintable()
    if not is_name:
        length = f"1 to {MAX_DATASET_NAME} printable characters"
        raise ValueError(f"{name!r:.40} is no name: it needs {length}")
    numbers = {"total": (total, MAX_SAMPLES), "size": (size, MAX_SAMPLES)}
    for what, (value, most) in {**numbers, "epochs": (epochs, MAX_EPOCHS)}.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 < value <= most:
            raise ValueError(f"{what} is {value!r:.40}; it must be a whole number from 1 to {most}")
    if shuffle is not None and (type(shuffle) is not int or not 0 <= shuffle < 2**63):
        raise ValueError(f"shuffle is {shuffle!r:.40}; it must be a seed of at least 0, or None")
    seed = -1 if shuffle is None else shuffle
    return Spec(name, operator.index(total), operator.index(size), operator.index(epochs), seed)


def _refuse_unrestored() -> None:
    """Raise RuntimeError if this process has a Checkpointer that has restored nothing yet: it would
    not be known which samples are used."""
    module = sys.modules.get("elasticrun.training.checkpointing.checkpointer")
    if module is not None and module.is_unrestored():
        raise RuntimeError("call the Checkpointer's restore() before the first shards()")


def _alone(spec: Spec) -> Iterator[WorkShard]:
    for number in range(spec.epochs * spec.per_epoch):
        yield spec.shard(number * spec.size, (number + 1) * spec.size)


def _leased(client: _Client, share: _Share) -> Iterator[WorkShard]:
    while (shard := client.take(share)) is not None:
        yield shard
        if shard.indices:
            raise RuntimeError(
                f"{len(shard.indices)} samples of the {shard!r} are left: iterate over all, "
                "or call done()"
            )


class _Share:
    """What this rank has of a dataset, in the terms of `wire.messages.DatasetShare`."""

    def __init__(self, spec: Spec, marks: int) -> None:
        self.spec = spec
        self.dropped = self.received = 0
        self.leases: deque[tuple[int, int]] = deque()
        self.waiting: deque[tuple[int, int]] = deque()  # those that have not begun
        self.marks = [0] * marks
        self.wants = self.is_over = False
        self.reported = 0  # of what is used
        self._begun = 0  # positions of the leases that have begun
        self._length = 0  # of the last one of these
        self._shard: WorkShard | None = None

    @property
    def used(self) -> int:
        """How many positions are used. The last shard of a dataset is shorter than the positions
        that it has."""
        shard = self._shard
        if shard is None or not shard.indices:
            return self._begun
        return self._begun - self._length + len(shard) - len(shard.indices)

    @property
    def unfinished(self) -> WorkShard | None:
        """The shard that has begun, if it is not used up."""
        return self._shard if self._shard is not None and self._shard.indices else None

    def begin(self) -> WorkShard:
        """Begin the next lease."""
        start, stop = self.waiting.popleft()
        self._length = stop - start
        self._begun += self._length
        self._shard = self.spec.shard(start, stop)
        return self._shard

    def add(self, message: RankLeases) -> bool:
        """Add leases, and drop those of which the master has recorded that they are used. Return
        whether any was dropped."""
        dropped = self.dropped
        at = message.first
        for start, stop in zip(message.leases[::2], message.leases[1::2], strict=True):
            if at >= self.received:
                self.leases.append((start, stop))
                self.waiting.append((start, stop))
                self.received += stop - start
            at += stop - start
        while self.leases:
            start, stop = self.leases[0]
            if self.dropped + stop - start > message.dropped:
                break
            self.dropped += stop - start
            self.leases.popleft()
        self.wants, self.is_over = False, message.over
        return self.dropped > dropped

    @property
    def is_used_up(self) -> bool:
        """Whether this rank has nothing left of it and gets no more."""
        return self.is_over and not self.waiting and self.unfinished is None

    def report(self) -> RankShare:
        spec = self.spec
        self.reported = self.used
        return RankShare(
            *(spec.name, spec.total, spec.size, spec.epochs, spec.shuffle, self.dropped),
            leases=tuple(edge for lease in self.leases for edge in lease),
            used=self.used,
            marks=tuple(self.marks),
            wants=self.wants,
        )


class _Client:
    """This rank's connection to its agent, for one round."""

    def __init__(self, place: str) -> None:
        """Raises RuntimeError if the agent cannot be reached."""
        self._pid = os.getpid()
        self._shares: dict[str, _Share] = {}
        self._marked: list[int] = []
        self._skipped: set[int] = set()
        self._record = 0
        self._since = max(_restored_step, costs.newest_step)
        self._buffer = FrameBuffer(ToWorker)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name, local_rank = read_place(place)
            self._socket.settimeout(CONNECT_LIMIT)
            self._socket.connect(address(name))
            self._socket.sendall(encode(WorkHere(local_rank, int(os.environ[env.RANK]))))
        except (OSError, ValueError, KeyError) as error:
            self._socket.close()
            raise RuntimeError(
                f"this rank can take no work: its agent does not answer ({error})"
            ) from None

    @property
    def is_ours(self) -> bool:
        """Whether this process has made it, and not the process that has forked this one."""
        return os.getpid() == self._pid

    def share(self, spec: Spec) -> _Share:
        """This rank's share of the dataset. Raises ValueError if it was opened differently, or if
        it is used up: a second pass would silently have nothing to do."""
        share = self._shares.get(spec.name)
        if share is None:
            if len(self._shares) >= MAX_DATASETS:
                raise ValueError(f"a job can hand out at most {MAX_DATASETS} datasets")
            share = self._shares[spec.name] = _Share(spec, len(self._marked))
        elif share.spec != spec:
            raise ValueError(f"this rank has opened {spec.name!r} with other values before")
        elif share.is_used_up:
            raise ValueError(
                f"all of {spec.name!r} is used: give another pass another name, or pass epochs="
            )
        return share

    def take(self, share: _Share) -> WorkShard | None:
        """The shard to use now, once there is one; None if nothing is left."""
        if not self.is_ours:
            raise RuntimeError("take work in the rank's own process")
        if (shard := share.unfinished) is not None:
            return shard
        while not share.waiting and not share.is_over:
            if not share.wants or share.used != share.reported:
                share.wants = True
                self._send()
            self._receive()
        if not share.waiting:
            self._send()  # nothing more is used: later steps need no mark of this rank
            return None
        shard = share.begin()
        if not share.waiting and not share.is_over:
            share.wants = True
            self._send()
        return shard

    def mark(self, step: int) -> None:
        """Report what this rank has used by this step, which is about to be saved. If the step is
        saved again, what was used since then belongs to later steps. Raises RuntimeError if the
        state has changed by then: more was used of a dataset that the step had used."""
        if step <= self._since:  # nothing had been used by then
            return
        if step in self._marked:
            place = self._marked.index(step)
            for share in self._shares.values():
                if share.marks[place] not in (0, share.used):
                    raise RuntimeError(
                        f"step {step} is saved again after more of {share.spec.name!r} was used: "
                        "give the state a higher step"
                    )
            return
        self._marked.append(step)
        for share in self._shares.values():
            share.marks.append(share.used)
        while len(self._marked) > MAX_MARKS or (self._skipped and self._has_many_leases()):
            skipped = (place for place, one in enumerate(self._marked) if one in self._skipped)
            place = next(skipped, 0)
            self._skipped.discard(self._marked.pop(place))
            for share in self._shares.values():
                share.marks.pop(place)
        self._send()

    def _has_many_leases(self) -> bool:
        """Whether so many leases are kept for the sake of open marks that the master may soon give
        no more. Then steps that this rank has not saved are abandoned."""
        return sum(len(share.leases) for share in self._shares.values()) > MAX_LEASES // 2

    def note_skipped(self, step: int) -> None:
        """This rank has no snapshot of a step that it has marked; another rank may have one."""
        if step in self._marked:
            self._skipped.add(step)

    def close(self) -> None:
        self._socket.close()

    def _send(self) -> None:
        work = RankWork(
            restored=_has_restored,
            since=self._since,
            marked=tuple(self._marked),
            shares=tuple(one.report() for one in self._shares.values()),
            record=self._record,
        )
        try:
            self._socket.settimeout(CONNECT_LIMIT)
            self._socket.sendall(encode(work))
        except OSError as error:
            raise RuntimeError(
                f"this rank can take no more work: the connection to its agent broke ({error})"
            ) from None

    def _receive(self) -> None:
        """Wait for a message. Ranks that wait for this one then see that it waits for work."""
        try:
            data = self._read()
        except OSError:
            data = b""
        if not data:
            raise RuntimeError(
                "this rank can take no more work: its agent has closed the connection"
            )
        try:
            messages: list[ToWorker] = list(self._buffer.feed(data))
        except FrameError as error:
            raise RuntimeError(f"{NO_WORK}: {error}") from None
        for message in messages:
            if isinstance(message, RankRefused):
                raise ValueError(message.reason)
            share = self._shares.get(message.dataset)
            if share is not None and share.add(message):
                self._record = max(self._record, message.record)

    def _read(self) -> bytes:
        """Raises OSError."""
        try:
            self._socket.settimeout(QUIET_AFTER)
            return self._socket.recv(READ_BYTES)
        except TimeoutError:
            pass
        with quiet("waiting for work", minutes=QUIET_MINUTES):
            self._socket.settimeout(None)
            return self._socket.recv(READ_BYTES)


_client: _Client | None = None
_restored_step = -1
_has_restored = False
_has_restored_alone = False
_is_unknown = False


def _connected(place: str) -> _Client:
    global _client
    if _client is None:
        _client = _Client(place)
    return _client


def refuse_restore() -> None:
    """Raise RuntimeError if this rank has taken work: it did not start from the restored step."""
    if _client is not None:
        raise RuntimeError("call restore() before the first shards()")


def resumed(step: int, *, with_agent: bool, is_known: bool = True) -> None:
    """This process has restored this step; 0: it has looked, and there was nothing. `with_agent`:
    the agent knows of it. `is_known`: the step's checkpoint says what was used by then; only rank 0
    looks."""
    global _restored_step, _has_restored, _has_restored_alone, _is_unknown
    _restored_step, _has_restored, _has_restored_alone = step, True, not with_agent
    _is_unknown = not is_known


def mark(step: int) -> None:
    """Report what is used by this step, which is about to be saved, if this rank has taken work.
    Raises RuntimeError if that is impossible."""
    if _client is not None and _client.is_ours:
        _client.mark(step)


def note_skipped(step: int) -> None:
    """The snapshot of a marked step was not taken."""
    if _client is not None and _client.is_ours:
        _client.note_skipped(step)


def begin_round() -> None:
    """All leases are void, because this process joins another round."""
    global _client, _restored_step, _has_restored, _has_restored_alone, _is_unknown
    if _client is not None:
        _client.close()
    _client, _restored_step = None, -1
    _has_restored = _has_restored_alone = _is_unknown = False
