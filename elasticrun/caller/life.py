"""One life of a rank, seen from its caller: the process, and what has come of its result."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

from elasticrun.caller.rank_process import LENGTH_BYTES, LET_END

READ_BYTES: Final = 256 * 1024


@dataclass(eq=False)
class Life:
    """One process that runs the function, and as much of its result as has come."""

    key: int
    local_rank: int
    rank: int
    of: int  # how many local ranks there are in this life
    process: BaseProcess
    results: Connection
    received: bytearray = field(default_factory=bytearray)
    ended_well: bool = False

    def read(self) -> bool:
        """Take in what it has sent; false when there is no more to come."""
        try:
            data = os.read(self.results.fileno(), READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.received += data
        return bool(data)

    def payload(self) -> bytes | None:
        """The pickled result, None if it did not come whole."""
        end = self._end()
        return bytes(self.received[LENGTH_BYTES:end]) if self._is_whole() else None

    def _end(self) -> int:
        return LENGTH_BYTES + int.from_bytes(self.received[:LENGTH_BYTES], "big")

    def _is_whole(self) -> bool:
        return len(self.received) >= LENGTH_BYTES and len(self.received) >= self._end()

    def has_returned(self) -> bool:
        """Whether its function is over, or the process without a word, but well."""
        return self.ended_well or self._is_whole()

    def let_end(self) -> None:
        """Its process waits for this after its function has returned."""
        if not self.results.closed:
            with contextlib.suppress(OSError):  # it has ended in another way
                os.write(self.results.fileno(), LET_END)
