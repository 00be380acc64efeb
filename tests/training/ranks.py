"""Real ranks without an agent: the test is the one who listens."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from elasticrun.wire.progress import DATAGRAM_BYTES, RankSteps, address, decode, mint_name, place
from tests.harness import LIMIT, SCRIPTS, Launched, World, free_port


class Listener:
    """A socket as an agent has it."""

    def __init__(self) -> None:
        self.name = mint_name()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(LIMIT)
        self._socket.bind(address(self.name))

    def next(self) -> RankSteps:
        """The next datagram; waits for it."""
        said = decode(self._socket.recv(DATAGRAM_BYTES + 1))
        assert said is not None
        return said

    def waiting(self) -> list[RankSteps]:
        """What is in the queue now."""
        found = []
        self._socket.setblocking(False)
        try:
            while True:
                found.append(self.next())
        except BlockingIOError:
            return found
        finally:
            self._socket.settimeout(LIMIT)

    def owns(self, count: int, ranks: int = 2) -> list[list[RankSteps]]:
        """By local rank, the first `count` datagrams that tell the own part; waits for them."""
        found: list[list[RankSteps]] = [[] for _ in range(ranks)]
        while min(map(len, found)) < count:
            said = self.next()
            if said.own == said.own:
                found[said.local_rank].append(said)
        return found

    def close(self) -> None:
        self._socket.close()


@contextmanager
def listening() -> Iterator[Listener]:
    listener = Listener()
    try:
        yield listener
    finally:
        listener.close()


def start_ranks(
    world: World, listener: Listener, *words: str, env: Mapping[str, str] | None = None
) -> list[Launched]:
    """Two ranks of tests/scripts/tells_steps.py with these arguments."""
    port = str(free_port())
    return [
        world.command(
            (sys.executable, os.fspath(SCRIPTS / "tells_steps.py"), *words),
            env={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "ELASTICRUN_PROGRESS": place(listener.name, rank),
                **(env or {}),
            },
        )
        for rank in range(2)
    ]
