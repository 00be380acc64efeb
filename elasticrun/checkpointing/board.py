"""What ranks tell each other without a collective: keys in the store that the job has anyway.

It is the default process group's store, or else torch's store at MASTER_ADDR:MASTER_PORT, which
every launcher has there. One rank alone needs none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from elasticrun.wire import env

LIMIT: Final = 300.0
"""Seconds that a rank waits for rank 0's word on what to go on from."""


AGREE_LIMIT: Final = 1800.0
"""Seconds that a rank waits for all others' word on a checkpoint: each has read a part of it."""


class BoardError(RuntimeError):
    """The store cannot be reached, or nothing is said there; a sentence."""


class Board:
    """Keys under a prefix that is of this life of the ranks alone."""

    def __init__(self, prefix: str, rank: int, world_size: int) -> None:
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._alone = world_size < 2
        self._store: Any = None

    def say(self, key: str, text: str) -> None:
        """For rank 0; nobody waits."""
        if not self._alone:
            self._tell(key, lambda store, name: store.set(name, text))

    def _tell(self, key: str, act: Callable[[Any, str], Any]) -> Any:
        """`act` on the store, with the key's whole name; what it returns."""
        try:
            return act(self._reach(), f"{self._prefix}/{key}")
        except Exception as error:  # torch raises many kinds
            raise BoardError(f"{key} cannot be told to the other ranks ({error})") from error

    def hear(self, key: str, limit: float = LIMIT) -> str:
        """What rank 0 said; waits for it, for so many seconds at most."""
        return self._heard(key, limit, "rank 0 has")

    def _heard(self, key: str, limit: float, who: str) -> str:
        try:
            store, name = self._reach(), f"{self._prefix}/{key}"
            store.wait([name], timedelta(seconds=limit))
            return bytes(store.get(name)).decode()
        except Exception as error:
            raise BoardError(f"{who} not said {key} in {limit:.0f} s ({error})") from error

    def object(self, key: str, objection: str) -> str:
        """One rank's word on what all have to agree to, for `agreed`; nobody waits. The first one
        stands, and is returned."""
        if self._alone:
            return objection
        stands: str = self._tell(key, lambda store, name: _first(store, name, f"no {objection}"))
        return stands.partition(" ")[2]

    def agreed(self, key: str) -> str:
        """This rank has no objection: wait until no rank has one (""), or for the first one's.
        BoardError if that takes longer than AGREE_LIMIT."""
        if self._alone:
            return ""

        def agree(store: Any, name: str) -> None:
            if store.add(f"{name}/ranks", 1) == self._world_size:
                _first(store, name, "yes")

        self._tell(key, agree)
        return self._heard(key, AGREE_LIMIT, "the ranks have").partition(" ")[2]

    def _reach(self) -> Any:
        c10d: Any = dist  # its names have no types
        if self._store is None:
            if dist.is_initialized():
                # the store of the group is had by this name alone; it is in all of torch's own code
                self._store = c10d.distributed_c10d._get_default_store()
            else:
                address, port = os.environ[env.MASTER_ADDR], int(os.environ[env.MASTER_PORT])
                limit = timedelta(seconds=LIMIT)
                self._store = c10d.TCPStore(address, port, is_master=False, timeout=limit)
        return self._store


def _first(store: Any, name: str, text: str) -> str:
    """Say it unless something has been said; what stands. torch's older store server, which runs
    where its libuv one cannot, wakes nobody who waits for a key that compare_set makes: it is set
    once more, to what it is."""
    stands = bytes(store.compare_set(name, "", text)).decode()
    store.set(name, stands)
    return stands
