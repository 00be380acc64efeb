"""The interface of the master's record store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from elasticrun.core.persisted import Facts


class StoreRefused(Exception):
    """This master must not serve: the record is unusable or another job's, another master leads, or
    etcd does not answer. The text is one sentence; `exit_code`: the exit code of the process."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class FactStore(Protocol):
    """One job's durable record: the interface to a disk or to etcd.

    It has two implementations: `file_store.FileStore` (the master's own disk) and
    `etcd_store.EtcdStore` (shared; it also elects the leader). The loop holds back every effect
    that follows a `write` until `done` is called, but keeps processing events.
    """

    lost: asyncio.Future[str]
    """Done, with a sentence, when this master must stop deciding: another master leads or may lead,
    or the shared record cannot be written."""

    term: int
    """The term that the store assigns to this master, known after `load`; 0: it assigns none, and
    any term above the predecessor's will do."""

    def leads(self) -> bool:
        """Whether orders may be sent now. Checked before each order, because the process may have
        been suspended since the decision. Always False once `lost` is done."""

    async def load(self) -> Facts | None:
        """Load the previous master's facts; None if there are none or they are unusable. Called
        once, after the port is bound and before any peer is served. Raises StoreRefused."""

    def write(self, facts: Facts, done: Callable[[], None]) -> None:
        """Make these facts durable, then call `done` in the loop's thread; never blocks. If newer
        facts replace these before they are written, `done` is called once the newer ones are
        durable. Once `lost` is done, it is not called any more."""

    def term_seen(self, term: int) -> None:
        """Check the term of the last master that an agent has obeyed (0: none yet). Never blocks.
        If the store assigns terms and another master's was not lower than ours, the store has lost
        its history: it makes later terms higher, and `lost` becomes done."""

    async def crashed(self) -> None:
        """Record that the state machine failed on these facts. After a few failures in quick
        succession the next `load` returns None, so that the state is rebuilt from the agents."""

    async def close(self) -> None:
        """Close the store and give up the leadership, if any. The outcome of a finished job was
        already written with its facts."""
