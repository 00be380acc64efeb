"""One life of a rank, seen from its caller: the process, and what has come of its result."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

from elasticrun.caller.rank_process import LENGTH_BYTES

READ_BYTES: Final = 256 * 1024


@dataclass(eq=False)
class Life:
    """One process that runs the function, and as much of its result as has come."""

    key: int
    local_rank: int
    rank: int
    process: BaseProcess
    results: Connection
    received: bytearray = field(default_factory=bytearray)

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
        length = int.from_bytes(self.received[:LENGTH_BYTES], "big")
        if len(self.received) < LENGTH_BYTES + length or not self.received:
            return None
        return bytes(self.received[LENGTH_BYTES : LENGTH_BYTES + length])
