"""The interface of the master's record store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from elasticrun.core.persisted import Facts


class StoreRefused(Exception):
    """This master must not serve: the folder is another job's, or another master leads. The text is
    one sentence; `exit_code`: the exit code of the process."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class FactStore(Protocol):
    """One job's durable record: the interface to a disk or to etcd.

    It has two implementations: `file_store.FileStore` (the master's own disk) and
    `etcd_store.EtcdStore` (shared; it also elects the leader). The loop sends no order that depends
    on a fact that is not `done`, but keeps processing events.
    """

    lost: asyncio.Future[str]
    """Done, with a sentence, when another master leads or may lead: this one must decide nothing
    more."""

    term: int
    """The term that the store assigns to this master, known after `load`; 0: it assigns none, and
    any term above the predecessor's will do."""

    def leads(self) -> bool:
        """Whether orders may be sent at this moment. Checked before each order, because the process
        may be stopped between decision and sending. False for good once `lost` is done."""

    async def load(self) -> Facts | None:
        """The facts of the previous master; None if there was none. The port is already bound, and
        nobody is served before this returns. Raises StoreRefused."""

    def write(self, facts: Facts, done: Callable[[], None]) -> None:
        """Make these facts durable, then call `done` in the loop's thread; never blocks. Newer
        facts replace unwritten older ones, whose `done` is then called together with theirs."""

    def term_seen(self, term: int) -> None:
        """An agent has obeyed a master of this term (0: none yet). Never blocks. If the store
        assigns terms and ours is lower, the store has lost its history: `lost` becomes done."""

    async def crashed(self) -> None:
        """The state machine has failed on these facts. After a few failures in a row the next
        `load` returns None, so that the state is rebuilt from the agents."""

    async def close(self) -> None:
        """Close; the outcome of a finished job was written with its facts."""
