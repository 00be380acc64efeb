"""What a master needs of the place of its record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from elasticrun.core.persisted import Facts


class StoreRefused(Exception):
    """This master may not serve: the folder is another's, or another master leads. The text is one
    sentence; `exit_code` is what the process ends with."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class FactStore(Protocol):
    """One job's durable record: what the loop needs of a disk or of etcd.

    Two keep this promise: `file_store.FileStore` (the master's own disk) and
    `etcd_store.EtcdStore` (a shared one, which also says who leads). The loop lets no order pass
    that a fact not yet `done` permits, and takes events in meanwhile.
    """

    lost: asyncio.Future[str]
    """Done, with a sentence, when this master may decide nothing any more: another one leads."""

    term: int
    """The term that the store gives this master, known after `load`; 0: any that is higher than
    its predecessor's."""

    def leads(self) -> bool:
        """Whether orders may go out at this very moment: asked before each, because a process may
        be stopped between deciding and saying. False for good once `lost` is done."""

    async def load(self) -> Facts | None:
        """The facts of the master before this one; None if there was none. The port is bound
        already, and nobody is served before this has returned. StoreRefused."""

    def write(self, facts: Facts, done: Callable[[], None]) -> None:
        """Make these facts durable, then call `done` in the loop's thread; never blocks. Newer
        facts replace older ones that were not written yet, whose `done` is called with theirs."""

    def heard_of(self, term: int) -> None:
        """An agent has obeyed a master of this term (0: none yet). Never blocks. Where the store is
        the source of terms and ours is lower, it has lost its history: `lost` is done."""

    async def crashed(self) -> None:
        """The brain has failed on these facts. After a few such ends in a row the next `load` gives
        none: then the agents are asked."""

    async def close(self) -> None:
        """End; the outcome of a job that is over was written with the facts that hold it."""
